// SPDX-License-Identifier: Apache-2.0
// Scores of cached FP8 keys for many tokens: a block keeps four pages of keys, and the queries of some tokens pass.
//
// Compiled at run time (NVRTC) with HEADS and STAGES defined. Warpgroups 0 to 3 multiply, each a page, in registers;
// the last copies queries into a ring, two tokens a stage. Grid: tiles of four pages x parts of `tokens` tokens.
// Tokens of one request come after the other.
//
// begins null: every score is written, -inf where a token does not see. Otherwise only what it sees, and its bounds.

#include "instructions.cuh"
#include "indexer_logits.cuh"

#define GROUPS 4
#define PAIR 2                    // tokens of a stage
#define COPIERS 4                 // warps, of which each has a stage on its way
#define CONSUMERS (128 * GROUPS)
#define TILE (GROUPS * PAGE)
#define CONSUMER_REGISTERS 112      // 96 of 640 threads at the start
#define COPIER_REGISTERS 32
#define WEIGHTS_AT (STAGES * PAIR * QUERY_BYTES)
#define BARRIERS_AT (WEIGHTS_AT + STAGES * PAIR * WEIGHTS_BYTES)  // full, then empty

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Tokens of a block that belong to one request; of those, the ones from `begin` on see some of the block's keys.
struct Part {
    int token, begin, stop;
    Owner owner;
    __device__ __forceinline__ Part(const Arguments& a, int token, int last, int lane)
        : token(token), owner(find_owner(a, token, lane)) {
        stop = (int)min(owner.end, (i64)last);
        begin = (int)min(max((i64)blockIdx.x * TILE - owner.after_own, (i64)token), (i64)stop);
    }
};

// Copy every COPIERS-th pair of tokens, from the one of this number on.
__device__ __forceinline__ void copy_queries(const Arguments& a, u32 base, int token, int last, int copier, int lane) {
    const u32 full = base + BARRIERS_AT, empty = full + 8 * STAGES;
    Stage stage = {0, 0};
    int turn = 0;
    while (token < last) {
        const Part part(a, token, last, lane);
        for (int first = part.begin; first < part.stop; first += PAIR, stage.next(), turn = (turn + 1) % COPIERS) {
            if (turn != copier) continue;
            const int s = stage.number;
            barrier_wait(empty + 8 * s, stage.parity ^ 1);
            for (int i = 0; i < PAIR; ++i) {
                const i64 from = min(first + i, part.stop - 1);
                const u8* query = a.q + from * a.q_stride_t + (lane >> 3) * a.q_stride_h + (lane & 7) * 16;
#pragma unroll
                for (int h = 0; h < HEADS; h += 4)
                    copy16(base + (s * PAIR + i) * QUERY_BYTES + chunk_at(h + (lane >> 3), lane & 7), query + h * a.q_stride_h);
#pragma unroll
                for (int h = 0; h < HEADS; h += 32)
                    copy4(base + WEIGHTS_AT + (s * PAIR + i) * WEIGHTS_BYTES + weight_at(h + lane) * 4,
                          a.weights + from * a.weight_stride + h + lane);
            }
            asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;" ::: "memory");
            async_fence();  // it waits for all copies of this warp: others copy meanwhile
            __syncwarp();
            warp_arrive(full + 8 * s, lane);
        }
        token = part.stop;
    }
}

__device__ __forceinline__ void score(const Arguments& a, u8* smem, int token, int last, int warp, int lane) {
    const u32 base = smem_u32(smem), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
    const int g = lane >> 2, t = lane & 3, key = 16 * (warp & 3) + g, own = key + 8 * (t & 1);
    const int group = warp >> 2, page = blockIdx.x * GROUPS + group, position = page * PAGE + own;
    const bool fill = a.begins == nullptr;
    Stage stage = {0, 0};
    while (token < last) {
        const Part part(a, token, last, lane);
        token = part.stop;
        if (!fill && blockIdx.x == 0)
            for (int i = part.token + threadIdx.x; i < part.stop; i += CONSUMERS) {
                a.begins[i - a.first_token] = 0;
                a.ends[i - a.first_token] = part.owner.seen(a, i);
            }
        float* scores = a.out + (part.token - a.first_token) * a.out_stride + position;
        if (fill && t < 2 && position < a.num_logits)
            for (int i = part.token; i < part.begin; ++i) scores[(i - part.token) * a.out_stride] = minus_infinity();
        if (part.begin == part.stop) continue;

        const int block = page < a.table_width ? __ldg(a.table + part.owner.request * a.table_stride + page) : -1;
        const bool there = block >= 0 && block < a.num_blocks;
        const u8* keys = a.cache + (there ? block : 0) * a.block_stride;
        u32 words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            words[i] = __ldg(reinterpret_cast<const u32*>(keys + (key + (i & 1) * 8) * KEY + (i >> 1) * 16) + t);
        const float scale = there ? __ldg(reinterpret_cast<const float*>(keys + PAGE * KEY) + own) : 0.f;
        // a lane's scores are those of every other token. seeing: the first token that sees the key
        int of = part.begin + (t >> 1);
        const int seeing = (int)min(max(position - part.owner.after_own, (i64)part.begin), (i64)part.stop);
        const int from = fill ? part.begin : seeing, stop = position < a.num_logits ? part.stop : part.begin;
        scores += (of - part.token) * a.out_stride;
        for (int first = part.begin; first < part.stop; first += PAIR) {
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
            if (of >= from && of < stop) *scores = there && of >= seeing ? sum * scale : minus_infinity();
            of += PAIR, scores += PAIR * a.out_stride;
            stage.next();
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32 * COPIERS, 1) indexer_logits_prefill(const Arguments a, int tokens) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_u32(smem), full = base + BARRIERS_AT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int token = a.first_token + blockIdx.y * tokens, last = min(token + tokens, a.first_token + a.num_rows);
    let_next_start();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, ARRIVALS);
            barrier_init(full + 8 * (STAGES + s), CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= CONSUMERS / 32) {
        set_registers_down<COPIER_REGISTERS>();
        copy_queries(a, base, token, last, warp - CONSUMERS / 32, lane);
    } else {
        set_registers_up<CONSUMER_REGISTERS>();
        score(a, smem, token, last, warp, lane);
    }
}
