// Neighbouring elements that one instruction loads or stores. Runs everywhere.
#pragma once

template <class Element, int SIZE>
struct alignas(SIZE * sizeof(Element)) Pack {
    static_assert(SIZE * sizeof(Element) <= 16, "no instruction moves more than 16 bytes");
    Element elements[SIZE];
};

template <int SIZE, class Element>
__device__ __forceinline__ Pack<Element, SIZE> load_pack(const Element* source) {
    return *reinterpret_cast<const Pack<Element, SIZE>*>(source);
}
template <int SIZE, class Element>
__device__ __forceinline__ void store_pack(Element* target, const Pack<Element, SIZE>& pack) {
    *reinterpret_cast<Pack<Element, SIZE>*>(target) = pack;
}
