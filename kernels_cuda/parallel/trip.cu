// parallel, a layer over G ranks: the ranks that a token's row goes to, and the experts that it meets there.
//
// Purpose      topk_experts (L, k) -> the rank of each slot, EMPTY where an earlier slot of the token has it, and the
//              words that travel with a row: k numbers of copies and k gates. Room for as many rows to every rank.
//              From the words that arrive: the places of experts here, and the gates.
// Source       GShard (arXiv 2006.16668), section 3.1, for the same room at every rank; MoEBlaze (arXiv 2601.05296),
//              section 4, for the index structures. Copies are chosen as by placement.copies.choose.
// Idea         Each kernel takes the place of several operations of torch, whose calls cost the host more than it does.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); RANKS, which is G; NODES of equally many neighbouring ranks.
// Determinism  Same input, same bits: each output element has one writer, and sums are of integers.
//
// kernel        grid                   block    shared bytes       bytes read         bytes written
// choose_ranks  ceil(L / THREADS)      THREADS  4 THREADS SETS     20 R + 2 G C       12 R
// make_room     1                      THREADS  4 THREADS / 32     8 G                4 G + 5 + O
// fill_rows     ceil(2 k P / THREADS)  THREADS  0                  16 k P + 16 k S    8 k P + 4 P
// move_slots    ceil(R / THREADS)      THREADS  0                  5 R + 8 S (1 - O)  4 R
// find_places   ceil(k P / THREADS)    THREADS  4 THREADS / 32     8 k P + 4 N        8 k P + 4 blocks
// sum_counts    1                      THREADS  4 THREADS / 32     4 B                1 + F
// withhold      ceil(k P / THREADS)    THREADS  0                  k P                4 k P F
// R = L k slots, of which C are of experts with several copies; SETS = 2 ceil(G / 32) + ceil(NODES / 32). S rows are
// sent, P = G rows have room; of the P rows that arrive, N slots have a number. find_places has B blocks. O is 1 if
// rows lack room, F is 1 if choices do, else they are 0. Bound: latency.
#include "common.cuh"

constexpr int PER_NODE = RANKS / NODES;
constexpr int RANK_WORDS = (RANKS + 31) / 32, NODE_WORDS = (NODES + 31) / 32;

// A set of small numbers for each thread of a block: number n is bit n % 32 of word n / 32.
struct Set {
    unsigned* words;  // (WORDS, THREADS)

    __device__ unsigned& word(int n) { return words[n / 32 * THREADS + threadIdx.x]; }
    __device__ bool has(int n) { return word(n) >> n % 32 & 1; }
    __device__ void add(int n) { word(n) |= 1u << n % 32; }
};

// The ranks that a token goes to, and their nodes.
struct Way {
    Set ranks, nodes;

    __device__ void visit(int rank) {
        ranks.add(rank);
        nodes.add(rank / PER_NODE);
    }
    __device__ int distance(int rank) { return 2 - nodes.has(rank / PER_NODE) - ranks.has(rank); }
};

// Of n nearest ranks that hold an expert, number `turn` % n.
__device__ int nearest(Way& way, const bool* holds, int turn) {
    int least = 3, ranks = 0;
    for (int rank = 0; rank < RANKS; ++rank) {
        const int distance = holds[rank] ? way.distance(rank) : 3;
        if (distance < least) least = distance, ranks = 0;
        ranks += distance == least;
    }
    turn %= ranks;
    int found = EMPTY;
    for (int rank = 0; rank < RANKS; ++rank) {
        const bool near = holds[rank] && way.distance(rank) == least;
        if (near && turn == 0) found = rank;
        turn -= near;
    }
    return found;
}

// A thread for each token. First the experts with a sole copy, then the others in order.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_ranks(const int* topk_experts, const float* gates, const int* sole, const bool* held, int* ranks, int* words,
                 int here, int L, int E, int k) {
    DYNAMIC_SHARED(unsigned, sets);
    const int token = blockIdx.x * THREADS + threadIdx.x;
    if (token >= L) return;
    Set sent{sets};
    Way way{{sets + RANK_WORDS * THREADS}, {sets + 2 * RANK_WORDS * THREADS}};
    for (int word = 0; word < 2 * RANK_WORDS + NODE_WORDS; ++word) sets[word * THREADS + threadIdx.x] = 0;

    const int first = token * k;
    way.visit(here);
    for (int j = 0; j < k; ++j) {
        const int rank = sole[topk_experts[first + j]];
        if (rank != EMPTY) way.visit(rank);
    }
    for (int j = 0; j < k; ++j) {
        const int expert = topk_experts[first + j];
        int rank = sole[expert];
        if (rank == EMPTY) {
            rank = nearest(way, held + expert * RANKS, token + expert);
            way.visit(rank);
        }
        ranks[first + j] = sent.has(rank) ? EMPTY : rank;
        sent.add(rank);
        words[2 * first + j] = rank * E + expert;
        words[2 * first + k + j] = __float_as_int(gates[first + j]);
    }
}

// Where each rank's rows begin if every rank has the same room, and whether that is too little, which is also noted.
extern "C" __global__ void __launch_bounds__(THREADS)
    make_room(const int* offsets, int* offsets_of_room, bool* overflowed, bool* noted, int rows) {
    int full = 0;
    for (int rank = threadIdx.x; rank < RANKS; rank += THREADS) {
        full += offsets[rank + 1] - offsets[rank] > rows;
        offsets_of_room[rank] = rank * rows;
    }
    const int any = block_sum<THREADS>(full);
    if (threadIdx.x != 0) return;
    offsets_of_room[RANKS] = RANKS * rows;
    overflowed[0] = any > 0;
    if (any > 0) noted[0] = true;
}

// The token of each row that has room, and the row's words: a thread for each word. Those of a spare row are EMPTY.
extern "C" __global__ void __launch_bounds__(THREADS)
    fill_rows(const int* offsets, const int* tokens, const int* words, int* tokens_of_room, int* words_of_room,
              int rows, int k) {
    const int word = blockIdx.x * THREADS + threadIdx.x;
    const int width = 2 * k, row = word / width, rank = row / rows;
    if (rank >= RANKS) return;
    const int place = offsets[rank] + row % rows;
    const bool spare = place >= offsets[rank + 1];
    const int token = spare ? EMPTY : tokens[place];
    words_of_room[word] = spare ? EMPTY : words[token * width + word % width];
    if (word % width == 0) tokens_of_room[row] = token;
}

// The row of each slot among those that have room; none if a rank has too little.
extern "C" __global__ void __launch_bounds__(THREADS)
    move_slots(const int* offsets, const int* ranks, const int* token_index_map, const bool* overflowed,
               int* map_of_room, int rows, int R) {
    const int slot = blockIdx.x * THREADS + threadIdx.x;
    if (slot >= R) return;
    const int rank = ranks[slot];
    const bool none = overflowed[0];
    map_of_room[slot] = rank == EMPTY || none ? EMPTY : rank * rows + token_index_map[slot] - offsets[rank];
}

// Of every slot that has arrived the place of its expert here, EMPTY if it has none, and its gate; of every block the
// number of the experts that are here.
extern "C" __global__ void __launch_bounds__(THREADS)
    find_places(const int* arrived, const int* here, int* places, float* gates, int* counts, int slots, int k) {
    const int slot = blockIdx.x * THREADS + threadIdx.x;
    int place = EMPTY;
    if (slot < slots) {
        const int* const words = arrived + slot / k * 2 * k;
        const int number = words[slot % k];
        if (number != EMPTY) place = here[number];
        places[slot] = place;
        gates[slot] = __int_as_float(words[k + slot % k]);
    }
    const int count = block_sum<THREADS>(int(place != EMPTY));
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// Sets overflowed if there are more choices than room, and then also noted.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_counts(const int* counts, bool* overflowed, bool* noted, int blocks, int room) {
    int count = 0;
    for (int block = threadIdx.x; block < blocks; block += THREADS) count += counts[block];
    const int choices = block_sum<THREADS>(count);
    if (threadIdx.x != 0) return;
    overflowed[0] = choices > room;
    if (choices > room) noted[0] = true;
}

// Then no slot keeps its place.
extern "C" __global__ void __launch_bounds__(THREADS) withhold(const bool* overflowed, int* places, int slots) {
    const int slot = blockIdx.x * THREADS + threadIdx.x;
    if (slot < slots && overflowed[0]) places[slot] = EMPTY;
}
