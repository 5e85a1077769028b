// SPDX-License-Identifier: Apache-2.0
// The positions of the topk largest scores of each row, in ascending order.
//
// Compiled at run time (NVRTC) with THREADS, BLOCKS_PER_SM and BATCH defined. A block takes one row, or, from compute capability
// 9.0 on, the blocks of a cluster one row.
//
// A score becomes a key, an unsigned integer that sorts like it; NaN and -inf have key 0, which is never chosen.
//
// short row   all its scores are the candidates, and stay in registers
// longer row  guess    a key that, by a sample of the row, somewhat more than topk scores reach
//             collect  the scores that reach it, in one pass over the row: the candidates. Blocks of a cluster take a part each
//                      and put what they find into the shared memory of the first, which goes on alone
//             if the guess gave fewer than topk or more than CANDIDATES, the first block goes over the row again and keeps the
//             topk largest so far, tile by tile: right for any row, slower
// then        edge     the topk-th largest candidate, 12 bits of its key at a time, and of its position where keys tie
//             list     a bit for each chosen position; counting the bits before it gives each its place
//
// Candidates lie in any order, but what is chosen depends on the scores alone.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef long long i64;

#define CANDIDATES 8192           // of a row; a shorter row needs no guess
#define TILE (CANDIDATES / 2)     // scores between two looks at how many candidates there are
#define MAX_TOPK (CANDIDATES - TILE)
#define BINS 4096
#define SHARE (BINS / THREADS)    // bins of a thread
#define WINDOW (BINS * 32)        // positions that have a bit at once
#define SLOTS (CANDIDATES / THREADS)  // candidates of a thread
#define WARPS (THREADS / 32)
#define LINE 32                   // scores of 128 bytes
#define CLUSTERS (__CUDA_ARCH__ >= 900 && BLOCKS_PER_SM == 1)  // where rows are many each has one block
#define AHEAD 512                 // lines that a block asks for before it samples
#define LOWEST 0x00800000u        // the key of the smallest finite score
#define HIGHEST 0xff800000u       // of +inf
#define NOTHING __uint_as_float(0xff800000u)  // -inf

struct Shared {
    u32 keys[CANDIDATES];
    u32 positions[CANDIDATES];
    u32 bins[BINS];               // counts, or a bit for each position; 0 while neither
    int totals[WARPS];
    int count;                    // of the candidates, also those that found no place
    u32 top;                      // no candidate's key is larger
    int bin, above, inside;       // what `narrow` found
};

struct Edge {                     // what is chosen: keys above `key`, and those equal to it up to a position
    u32 key, last;
    __device__ __forceinline__ bool has(u32 k, u32 position) const { return k > key || (k == key && position <= last); }
};

static_assert(BINS % THREADS == 0 && CANDIDATES % THREADS == 0 && WARPS <= 32 && BATCH <= 32, "no such build");

__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = __float_as_uint(score + 0.f);  // 0.0 for -0.0
    return score > NOTHING ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0;
}
__device__ __forceinline__ float score_of(u32 key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }
__device__ __forceinline__ void prefetch(const float* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

// the sum over the lanes up to this one
__device__ __forceinline__ int sum_to(int value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, value, step);
        if ((threadIdx.x & 31) >= step) value += other;
    }
    return value;
}

// The sum over the warps before this one. Every thread takes part; of_warp: of this warp.
__device__ __forceinline__ int sum_before_warp(Shared& s, int of_warp, int& all) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) s.totals[warp] = of_warp;
    __syncthreads();
    const int total = lane < WARPS ? s.totals[lane] : 0;
    all = __reduce_add_sync(~0u, total);
    return __reduce_add_sync(~0u, lane < warp ? total : 0);
}

// A value that at least k values reach, and at most k + slack unless those beyond are equal to it. Values of [least, least + size)
// count; where they are fewer than k, `least`. s.above and s.inside: values above those of the last bin that was looked into, and
// inside it. value(first, j): number first + j of this thread's `count`; first counts up by AT_ONCE, so that it is 0 for values in
// registers, which are AT_ONCE.
template <int AT_ONCE, typename Value>
__device__ __forceinline__ u32 narrow(Shared& s, u32 least, u32 size, int count, int k, int slack, Value value) {
    const int warp = threadIdx.x >> 5;
    int shift = max(20 - __clz(size), 0), above = 0;
    for (;;) {
#pragma unroll 1
        for (int first = 0; first < count; first += AT_ONCE) {
            u32 beyond[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) beyond[j] = (first + j < count ? value(first, j) : 0) - least;
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (beyond[j] < size) atomicAdd(&s.bins[beyond[j] >> shift], 1);
        }
        __syncthreads();
        const int first = BINS - (threadIdx.x + 1) * SHARE;  // the highest bins are those of the first thread
        int counts[SHARE], own = 0, all;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) own += counts[i] = s.bins[first + i];
#pragma unroll
        for (int i = 0; i < SHARE; ++i) s.bins[first + i] = 0;
        const int of_warp = __reduce_add_sync(~0u, own);
        int before = above + sum_before_warp(s, of_warp, all);
        if (before < k && (before + of_warp >= k || warp == WARPS - 1)) {
            before += sum_to(own) - own;
            if (before < k && (before + own >= k || first == 0)) {
                bool found = false;
#pragma unroll
                for (int i = SHARE - 1; i >= 0; --i) {
                    if (!found && (before + counts[i] >= k || i == 0)) {
                        s.bin = first + i, s.above = before, s.inside = counts[i];
                        found = true;
                    }
                    before += counts[i];
                }
            }
        }
        __syncthreads();
        least += (u32)s.bin << shift;
        size = 1u << shift;
        above = s.above;
        if (above + s.inside <= k + slack || shift == 0) return least;
        shift = max(shift - 12, 0);
    }
}

__device__ __forceinline__ int slots_of(int count) { return (count + THREADS - 1) / THREADS; }

__device__ __noinline__ u32 narrow_keys(Shared& s, u32 least, u32 top, int count, int k, int slack) {
    return narrow<4>(s, least, top - least + 1, slots_of(count), k, slack, [&](int first, int j) {
        const int i = (first + j) * THREADS + threadIdx.x;
        return i < count ? s.keys[i] : 0;
    });
}

// The last of the k lowest positions that have this key.
__device__ __noinline__ u32 last_of_ties(Shared& s, u32 key, int count, int k, int length) {
    return length - narrow<4>(s, 1, length, slots_of(count), k, 0, [&](int first, int j) {
        const int i = (first + j) * THREADS + threadIdx.x;
        return i < count && s.keys[i] == key ? length - s.positions[i] : 0;  // the lowest position is the largest value
    });
}

// The edge of the k largest of the candidates, whose keys are `least` to `top`; all of them where they are no more.
__device__ __forceinline__ Edge edge_of(Shared& s, u32 least, u32 top, int count, int k, int length) {
    if (count <= k) return {least, ~0u};
    const u32 key = narrow_keys(s, least, top, count, k, 0);
    const int above = s.above, inside = s.inside;
    return {key, above + inside > k ? last_of_ties(s, key, count, k - above, length) : ~0u};
}

// A key that, by a sample, somewhat more than topk scores of a row reach.
__device__ __forceinline__ u32 guess(Shared& s, const float* scores, int length, int topk) {
    const float share = (float)topk * (4 * THREADS) / length;
    const int rank = (int)(share + 5.f * sqrtf(share) + 4.f);
    if (rank >= 4 * THREADS) return LOWEST;
    // four neighbours of each of THREADS strata, at an odd place, so that no period of the row meets another
    const u32 stratum = (u32)((u64)threadIdx.x * length / THREADS), odd = (threadIdx.x * 0x9e3779b1u) >> 20;
    const u32 place = stratum + 3 + (u32)((u64)odd * (length / THREADS - 7) >> 12);
    const float* aligned = scores + place - (u64)(scores + place) / 4 % 4;
    const float4 sample = *reinterpret_cast<const float4*>(aligned);
    u32* keys = s.keys + 4 * threadIdx.x;
    keys[0] = key_of(sample.x), keys[1] = key_of(sample.y), keys[2] = key_of(sample.z), keys[3] = key_of(sample.w);
    __syncthreads();
    return narrow_keys(s, LOWEST, HIGHEST, 4 * THREADS, rank, rank / 2);
}

// Add the scores of positions [from, to) whose keys reach `least` to the candidates. Warps take turns.
__device__ __noinline__ void collect(Shared& s, const float* scores, int from, int to, u32 least) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int aligned = from - (int)((u64)(scores + from) / 4 % LINE);
    const float reached = score_of(least);
    u32 top = 0;
    for (int first = aligned + warp * (BATCH * 32); first < to; first += THREADS * BATCH) {
        const float* own = scores + first + lane;
        float batch[BATCH];
        if (first >= from && to - first >= BATCH * 32) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j) batch[j] = own[32 * j];
        } else {
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int position = first + lane + 32 * j;
                batch[j] = position >= from && position < to ? own[32 * j] : NOTHING;
            }
        }
        u32 mask = 0;
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (batch[j] >= reached) mask |= 1u << j;
        const int found = __reduce_add_sync(~0u, __popc(mask));
        if (found == 0) continue;
        int place = 0;
        if (lane == 0) place = atomicAdd(&s.count, found);
        place = __shfl_sync(~0u, place, 0);
        for (u32 lanes; (lanes = __ballot_sync(~0u, mask != 0)) != 0; mask &= mask - 1) {
            const int slot = place + __popc(lanes & ((1u << lane) - 1));
            if (mask && slot < CANDIDATES) {
                const int j = __ffs(mask) - 1;
                const u32 key = key_of(own[32 * j]);
                top = max(top, key);
                s.keys[slot] = key;
                s.positions[slot] = first + lane + 32 * j;
            }
            place += __popc(lanes);
        }
    }
    top = __reduce_max_sync(~0u, top);
    if (lane == 0) atomicMax(&s.top, top);
}

// Only the candidates within the edge stay.
__device__ __forceinline__ void drop(Shared& s, Edge edge, int count) {
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    for (int first = 0; first < count; first += THREADS) {
        const int i = first + threadIdx.x;
        const u32 key = i < count ? s.keys[i] : 0, position = i < count ? s.positions[i] : 0;
        __syncthreads();  // what is overwritten was read
        if (edge.has(key, position)) {
            const int slot = atomicAdd(&s.count, 1);
            s.keys[slot] = key;
            s.positions[slot] = position;
        }
    }
    __syncthreads();
}

// Collect with room for every tile. Once there are topk candidates, a score has to be larger than the smallest of them: an
// equal one comes too late.
__device__ __noinline__ void collect_in_tiles(Shared& s, const float* scores, int length, int topk) {
    u32 least = LOWEST;
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    for (int from = 0; from < length; from += TILE) {
        const int count = s.count;
        if (count > CANDIDATES - TILE) {
            const Edge edge = edge_of(s, LOWEST, HIGHEST, count, topk, length);
            drop(s, edge, count);
            least = edge.key + 1;
        }
        __syncthreads();
        collect(s, scores, from, min(from + TILE, length), least);
        __syncthreads();
    }
}

#if CLUSTERS
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
template <typename T>
__device__ __forceinline__ T* of_first(T* mine) {
    u64 theirs;
    asm("mapa.u64 %0, %1, 0;" : "=l"(theirs) : "l"(mine));
    return reinterpret_cast<T*>(theirs);
}

// Put this block's candidates after those that the first block of the cluster has.
__device__ __forceinline__ void hand_over(Shared& s) {
    const int count = s.count;
    if (threadIdx.x == 0) {
        s.above = atomicAdd(of_first(&s.count), count);
        atomicMax(of_first(&s.top), s.top);
    }
    __syncthreads();
    const int before = s.above;
    u32 *keys = of_first(s.keys), *positions = of_first(s.positions);
    for (int i = threadIdx.x; i < count && before + i < CANDIDATES; i += THREADS) {
        keys[before + i] = s.keys[i];
        positions[before + i] = s.positions[i];
    }
}
#endif

struct Row {                      // where the scores of a row are that count
    int begin, length;
    __device__ __forceinline__ Row(const int* start, const int* end, int num_logits) : begin(max(*start, 0)) {
        length = max(min(max(*end, 0), num_logits) - begin, 0);  // of two that are not negative, so that nothing wraps
    }
};

// Write the positions of the topk largest scores of a row of up to N * THREADS, in ascending order. Returns how many they are.
// A warp has 32 N neighbours, of which a thread's are 32 apart.
template <int N>
__device__ __forceinline__ int select_short(
    Shared& s, int* out, const float* scores, const int* start, const int* end, int num_logits, int topk) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x - lane) * N + lane;
    float batch[N];
    const auto load = [&](int from, int count) {
#pragma unroll
        for (int j = 0; j < N; ++j) batch[j] = first + 32 * j < count ? scores[from + first + 32 * j] : NOTHING;
    };
    const bool ahead = BLOCKS_PER_SM == 1 && num_logits <= N * THREADS;  // few rows: do not wait for the bounds
    if (ahead) load(0, num_logits);
    const Row row(start, end, num_logits);
    const int length = row.length;
    if (!ahead || row.begin > 0) load(row.begin, length);
    u32 keys[N];
#pragma unroll
    for (int j = 0; j < N; ++j) keys[j] = first + 32 * j < length ? key_of(batch[j]) : 0;
    __syncthreads();
    Edge edge = {LOWEST, ~0u};
    if (length > topk) {
        edge.key = narrow<N>(s, LOWEST, HIGHEST - LOWEST + 1, N, topk, 0, [&](int, int j) { return keys[j]; });
        const int above = s.above;
        if (above + s.inside > topk)  // of equal scores the lowest positions
            edge.last = N * THREADS - narrow<N>(s, 1, N * THREADS, N, topk - above, 0, [&](int, int j) {
                return keys[j] == edge.key ? N * THREADS - first - 32 * j : 0;
            });
    }
    u32 words[N];  // a bit for each position of the warp
    int of_warp = 0, all;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        words[j] = __ballot_sync(~0u, edge.has(keys[j], first + 32 * j));
        of_warp += __popc(words[j]);
    }
    int place = sum_before_warp(s, of_warp, all);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (words[j] >> lane & 1) out[place + __popc(words[j] & ((1u << lane) - 1))] = first + 32 * j;
        place += __popc(words[j]);
    }
    return all;
}

// Write the positions of the candidates within the edge, in ascending order: each sets its bit, then counts the bits before it.
// Returns how many they are.
__device__ __forceinline__ int list_in_order(Shared& s, int* out, int length, int count, Edge edge) {
    u32 chosen[SLOTS];  // positions
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        if (j * THREADS >= count) break;
        const int i = j * THREADS + threadIdx.x;
        chosen[j] = i < count && edge.has(s.keys[i], s.positions[i]) ? s.positions[i] : ~0u;
    }
    int written = 0;
    for (int window = 0; window < length; window += WINDOW) {
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (j * THREADS >= count) break;
            const u32 at = chosen[j] - window;
            if (at < WINDOW) atomicOr(&s.bins[at / 32], 1u << at % 32);
        }
        __syncthreads();
        u32* before = s.positions;  // the bits before each word; the positions are in registers now
        const int first = threadIdx.x * SHARE;
        int counts[SHARE], own = 0, all;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) own += counts[i] = __popc(s.bins[first + i]);
        const int to_here = sum_to(own), of_warp = __shfl_sync(~0u, to_here, 31);
        int place = written + sum_before_warp(s, of_warp, all) + to_here - own;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            before[first + i] = place;
            place += counts[i];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            if (j * THREADS >= count) break;
            const u32 at = chosen[j] - window;
            if (at < WINDOW) out[before[at / 32] + __popc(s.bins[at / 32] & ((1u << at % 32) - 1))] = chosen[j];
        }
        written += all;
        if (length - window <= WINDOW) break;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
    }
    return written;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_select(
    int* out, const float* logits, const int* starts, const int* ends, int topk, int num_logits, i64 logits_stride,
    i64 out_stride) {
    extern __shared__ __align__(16) u8 smem[];
    Shared& s = *reinterpret_cast<Shared*>(smem);
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    if (threadIdx.x == 0) s.count = 0, s.top = 0;
#if __CUDA_ARCH__ >= 900
    // For the scores and the bounds, where their kernel lets this one start before its end. They change during the life of this
    // kernel, so nothing in this file loads them as memory that does not (__ldg, __restrict__): such a load may be moved in
    // front of the wait, and may read a line that was cached before it.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const i64 row = blockIdx.x;
    const int block = blockIdx.y, blocks = gridDim.y;  // of the row
    const float* scores = logits + row * logits_stride;
    int* own = out + row * out_stride;
    int written;
    // Of many rows, as those of a prompt, some are far shorter than the longest; few rows do not wait for their bounds here.
    const bool half = BLOCKS_PER_SM > 1 && Row(starts + row, ends + row, num_logits).length <= CANDIDATES / 2;
    if (half || num_logits <= CANDIDATES / 2) {
        written = select_short<SLOTS / 2>(s, own, scores, starts + row, ends + row, num_logits, topk);
    } else if (const Row all(starts + row, ends + row, num_logits); num_logits <= CANDIDATES || all.length <= CANDIDATES) {
        if (block > 0) return;
        written = select_short<SLOTS>(s, own, scores, starts + row, ends + row, num_logits, topk);
    } else {
        const int begin = all.begin, length = all.length;
        u32 least = LOWEST, top = HIGHEST;
        int count;
        scores += begin;
        const int part = ((length + blocks - 1) / blocks + LINE - 1) / LINE * LINE;
        const int from = min(block * part, length), to = min(from + part, length);
        for (int i = threadIdx.x; i < min((to - from) / LINE, AHEAD); i += THREADS) prefetch(scores + from + i * LINE);
        least = guess(s, scores, length, topk);
#if CLUSTERS
        if (blocks > 1) {  // s.count of the first block is 0, and it has guessed: its candidates are where its samples were
            cluster_arrive();
            cluster_wait();
        }
#endif
        __syncthreads();
        collect(s, scores, from, to, least);
        __syncthreads();
#if CLUSTERS
        if (blocks > 1) {
            if (block > 0) hand_over(s);
            cluster_arrive();
            if (block > 0) return;
            cluster_wait();
        }
#endif
        count = s.count, top = max(s.top, least);
        if (count > CANDIDATES || (count < topk && least > LOWEST)) {
            collect_in_tiles(s, scores, length, topk);
            least = LOWEST, top = HIGHEST;
            count = s.count;
        }
        const Edge edge = edge_of(s, least, top, count, topk, length);
        written = list_in_order(s, own, length, count, edge);
    }
    for (int i = written + threadIdx.x; i < topk; i += THREADS) own[i] = -1;
}
