// SPDX-License-Identifier: Apache-2.0
// Sparse MLA attention on the BF16 cache for few heads: 16 * MT heads of one query row, MT 1 or 2, over one split of its
// indices.
//
// Compiled at run time (NVRTC) with LAYOUT, LISTS, MT, GROUPS, STAGES, BLOCKS_PER_SM, CONSUMER_REGISTERS and SHARED (bytes) defined. The
// splits of a row are the blocks of a cluster; the first `whole_clusters` have rows that are not split, one for each block.
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

#define TILE 32                   // tokens
#include "sparse_decode.cuh"

#define HT 16                     // heads of a group
#define HEADS (HT * MT)           // of a block
#define TURNS (GROUPS / MT)       // groups that share the tiles among them
#define GROUP 128                 // threads of a group
#define CONSUMERS (GROUP * GROUPS)
#define THREADS (CONSUMERS + GROUP)
#define PRODUCER_REGISTERS 32
#define STAGE_BYTES (TILE * ROW_STRIDE)
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

__device__ __forceinline__ void group_barrier(int group) { meet<GROUP>(group + 1); }
__device__ __forceinline__ void consumers_barrier() { meet<CONSUMERS>(GROUPS + 1); }

using Merged = Merge<TURNS, HEADS, MERGE_STRIDE, 0, CONSUMERS>;
constexpr int ATTENDING = GROUPS_AT + GROUPS * GROUP_BYTES, MERGING = STAGES_AT + Merged::BYTES;
constexpr int SHARED_BYTES = ATTENDING > MERGING ? ATTENDING : MERGING;

static_assert(!FP8 && GROUPS % MT == 0 && STAGES >= TURNS, "no such build");
static_assert(SharedMemory<SHARED_BYTES, SHARED>::BYTES <= 227 << 10, "no such build");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_decode_bf16(
    u16* out, float* lse_out, const u16* q, const u8* kv, const int* indices, const int* lengths, const float* sink,
    const u8* extra_kv, const int* extra_indices, const int* extra_lengths, float scale_log2,
    int topk, int whole_clusters, int num_slots, int num_heads, int head_tiles, int query_len, int block_size, int extra_topk,
    int extra_slots, int extra_block_size, i64 block_stride, i64 extra_block_stride, Strides st) {  // block_stride: bytes
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
    const int group = __shfl_sync(~0u, thread >> 7, 0);  // GROUPS: the warps that copy
    const int t = lane >> 2, c = lane & 3;
    const Work work = own_work(whole_clusters);
    const Place here = place_of<HEADS>(work.unit, head_tiles, query_len);
    const u32 shared = smem_u32(smem);
    const List lists[LISTS] = {
        first_list({kv, num_slots, block_size, block_stride}, indices, lengths, topk, here, st),
#if LISTS > 1
        second_list({extra_kv, extra_slots, extra_block_size, extra_block_stride}, extra_indices, extra_lengths, extra_topk, here,
                    st),
#endif
    };
    if (thread < FULLS) barrier_init(shared + FULL_AT + thread * 8, 4 * ARRIVALS);
    if (thread < STAGES) barrier_init(shared + EMPTY_AT + thread * 8, 4 * MT * ARRIVALS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    wait_for_kernel_in_front();

    const Row row = begin_row<TILE>(lists, work, group == GROUPS, warp, lane);
    const int tiles = (row.own.end - row.own.begin + TILE - 1) / TILE;
    __syncthreads();

    // ---- the warps that copy: eight tokens of a tile each, in the order of the tiles
    if (group == GROUPS) {
        set_registers_down<PRODUCER_REGISTERS>();
        int stage = 0, filled = 0;
        u32 parity = 1;  // stages begin empty
        produce(smem, lists, row, tiles, work.splits, warp, lane, [&] {
            const Stage to = {STAGES_AT + stage * STAGE_BYTES + warp * 8 * ROW_STRIDE, MASK_AT + stage * 4 + warp,
                              shared + EMPTY_AT + stage * 8, parity, shared + FULL_AT + filled * 8};
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (++filled == FULLS) filled = 0;
            return to;
        });
        return;
    }
    set_registers_up<CONSUMER_REGISTERS>();
    const int turn = group / MT, group_head = group % MT * HT;  // first head in the block
    const u32 base = GROUPS_AT + group * GROUP_BYTES;

    const float own_sink = sink_of(sink, thread, HEADS, here.head0, num_heads);

    // ---- q: operand registers of eight steps of 16 latent columns and one of rope
    u32 q_op[Q_STEPS][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int h = here.head0 + group_head + half * 8 + t;
        load_q(q_op, half, q + here.b * st.q_b + here.s * st.q_s + (i64)h * st.q_h + 2 * c, h < num_heads, warp);
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
        for (int k = 0; k < Q_STEPS; ++k) {
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
            float x[4];
            sum_scores<4, HT, SCORE_STRIDE>(x, smem, base + (own_head * SCORE_STRIDE + own_token) * 4);
            const u32 mask = at<u32>(smem, MASK_AT + stage * 4) >> own_token;
            const float decay = softmax_quarter<8>(x, [&](int k) { return (mask >> k) & 1; }, scale_log2, m, total);
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

    // ---- one sum for a head, then one state for all groups of its heads, then for all splits
    total = sum_of_lanes<8>(total);
#if VISIBLE && GROUPS > MT  // racecheck follows a barrier of all groups where each group met as often before
    if (turn >= tiles % TURNS && tiles % TURNS > 0) group_barrier(group), group_barrier(group);
#endif
    consumers_barrier();  // the stages are free; their barriers stay what they are
    Merged merge(smem, STAGES_AT);
    if (lane % 8 == 0) merge.leave(turn, group_head + own_head, m, total);
    consumers_barrier();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = group_head + half * 8 + t;
        const float factor = merge.factor(turn, head, turn == 0 && warp == 0 && c == 0);
        float* to = merge.outputs + (turn * HEADS + head) * MERGE_STRIDE + warp * 128 + 2 * c;
#pragma unroll
        for (int j = 0; j < 16; ++j)
            *reinterpret_cast<float2*>(to + j * 8) = make_float2(acc[j][2 * half] * factor, acc[j][2 * half + 1] * factor);
    }
    merge.finish<GROUPS + 1>(out, lse_out, st, here, work, num_heads, own_sink, thread);
}
