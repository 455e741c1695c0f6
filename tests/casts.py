"""Kernel files in which each 64-bit cast can be removed while they run, one at a time.

A cast becomes an expression that computes both values, that with the cast and that without it. Which of them an index
gets is chosen by a number, so one compiled file serves for every cast of it.
"""

import ctypes
import functools
import re

from planted import quick_builds

from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import inlined
from moeblaze_ref.runtime.sparse import SparseExecutor, SparseModule

CAST = re.compile(r"(?<!\])\((?:unsigned )?long long\)|\b(\d+)LL\b")
UNCOMPILED = re.compile(r"\bmin\(.*\(long long\)")  # without the cast there is no such min: the compiler refuses it

MOST = 999
SWITCH = """
extern "C" {
__attribute__((visibility("default"))) int removed_cast = 0;               // the number of the cast that is not there
__attribute__((visibility("default"))) unsigned char differs[MOST_CASTS];  // an index would be another without the cast
}

// An integer that cast number N made wide, and what it is in type T without the cast.
template <int N, class T>
struct Wide {
    long long wide;
    T narrow;

    SIMT_PLAIN operator long long() const {
        if (wide != (long long)narrow) differs[N] = 1;
        return removed_cast == N ? (long long)narrow : wide;
    }
};
template <class U>
concept Narrow = std::is_integral_v<U> && sizeof(U) <= 4;
template <class U>
concept LongLong = std::is_integral_v<U> && sizeof(U) == 8;
template <int N>
struct Cast {
    template <Narrow U>
    SIMT_PLAIN friend Wide<N, decltype(+U())> operator->*(Cast, U value) { return {(long long)value, value}; }
    template <LongLong U>
    SIMT_PLAIN friend long long operator->*(Cast, U value) { return value; }
};
// Both values, and in 32 bits as the hardware has it.
#define WIDE_OPERATOR(op, computed)                                                                                \\
    template <int N, class T, Narrow U>                                                                            \\
    SIMT_PLAIN auto operator op(Wide<N, T> a, U b) {                                                               \\
        using R = decltype(T() op U());                                                                            \\
        return Wide<N, R>{a.wide op (long long)b, R(computed(a.narrow) op computed(b))};                           \\
    }                                                                                                              \\
    template <int N, class T, Narrow U>                                                                            \\
    SIMT_PLAIN auto operator op(U a, Wide<N, T> b) {                                                               \\
        using R = decltype(U() op T());                                                                            \\
        return Wide<N, R>{(long long)a op b.wide, R(computed(a) op computed(b.narrow))};                           \\
    }
WIDE_OPERATOR(*, unsigned);
WIDE_OPERATOR(+, unsigned);
WIDE_OPERATOR(-, unsigned);
WIDE_OPERATOR(/, R);
#undef WIDE_OPERATOR
"""


@functools.cache
def switched(file: str) -> tuple[str, tuple[str, ...]]:
    """A kernel file with its headers, every cast switched, and the lines of the casts; their numbers count from 1."""
    lines, found = [], []
    for line in inlined(file).splitlines():
        code, slashes, comment = line.partition("//")
        if not UNCOMPILED.search(code):
            code = CAST.sub(functools.partial(_switch, found, line.strip()), code)
        lines.append(code + slashes + comment)
    return SWITCH.replace("MOST_CASTS", str(MOST)) + "\n".join(lines) + "\n", tuple(found)


def _switch(found: list[str], line: str, match: re.Match) -> str:
    found.append(line)
    cast = f"Cast<{len(found)}>() ->* "
    return f"({cast}{match[1]})" if match[1] else cast


class Switched(SparseExecutor):
    """An executor of such files."""

    def __init__(self, launch, multiprocessors, removed: int = 0):
        super().__init__(launch, multiprocessors)
        self.removed, self.builds = removed, {}

    def load(self, file, text=None, **constants):
        text, _ = switched(file)
        with quick_builds():
            module = SimtExecutor.load(self, file, text=text, **constants)
        self.builds.setdefault(file, []).append(module.built)
        ctypes.c_int.in_dll(module.built, "removed_cast").value = self.removed
        return SparseModule(self, (module.source, module.built))

    def differing(self, file: str) -> set[int]:
        """The casts of a file without which an index was another."""
        marks = [(ctypes.c_ubyte * MOST).in_dll(built, "differs") for built in self.builds.get(file, ())]
        return {number for number in range(MOST) if any(mark[number] for mark in marks)}
