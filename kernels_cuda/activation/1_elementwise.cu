// activation, version 1: one thread an element.
//
// Purpose      act(a) as a tensor of its own, which only the policy `conventional` keeps.
// Source       MoEBlaze (arXiv 2601.05296), section 5: SiLU(A).
// Idea         None: the expert kernels apply the activation in registers and never store it alone.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, ACTIVATION, THREADS per block. pitch is the number of elements
//              from one row to the next.
// Determinism  Same input, same bits: each element has one writer.
//
// kernel  grid                  block    shared bytes  bytes read  bytes written
// act     ceil(R h / THREADS)   THREADS  0             s R h       s R h
// Bound: memory.
#include "activation.cuh"
#include "scalar.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) act(const Scalar* a, Scalar* act_a, int R, int h, int pitch) {
    const long long element = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (element >= (long long)R * h) return;
    // Without gaps no division is needed.
    const long long at = pitch == h ? element : element + element / h * (pitch - h);
    act_a[at] = from_float<Scalar>(ACTIVATION::act(to_float(a[at])));
}
