// Sends the launches and the products of one part of a plan, with no Python between them.
//
// The plan holds the bytes of all parameters. A call copies them, writes the addresses of this step into the copy,
// encodes the tensor maps, and launches. So several threads may send the same part at once.
// What is used of the CUDA driver and of cuBLAS is declared here: no header of CUDA is needed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

// CUDA driver API, cuLaunchKernel and cuTensorMapEncodeTiled; a result of 0 is success.
using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                             void** extra);
using EncodeTiled = int (*)(void* map, int dtype, uint32_t rank, void* address, const uint64_t* extents,
                            const uint64_t* pitches, const uint32_t* box, const uint32_t* steps, int interleave,
                            int swizzle, int promotion, int fill);
// cuBLAS, cublasGemmEx: matrices of columns that follow one another.
using Multiply = int (*)(void* handle, int left_op, int right_op, int m, int n, int k, const void* alpha,
                         const void* left, int left_dtype, int left_leading, const void* right, int right_dtype,
                         int right_leading, const void* beta, void* out, int out_dtype, int out_leading, int compute,
                         int algorithm);
constexpr int SUMS_IN_FLOAT32 = 68, ON_TENSOR_CORES = 99;
constexpr int NO_INTERLEAVE = 0, SWIZZLE_128B = 3, PROMOTION_256B = 3, FILL_ZEROS = 0;
constexpr std::align_val_t ALIGNMENT{64};  // bytes: a tensor map needs so many

struct Launch {
    void* function;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;
    uint32_t first_parameter;  // in `Part::places`
};

// An address among the parameters: that of a buffer of this step, and how many bytes are before it.
struct Pointer {
    uint64_t place, buffer, offset;
};

struct Map {
    Pointer at;
    uint64_t extents[3], pitches[2];
    uint32_t box[3];
    uint32_t rank;
    int32_t dtype;
};

struct Matrix {
    uint64_t buffer, offset;
    int32_t columns;  // 1: its columns follow one another; 0: its rows do
    int32_t leading;  // elements of one of them
    int32_t dtype;
};

// out (M, N) = left (M, K) right (K, N) + beta out
struct Product {
    Matrix left, right, out;
    int32_t m, n, k;
    float beta;
    uint64_t launches_before;  // of this part
};

struct Part {
    LaunchKernel launch_kernel;
    EncodeTiled encode_tiled;
    Multiply multiply;
    const std::byte* memory;  // of all parameters
    uint64_t num_memory;      // bytes
    const uint64_t* places;   // where each parameter begins in it, launch after launch
    uint64_t num_places;
    const Launch* launches;
    uint64_t num_launches;
    const Pointer* pointers;
    uint64_t num_pointers;
    const Map* maps;
    uint64_t num_maps;
    const Product* products;
    uint64_t num_products;
};

namespace {

struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, ALIGNMENT); }
};

uint64_t address_of(const Pointer& pointer, const uint64_t* buffers) {
    return buffers[pointer.buffer] + pointer.offset;
}

int encode(const Part& part, const Map& map, const uint64_t* buffers, std::byte* memory) {
    const uint32_t every_element[3] = {1, 1, 1};
    void* address = reinterpret_cast<void*>(address_of(map.at, buffers));
    return part.encode_tiled(memory + map.at.place, map.dtype, map.rank, address, map.extents, map.pitches, map.box,
                             every_element, NO_INTERLEAVE, SWIZZLE_128B, PROMOTION_256B, FILL_ZEROS);
}

void* address_of(const Matrix& matrix, const uint64_t* buffers) {
    return reinterpret_cast<void*>(buffers[matrix.buffer] + matrix.offset);
}

// Rows that follow one another are the columns of the transpose: cuBLAS computes that of out, right^T left^T.
int multiply(const Part& part, const Product& product, const uint64_t* buffers, void* handle) {
    const auto& [left, right, out, m, n, k, beta, before] = product;
    const float alpha = 1;
    return part.multiply(handle, right.columns, left.columns, n, m, k, &alpha, address_of(right, buffers), right.dtype,
                         right.leading, address_of(left, buffers), left.dtype, left.leading, &beta,
                         address_of(out, buffers), out.dtype, out.leading, SUMS_IN_FLOAT32, ON_TENSOR_CORES);
}

}  // namespace

// Returns the error of the driver or of cuBLAS, or 0. ``buffers`` are the addresses of this step, and ``blas_handle``
// is that of the stream.
extern "C" int send_launches(const Part* part, const uint64_t* buffers, void* stream, void* blas_handle) {
    std::unique_ptr<std::byte, Free> copy(new (ALIGNMENT) std::byte[part->num_memory]);
    std::byte* memory = copy.get();
    std::memcpy(memory, part->memory, part->num_memory);
    for (uint64_t i = 0; i < part->num_pointers; ++i) {
        const uint64_t address = address_of(part->pointers[i], buffers);
        std::memcpy(memory + part->pointers[i].place, &address, sizeof address);
    }
    for (uint64_t i = 0; i < part->num_maps; ++i)
        if (int error = encode(*part, part->maps[i], buffers, memory)) return error;

    std::unique_ptr<void*[]> parameters(new void*[part->num_places]);
    for (uint64_t i = 0; i < part->num_places; ++i) parameters[i] = memory + part->places[i];
    const Product *product = part->products, *last = product + part->num_products;
    for (uint64_t i = 0;; ++i) {
        for (; product < last && product->launches_before == i; ++product)
            if (int error = multiply(*part, *product, buffers, blas_handle)) return error;
        if (i == part->num_launches) return 0;
        const Launch& launch = part->launches[i];
        const auto &grid = launch.grid, &block = launch.block;
        if (int error = part->launch_kernel(launch.function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                                            launch.shared_bytes, stream, &parameters[launch.first_parameter], nullptr))
            return error;
    }
}
