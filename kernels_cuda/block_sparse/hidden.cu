// block_sparse, shared by all versions: what happens between the two products, element by element.
//
// Purpose      y_swi = act(a) * b, or act(a) without a gate; and the gradients of a and b.
// Source       MegaBlocks (arXiv 2211.15841), section 5.1; MoEBlaze (arXiv 2601.05296), section 5, for the derivative.
// Idea         None: the system's products know nothing of the activation, so a and b go to memory and come back.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, ACTIVATION, THREADS per block; PACK neighbours that a thread moves,
//              which divides the number of values.
// Determinism  Same input, same bits: each element has one writer.
//
// kernel             grid                      block    shared bytes  bytes read     bytes written
// activate           ceil(V / PACK / THREADS)  THREADS  0             s V G          s V
// activate_backward  ceil(V / PACK / THREADS)  THREADS  0             s V (1 + G)    s V G
// V values; G is 2 with a gated activation, else 1. Bound: memory.
#include "hidden.cuh"
#include "pack.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    activate(const Scalar* a, const Scalar* b, Scalar* y_swi, long long values) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (at >= values) return;
    const Pack<Scalar, PACK> a_pack = load_pack<PACK>(a + at), b_pack = GATED ? load_pack<PACK>(b + at) : a_pack;
    Pack<Scalar, PACK> y_pack;
#pragma unroll
    for (int i = 0; i < PACK; ++i)
        y_pack.elements[i] =
            from_float<Scalar>(hidden_activation(to_float(a_pack.elements[i]), to_float(b_pack.elements[i])));
    store_pack(y_swi + at, y_pack);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    activate_backward(const Scalar* d_y_swi, const Scalar* a, const Scalar* b, Scalar* d_a, Scalar* d_b,
                      long long values) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (at >= values) return;
    const Pack<Scalar, PACK> a_pack = load_pack<PACK>(a + at), b_pack = GATED ? load_pack<PACK>(b + at) : a_pack;
    const Pack<Scalar, PACK> d_y_pack = load_pack<PACK>(d_y_swi + at);
    Pack<Scalar, PACK> d_a_pack, d_b_pack;
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
        const HiddenGradient found = hidden_gradient(to_float(a_pack.elements[i]), to_float(b_pack.elements[i]),
                                                     to_float(d_y_pack.elements[i]), 1.0f);
        d_a_pack.elements[i] = from_float<Scalar>(found.d_a);
        d_b_pack.elements[i] = from_float<Scalar>(found.d_b);
    }
    store_pack(d_a + at, d_a_pack);
    if (GATED) store_pack(d_b + at, d_b_pack);
}
