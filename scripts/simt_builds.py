"""Compile and link the SIMT executor's runtime and a kernel file of every stage, and load none of them.

$CXX may so be a compiler for another machine: `scripts/simt_elsewhere.sh` names one for macOS.
"""

from moeblaze_ref.backends.raw_cuda import dispatch, gating, gemm, tiles
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.source import KernelSource

BLOCK = {"BLOCK": 32, "TRANSPOSE_LHS": 0, "TRANSPOSE_RHS": 0}
FILES = {
    "gating/2_warp.cu": gating.constants("2_warp", 8),
    "dispatch/3_single_pass.cu": dispatch.constants("3_single_pass", 8, 2),
    "activation/1_elementwise.cu": gemm.constants("float16", "gelu"),
    "expert_up/3_mma.cu": gemm.constants("bfloat16", "swiglu", tiles.DEFAULTS["3_mma"]),
    "expert_down/7_persistent.cu": gemm.constants("float16", "swiglu"),
    "combine/2_vector.cu": gemm.constants("bfloat16") | {"PACK": 8},
    "block_sparse/2_tiled.cu": gemm.constants("float32", "swiglu") | BLOCK,
}


def main():
    print(f"{' '.join(build.compiler())}: {build.compile_runtime().name}", flush=True)
    for file, constants in FILES.items():
        source = KernelSource.read(file, constants)
        for instrumented in (True, False):
            build.compile_kernels(file, source.text, list(source.kernels), source.include_dirs, constants, instrumented)
        print(f"built  {file}", flush=True)


if __name__ == "__main__":
    main()
