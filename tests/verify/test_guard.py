"""A reader's code that cheats fails to cheat, and all that it starts ends with the check."""

import functools
import itertools
import json
import os
import re
import signal
import sys

import hostile
import processes
import pytest
from test_checker import COMBINE, WIDE_COMBINE, changed

from moeblaze_ref.runtime.source import inlined
from moeblaze_ref.verify import guard, in_subprocess
from moeblaze_ref.verify.checker import QUANTITIES, claims, prepare
from moeblaze_ref.verify.checker.runners import RUNNERS
from moeblaze_ref.verify.checker.sources import check_source

RIGHT = "    out[index] = sum;\n"
NOTHING_WRITTEN = "out[0, 0] is never written"
NUMBA = "from numba import cuda\n\n\n@cuda.jit\ndef mine(y, gates, token_index_map, out, L, d, k):\n"
WRITES_ZERO = "    out[0, 0] = 0\n"


def combine_that(does, includes="", then=RIGHT):
    """A right combine whose first thread does something, once in a process, before it writes."""
    once = f"    static bool first = true;\n    if (index == 0 && first) {{ first = false; {does} }}\n"
    return includes + changed(WIDE_COMBINE, RIGHT, once + then)


def check(text, limits=guard.Limits(120)):
    """What the checker says of a text."""
    file = "mine.cu" if "__global__" in text else "mine.py"
    options = {} if file == "mine.cu" else {"grid": "1", "block": "1"}
    return in_subprocess.examine_text(file, text, "mine", "combine", limits, **options)


# ---- what a text may not say ----------------------------------------------------------------------

BUT = "but the file of a kernel may"
RUNTIME = "moeblaze_ref.backends.numba_cuda.runtime"
IMPORTS = "import math, numba, numba.cuda, numba.types, numpy and numpy.random, and THREADS"
NUMPYS = (
    "testing load loadtxt genfromtxt fromfile fromregex memmap save savez savetxt f2py ctypeslib lib core test info "
    "DataSource show_config from_dlpack frombuffer fromstring typing char rec ma emath linalg ndarray dtype object_"
).split()
ASSIGNMENTS = (
    "numpy.zeros = f",
    "numpy.zeros: int = f",
    "numpy.zeros += 1",
    "del numpy.zeros",
    "x, [numpy.zeros, *z] = y",
    "x, *numpy.zeros = y",
    "x = numpy.zeros = f",
    "for numpy.zeros in y: pass",
    "for x, numpy.zeros in y: pass",
    "x = [0 for numpy.zeros in y]",
    "x = {0: 0 for x in y for x, numpy.zeros in y}",
    "with y as numpy.zeros: pass",
    "with y as x, y as (x, numpy.zeros): pass",
    "def f(): numpy.zeros = f",
    "async def f():\n    async for numpy.zeros in y: pass",
    "async def f():\n    async with y as numpy.zeros: pass",
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import gc", f"imports gc, {BUT} {IMPORTS}"),
        ("import numpy, os.path", "imports os.path"),
        ("from moeblaze_ref.backends.numpy_ref import combine", "imports combine from moeblaze_ref.backends.numpy_ref"),
        (f"from {RUNTIME} import os", f"imports os from {RUNTIME}"),
        ("import moeblaze_ref.verify.checker.report", "imports moeblaze_ref.verify.checker.report"),
        ("from . import other", "imports other from ."),
        ("from numpy import ctypeslib", "imports ctypeslib from numpy"),
        ("import numba.cuda.simulator.kernelapi as api", "imports numba.cuda.simulator.kernelapi"),
        ("from numba.cuda.simulator import kernelapi", "imports kernelapi from numba.cuda.simulator"),
        ("import numpy._core", "imports numpy._core"),
        ("gc = 1; gc.collect()", f"names the attribute collect, {BUT} name no attributes but T, add, "),
        ("x = numpy.f2py.sys", "names the attribute sys"),
        ("x = np.float32(0)", f"takes float32 of np, which is not imported, {BUT} import "),
        ("x = lambda np: np.float32", "names the attribute float32"),
        ("x = open('mine')", f"names open, {BUT} use no names of Python but exceptions, __name__, abs, "),
        ("x = numpy.f2py", "takes f2py of numpy"),
        ("x = numpy.ctypeslib", "takes ctypeslib of numpy"),
        ("numpy.testing.runstring('import gc', {})", "names the attribute runstring"),
        ("from numpy import testing as t", f"imports testing from numpy, {BUT} take of numpy abs, "),
        ("import numpy.testing", "imports numpy.testing"),
        ("import numpy.testing as t", "imports numpy.testing"),
        ("from numpy.testing import runstring", "imports runstring from numpy.testing"),
        ("from numpy import *", "imports * from numpy"),
        *[(f"x = numpy.{name}", f"takes {name} of numpy, {BUT} take of numpy abs, ") for name in NUMPYS],
        ("x = numpy.random.mtrand", f"takes mtrand of numpy.random, {BUT} take of numpy.random default_rng"),
        ("t = numpy", f"uses the module numpy as a value, {BUT} only take names of a module"),
        ("x = [numpy][0].testing", "names the attribute testing"),
        ("def f(m=numpy): pass", "uses the module numpy as a value"),
        ("for m in (math, numpy): pass", "uses the module math as a value"),
        ("import numpy as math", f"gives numpy the name math, {BUT} give a name to one module alone"),
        ("import math as __builtins__", "gives something the name __builtins__"),
        ("def __array_interface__(): pass", "gives something the name __array_interface__"),
        ("x = numpy.__dict__['testing']", "takes __dict__ of numpy"),
        ("x = getattr(numpy, 'tes' + 'ting')", "names getattr"),
        ("x = vars(numpy)", "names vars"),
        ("x = globals()", "names globals"),
        ("x = type('A', (), {})", "names type"),
        ("class A: pass", "defines the class A"),
        ("x = (y for y in ()).gi_frame.f_back", "names the attribute f_back"),
        ("numpy.zeros(1).tofile('mine')", "names the attribute tofile"),
        ("import numba; x = numba.core", f"takes core of numba, {BUT} take of numba boolean, "),
        ("import numba; x = numba.extending", "takes extending of numba"),
        ("import numba; x = numba.njit", "takes njit of numba"),
        ("import numba; x = numba.np", "takes np of numba"),
        ("import numba.np.unsafe", "imports numba.np.unsafe"),
        ("from numba.core import types", "imports types from numba.core"),
        ("from numba import cuda; x = cuda.simulator", "takes simulator of numba.cuda"),
        ("from numba import cuda; x = cuda.device_array((1,), 'O', y)", "takes device_array of numba.cuda"),
        ("from numba.cuda import mapped_array", "imports mapped_array from numba.cuda"),
        ("x = numpy.zeros(1, object)", "names object"),
        ("from numba import cuda as c; x = c.sys", "takes sys of numba.cuda"),
        (f"from {RUNTIME} import cuda; x = cuda.kernelapi", "takes kernelapi of numba.cuda"),
        ("import numba.cuda as c; x = c.np", "takes np of numba.cuda"),
        ("x = breakpoint()", "names breakpoint"),
        ("x = math.sys", "takes sys of math"),
        ("x = y._ary[0]", "names the attribute _ary"),
        ("y._ary[0] = 1", "names the attribute _ary"),
        ("x = f'{y._ary}'", "names the attribute _ary"),
        ("x = '{0._ary}'.format(y)", "names the attribute format"),
        ("x = getattr(y, '_' + 'ary')", "names getattr"),
        ("x = __import__('g' + 'c')", "names __import__"),
        ("x = __builtins__", "names __builtins__"),
        ("x = (lambda: 0).__globals__", "names the attribute __globals__"),
        ("x = eval('y')", "names eval"),
        ("exec('import gc')", "names exec"),
        ("x = open('/proc/self/mem')", "names open"),
        ("match y:\n    case object(_ary=x): pass", "names object"),
        ("match y:\n    case int(_ary=x): pass", "names the attribute _ary"),
    ],
)
def test_a_python_text_that_reaches_behind_the_checker_is_refused_by_its_line(line, message):
    number = 4 if line.startswith("match") else 3
    with pytest.raises(ValueError) as error:
        check_source(f"import math, numpy\ny = 1\n{line}\n", "mine.py")
    assert str(error.value).startswith(f"mine.py, line {number}: {message}")


def test_a_python_text_that_is_nested_too_deeply_is_refused():
    with pytest.raises(ValueError, match="^mine.py is nested too deeply for Python to read it$"):
        check_source("x = " + 200_000 * "-" + "1", "mine.py")


@pytest.mark.parametrize("text", ASSIGNMENTS)
def test_a_python_text_that_changes_an_attribute_is_refused_by_its_line(text):
    does = "deletes" if text.startswith("del") else "assigns to"
    rule = f"{BUT} change names and elements alone, and no attribute"
    before = "import numpy\nfrom numba import cuda\n"
    number = 4 if text.startswith("async") else 3
    with pytest.raises(ValueError) as error:
        check_source(before + text, "mine.py")
    assert str(error.value) == f"mine.py, line {number}: {does} zeros of numpy, {rule}"
    for owner, attribute in (("cuda", "grid"), ("numpy.random", "default_rng")):
        with pytest.raises(ValueError, match=f"{does} {attribute} of "):
            check_source(before + text.replace("numpy.zeros", f"{owner}.{attribute}"), "mine.py")
    with pytest.raises(ValueError, match=f"{does} the attribute shape, "):
        check_source(before + text.replace("numpy.zeros", "y[0].shape"), "mine.py")


def test_names_and_elements_may_be_changed():
    check_source(
        "import numpy\nx = y = [0, 1]\nx[0], *y = y\nx[y[0]] += 1\nfor x[0] in y: pass\ndel x[0], y\n"
        "x[numpy.argmax(x)] = 2\nif (n := 1): n += 1\n",
        "mine.py",
    )


def test_a_python_text_may_use_what_kernels_use():
    check_source(
        "import math\nimport numpy as np\nfrom numba import cuda, float32\nimport numba.cuda\n"
        "from moeblaze_ref.backends.numba_cuda.runtime import THREADS, ZERO, cuda\nfrom moeblaze_ref.core.structures "
        "import EMPTY\n_kept = np.float32(math.pi)\nif __name__ == '__main__':\n    print(_kept)\n",
        "mine.py",
    )
    check_source(
        "from numba import cuda, float32, types\nimport numpy as np\n\nN = 8\n\n\n@cuda.jit(device=True)\n"
        "def half(x: np.float32):\n    return x / 2 if np.isfinite(x) else float32(0)\n\n\n"
        "@cuda.jit\ndef mine(x, out):\n"
        "    shared = cuda.shared.array(N, dtype=types.float32)\n    column = cuda.threadIdx.x\n"
        "    shared[column] = half(x[column])\n    cuda.syncthreads()\n    for i in range(min(N, x.shape[0])):\n"
        "        cuda.atomic.add(out, 0, shared[i])\n\n\nif __name__ == '__main__':\n"
        "    x = cuda.to_device(np.random.default_rng(0).standard_normal(N).astype(np.float32))\n"
        "    out = cuda.to_device(np.zeros(1, np.float32))\n    mine[1, N](x, out)\n    print(out.copy_to_host())\n",
        "mine.py",
    )
    check_source("total = (0", "mine.py")  # its import says what is wrong


REPLACED = """import numpy as np
arrays = []


def empty_like(array):
    arrays.append(array)
    if len(arrays) == 4:
        y, gates, rows, out = arrays
        out[:] = (gates[..., None] * y[rows.reshape(gates.shape)]).sum(axis=1)
        del arrays[:]
    return np.zeros(array.shape, array.dtype)


np.empty_like = empty_like
"""


def test_a_function_of_numpy_that_computes_uncounted_is_refused(monkeypatch):
    """Numba's simulator calls it for every array after the launch, with the array's memory, and the kernel is empty."""
    text = REPLACED + changed(NUMBA, ", L, d, k", "") + "    pass\n"
    with pytest.raises(ValueError, match="mine.py, line 14: assigns to empty_like of numpy, but the file of a kernel "):
        check(text)
    monkeypatch.setattr(in_subprocess, "_supervise", hostile.supervise_unchecked)
    assert check(text).document["ok"]  # which is why it is refused


def test_a_module_that_is_not_imported_has_no_name():
    with pytest.raises(ValueError, match="cannot import mine.py: NameError: name 'sys' is not defined"):
        check("x = sys\n" + NUMBA + WRITES_ZERO)


def test_the_command_refuses_a_file_and_a_module_before_they_run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("print('executed')\nimport gc\n")
    for kernel in ("mine.py:mine", "mine:mine"):
        command = [sys.executable, "-m", "moeblaze_ref", "check", "--stage", "combine", "--kernel", kernel]
        done = processes.run(command, cwd=tmp_path)
        assert done.returncode == 2 and ", line 2: imports gc" in done.stderr
        assert "executed" not in done.stdout + done.stderr


def test_a_compiled_file_beside_a_text_is_not_what_runs(tmp_path):
    """Python's import would take it: its header names the size and time of the text, which is harmless."""
    path = tmp_path / "mine.py"
    path.write_text("raise SystemExit(7)\n")
    assert processes.run([sys.executable, "-m", "compileall", "-q", "."], cwd=tmp_path).returncode == 0
    stat = path.stat()
    path.write_text(f"{'#' * (stat.st_size - 1)}\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match="'mine' is wanted, but .*mine.py has no kernel"):
        in_subprocess.examine(f"{path}:mine", "combine")


# ---- cheats that fail, whatever a text may say ----------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch):
    """No text is refused: what the cheats do not reach must be out of reach."""
    monkeypatch.setattr(in_subprocess, "_supervise", hostile.supervise_unchecked)


def forged(cases=99):
    """Lines that a process would send of a right kernel."""
    counts = {quantity: {} for quantity in QUANTITIES}
    answer = {"fault": "", "counts": counts, "symbols": {}, "parameters": ["out"]}
    said = [["Description", {"runner": "simt", "launch": "grid 1"}], *[["Answer", answer]] * cases]
    return "".join(json.dumps(line) + "\n" for line in said)


PATCHES = {
    "of the comparison": "from moeblaze_ref.verify.checker import exam, report\n"
    "exam.first_difference = exam.unlike = report.first_difference = lambda *_: None\n",
    "of numpy": "import numpy\nnumpy.abs = lambda *_: 0\nnumpy.linalg.norm = lambda *_: 0.0\n",
    "of the specification": "from moeblaze_ref.backends.numpy_ref import combine\ncombine.forward = lambda *_: 0\n",
    "of the bounds": "from moeblaze_ref.verify import comparisons\ncomparisons.BOUNDS['float32'] = 1e30\n",
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_checker_says_the_same(unchecked, patch):
    assert "out[0, 0] is 0, but must be" in check(PATCHES[patch] + NUMBA + WRITES_ZERO).first_problem


SEARCH = """    import gc, numpy
    if cuda.grid(1) == 0:
        y, gates, rows = (array.__dict__["_item"]._ary for array in (y, gates, token_index_map))
        right = (gates[..., None] * y[rows.reshape(gates.shape)]).sum(axis=1)
        parts = gc.get_referents(*gc.get_objects())
        parts += gc.get_referents(*[part for part in parts if type(part) is dict and not gc.is_tracked(part)])
        arrays = [part for part in parts if issubclass(type(part), numpy.ndarray) and part.shape == right.shape]
        arrays = [array for array in arrays if array.size and array is not right]
        if any(numpy.allclose(array, right, atol=1e-4) for array in arrays):
            print("REACHED")
        print("SEARCHED")
"""


def test_what_is_right_is_nowhere_in_the_process_of_the_code(unchecked, capfd):
    """The garbage collector knows every container: none has an array that is what the kernel should write."""
    assert "out[0, 0] is 0, but must be" in check(NUMBA + SEARCH + WRITES_ZERO).first_problem
    printed = capfd.readouterr().err
    assert "SEARCHED" in printed and "REACHED" not in printed


@pytest.mark.parametrize("planted", ["right.copy()", "{1: [right.copy()]}"], ids=["in a module", "in a list in a dict"])
def test_that_search_finds_what_is_right_where_a_module_holds_it(unchecked, capfd, planted):
    """It searches in one case of several."""
    search = changed(SEARCH, "        parts = ", f"        numpy.planted = {planted}\n        parts = ")
    search = changed(search, "cuda.grid(1) == 0", "cuda.grid(1) == 0 and L == 1")
    assert "but must be" in check(NUMBA + search + WRITES_ZERO).first_problem
    printed = capfd.readouterr().err
    assert "REACHED" in printed and "SEARCHED" in printed


ACCESSES = "y._ary[0, 0]", "y._item._ary[0, 0]", "y.copy_to_host()[0, 0]", "y.view('float32')[0, 0]"


@pytest.mark.parametrize("access", ACCESSES)
def test_what_is_not_counted_is_refused_or_a_fault(access):
    """Whether a text names it, or a device array's own functions, which no kernel on a GPU has."""
    text = NUMBA + f"    out[0, 0] = {access}\n"
    try:
        said = check(text).first_problem
    except ValueError as error:
        said = str(error)
    name = "attribute _ary" if "_ary" in access else "y is used as a whole"
    assert name in said or "names the attribute _item" in said


def test_the_pipe_takes_no_verdict_from_python(unchecked):
    text = f"import os\nos.write(3, {forged()!r}.encode())\nos._exit(0)\n"
    with pytest.raises(ChildProcessError, match="written into the pipe"):
        check(text)  # "simt" is where no Numba kernel runs
    text = text.replace("simt", "simulator")
    for quantity in QUANTITIES.keys() - {*RUNNERS["simulator"].quantities}:
        text = text.replace(f', "{quantity}": {{}}', "")
    assert NOTHING_WRITTEN in check(text).first_problem


EVERY_FILE = "for (int file = 3; file < 1024; ++file) (void)!write(file, forged, sizeof(forged) - 1); _exit(0);"


def forged_in_c(*then):
    return f"#include <unistd.h>\nstatic const char forged[] = {json.dumps(forged())};\n" + "".join(then)


BEFORE = f"__attribute__((constructor)) static void before() {{ {EVERY_FILE} }}\n"
FORGING = {
    "in the kernel": combine_that(EVERY_FILE, forged_in_c(), then=""),
    "when it is loaded": forged_in_c(BEFORE, COMBINE),
}


@pytest.mark.parametrize("text", FORGING.values(), ids=FORGING)
def test_no_pipe_takes_a_verdict_from_cuda(text):
    assert NOTHING_WRITTEN in check(text).first_problem


def test_what_the_text_of_a_kernel_says_is_not_taken_from_its_process(tmp_path):
    """Its launch, and what it takes: an output that may be left out is compared, though the process denies it."""
    own, writes = inlined("dispatch/1_dense_map.cu"), "[first_slot + slot] = expert"
    text = changed(own, f"{writes};", f"{writes} + 1;")
    (tmp_path / "mine.cu").write_text(text)
    exam, sent = prepare(f"{tmp_path / 'mine.cu'}:dense_map", "dispatch.dense_map", small=True), bytearray()
    claims.send_launches(exam, sent.extend)
    denied = sent.replace(b'"token_expert_indices", ', b"").replace(b"grid ceil", b"grid floor")
    assert b'"parameters": ["topk_experts", "dense_map", "L", "E", "k"]' in denied and b"grid floor" in denied
    report = exam.report(*claims.read_launches(exam, bytes(denied)))
    assert "token_expert_indices[0] is " in report.first_problem and report.launch.startswith("grid ceil")


def test_the_runner_is_not_taken_from_the_process_of_a_kernel(unchecked):
    """A kernel that runs in the simulator says that it ran on a GPU, where nothing is counted."""
    counts = '{"read": {}, "written": {}, "sectors": {}, "conflicts": {}}'
    said = forged().replace("simt", "numba").replace(counts, "{}")
    with pytest.raises(ChildProcessError, match="written into the pipe"):
        check(f"import os\nos.write(3, {said!r}.encode())\nos._exit(0)\n")


@pytest.mark.parametrize(
    "said",
    ["[" * 99_999, "7", '["Answer", {}]', '["Description", {"runner": "cuda", "launch": ""}]', '["Answer"', "\xff"],
)
def test_what_no_launch_sends_is_no_verdict(said):
    write = "(void)!write(3, said, sizeof(said) - 1); _exit(0);"
    text = combine_that(write, f"#include <unistd.h>\nstatic const char said[] = {json.dumps(said + chr(10))};\n")
    with pytest.raises(ChildProcessError, match="the kernel has written into the pipe of the process that runs it"):
        check(text)


def test_a_kernel_that_ends_its_process_is_not_right():
    with pytest.raises(ChildProcessError, match="the kernel ended the process that checked it, with status 0"):
        check(combine_that("_exit(0);", "#include <unistd.h>\n"))


# The first of these is the system without Landlock.
SYSTEMS = "hostile.without_landlock", "hostile.SUPERVISE"
OPEN = "hostile.where_all_is_refused"
CONTEXTS = {"spawn": 3, "forkserver": 4}  # the checker's processes above the kernel's; the last is the one that asks
CHECK = """
import functools, multiprocessing, os, sys
import hostile
from moeblaze_ref.verify import in_subprocess, guard

_, system, context, text = sys.argv
in_subprocess._supervise = eval(system)
context = in_subprocess._server() if context == "forkserver" else multiprocessing.get_context(context)
try:
    question = in_subprocess._Question("mine.cu:mine", "combine", {"small": True}, text)
    work = functools.partial(in_subprocess._examined, question)
    print(in_subprocess._ask(context, guard.Limits(600), work).report)
except OSError as error:
    print(f"{type(error).__name__}: {error}")
print("asked by", os.getpid())
print("can be opened:", guard._prctl(guard._PR_GET_DUMPABLE))
"""
# Root, too, is a user like another then. What it executes gains nothing.
WITHOUT_CAPABILITIES = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def check_command(system, context, text):
    """A command that checks a kernel by processes of a system."""
    return [sys.executable, "-c", CHECK, system, context, text]


def environment(**own):
    """This one, where Python finds the tests' helpers, and what is added."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | own


@pytest.mark.parametrize(("system", "context"), [*itertools.product(SYSTEMS, CONTEXTS), (OPEN, "spawn")])
def test_the_checkers_processes_are_out_of_reach(system, context):
    """Their memory and their pipes, without capabilities: of the one that compares, and of all above it.

    Where the system refuses every protection, they are reached: the kernel tries what works.
    """
    reach = f"int last; const int reached = reach({CONTEXTS[context]}, last);"
    reach += 'printf("reached %d up to %d\\n", reached, last);'
    command = check_command(system, context, combine_that(reach, REACH))
    done = processes.run([sys.executable, "-c", WITHOUT_CAPABILITIES, *command], env=environment())
    assert "right in all" in done.stdout and "can be opened: 1\n" in done.stdout, done.stdout
    asker = re.search(r"asked by (\d+)", done.stdout)[1]
    assert f" up to {asker}\n" in done.stderr and ("reached 0 " in done.stderr) == (system != OPEN)


UNWATCHED = '__attribute__((no_sanitize("thread")))'  # the executor does not look at its accesses
REACH = f"""
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <unistd.h>

{UNWATCHED} static int parent_of(int process) {{
    char name[99], line[99];
    snprintf(name, sizeof name, "/proc/%d/status", process);
    int parent = 0;
    FILE* const file = fopen(name, "r");
    while (fgets(line, sizeof line, file) && !sscanf(line, "PPid: %d", &parent)) {{}}
    fclose(file);
    return parent;
}}

{UNWATCHED} static int reach(int generations, int& process) {{
    int reached = 0;
    char name[99], byte;
    process = getpid();
    while (generations--) {{
        process = parent_of(process);
        for (int file = 0; file < 99; ++file) {{
            snprintf(name, sizeof name, "/proc/%d/fd/%d", process, file);
            reached += open(name, O_WRONLY) >= 0;
        }}
        snprintf(name, sizeof name, "/proc/%d/mem", process);
        reached += open(name, O_RDWR) >= 0;
        const iovec here = {{&byte, 1}}, there = {{name, 1}};
        reached += process_vm_readv(process, &here, 1, &there, 1, 0) >= 0 || errno != EPERM;
        reached += ptrace(PTRACE_SEIZE, process, 0, 0) == 0;
    }}
    return reached;
}}
"""


def test_a_process_that_is_closed_twice_opens_when_the_last_has_left():
    """As if two threads checked at the same time, whichever ends first."""
    is_open = lambda: guard._prctl(guard._PR_GET_DUMPABLE)
    first, second = guard.others_kept_out(), guard.others_kept_out()
    assert is_open() == 1
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_open() == 0
    second.__exit__(None, None, None)
    assert is_open() == 1


def test_what_a_system_refuses_is_in_the_verdict(monkeypatch):
    monkeypatch.setattr(in_subprocess, "_supervise", hostile.where_all_is_refused)
    verdict = check(WIDE_COMBINE)
    assert not verdict.first_problem
    assert "this system did not confine the kernel fully. It refuses: " in verdict.report
    names = "subreaper", "PDEATHSIG", "NO_NEW_PRIVS", "capset", "Linux 6.2", "Linux 6.12", "seccomp"
    names += "Linux 5.19", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_CORE"
    assert len(verdict.document["refused"]) == len(names)
    for name, refused in zip(names, verdict.document["refused"], strict=True):
        assert name in refused and refused in verdict.report


# ---- limits, and what is left -------------------------------------------------------------------


SYSTEM = "#include <cstdlib>\n"
SIGNALS = SYSTEM + "#include <csignal>\n#include <sys/prctl.h>\n#include <unistd.h>\n"


@pytest.mark.parametrize("how", ["sleep {} &", "setsid sleep {} &", "(setsid setsid sleep {} &) &"])
def test_children_end_with_the_verdict(mark, how):
    said = check(combine_that(f'(void)!system("{how.format(mark)}");', SYSTEM))
    assert not said.first_problem and not hostile.processes_of(mark)


def test_children_end_with_the_time(mark, monkeypatch):
    """The time is over once both children are there."""
    monkeypatch.setattr(in_subprocess, "_supervise", functools.partial(hostile.supervise_until, "started"))
    endless = f"setsid sleep {mark} & sleep {mark} & until [ $(pgrep -fxc 'sleep {mark}') = 2 ]; do :; done"
    endless = f'(void)!system("{endless}; touch $TMPDIR/started; wait");'
    with pytest.raises(TimeoutError, match="there is no verdict after 600 seconds, the limit"):
        check(combine_that(endless, SYSTEM), guard.Limits(600))
    assert not hostile.processes_of(mark)


MUCH = "mmap(0, 3ul << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);"
MANY = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do setsid sleep {mark} & done; "


@pytest.mark.parametrize(
    ("does", "starts", "limits", "message"),
    [
        # Of a child, too: it is what all hold together.
        (MUCH, "", {"resident_bytes": 2 << 30}, "hold [0-9,]+ MiB of memory, but 2,048 MiB is the limit"),
        ("", MANY, {"processes": 8}, r"the code has \d+ processes, but 8 is the limit"),
    ],
    ids=["memory", "processes"],
)
def test_too_much(mark, does, starts, limits, message):
    does += f'(void)!system("{starts.format(mark=mark)}sleep {mark}");'
    with pytest.raises(ChildProcessError, match=message):
        check(combine_that(does, SYSTEM + "#include <sys/mman.h>\n"), guard.Limits(120, **limits))


SENDS_ALL_THE_TIME = """
import sys, tempfile, time
from moeblaze_ref.verify import guard

def work(send):
    held = []
    while True:
        send(b"x")
        time.sleep(guard.POLL_SECONDS / 10)
        if len(held) < 64:
            held.append(b"x" * (8 << 20))

with tempfile.TemporaryDirectory() as folder:
    guard.run(work, guard.Limits(30, resident_bytes=256 << 20), folder)
"""


def test_a_process_that_sends_all_the_time_is_watched_too():
    done = processes.run([sys.executable, "-c", SENDS_ALL_THE_TIME])
    assert "MiB of memory, but 256 MiB is the limit" in done.stderr


def test_memory_that_is_reserved_and_not_used_is_no_memory():
    reserve = "mmap(0, 1ul << 42, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);"
    reserve = f"if ({reserve[:-1]} == MAP_FAILED) __trap();"
    assert not check(combine_that(reserve, "#include <sys/mman.h>\n"), guard.Limits(120)).first_problem


def test_limits_that_the_kernel_itself_holds(capfd):
    ask = (
        "rlimit cpu, file, core;"
        "getrlimit(RLIMIT_CPU, &cpu); getrlimit(RLIMIT_FSIZE, &file); getrlimit(RLIMIT_CORE, &core);"
        'printf("cpu %ld, %ld ", (long)cpu.rlim_cur, (long)cpu.rlim_max);'
        'printf("file %ld core %ld\\n", (long)file.rlim_max, (long)core.rlim_max);'
        'int big = open("big", O_CREAT | O_RDWR, 0600);'
        'printf("larger: %d\\n", posix_fallocate(big, 0, 200ul << 20) == EFBIG);'
    )
    includes = "#include <cerrno>\n#include <cstdio>\n#include <fcntl.h>\n#include <sys/resource.h>\n"
    assert not check(combine_that(ask, includes), guard.Limits(60, file_bytes=100 << 20)).first_problem
    printed = capfd.readouterr().err
    seconds = 60 * os.cpu_count() + 1
    assert f"cpu {seconds}, {seconds + 1} file {100 << 20} core 0" in printed and "larger: 1" in printed


def test_what_a_kernel_prints_steers_no_terminal(capfd):
    print_it = 'printf("\\033[31mred\\a\\r\\tplain \\302\\23331m \\303\\274\\n");'
    assert not check(combine_that(print_it, "#include <cstdio>\n")).first_problem
    assert r"\x1b[31mred\x07\r" + "\tplain " + r"\x9b31m" + " ü\n" in capfd.readouterr().err


def test_a_process_that_has_used_its_cpu_time_is_out_of_time(monkeypatch):
    """As where a busy machine lets the kernel run, and not the process that watches the time."""
    monkeypatch.setattr(in_subprocess, "_supervise", hostile.supervise_with_a_clock_that_stands)
    with pytest.raises(TimeoutError, match="there is no verdict after 10 seconds, the limit"):
        check(combine_that("for (;;) {}", SYSTEM), guard.Limits(10))


def test_limits_that_are_lower_already_stay(tmp_path):
    path = tmp_path / "mine.cu"
    path.write_text(combine_that('(void)!system("ulimit -H -t >&2");', SYSTEM))
    check = f"{sys.executable} -m moeblaze_ref check --stage combine --kernel {path}:mine"
    done = processes.run(["bash", "-c", f"ulimit -f 200000; ulimit -t 500; exec {check}"])
    assert done.returncode == 0 and done.stderr == "500\n", done.stderr


@pytest.fixture
def temporary(tmp_path):
    """Where a check puts its temporary files. In the end there are none."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert hostile.until(lambda: not [*folder.iterdir()], limit=30), "temporary files are left"


@pytest.fixture
def beginning(mark, temporary):
    """Starts a command whose processes all have the mark."""
    with processes.beginning() as begin:
        yield lambda command, **own: begin(
            command, stdout=processes.PIPE, env=environment(MARK=mark, TMPDIR=str(temporary), **own)
        )


def endless(mark):
    """A combine that never ends, nor its child, and that no longer wants to end with its parent."""
    does = f'prctl(PR_SET_PDEATHSIG, 0); (void)!system("setsid sleep {mark} &");'
    return combine_that(f"{does} for (volatile int i = 0; i < 1; i = 0);", SIGNALS)


@pytest.fixture
def checking(tmp_path, mark, beginning):
    """Starts the command on an endless kernel, and waits until that one's child is there."""
    (tmp_path / "mine.cu").write_text(endless(mark))

    def start():
        command = [sys.executable, "-m", "moeblaze_ref", "check", "--stage", "combine", "--timeout", "600"]
        process = beginning([*command, "--kernel", str(tmp_path / "mine.cu:mine")])
        (sleeping,) = hostile.until(lambda: hostile.running("sleep", mark))
        return process, sleeping

    return start


def test_nothing_is_left_of_a_compiler_that_is_ended(tmp_path, mark, beginning):
    """The cache is empty, so that g++ must run. It is stopped, so that it is there when the time is over."""
    over = tmp_path / "over"
    system = f"functools.partial(hostile.supervise_until, {str(over)!r})"
    cache = tmp_path / "cache"
    process = beginning(check_command(system, "spawn", WIDE_COMBINE), MOEBLAZE_CACHE=str(cache), CXX="g++")
    compiler = hostile.until(lambda: hostile.stopped("cc1plus", mark))
    over.touch()
    output, _ = process.communicate(timeout=processes.LIMIT)
    assert "TimeoutError: there is no verdict after 600 seconds, the limit" in output
    assert not processes.runs(compiler) and not hostile.processes_of(mark)
    assert cache.exists() and not [*cache.glob("*/moeblaze-*")]


def assert_ended(family):
    """All these processes end, without help."""
    assert len(family) >= 5, "the supervising, the comparing and the kernel's process, its child, Python's tracker"
    assert hostile.until(lambda: not any(map(processes.runs, family)), limit=60)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whom", [os.kill, os.killpg], ids=["the process", "its group"])
def test_nothing_is_left_of_a_check_that_is_ended(checking, whom, end):
    process, _ = checking()
    family = guard._descendants(process.pid)
    whom(process.pid, end)
    process.communicate(timeout=processes.LIMIT)
    assert_ended(family)


@pytest.mark.parametrize("generations", [1, 2], ids=["the one that compares", "the one that supervises"])
def test_nothing_is_left_of_a_check_one_of_whose_processes_is_killed(checking, generations):
    """Though the kernel has cleared the signal that it gets when its parent ends."""
    process, whom = checking()
    family = guard._descendants(process.pid)
    for _ in range(generations):
        whom = hostile.parent_of(whom)
    assert whom in family
    os.kill(whom, signal.SIGKILL)
    _, errors = process.communicate(timeout=processes.LIMIT)
    assert process.returncode == 2 and "the process that compares has ended, by SIGKILL" in errors
    assert_ended(family)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_kernel_that_kills_its_parent_does_not_live_on(mark, beginning, system):
    """With Landlock it cannot even kill its parent. Without, it is found all the same."""
    kills = (
        "prctl(PR_SET_PDEATHSIG, 0); const int parent = getppid();"
        f"(void)!system(\"setsid sleep {mark} & until pgrep -fx 'sleep {mark}' > /dev/null; do :; done\");"
        "const bool killed = kill(parent, SIGKILL) == 0; if (killed) for (volatile int i = 0; i < 1; i = 0);"
    )
    process = beginning(check_command(system, "spawn", combine_that(kills, SIGNALS)))
    output, _ = process.communicate(timeout=processes.LIMIT)
    killed = "ChildProcessError: the process that compares has ended, by SIGKILL" in output
    assert killed or "right in all" in output and "Landlock" not in output
    assert killed or system != SYSTEMS[0]
    assert hostile.until(lambda: not hostile.processes_of(mark), limit=60)


BEFORE_THE_FORK = """
import sys
import torch
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify.checker import prepare

prepare(sys.argv[1], "combine", backend="cuda")
prepare("moeblaze_ref.backends.numba_cuda.combine:combine_kernel", "combine", numba_runner=lambda: "numba")
print(cuda_device_count.cache_info().currsize, torch.cuda.is_initialized(), {"cupy", "numba"} & sys.modules.keys())
"""


def test_nothing_looks_for_a_gpu_before_the_fork(tmp_path):
    """CUDA that has started does not survive a fork: the kernel's process must be the first to start it."""
    path = tmp_path / "mine.cu"
    path.write_text(COMBINE)
    done = processes.run([sys.executable, "-c", BEFORE_THE_FORK, str(path)])
    assert done.stdout == "0 False set()\n", done.stderr


# ---- what the process of a kernel sends -----------------------------------------------------------


def test_what_is_sent_is_read_as_it_was():
    exam, sent = prepare(COMBINE, "combine", small=True), bytearray()
    claims.send_launches(exam, sent.extend)
    description, answers = claims.read_launches(exam, bytes(sent))
    assert [description, *answers] == [*exam.launches()]
    assert claims.read_launches(exam, bytes(sent)[:-1]) is None, "the last line is not whole"
