// packed, shared by all versions: the activation alone.
//
// Purpose      act(a) as a tensor of its own, which only the policy `conventional` keeps, from where a lies in ab.
// Source       MoEBlaze (arXiv 2601.05296), section 5: SiLU(A).
// Idea         None: the expert kernels apply the activation in registers and never store it alone.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, ACTIVATION, LAYOUT, THREADS per block.
// Determinism  Same input, same bits: each element has one writer.
//
// kernel  grid                  block    shared bytes  bytes read  bytes written
// act     ceil(R h / THREADS)   THREADS  0             s R h       s R h
// Bound: memory.
#include "packed.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) act(const Scalar* ab, Scalar* act_a, int R, int h) {
    const long long element = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (element >= (long long)R * h) return;
    act_a[element] = from_float<Scalar>(ACTIVATION::act(to_float(ab[packed_at(element / h, 0, element % h, h)])));
}
