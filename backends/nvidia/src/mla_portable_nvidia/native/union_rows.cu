// SPDX-License-Identifier: Apache-2.0
// The union of the lists of SHARERS neighbouring query tokens: every slot that one of them chose, once, and whose key it is.
//
// A block makes one list. Its slots go to a table in shared memory by open addressing, one byte beside each with a bit for every token
// that chose it; where a slot lands depends on the order of the threads, what the table holds does not. Each slot is then listed by
// the first token that chose it, in the order of that token's own list, so the same lists give the same union in every run. An index
// is the slot and, from OWNERS_AT on, the bits of the tokens. Absent entries (negative, not below num_slots, past the length) are left out.
//
// A slot that one token lists twice counts twice. A block that meets one lists every token's entries by themselves.
//
// Compiled at run time (NVRTC) with SHARERS, MOST (entries of a token), TABLE (a power of two, at least twice SHARERS * MOST), THREADS.
// Cost: the lists are read once, the union is written once; two atomic operations of shared memory for each entry.

typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

#define OWNERS_AT 28              // as in sparse_decode.cuh
#define FREE 0xffffffffu          // of a place in the table
#define PER_THREAD (MOST / THREADS)  // entries of a token that a thread has
#define RUNS (SHARERS * PER_THREAD * (THREADS / 32))  // of 32 entries, of a warp

static_assert(MOST % THREADS == 0 && RUNS % 32 == 0 && RUNS <= THREADS && (TABLE & TABLE - 1) == 0, "no such build");

struct Shared {
    u32 slots[TABLE];
    u32 owners[TABLE / 4];        // a byte each
    u32 counts[RUNS];             // entries that a run lists; then of all runs before it
    u32 all;                      // entries of the union
    u32 twice;                    // a token lists a slot twice
};

extern "C" __global__ void __launch_bounds__(THREADS) union_rows(
    u32* __restrict__ lists, int* __restrict__ counts, const int* __restrict__ indices, const int* __restrict__ lengths, int tokens,
    int topk, int num_slots, i64 list_stride, i64 index_stride, i64 length_stride) {
    extern __shared__ __align__(16) u8 smem[];
    Shared& own = *reinterpret_cast<Shared*>(smem);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const i64 group = blockIdx.x, first = group * SHARERS;
    const int here = min(SHARERS, (int)(tokens - first));

    for (int i = thread; i < TABLE; i += THREADS) own.slots[i] = FREE;
    for (int i = thread; i < TABLE / 4; i += THREADS) own.owners[i] = 0;
    if (thread == 0) own.twice = 0;

    int slots[SHARERS][PER_THREAD];  // -1: absent
#pragma unroll
    for (int g = 0; g < SHARERS; ++g) {
        const int* row = indices + (first + g) * index_stride;
        int length = g < here ? topk : 0;
        if (g < here && lengths) length = min(length, lengths[(first + g) * length_stride]);
#pragma unroll
        for (int p = 0; p < PER_THREAD; ++p) {
            const int i = p * THREADS + thread;
            const int slot = i < length ? row[i] : -1;
            slots[g][p] = slot < num_slots ? slot : -1;
        }
    }
    __syncthreads();

    u32 places[SHARERS][PER_THREAD];
#pragma unroll
    for (int g = 0; g < SHARERS; ++g)
#pragma unroll
        for (int p = 0; p < PER_THREAD; ++p) {
            const u32 slot = (u32)slots[g][p];
            u32 place = slot * 2654435761u / (u32)((1ull << 32) / TABLE);  // Fibonacci hashing: the highest bits of the product
            if (slots[g][p] >= 0) {
                for (u32 old; (old = atomicCAS(&own.slots[place], FREE, slot)) != FREE && old != slot;)
                    place = place + 1 & TABLE - 1;
                const u32 bit = 1u << (place & 3) * 8 + g;
                if (atomicOr(&own.owners[place >> 2], bit) & bit) own.twice = 1;
            }
            places[g][p] = place;
        }
    __syncthreads();

    const bool apart = own.twice;
    u32 words[SHARERS][PER_THREAD];  // what this thread lists; FREE: nothing
#pragma unroll
    for (int g = 0; g < SHARERS; ++g)
#pragma unroll
        for (int p = 0; p < PER_THREAD; ++p) {
            const u32 place = places[g][p], owners = own.owners[place >> 2] >> (place & 3) * 8 & 255;
            const bool lists_it = slots[g][p] >= 0 && (apart || (owners & (1u << g) - 1) == 0);
            words[g][p] = lists_it ? (u32)slots[g][p] | (apart ? 1u << g : owners) << OWNERS_AT : FREE;
            const u32 listed = __ballot_sync(~0u, lists_it);
            if (lane == 0) own.counts[(g * PER_THREAD + p) * (THREADS / 32) + warp] = __popc(listed);
        }
    __syncthreads();
    if (warp == 0) {
        u32 sum = 0, before;
        for (int i = 0; i < RUNS / 32; ++i) sum += own.counts[lane * (RUNS / 32) + i];
        before = sum;
        for (int d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(~0u, before, d);
            if (lane >= d) before += other;
        }
        if (lane == 31) own.all = before;
        before -= sum;
        for (int i = 0; i < RUNS / 32; ++i) {
            const u32 count = own.counts[lane * (RUNS / 32) + i];
            own.counts[lane * (RUNS / 32) + i] = before;
            before += count;
        }
    }
    __syncthreads();
    u32* list = lists + group * list_stride;
#pragma unroll
    for (int g = 0; g < SHARERS; ++g)
#pragma unroll
        for (int p = 0; p < PER_THREAD; ++p) {
            const bool lists_it = words[g][p] != FREE;
            const u32 listed = __ballot_sync(~0u, lists_it);
            const u32 before = own.counts[(g * PER_THREAD + p) * (THREADS / 32) + warp];
            if (lists_it) list[before + __popc(listed & (1u << lane) - 1)] = words[g][p];
        }
    if (thread == 0) counts[group] = own.all;
}
