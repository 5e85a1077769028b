// SPDX-License-Identifier: Apache-2.0
// Sparse MLA attention on the BF16 cache for few heads: 16 * MT heads of one query row, MT 1 or 2, over one split of its
// indices.
//
// Compiled at run time (NVRTC) with MT, GROUPS, STAGES, BLOCKS_PER_SM and CONSUMER_REGISTERS defined. The splits of a row are the
// blocks of a cluster; the first `whole_clusters` have rows that are not split, one for each block.
//
// A block is GROUPS groups of four warps, and four warps that copy for them. A group has 16 of the heads; those with the same
// heads take turns at the tiles of 32 tokens, those with other heads read the same tile. Every group keeps its own running
// softmax; at the end they are merged in shared memory, then the splits through the cluster's.
// Within a group, warp w owns columns [128 w, 128 w + 128) of the latent and 16 of the 64 rope columns, for the scores and
// the same columns of the latent for the output. The partial scores of the four warps meet in shared memory, where each warp
// sums and exponentiates a quarter of the heads, and hands the probabilities to all.
//
// Rows come whole, one bulk copy each, and lie 16 bytes further apart than they are long, one more than a whole number of
// banks: `ldmatrix` meets no bank twice, for the scores as it is (a token a row), for the output transposed.
//
// An absent token (negative, not below num_slots, past its length) is zeros in shared memory and scores -inf. A head whose q is
// not finite scores NaN.

#define ROW 1152                  // bytes
#define ROW_STRIDE (ROW + 16)     // between rows of a stage
#include "sparse_decode.cuh"

#define HT 16                     // heads of a group
#define HEADS (HT * MT)           // of a block
#define TURNS (GROUPS / MT)       // groups that share the tiles among them
#define GROUP 128                 // threads of a group
#define CONSUMERS (GROUP * GROUPS)
#define THREADS (CONSUMERS + GROUP)
#define PRODUCER_REGISTERS 32
#define STAGE_BYTES (TN * ROW_STRIDE)
#define SCORE_STRIDE 40           // floats between heads of the partial scores
#define P_STRIDE 40               // bfloat16s between heads of the probabilities
#define FULLS (STAGES * TURNS)
#define FULL_AT 0                                  // a barrier for each stage and turn: only those who wait for all of a
                                                   // barrier's phases can tell one from the next but one
#define EMPTY_AT (FULLS * 8)                       // a barrier for each stage: its readers have left it
#define STAGES_AT ((EMPTY_AT + STAGES * 8 + 127) / 128 * 128)
#define MASK_AT (STAGES_AT + STAGES * STAGE_BYTES) // a byte for each copying warp's eight tokens of a stage
#define GROUPS_AT ((MASK_AT + STAGES * 4 + 127) / 128 * 128)
#define PROB_AT (4 * HT * SCORE_STRIDE * 4)        // in the memory of a group, after the partial scores
#define DECAY_AT (PROB_AT + HT * P_STRIDE * 2)
#define GROUP_BYTES ((DECAY_AT + HT * 4 + 127) / 128 * 128)
#define MERGE_STRIDE 520          // floats between heads of a group's output
#define SHARE (HEADS * 128 / CONSUMERS)  // of a thread, in float4s of a block's output

__device__ __forceinline__ void group_barrier(int group) { meet<GROUP>(group + 1); }
__device__ __forceinline__ void consumers_barrier() { meet<CONSUMERS>(GROUPS + 1); }

static_assert(GROUPS % MT == 0 && STAGES >= TURNS && HEADS * 128 % CONSUMERS == 0, "no such build");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_decode_bf16(
    u16* __restrict__ out, float* __restrict__ lse_out, const u16* __restrict__ q, const u8* __restrict__ kv,
    const int* __restrict__ indices, const int* __restrict__ lengths, const float* __restrict__ sink, float scale_log2,
    int topk, int whole_clusters, int num_slots, int num_heads, int head_tiles, int query_len, int block_size, i64 block_stride,
    Strides st) {  // block_stride: bytes
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
    const int group = __shfl_sync(~0u, thread >> 7, 0);  // GROUPS: the warps that copy
    const int t = lane >> 2, c = lane & 3;
    const Work work = own_work(whole_clusters);
    const int head0 = (work.unit % head_tiles) * HEADS;
    const u32 row = work.unit / head_tiles;
    const i64 b = row / query_len, s = row % query_len;
    const u32 shared = smem_u32(smem);

    const int* index_row = indices + b * st.indices_b + s * st.indices_s;
    const int* length = lengths + b * st.lengths_b + s * st.lengths_s;
    const Span all = share(topk, TN, work);  // where the row has all of its keys: read before its length is known
    int next = group == GROUPS ? indices_of(index_row, all, warp, lane).read() : 0;
    const Span own = lengths ? share(min(topk, *length), TN, work) : all;
    const int tiles = (own.end - own.begin + TN - 1) / TN;
    if (thread < FULLS) barrier_init(shared + FULL_AT + thread * 8, 4 * ARRIVALS);
    if (thread < STAGES) barrier_init(shared + EMPTY_AT + thread * 8, 4 * MT * ARRIVALS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();

    // ---- the warps that copy: eight tokens of a tile each, in the order of the tiles
    if (group == GROUPS) {
        Indices listed = indices_of(index_row, own, warp, lane);
        next = listed.first(next, own.begin == all.begin);
        set_registers_down<PRODUCER_REGISTERS>();
        const Cache cache = {kv, num_slots, block_size, block_stride};
        int stage = 0, filled = 0;
        u32 parity = 1;  // stages begin empty
        for (int first = 0; first < tiles; first += 4) {
            const int slots = next;
            next = listed.read();
            for (int j = 0; j < 4 && first + j < tiles; ++j) {
                const int slot = __shfl_sync(~0u, slots, j * 8 + (lane & 7));
                copy_rows(smem, STAGES_AT + stage * STAGE_BYTES + warp * 8 * ROW_STRIDE, MASK_AT + stage * 4 + warp,
                          shared + EMPTY_AT + stage * 8, parity, shared + FULL_AT + filled * 8, cache, slot, lane);
                if (++stage == STAGES) stage = 0, parity ^= 1;
                if (++filled == FULLS) filled = 0;
            }
        }
        if (work.splits > 1) {
            cluster_publish();
            cluster_leave();
        }
        return;
    }
    set_registers_up<CONSUMER_REGISTERS>();
    const int turn = group / MT, group_head = group % MT * HT;  // first head in the block
    const u32 base = GROUPS_AT + group * GROUP_BYTES;

    const float absent = minus_infinity();
    const bool has_sink = sink && thread < HEADS && head0 + thread < num_heads;
    const float own_sink = has_sink ? sink[head0 + thread] * LOG2_E : absent;

    // ---- q: operand registers of eight steps of 16 latent columns and one of rope
    u32 q_op[9][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int h = head0 + group_head + half * 8 + t;
        const u16* q_row = q + b * st.q_b + s * st.q_s + (i64)h * st.q_h + 2 * c;
#pragma unroll
        for (int k = 0; k < 9; ++k) {
            const u32* from = reinterpret_cast<const u32*>(q_row + (k < 8 ? warp * 128 + k * 16 : 512 + warp * 16));
            q_op[k][half] = h < num_heads ? from[0] : 0;
            q_op[k][half + 2] = h < num_heads ? from[4] : 0;
        }
        u32 nothing = 0;  // NaN where q is not finite: an infinity alone would score -inf against a negative key
#pragma unroll
        for (int k = 0; k < 9; ++k) nothing = add_nothing(q_op[k][half], add_nothing(q_op[k][half + 2], nothing));
        q_op[0][half] = add_bf162(q_op[0][half], nothing);
    }

    float acc[16][4];  // heads t and t + 8, columns 8 j + 2c and the next
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
    float m = -1.0e30f, total = 0.f;  // of this lane's head; total only over this lane's tokens
    const int own_head = warp * 4 + lane / 8, own_token = lane % 8 * 4;

    // where this lane points ldmatrix: eight tokens of a chunk of 16 bytes are one of its four matrices
    const u32 score_from = shared + ((lane >> 4) * 8 + (lane & 7)) * ROW_STRIDE + (lane >> 3 & 1) * 16;
    const u32 output_from = shared + (lane & 15) * ROW_STRIDE + warp * 256 + (lane >> 4) * 16;
    const u32 prob_from = shared + base + PROB_AT + ((lane & 15) * P_STRIDE + (lane >> 4) * 8) * 2;
    const u32 score_to = base + ((warp * HT + t) * SCORE_STRIDE + 2 * c) * 4;

    int stage = turn, filled = turn;
    u32 parity = 0;
    for (int i = turn; i < tiles; i += TURNS) {
        const u32 stage_at = STAGES_AT + stage * STAGE_BYTES;
        barrier_wait(shared + FULL_AT + filled * 8, parity);

        // ---- scores of this warp's columns: tokens 8 n .. of heads t and t + 8
        float part[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) part[n][k] = 0.f;
#pragma unroll
        for (int k = 0; k < 9; ++k) {
            const u32 column = k < 8 ? warp * 256 + k * 32 : 1024 + warp * 32;  // bytes
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                u32 keys[4];
                ldmatrix4(keys, score_from + stage_at + n * 8 * ROW_STRIDE + column);
                mma_bf16(part[n], q_op[k], keys[0], keys[1]);
                mma_bf16(part[n + 1], q_op[k], keys[2], keys[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            at<float2>(smem, score_to + n * 32) = make_float2(part[n][0], part[n][1]);
            at<float2>(smem, score_to + (8 * SCORE_STRIDE + n * 8) * 4) = make_float2(part[n][2], part[n][3]);
        }
        group_barrier(group);

        // ---- softmax of a quarter of the heads, four tokens a lane
        {
            float x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float4 v = at<float4>(smem, base + ((w * HT + own_head) * SCORE_STRIDE + own_token) * 4);
                x[0] += v.x, x[1] += v.y, x[2] += v.z, x[3] += v.w;
            }
            const u32 mask = at<u32>(smem, MASK_AT + stage * 4) >> own_token;
            float top = -1.0e30f;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                x[k] = (mask >> k) & 1 ? x[k] * scale_log2 : absent;
                top = fmaxf(top, x[k]);
            }
#pragma unroll
            for (int d = 1; d < 8; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            const float m_new = fmaxf(m, top), decay = exp2_(m - m_new);
            m = m_new;
            total *= decay;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                x[k] = exp2_(x[k] - m_new);
                total += x[k];
            }
            if (lane % 8 == 0) at<float>(smem, base + DECAY_AT + own_head * 4) = decay;
            at<uint2>(smem, base + PROB_AT + (own_head * P_STRIDE + own_token) * 2) =
                make_uint2(to_bf162(x[0], x[1]), to_bf162(x[2], x[3]));
        }
        group_barrier(group);

        // ---- output columns of this warp
        const float decay0 = at<float>(smem, base + DECAY_AT + t * 4), decay1 = at<float>(smem, base + DECAY_AT + (t + 8) * 4);
        if (!__all_sync(~0u, decay0 == 1.f && decay1 == 1.f)) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                acc[j][0] *= decay0, acc[j][1] *= decay0;
                acc[j][2] *= decay1, acc[j][3] *= decay1;
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            u32 p[4];
            ldmatrix4(p, prob_from + k * 32);
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                u32 values[4];
                ldmatrix4_transposed(values, output_from + stage_at + k * 16 * ROW_STRIDE + j * 16);
                mma_bf16(acc[j], p, values[0], values[1]);
                mma_bf16(acc[j + 1], p, values[2], values[3]);
            }
        }
        __syncwarp();
        warp_arrive(shared + EMPTY_AT + stage * 8, lane);
        stage += TURNS, filled += TURNS;
        if (stage >= STAGES) stage -= STAGES;
        if (filled >= FULLS) filled -= FULLS, parity ^= 1;
    }

    // ---- one sum for a head, then one state for all groups of its heads
#pragma unroll
    for (int d = 1; d < 8; d *= 2) total += __shfl_xor_sync(~0u, total, d);
#if VISIBLE && GROUPS > MT  // racecheck follows a barrier of all groups where each group met as often before
    if (turn >= tiles % TURNS && tiles % TURNS > 0) group_barrier(group), group_barrier(group);
#endif
    consumers_barrier();  // the stages are free; their barriers stay what they are
    float* states = &at<float>(smem, STAGES_AT);      // [TURNS][HEADS][2]: maximum, sum
    float* whole = states + TURNS * HEADS * 2;        // [HEADS][2]: of the block
    float* outputs = whole + HEADS * 2;               // [TURNS][HEADS][MERGE_STRIDE]; the first becomes the block's
    if (lane % 8 == 0) {
        states[(group * HT + own_head) * 2] = m;
        states[(group * HT + own_head) * 2 + 1] = total;
    }
    consumers_barrier();
    const int splits = work.splits;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = group_head + half * 8 + t;
        float top = -1.0e30f, sum = 0.f;
#pragma unroll
        for (int g = 0; g < TURNS; ++g) top = fmaxf(top, states[(g * HEADS + head) * 2]);
#pragma unroll
        for (int g = 0; g < TURNS; ++g)
            sum += states[(g * HEADS + head) * 2 + 1] * exp2_(states[(g * HEADS + head) * 2] - top);
        const float factor = exp2_(states[(turn * HEADS + head) * 2] - top);
        if (turn == 0 && warp == 0 && c == 0) whole[head * 2] = top, whole[head * 2 + 1] = sum;
        float* to = outputs + (turn * HEADS + head) * MERGE_STRIDE + warp * 128 + 2 * c;
#pragma unroll
        for (int j = 0; j < 16; ++j)
            *reinterpret_cast<float2*>(to + j * 8) = make_float2(acc[j][2 * half] * factor, acc[j][2 * half + 1] * factor);
    }
    consumers_barrier();
#if GROUPS > MT
    if (splits > 1) {  // once here instead of once for each reader in the cluster
#pragma unroll 4
        for (int n = 0; n < SHARE; ++n) {
            const int k = n * CONSUMERS + thread;
            float* to = outputs + (k >> 7) * MERGE_STRIDE + (k & 127) * 4;
            float4 sum = *reinterpret_cast<float4*>(to);
#pragma unroll
            for (int g = 1; g < TURNS; ++g) add(sum, *reinterpret_cast<float4*>(to + g * HEADS * MERGE_STRIDE), 1.f);
            *reinterpret_cast<float4*>(to) = sum;
        }
    }
#endif

    // ---- what the output of each split counts, by head
    const u32 whole_at = smem_u32(whole), outputs_at = smem_u32(outputs);
    float* weights = outputs + TURNS * HEADS * MERGE_STRIDE;  // [splits][HEADS]
    if (splits > 1) cluster_publish();
    if (thread < HEADS) {
        float* lse = lse_out + b * st.lse_b + s * st.lse_s + (head0 + thread) * st.lse_h;
        const bool tells = work.split == 0 && head0 + thread < num_heads;
        weigh_splits<HEADS>(weights + thread, whole_at + thread * 8, splits, own_sink, tells ? lse : nullptr);
    }
    consumers_barrier();

    u16* out_row = out + b * st.out_b + s * st.out_s + head0 * st.out_h;
    if (splits > 1) {
        sum_splits<HEADS, MERGE_STRIDE, CONSUMERS>(
            out_row, st.out_h, num_heads - head0, outputs_at, weights, work.split, splits, thread);
        return;
    }
#pragma unroll 4
    for (int n = 0; n < SHARE; ++n) {
        const int k = n * CONSUMERS + thread, head = k >> 7;
        float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int g = 0; g < TURNS; ++g) {
            const float* from = outputs + (g * HEADS + head) * MERGE_STRIDE + (k & 127) * 4;
            add(value, *reinterpret_cast<const float4*>(from), weights[head]);
        }
        store_columns(out_row, st.out_h, num_heads - head0, k, value);
    }
}
