"""Compile a .cu file for the CPU: g++ over simt.hpp, with a content-hashed cache.

The instrumented build (``-fsanitize=thread``) reports every memory access to our own
callbacks, libtsan is not linked; the plain build only runs.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moeblaze_ref.runtime.simt import cache
from moeblaze_ref.runtime.simt.cache import SimtUnavailable

SIMT_DIR = Path(__file__).parent
PRELUDE = '#include "simt.hpp"\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n'
# A char has a sign in CUDA on x86-64, and here on every processor.
COMMON_FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-fno-strict-aliasing", "-fsigned-char", "-U_FORTIFY_SOURCE")
# Apart from compiling: with the sanitizer's flag, libtsan would come along. A file's own memcpy goes before libc's.
# What no kernel uses goes, so that the static shared memory that is left is that of the kernels.
LINK_FLAGS = ("-shared", "-Wl,-Bsymbolic", "-Wl,--gc-sections")
# On macOS names of the runtime are looked up when the file is loaded only if the linker is told so.
MACOS_LINK_FLAGS = ("-shared", "-Wl,-undefined,dynamic_lookup", "-Wl,-dead_strip")
RUNTIME_LIBRARIES = ("-pthread",)
# The runtime has loaded those of C++, which to read takes most of a link. libm has several versions of one function.
KERNEL_LIBRARIES = ("-nodefaultlibs", "-lm")
MACOS_KERNEL_LIBRARIES = ()  # libm is a part of the system's library
# Names stay inside their file: a kernel may be called read, and two files may hold the same template.
KERNEL_FLAGS = ("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffunction-sections", "-fdata-sections")
# An empty endless loop hangs a GPU, so the compiler must not assume that loops end. All processors round alike.
INSTRUMENTED_FLAGS = ("-fsanitize=thread", "-fno-tree-vectorize", "-fno-finite-loops", "-ffp-contract=off")
# Flags that each compiler names in its own way. Without -O2 g++ takes a third less time; with PRE kernels read as
# often. Without SRA g++ makes a float4 one 16-byte access, as on a GPU. Without sinking it reads where the text does,
# not behind the bounds check that comes too late.
GCC_KERNEL_FLAGS = ("-fno-gnu-unique",)
GCC_INSTRUMENTED_FLAGS = (
    *("-O1", "-ftree-pre"),
    *("-fno-tree-sra", "-fno-tree-sink", "--param=tsan-instrument-func-entry-exit=0"),
)
# Clang's thread sanitizer would leave out a read before a write, and call what libtsan alone has for atomics.
CLANG_INSTRUMENTED_FLAGS = (
    "-O2",
    "-fno-slp-vectorize",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
    *("-mllvm", "-tsan-instrument-atomics=0"),
)
# An atomic would be a call of the compiler's own library, which is not linked.
AARCH64_KERNEL_FLAGS = ("-mno-outline-atomics",)
# Which line an instruction is of; the instructions stay the same. binutils misreads files of DWARF 5.
LINE_FLAGS = ("-g1", "-gdwarf-4")
# With what the compiler calls this machine's processor.
PLAIN_FLAGS = ("-O3", "-ffp-contract=fast")
RUNTIME_FLAGS = ("-O2", "-ffp-contract=off")
NATIVE_FLAGS = ("-march=native", "-mcpu=native")


class SimtCompileError(RuntimeError):
    """g++ refused a kernel file; the message is the compiler's."""


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: $CXX with its options, else g++, else Clang as the package ziglang has it.

    Raises
    ------
    SimtUnavailable
        If $CXX names a program that is not there, or there is none of the others.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    program, *options = named or ["g++"]
    if path := shutil.which(program):
        return (path, *options)
    if not named and importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise SimtUnavailable(
        f"the SIMT executor compiles kernels with {program}, "
        "which is not on the PATH; install g++, or pip install ziglang"
    )


@functools.cache
def _native() -> tuple[tuple[str, ...], str]:
    """The flag for this machine's processor, none if the compiler knows none; and its macros with that flag."""
    for flag in NATIVE_FLAGS:
        with suppress(subprocess.CalledProcessError):
            return (flag,), _macros(flag)
    return (), _macros()


def _macros(*flags: str) -> str:
    return _called(*flags, "-dM", "-E", "-x", "c++", os.devnull).stdout


@functools.cache
def _toolchain() -> str:
    """Return the part of the key that names the compiler, and the processor that it detects."""
    flags, macros = _native()
    return "\n".join([_called("--version").stdout, *flags, macros])


@functools.cache
def _defines(macro: str) -> bool:
    """Return True if the compiler predefines a macro."""
    return f"#define {macro} " in _native()[1]


def is_clang() -> bool:
    """Return True if the compiler is Clang, which has other names for some flags."""
    return _defines("__clang__")


def _for_macos() -> bool:
    """Return True if the compiler builds for macOS, which links in another way than Linux."""
    return _defines("__APPLE__")


def _key(flags: tuple[str, ...], text: str, depends_on: list[Path]) -> str:
    """Return the name of a result in the cache, a hash of everything that decides the result."""
    digest = hashlib.sha256()
    headers = [path.name + path.read_text() for path in sorted(depends_on, key=lambda path: path.name)]
    for part in (_toolchain(), " ".join(flags), text, *headers):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compile(
    text: str,
    flags: tuple[str, ...],
    libraries: tuple[str, ...],
    options: Callable[[], list[str]],
    depends_on: list[Path],
) -> Path:
    """The shared object for a C++ text, from the cache if nothing that it depends on has changed.

    ``options`` says where headers are, and is asked only if there is something to compile: what lies there decides, and
    not where it lies.
    """
    link_flags = (*(MACOS_LINK_FLAGS if _for_macos() else LINK_FLAGS), *libraries)

    def make(built: Path) -> None:
        source, object_file = built.with_name("driver.cpp"), built.with_name("driver.o")
        source.write_text(text)
        _run(*flags, *options(), "-c", "-o", object_file, source)
        _run("-o", built, object_file, *link_flags)

    return cache.kept(f"{_key((*flags, *link_flags), text, depends_on)}.so", make)


def _prelude(flags: tuple[str, ...], folders: list[str]) -> Path:
    """Return the header that every kernel file includes first. g++ also gets a precompiled header beside it.

    If a file's constants change the header, g++ reads the header itself. Clang always does: its precompiled headers
    are bound to the folder that they were made in.
    """
    key = _key(flags, PRELUDE, _own_headers())
    header = cache.kept(f"{key}.hpp", lambda made: made.write_text(PRELUDE))
    if not is_clang():
        cache.kept(f"{key}.hpp.gch", lambda made: _precompile(flags, folders, made))
    return header


def _precompile(flags: tuple[str, ...], folders: list[str], made: Path) -> None:
    header = made.with_suffix("")
    header.write_text(PRELUDE)
    _run(*flags, *folders, "-x", "c++-header", "-o", made, header)


def _run(*arguments: object) -> None:
    try:
        _called(*arguments)
    except subprocess.CalledProcessError as error:
        first_errors = "\n".join(error.stderr.splitlines()[:40])
        raise SimtCompileError(f"{' '.join(error.cmd)}\n{first_errors}") from None


def _called(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the compiler. Zig keeps what it has built in our cache, where confined processes may write."""
    words = [*compiler(), *map(str, arguments)]
    place = str(cache.folder() / "zig")
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": place, "ZIG_LOCAL_CACHE_DIR": place}
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment)


def _own_headers() -> list[Path]:
    return [*SIMT_DIR.glob("*.hpp"), *(SIMT_DIR / "include").glob("*.h*")]


def compile_runtime() -> Path:
    """Compile the runtime, for whatever machine the compiler builds for."""
    text = (SIMT_DIR / "runtime.cpp").read_text()
    folders = [f"-I{SIMT_DIR}", f"-I{SIMT_DIR / 'include'}"]
    flags = (*COMMON_FLAGS, *RUNTIME_FLAGS, *_native()[0])
    return _compile(text, flags, RUNTIME_LIBRARIES, lambda: folders, _own_headers())


def host_library(text: str) -> ctypes.CDLL:
    """Compile and load a C++ text for the host that includes the standard library alone.

    Raises
    ------
    SimtUnavailable
        If there is no compiler, or the system does not load what was built.
    """
    flags = (*COMMON_FLAGS, *RUNTIME_FLAGS, *_native()[0])
    return _loaded(lambda: _compile(text, flags, RUNTIME_LIBRARIES, list, []), _not_loaded)


@functools.cache
def runtime_library() -> ctypes.CDLL:
    """The loaded runtime; its symbols are global, so that kernel files find them."""
    library = _loaded(compile_runtime, _not_loaded, ctypes.RTLD_GLOBAL)
    library.simt_static_shared_bytes.restype = ctypes.c_uint64
    return library


def _loaded(
    build: Callable[[], Path], refusal: Callable[[OSError], Exception], mode: int = ctypes.DEFAULT_MODE
) -> ctypes.CDLL:
    """Load a library of the cache. If it does not load, remove it and build it once more."""
    path = str(build())
    try:
        return ctypes.CDLL(path, mode=mode)
    except OSError:
        cache.discard(Path(path))
    path = str(build())
    try:
        return ctypes.CDLL(path, mode=mode)
    except OSError as error:
        raise refusal(error) from None


def _not_loaded(error: OSError) -> SimtUnavailable:
    """Return the error for a new library that does not load, such as where no file may be executed."""
    return SimtUnavailable(f"{error}; set MOEBLAZE_CACHE to a folder whose libraries can be loaded")


def build_kernels(
    file: str,
    source: str,
    kernels: list[str],
    include_dirs: list[Path],
    constants: dict[str, object],
    instrumented: bool = True,
    lines: bool = False,
) -> ctypes.CDLL:
    """Compile and load the text of a .cu file; arguments as of `compile_kernels`.

    Raises
    ------
    SimtUnavailable
        If there is no compiler, or the system does not load what was built.
    SimtCompileError
        If the compiler refuses the source, or it uses a function that nothing defines.
    """
    runtime_library()
    build = functools.partial(compile_kernels, file, source, kernels, include_dirs, constants, instrumented, lines)
    return _loaded(build, functools.partial(_kernels_not_loaded, file))


def compile_kernels(
    file: str,
    source: str,
    kernels: list[str],
    include_dirs: list[Path],
    constants: dict[str, object],
    instrumented: bool = True,
    lines: bool = False,
) -> Path:
    """Compile the text of a .cu file, for whatever machine the compiler builds for.

    Parameters
    ----------
    file, source : str
        Name of the file, for messages, and its text.
    kernels : list of str
        Names of those of its ``extern "C" __global__`` functions that can be launched; others are left out.
    include_dirs : list of Path
        Folders of its own headers; their files are part of the cache key.
    constants : dict
        Preprocessor constants, as nvcc's ``-DNAME=VALUE``.
    instrumented : bool
        Count and check every memory access (slower), or only run.
    lines : bool
        Keep which line of the source each instruction is of, for `symbols.frames`.

    Raises
    ------
    SimtUnavailable
        If there is no compiler.
    SimtCompileError
        If the compiler refuses the source.
    """
    entries = "".join(f"SIMT_KERNEL({name})\n" for name in kernels)
    own_text = f'#line 1 "{file}"\n{source}\n'
    flags = (*COMMON_FLAGS, *_kernel_flags(instrumented))
    defined = tuple(f"-D{name}={value}" for name, value in sorted(constants.items()))
    own = [SIMT_DIR / "include", *include_dirs]
    folders = [f"-I{path}" for path in own]
    folders += [f"-fmacro-prefix-map={path}/=" for path in own]  # messages name a header, not where it lies
    if lines:
        flags += (*LINE_FLAGS, *folders)  # a line is of a file in its folder

    def options() -> list[str]:
        return [*folders, "-include", str(_prelude(flags, folders))]

    headers = [header for path in include_dirs for header in path.rglob("*.cuh")]
    headers += _own_headers()

    def compiled(text: str) -> Path:
        libraries = MACOS_KERNEL_LIBRARIES if _for_macos() else KERNEL_LIBRARIES
        return _compile(text, flags + defined, libraries, options, headers)

    try:
        return compiled(own_text + entries)
    except SimtCompileError:
        compiled(own_text)  # says the same, of the file's lines
        raise


def _kernels_not_loaded(file: str, error: OSError) -> Exception:
    """Return the error for a kernel file that does not load; an undefined name is the kernel's own mistake."""
    found = re.search(r"(?:undefined symbol: |symbol not found in flat namespace '_)(?:_Z(\d+))?(\w+)", str(error))
    if not found:
        return _not_loaded(error)
    length, name = found.groups()
    missing = name[: int(length)] if length else name
    return SimtCompileError(f"{error}\n{file}: error: {missing} is declared and used, but nowhere defined")


def _kernel_flags(instrumented: bool) -> tuple[str, ...]:
    """How this compiler builds a kernel file."""
    kernel: tuple[str, ...] = KERNEL_FLAGS
    counted: tuple[str, ...] = INSTRUMENTED_FLAGS
    if is_clang():
        counted += CLANG_INSTRUMENTED_FLAGS
    else:
        kernel, counted = kernel + GCC_KERNEL_FLAGS, counted + GCC_INSTRUMENTED_FLAGS
    if _defines("__aarch64__"):
        kernel += AARCH64_KERNEL_FLAGS
    return kernel + (counted if instrumented else PLAIN_FLAGS + _native()[0])


def entry(built: ctypes.CDLL, kernel: str) -> ctypes.c_void_p:
    """Address of the function through which the runtime calls a kernel of a built file."""
    return ctypes.cast(getattr(built, f"simt_entry_{kernel}"), ctypes.c_void_p)


def static_shared_bytes(built: ctypes.CDLL, kernel: str) -> int:
    """Bytes of static shared memory of the built file that holds this kernel, all its kernels together."""
    size: int = runtime_library().simt_static_shared_bytes(entry(built, kernel))
    return size
