// SPDX-License-Identifier: Apache-2.0
// Scores of cached FP8 keys for many tokens: a block keeps four pages of keys, and the queries of some tokens pass.
//
// Compiled at run time (NVRTC) with HEADS and STAGES defined. Warpgroups 0 to 3 multiply, each a page, in registers;
// the last copies queries into a ring, two tokens a stage.
//
// Work is what is seen: for each tile of four pages of a request, the tokens that see some of it, UNIT tokens a unit. The units
// of all requests make one list, tile by tile, of which each block takes an equal share: runs of tokens of one tile. So blocks
// start and end together however long the contexts are, and none is for a tile beyond the diagonal.
//
// begins null: every score is written, -inf where a token does not see. Otherwise only what it sees, and its bounds; and a token
// that sees at most `all_chosen` positions is not scored: its scores are 0 where there is a page, and -inf elsewhere.

#include "instructions.cuh"
#include "indexer_logits.cuh"

#define GROUPS 4
#define PAIR 2                    // tokens of a stage
#define COPIERS 4                 // warps, of which each has a stage on its way
#define CONSUMERS (128 * GROUPS)
#define TILE (GROUPS * PAGE)
#define UNIT 16                   // tokens
#define CONSUMER_REGISTERS 112      // 96 of 640 threads at the start
#define COPIER_REGISTERS 32
#define WEIGHTS_AT (STAGES * PAIR * QUERY_BYTES)
#define BARRIERS_AT (WEIGHTS_AT + STAGES * PAIR * WEIGHTS_BYTES)  // full, then empty
#define SHARE_AT (BARRIERS_AT + 16 * STAGES)                      // two integers

static_assert(STAGES % COPIERS == 0, "a copier has stages of its own");

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
}
struct Scored {                   // of the tokens of one request, those that are scored
    int begin, stop;
    int tiles;                    // that the last of them sees some of
    int after_own;                // added to a token, its own position

    __device__ __forceinline__ Scored(const Arguments& a, const Bounds& of, int all_chosen) {
        after_own = max(min(max(of.length, 0), a.table_width * PAGE) - max(of.end, 0), -(1 << 30));  // no call has 2^30 tokens
        stop = min(of.end, a.first_token + a.num_rows);
        begin = min(max(max(of.begin, a.first_token), all_chosen - after_own), stop);
        const bool any = begin < stop && a.num_logits > all_chosen;
        tiles = any ? (min(stop + after_own, a.num_logits) + TILE - 1) / TILE : 0;
    }
    // the first of them that sees some of a tile
    __device__ __forceinline__ int first(int tile) const { return max(begin, tile * TILE - after_own); }
    __device__ __forceinline__ int units(int tile) const { return (stop - first(tile) + UNIT - 1) / UNIT; }
    // tiles of which all see some
    __device__ __forceinline__ int whole() const { return min((begin + after_own) / TILE + 1, tiles); }
    // units of all tiles: each tile behind the whole ones has TILE / UNIT fewer than the one before it
    __device__ __forceinline__ int listed() const {
        if (tiles == 0) return 0;
        const int all = whole(), cut = tiles - all;
        return all * units(0) + (cut ? cut * units(all) - cut * (cut - 1) / 2 * (TILE / UNIT) : 0);
    }
};

struct Run {                      // tokens of a request, and a tile of which the first of them sees some
    int request, tile, token, stop, after_own;
};
// The run that begins with unit `at` of the list, of at most `units`, which is set to how many it has. All lanes take part.
__device__ __forceinline__ Run run_at(const Arguments& a, int all_chosen, int at, int& units, int lane) {
    int before = 0;                   // in the list, of the requests in front of these 32
    for (int first = 0;; first += 32) {
        Scored some(a, Bounds(a, first + lane), all_chosen);
        const int listed = some.listed();
        const int to_here = before + sum_to(listed, lane);
        before = __shfl_sync(~0u, to_here, 31);
        if (at >= before) continue;
        const int of = __ffs(__ballot_sync(~0u, to_here > at)) - 1;
        int unit = at - __shfl_sync(~0u, to_here - listed, of);
        some.begin = __shfl_sync(~0u, some.begin, of), some.stop = __shfl_sync(~0u, some.stop, of);
        some.tiles = __shfl_sync(~0u, some.tiles, of), some.after_own = __shfl_sync(~0u, some.after_own, of);
        int tile = min(unit / some.units(0), some.whole());
        unit -= tile * some.units(0);
        for (; unit >= some.units(tile); ++tile) unit -= some.units(tile);
        units = min(some.units(tile) - unit, units);
        const int token = some.first(tile) + unit * UNIT;
        return {first + of, tile, token, min(token + units * UNIT, some.stop), some.after_own};
    }
}

// Write which units of the list are this block's to shared memory: the first, and the one behind the last. For one warp.
__device__ __forceinline__ void find_share(const Arguments& a, u8* smem, int all_chosen, int lane) {
    int total = 0;
    for (int first = 0; first < a.num_requests; first += 32) total += Scored(a, Bounds(a, first + lane), all_chosen).listed();
    total = __reduce_add_sync(~0u, total);
    const int blocks = gridDim.x, each = total / blocks, rest = total % blocks, block = blockIdx.x + lane;
    if (lane < 2) at<int>(smem, SHARE_AT + 4 * lane) = each * block + (int)((u32)(rest * block) / blocks);
}
// Call take(run) for each run of this block's share. All lanes of a warp take part. Registers are few: what finds a run keeps none.
template <typename Take>
__device__ __forceinline__ void for_runs(const Arguments& a, u8* smem, int all_chosen, int lane, Take take) {
    for (int next = at<int>(smem, SHARE_AT), units; (units = at<int>(smem, SHARE_AT + 4) - next) > 0;) {
        const Run run = run_at(a, all_chosen, next, units, lane);
        next += units;
        take(run);
    }
}

// Copy every COPIERS-th pair of tokens, from the one of this number on: those of every COPIERS-th stage.
__device__ __forceinline__ void copy_queries(const Arguments& a, u8* smem, int all_chosen, int copier, int lane) {
    const u32 base = smem_u32(smem), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
    Stage stage = {0, 0};
    for_runs(a, smem, all_chosen, lane, [&](const Run& run) {
        const int stop = run.stop;
        for (int token = run.token; token < stop; token += PAIR, stage.next()) {
            if (stage.number % COPIERS != copier) continue;
            const int s = stage.number;
            barrier_wait(empty + 8 * s, stage.parity ^ 1);
            for (int i = 0; i < PAIR; ++i) {
                const i64 from = min(token + i, stop - 1);
                const u8* query = a.q + from * a.q_stride_t + (lane >> 3) * a.q_stride_h + (lane & 7) * 16;
#pragma unroll
                for (int h = 0; h < HEADS; h += 4)
                    copy16(base + (s * PAIR + i) * QUERY_BYTES + chunk_at(h + (lane >> 3), lane & 7), query + h * a.q_stride_h);
#pragma unroll
                for (int h = 0; h < HEADS; h += 32)
                    copy4(base + WEIGHTS_AT + (s * PAIR + i) * WEIGHTS_BYTES + weight_at(h + lane) * 4,
                          a.weights + from * a.weight_stride + h + lane);
            }
            await_copies();
            async_fence();  // it waits for all copies of this warp: others copy meanwhile
            __syncwarp();
            warp_arrive(full + 8 * s, lane);
        }
    });
}

__device__ __forceinline__ void score(const Arguments& a, u8* smem, int all_chosen, int warp, int lane) {
    const u32 base = smem_u32(smem), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
    const int g = lane >> 2, t = lane & 3, key = 16 * (warp & 3) + g, own = key + 8 * (t & 1), group = warp >> 2;
    Stage stage = {0, 0};
    for_runs(a, smem, all_chosen, lane, [&](const Run& run) {
        const int stop = run.stop, page = run.tile * GROUPS + group, position = page * PAGE + own;
        const int block = page < a.table_width ? __ldg(a.table + run.request * a.table_stride + page) : -1;
        const bool there = block >= 0 && block < a.num_blocks;
        const u8* keys = a.cache + (there ? block : 0) * a.block_stride;
        u32 words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            words[i] = __ldg(reinterpret_cast<const u32*>(keys + (key + (i & 1) * 8) * KEY + (i >> 1) * 16) + t);
        const float scale = there ? __ldg(reinterpret_cast<const float*>(keys + PAGE * KEY) + own) : 0.f;
        // a lane's scores are those of every other token, from the first one on that sees the key
        int of = run.token + (t >> 1);
        const int seeing = min(max(position - run.after_own, run.token), stop);
        const int end = position < a.num_logits ? stop : run.token;
        float* scores = a.out + (of - a.first_token) * a.out_stride + position;
        for (int token = run.token; token < stop; token += PAIR) {
            const int s = stage.number;
            float products[PAIR * HEADS / 2];
            barrier_wait(full + 8 * s, stage.parity);
            begin_products(products, words, base + s * PAIR * QUERY_BYTES);
            end_products(products);
            const float* weights = &at<float>(smem, WEIGHTS_AT + s * PAIR * WEIGHTS_BYTES);
            const float2 even = sum_own_heads(products, weights, t);
            const float2 odd = sum_own_heads(products + HEADS / 2, weights + 4 * WEIGHT_STRIDE, t);
            __syncwarp();
            warp_arrive(empty + 8 * s, lane);
            const float sum = add_across(add_across(even.x, even.y, 1, lane), add_across(odd.x, odd.y, 1, lane), 2, lane);
            if (of >= seeing && of < end) *scores = written(sum * scale, there);
            of += PAIR, scores += PAIR * a.out_stride;
            stage.next();
        }
    });
}

// What is not scored: -inf where a token does not see; or its bounds, and scores of a token all of whose positions are chosen.
// Warps share the tokens.
__device__ __forceinline__ void write_rows(const Arguments& a, int all_chosen, int warp, int warps, int lane) {
    for (int row = warp; row < a.num_rows; row += warps) {
        const int token = a.first_token + row;
        const Owner owner = find_owner(a, token, lane);
        const int seen = owner.seen(a, token);
        float* scores = a.out + row * a.out_stride;
        if (!a.begins) {
            for (int position = seen + lane; position < a.num_logits; position += 32) scores[position] = minus_infinity();
            continue;
        }
        if (lane == 0) a.begins[row] = 0, a.ends[row] = seen;
        if (seen > all_chosen) continue;
        const int* table = a.table + owner.request * a.table_stride;
        for (int position = lane; position < seen; position += 32) {
            const int block = __ldg(table + position / PAGE);
            scores[position] = block >= 0 && block < a.num_blocks ? 0.f : minus_infinity();
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32 * COPIERS, 1)
    indexer_logits_prefill(const Arguments a, int all_chosen) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_u32(smem), full = base + BARRIERS_AT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, ARRIVALS);
            barrier_init(full + 8 * (STAGES + s), CONSUMERS / 32 * ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == 1) find_share(a, smem, all_chosen, lane);
    __syncthreads();
    if (warp >= CONSUMERS / 32) {
        set_registers_down<COPIER_REGISTERS>();
        const int copier = warp - CONSUMERS / 32;
        copy_queries(a, smem, all_chosen, copier, lane);
        write_rows(a, all_chosen, blockIdx.x * COPIERS + copier, gridDim.x * COPIERS, lane);  // while others still multiply
    } else {
        set_registers_up<CONSUMER_REGISTERS>();
        score(a, smem, all_chosen, warp, lane);
    }
}
