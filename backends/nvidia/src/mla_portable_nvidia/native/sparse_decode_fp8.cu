// SPDX-License-Identifier: Apache-2.0
// Sparse MLA attention on the FP8 cache for few heads: 16 * MT heads of one query row, MT 1 or 2, over one split of its
// indices.
//
// Compiled at run time (NVRTC) with LAYOUT, LISTS, MT, GROUPS, STAGES, BLOCKS_PER_SM, CONSUMER_REGISTERS and SHARED (bytes) defined. The
// splits of a row are the blocks of a cluster; the first `whole_clusters` have rows that are not split, one for each block.
//
// A block is GROUPS groups of four warps, and four warps that copy for them. A group takes every GROUPS-th tile of 32 tokens
// and keeps its own running softmax; at the end the groups are merged in shared memory, then the splits through the cluster's.
// Within a group, warp w owns columns [128 w, 128 w + 128) of the latent (one scale of the row) and 16 of the 64 rope columns,
// for the scores and for the output alike. Rows come whole, one bulk copy each, and stay e4m3 in shared memory: each dot reads
// them straight into its own operand layout. The 656 bytes of a row shift it by one 16-byte chunk against the row before, so
// that neither reading order meets a bank twice.
//   scores: lane (t, c) of an operand holds a token and four columns of a step, so it takes 32 consecutive bytes of a row.
//   output: lane (r, c) holds a column and four tokens; byte permutes transpose the codes of four tokens while they unpack.
// Codes convert to float16 exactly, one instruction for two. The partial scores of the four warps meet in shared memory,
// where each warp sums and exponentiates a quarter of the heads, and hands the probabilities to all.
//
// Range of float16: q is scaled per head to a power of two below 2^(Q_EXPONENT + 1) (its rope part too, which stays bfloat16);
// probabilities carry 2^P_EXPONENT, and scales, which multiply them, 2^(UNIT_EXPONENT - e), e the running exponent of the largest
// scale of the group's 128 columns. A head whose q is not finite scores NaN.
//
// Rows with a scale for 64 columns (fp8_v4): a warp has two of them, and reads 64 columns after 64. Sums of the first become those
// of the second's unit before it is added. So that neither order meets a bank twice, eights of tokens lie interleaved in a stage
// (PLACE). The last half of the last warp's columns are bfloat16, which its products of them are of, probabilities too.
//
// An absent token (negative, not below num_slots, past its length) is zeros in shared memory and scores -inf.

#define TILE 32                   // tokens
#define PLACE(token) (SCALE_GROUP == 128 ? (token) : (token) ^ ((token) & 1) * 13)
#include "sparse_decode.cuh"

#define HT (16 * MT)              // heads of a block
#define GROUP 128                 // threads of a group
#define CONSUMERS (GROUP * GROUPS)
#define THREADS (CONSUMERS + GROUP)
#define PRODUCER_REGISTERS 32
#define LANES_PER_HEAD (8 / MT)   // in the softmax
#define TOKENS_PER_LANE (4 * MT)
#define STAGE_BYTES (TILE * ROW_STRIDE)
#define SCORE_STRIDE 40           // floats between heads of the partial scores
#define P_STRIDE 40               // halves between heads of the probabilities
#define SCORE_AT (STAGES * STAGE_BYTES)
#define PROB_AT (SCORE_AT + 4 * HT * SCORE_STRIDE * 4)
#define DECAY_AT (PROB_AT + HT * P_STRIDE * 2)
#define MASK_AT (DECAY_AT + HT * 4)     // a byte for each warp's eight tokens of a stage
#define TOP_AT (MASK_AT + STAGES * 4)   // [4][HT] largest |q| of each warp's columns, as bits
#define GROUP_BYTES ((TOP_AT + 4 * HT * 4 + 127) / 128 * 128)
// From the start of shared memory, for each stage of each group: a barrier that it is full, one that its readers have left it.
#define BARRIER_BYTES ((GROUPS * STAGES * 16 + 127) / 128 * 128)
#define Q_AT BARRIER_BYTES              // q in operand order, where registers do not hold it
#define GROUPS_AT (Q_AT + (MT > 1 ? 4 * MT * 8 * 32 * 16 : 0))
#define MERGE_STRIDE 528                // floats between heads of a group's output
#define MERGE_SWIZZLE 3                 // its order of columns: a warp writes them 32 apart, and meets no bank twice
#define HALVES (SCALE_GROUP == 64)      // a warp's columns have two scales
#define PLAIN_LAST (CODES < 512)        // the second half of the last warp's columns has none, it is bfloat16
#define APART_MOST 60                   // exponents between two scales, from where on the lesser does not count
#define Q_EXPONENT 13                   // of float16s: see above
#define P_EXPONENT 10
#define UNIT_EXPONENT 5

__device__ __forceinline__ void group_barrier(int group) { meet<GROUP>(group + 1); }
__device__ __forceinline__ void consumers_barrier() { meet<CONSUMERS>(GROUPS + 1); }

using Merged = Merge<GROUPS, HT, MERGE_STRIDE, MERGE_SWIZZLE, CONSUMERS>;
constexpr int ATTENDING = GROUPS_AT + GROUPS * GROUP_BYTES, MERGING = Q_AT + Merged::BYTES;
constexpr int SHARED_BYTES = ATTENDING > MERGING ? ATTENDING : MERGING;

static_assert(FP8 && (SCALE_GROUP == 128 ? CODES == 512 : HALVES && CODES >= 448), "no such build");
static_assert(SharedMemory<SHARED_BYTES, SHARED>::BYTES <= 227 << 10, "no such build");

// the scales of a warp's columns, of tokens 8 n + 2c and the next
struct Scales {
#if HALVES
    u32 of[4];  // exponents, two of the first token in the lower half of a word
    // as the bits of a float. last: the second of a token is that of columns without one
    __device__ __forceinline__ u32 largest(bool last) const {
        u32 most = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (k % 2 == 0 || !last) most = max(most, of[n] >> k * 8 & 255);
        return most << 23;
    }
#else
    float of[4][2];
    __device__ __forceinline__ u32 largest(bool) const {
        u32 most = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int k = 0; k < 2; ++k) most = max(most, __float_as_uint(of[n][k]) & 0x7fffffffu);
        return most;
    }
#endif
};
// what is computed from these is computed again behind here
__device__ __forceinline__ void hold(u32 (&words)[4]) {
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
}
#define EIGHT_AT(n8) (((n8) >> 1) * 16 + ((n8) & 1)) * ROW_STRIDE  // of tokens 8 n8 .. in a stage, where they are interleaved

// of the largest |q| of a head
__device__ __forceinline__ int q_exponent(u8* smem, u32 base, int head) {
    u32 top = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) top = max(top, at<u32>(smem, base + TOP_AT + (w * HT + head) * 4));
    return size_exponent(top);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_decode_fp8(
    u16* out, float* lse_out, const u16* q, const u8* kv, const int* indices, const int* lengths, const float* sink,
    const u8* extra_kv, const int* extra_indices, const int* extra_lengths, float scale_log2,
    int topk, int whole_clusters, int num_slots, int num_heads, int head_tiles, int query_len, int block_size, int extra_topk,
    int extra_slots, int extra_block_size, i64 block_stride, i64 extra_block_stride, Strides st) {
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
    const int group = __shfl_sync(~0u, thread >> 7, 0);  // GROUPS: the warps that copy
    const int t = lane >> 2, c = lane & 3;
    const Work work = own_work(whole_clusters);
    const Place here = place_of<HT>(work.unit, head_tiles, query_len);
    const u32 base = GROUPS_AT + group * GROUP_BYTES, shared = smem_u32(smem);
    const List lists[LISTS] = {
        first_list({kv, num_slots, block_size, block_stride}, indices, lengths, topk, here, st),
#if LISTS > 1
        second_list({extra_kv, extra_slots, extra_block_size, extra_block_stride}, extra_indices, extra_lengths, extra_topk, here,
                    st),
#endif
    };
    if (thread < GROUPS * STAGES) {
        barrier_init(shared + thread * 16, 4 * FILLED);
        barrier_init(shared + thread * 16 + 8, 4 * ARRIVALS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    wait_for_kernel_in_front();

    const Row row = begin_row<TILE>(lists, work, group == GROUPS, warp, lane);
    const int tiles = (row.own.end - row.own.begin + TILE - 1) / TILE;
    __syncthreads();

    // ---- the warps that copy: eight tokens of a tile each, in the order of the tiles
    if (group == GROUPS) {
        set_registers_down<PRODUCER_REGISTERS>();
        int of_group = 0, stage = 0;
        u32 parity = 1;  // stages begin empty
        produce(smem, lists, row, tiles, work.splits, warp, lane, [&] {
            const u32 group_at = GROUPS_AT + of_group * GROUP_BYTES, full = shared + (of_group * STAGES + stage) * 16;
            const int first = HALVES ? (warp >> 1) * 16 + (warp & 1) : warp * 8;  // row of this warp's
            const Stage to = {group_at + stage * STAGE_BYTES + first * ROW_STRIDE, group_at + MASK_AT + stage * 4 + warp,
                              full + 8, parity, full};
            if (++of_group == GROUPS) {
                of_group = 0;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            return to;
        });
        return;
    }
    set_registers_up<CONSUMER_REGISTERS>();
    const bool last = PLAIN_LAST && warp == 3;
    const int mine = tiles > group ? (tiles - group + GROUPS - 1) / GROUPS : 0;  // tiles of this group

    const float own_sink = sink_of(sink, thread, HT, here.head0, num_heads);  // long before it is wanted

    // ---- q: operand registers; k steps of 16 columns are 4 consecutive columns of each lane
    u32 q_nope[MT][8][4], q_rope[MT][4];  // q_nope moves to shared memory where MT is 2
    {
        uint4 v[MT][2][4];
        uint2 r[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int head = mt * 16 + half * 8 + t, h = here.head0 + head;
                const u16* q_row = q + here.b * st.q_b + here.s * st.q_s + (i64)h * st.q_h;
                const bool on = h < num_heads;
                u32 top = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint4 none = make_uint4(0, 0, 0, 0);
                    const u16* from = q_row + warp * 128 + c * (HALVES ? 16 : 32) + (HALVES ? (j >> 1) * 64 + (j & 1) * 8 : j * 8);
                    const uint4 w = on ? *reinterpret_cast<const uint4*>(from) : none;
                    v[mt][half][j] = w;
                    const u32 size = largest_size(w);
                    if (!(last && j >= 2 && size < NOT_FINITE)) top = max(top, size);
                }
                const u16* rope_at = q_row + 512 + warp * 16 + c * 4;
                const uint2 rope = ROPE && on ? *reinterpret_cast<const uint2*>(rope_at) : make_uint2(0, 0);
                const u32 rope_top = max(larger_size(rope.x), larger_size(rope.y));
                if (rope_top >= NOT_FINITE) top = rope_top;
                r[mt][half] = rope;
                top = max(top, __shfl_xor_sync(~0u, top, 1));
                top = max(top, __shfl_xor_sync(~0u, top, 2));
                if (c == 0) at<u32>(smem, base + TOP_AT + (warp * HT + head) * 4) = top;
            }
        group_barrier(group);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float shrink = power(Q_EXPONENT - q_exponent(smem, base, mt * 16 + half * 8 + t));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint4 w = v[mt][half][j];
                    auto scaled = [&](u32 x) {
                        const float low = low_bf16(x) * shrink, high = high_bf16(x) * shrink;
                        return last && j >= 2 ? to_bf162(low, high) : to_half2(low, high);
                    };
                    q_nope[mt][2 * j][half] = scaled(w.x);
                    q_nope[mt][2 * j][half + 2] = scaled(w.y);
                    q_nope[mt][2 * j + 1][half] = scaled(w.z);
                    q_nope[mt][2 * j + 1][half + 2] = scaled(w.w);
                }
                const uint2 w = r[mt][half];
                q_rope[mt][half] = to_bf162(low_bf16(w.x) * shrink, high_bf16(w.x) * shrink);
                q_rope[mt][half + 2] = to_bf162(low_bf16(w.y) * shrink, high_bf16(w.y) * shrink);
            }
    }
#if MT > 1
    if (group == 0) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int kk = 0; kk < 8; ++kk)
                at<uint4>(smem, Q_AT + (((warp * MT + mt) * 8 + kk) * 32 + lane) * 16) =
                    make_uint4(q_nope[mt][kk][0], q_nope[mt][kk][1], q_nope[mt][kk][2], q_nope[mt][kk][3]);
    }
    consumers_barrier();
#endif

    float acc[MT][16][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[mt][j][i] = 0.f;
    float m = -1.0e30f, total = 0.f;  // of this lane's head; total only over this lane's tokens
    int top_e = -100;                 // 2^top_e is above every scale so far
    const int own_head = warp * (HT / 4) + lane / LANES_PER_HEAD, own_token = (lane % LANES_PER_HEAD) * TOKENS_PER_LANE;

    const int own_exponent = q_exponent(smem, base, own_head);
    const float score_scale = own_exponent > 127 ? not_a_number() : scale_log2 * power(own_exponent - Q_EXPONENT);  // a broken head shows

    // where this lane reads a stage: token t and two chunks for the scores, tokens 2c .. and chunk t for the output
#if HALVES  // a half has a chunk of a lane; for the output the tokens 2c and the next lie apart
    const u32 score_from = base + PLACE(t) * ROW_STRIDE + warp * 128 + c * 16;
    const u32 even_from = base + 2 * c * ROW_STRIDE, odd_from = base + PLACE(2 * c + 1) * ROW_STRIDE;
#else
    const u32 score_from = base + t * ROW_STRIDE + warp * 128 + c * 32;
    const u32 output_from = base + 2 * c * ROW_STRIDE + warp * 128 + t * 16;
    const u32 rope_from = base + t * ROW_STRIDE + PLAIN_COLUMN + warp * 32 + c * 8;
    const u32 scale_from = base + 2 * c * ROW_STRIDE + SCALE_COLUMN + warp * 4;
#endif
    const u32 barriers = shared + group * STAGES * 16;
    const u32 scores = base + SCORE_AT, probs = base + PROB_AT, decays = base + DECAY_AT;
    const u32 score_to = scores + ((warp * HT + t) * SCORE_STRIDE + 2 * c) * 4;

#if HALVES
    // ---- the scores of a tile, of this warp's columns, and its scales, of tokens 8 n8 + 2c and the next. Four independent sums,
    // because one dot waits long for the one before.
    auto score = [&](u32 stage_at, Scales& scale) {
        float part[4][MT][4];
#pragma unroll
        for (int n8 = 0; n8 < 4; ++n8)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int k = 0; k < 4; ++k) part[n8][mt][k] = 0.f;
        auto q_of = [&](u32 (&a)[MT][4], int kk) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#if MT > 1
                const uint4 v = at<uint4>(smem, Q_AT + (((warp * MT + mt) * 8 + kk) * 32 + lane) * 16);
                a[mt][0] = v.x, a[mt][1] = v.y, a[mt][2] = v.z, a[mt][3] = v.w;
#else
#pragma unroll
                for (int r = 0; r < 4; ++r) a[mt][r] = q_nope[mt][kk][r];
#endif
            }
        };
        auto add_codes = [&](int side) {
            uint4 words[4];
#pragma unroll
            for (int n8 = 0; n8 < 4; ++n8) words[n8] = at<uint4>(smem, score_from + stage_at + EIGHT_AT(n8) + side * 64);
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                u32 a[MT][4];
                q_of(a, side * 4 + word);
#pragma unroll
                for (int n8 = 0; n8 < 4; ++n8) {
                    u32 b0, b1;
                    decode4(word == 0 ? words[n8].x : word == 1 ? words[n8].y : word == 2 ? words[n8].z : words[n8].w, b0, b1);
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) mma_f16(part[n8][mt], a[mt], b0, b1);
                }
            }
        };
        auto add_plain = [&] {  // 32 bytes of a row
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                uint4 words[4];
#pragma unroll
                for (int n8 = 0; n8 < 4; ++n8)
                    words[n8] = at<uint4>(smem, score_from + stage_at + EIGHT_AT(n8) + 64 + c * 16 + side * 16);
#pragma unroll
                for (int word = 0; word < 2; ++word) {
                    u32 a[MT][4];
                    q_of(a, 4 + side * 2 + word);
#pragma unroll
                    for (int n8 = 0; n8 < 4; ++n8)
#pragma unroll
                        for (int mt = 0; mt < MT; ++mt)
                            mma_bf16(part[n8][mt], a[mt], word ? words[n8].z : words[n8].x, word ? words[n8].w : words[n8].y);
                }
            }
        };
        add_codes(0);
        auto exponent_of = [&](int n8, int k, int& first, int& second) {
            first = scale.of[n8] >> k * 16 & 255, second = scale.of[n8] >> k * 16 + 8 & 255;
            return max(second, first - APART_MOST);  // of the second scale; or of a part of the first, where it is that much less
        };
        int first, second;
#pragma unroll
        for (int n8 = 0; n8 < 4; ++n8) {
            const u32 even = at<u16>(smem, even_from + stage_at + EIGHT_AT(n8) + SCALE_COLUMN + warp * 2);
            const u32 odd = at<u16>(smem, odd_from + stage_at + EIGHT_AT(n8) + SCALE_COLUMN + warp * 2);
            scale.of[n8] = (even | odd << 16) & (last ? 0x00ff00ffu : ~0u) | (last ? 0x7f007f00u : 0u);
            float ratio[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int exponent = exponent_of(n8, k, first, second);
                ratio[k] = __uint_as_float(max(first - exponent + 127, 0) << 23);
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int k = 0; k < 4; ++k) part[n8][mt][k] *= ratio[k & 1];
        }
        if (last)
            add_plain();
        else
            add_codes(1);
        if (MT > 1) hold(scale.of);  // registers for eight units until here do not suffice
#pragma unroll
        for (int n8 = 0; n8 < 4; ++n8) {
            float unit[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int exponent = exponent_of(n8, k, first, second);
                unit[k] = max(first, second) == 255 ? not_a_number() : as_float(exponent);
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                for (int k = 0; k < 4; ++k) part[n8][mt][k] *= unit[k & 1];
                const u32 to = score_to + (mt * 16 * SCORE_STRIDE + n8 * 8) * 4;
                at<float2>(smem, to) = make_float2(part[n8][mt][0], part[n8][mt][1]);
                at<float2>(smem, to + 8 * SCORE_STRIDE * 4) = make_float2(part[n8][mt][2], part[n8][mt][3]);
            }
        }
    };
    // ---- the output of a tile, of this warp's columns
    auto add_output = [&](u32 stage_at, const Scales& scale, float to_unit) {
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
            u32 p[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
                ldmatrix4(p[mt], shared + probs + ((mt * 16 + (lane & 15)) * P_STRIDE + k16 * 16 + (lane >> 4) * 8) * 2);
            const u32 even = even_from + stage_at + k16 * 16 * ROW_STRIDE, odd = odd_from + stage_at + k16 * 16 * ROW_STRIDE;
            auto row = [&](int k) { return (k & 1 ? odd : even) + (k >> 1) * ROW_STRIDE; };  // of token 2c, the next, 2c + 8, the next
            auto add_codes = [&](int side) {
                u32 own[MT][4], by[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const u32 both = scale.of[2 * k16 + k] >> side * 8;
                    by[k] = to_half2(as_float(both & 255) * to_unit, as_float(both >> 16 & 255) * to_unit);
                }
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int r = 0; r < 4; ++r) own[mt][r] = mul_half2(p[mt][r], by[r >> 1]);
                uint2 w[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) w[k] = at<uint2>(smem, row(k) + warp * 128 + side * 64 + t * 8);
#pragma unroll
                for (int word = 0; word < 2; ++word) {
                    const u32 w0 = word ? w[0].y : w[0].x, w1 = word ? w[1].y : w[1].x;
                    const u32 w2 = word ? w[2].y : w[2].x, w3 = word ? w[3].y : w[3].x;
                    u32 b0[4], b1[4];
                    decode4(__byte_perm(w0, w1, 0x5140), b0[0], b0[1]);
                    decode4(__byte_perm(w0, w1, 0x7362), b0[2], b0[3]);
                    decode4(__byte_perm(w2, w3, 0x5140), b1[0], b1[1]);
                    decode4(__byte_perm(w2, w3, 0x7362), b1[2], b1[3]);
#pragma unroll
                    for (int k = 0; k < 4; ++k)
#pragma unroll
                        for (int mt = 0; mt < MT; ++mt) mma_f16(acc[mt][side * 8 + word * 4 + k], own[mt], b0[k], b1[k]);
                }
            };
            auto add_plain = [&] {
                u32 own[MT][4], w[4][4];
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int r = 0; r < 4; ++r) own[mt][r] = half2_to_bf162(p[mt][r]);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint4 v = at<uint4>(smem, row(k) + PLAIN_COLUMN + t * 16);
                    w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const u32 pick = k & 1 ? 0x7632 : 0x5410;
                    const u32 b0 = __byte_perm(w[0][k >> 1], w[1][k >> 1], pick), b1 = __byte_perm(w[2][k >> 1], w[3][k >> 1], pick);
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) mma_bf16(acc[mt][8 + k], own[mt], b0, b1);
                }
            };
            add_codes(0);
            if (last)
                add_plain();
            else
                add_codes(1);
        }
    };
#else
    // ---- the scores of a tile, of this warp's columns, and its scales, of tokens 8 n8 + 2c and the next. Four independent sums,
    // because one dot waits long for the one before.
    auto score = [&](u32 stage_at, Scales& scale) {
        float part[4][MT][4];
#pragma unroll
        for (int n8 = 0; n8 < 4; ++n8)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int k = 0; k < 4; ++k) part[n8][mt][k] = 0.f;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            uint4 words[4];
#pragma unroll
            for (int n8 = 0; n8 < 4; ++n8) {
                words[n8] = at<uint4>(smem, score_from + stage_at + n8 * 8 * ROW_STRIDE + side * 16);
            }
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                const int kk = side * 4 + word;
#if MT > 1
                u32 a[MT][4];
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    const uint4 v = at<uint4>(smem, Q_AT + (((warp * MT + mt) * 8 + kk) * 32 + lane) * 16);
                    a[mt][0] = v.x, a[mt][1] = v.y, a[mt][2] = v.z, a[mt][3] = v.w;
                }
#endif
#pragma unroll
                for (int n8 = 0; n8 < 4; ++n8) {
                    u32 b0, b1;
                    decode4(word == 0 ? words[n8].x : word == 1 ? words[n8].y : word == 2 ? words[n8].z : words[n8].w, b0, b1);
#if MT > 1
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) mma_f16(part[n8][mt], a[mt], b0, b1);
#else
                    mma_f16(part[n8][0], q_nope[0][kk], b0, b1);
#endif
                }
            }
        }
#pragma unroll
        for (int n8 = 0; n8 < 4; ++n8) {
            uint2 rope;
            if (ROPE) rope = at<uint2>(smem, rope_from + stage_at + n8 * 8 * ROW_STRIDE);
            scale.of[n8][0] = at<float>(smem, scale_from + stage_at + n8 * 8 * ROW_STRIDE);
            scale.of[n8][1] = at<float>(smem, scale_from + stage_at + (n8 * 8 + 1) * ROW_STRIDE);
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
                for (int k = 0; k < 4; ++k) part[n8][mt][k] *= scale.of[n8][k & 1];
                if (ROPE) mma_bf16(part[n8][mt], q_rope[mt], rope.x, rope.y);
            }
        }
#pragma unroll
        for (int n8 = 0; n8 < 4; ++n8)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                const u32 to = score_to + (mt * 16 * SCORE_STRIDE + n8 * 8) * 4;
                at<float2>(smem, to) = make_float2(part[n8][mt][0], part[n8][mt][1]);
                at<float2>(smem, to + 8 * SCORE_STRIDE * 4) = make_float2(part[n8][mt][2], part[n8][mt][3]);
            }
    };
    // ---- the output of a tile, of this warp's columns
    auto add_output = [&](u32 stage_at, const Scales& scale, float to_unit) {
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
            u32 p[MT][4];
            const u32 sc01 = to_half2(scale.of[2 * k16][0] * to_unit, scale.of[2 * k16][1] * to_unit);
            const u32 sc23 = to_half2(scale.of[2 * k16 + 1][0] * to_unit, scale.of[2 * k16 + 1][1] * to_unit);
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                ldmatrix4(p[mt], shared + probs + ((mt * 16 + (lane & 15)) * P_STRIDE + k16 * 16 + (lane >> 4) * 8) * 2);
                p[mt][0] = mul_half2(p[mt][0], sc01);
                p[mt][1] = mul_half2(p[mt][1], sc01);
                p[mt][2] = mul_half2(p[mt][2], sc23);
                p[mt][3] = mul_half2(p[mt][3], sc23);
            }
            u32 w[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint4 v = at<uint4>(smem, output_from + stage_at + (k16 * 16 + (k >> 1) * 8 + (k & 1)) * ROW_STRIDE);
                w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
            }
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                u32 b0[4], b1[4];
                decode4(__byte_perm(w[0][word], w[1][word], 0x5140), b0[0], b0[1]);
                decode4(__byte_perm(w[0][word], w[1][word], 0x7362), b0[2], b0[3]);
                decode4(__byte_perm(w[2][word], w[3][word], 0x5140), b1[0], b1[1]);
                decode4(__byte_perm(w[2][word], w[3][word], 0x7362), b1[2], b1[3]);
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) mma_f16(acc[mt][word * 4 + k], p[mt], b0[k], b1[k]);
            }
        }
    };
#endif

    // ---- a tile's softmax, then its output together with the next tile's scores: instructions of one cover waits of the other
    static_assert(STAGES > 1, "a tile is kept while the next is scored");
    int stage = 0;
    u32 parity = 0;
    Scales scale;
    if (mine > 0) {
        barrier_wait(barriers, 0);
        score(0, scale);
    }
    for (int left = mine; left > 0; --left) {
        group_barrier(group);

        // softmax of a quarter of the heads
        {
            float x[TOKENS_PER_LANE];
            sum_scores<TOKENS_PER_LANE, HT, SCORE_STRIDE>(x, smem, scores + (own_head * SCORE_STRIDE + own_token) * 4);
            const u32 mask = at<u32>(smem, base + MASK_AT + stage * 4) >> own_token;
            const float decay =
                softmax_quarter<LANES_PER_HEAD>(x, [&](int k) { return (mask >> k) & 1; }, score_scale, m, total);
            if (lane % LANES_PER_HEAD == 0) at<float>(smem, decays + own_head * 4) = decay;
            constexpr float UP = 1 << P_EXPONENT;
#pragma unroll
            for (int k = 0; k < TOKENS_PER_LANE; k += 4)
                at<uint2>(smem, probs + (own_head * P_STRIDE + own_token + k) * 2) =
                    make_uint2(to_half2(x[k] * UP, x[k + 1] * UP), to_half2(x[k + 2] * UP, x[k + 3] * UP));
        }
        // the largest scale of this warp's columns, while the others finish
        const u32 largest = __reduce_max_sync(~0u, scale.largest(last));
        const int new_e = max(top_e, min((int)(largest >> 23) - 126, 126));
        const float shift = new_e == top_e ? 1.f : power(max(top_e - new_e, -126));
        top_e = new_e;
        const float to_unit = power(min(UNIT_EXPONENT - top_e, 126));
        group_barrier(group);

        {
            float decay[MT][2], decay_last[MT][2];  // of the first half of the columns and of the second
            bool same = shift == 1.f;
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float d = at<float>(smem, decays + (mt * 16 + half * 8 + t) * 4);
                    same = same && d == 1.f;
                    decay[mt][half] = d * shift;
                    decay_last[mt][half] = last ? d : decay[mt][half];
                }
            if (!__all_sync(~0u, same)) {
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        const float (&by)[2] = j < 8 ? decay[mt] : decay_last[mt];
                        acc[mt][j][0] *= by[0];
                        acc[mt][j][1] *= by[0];
                        acc[mt][j][2] *= by[1];
                        acc[mt][j][3] *= by[1];
                    }
            }
        }
        const int done = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (left > 1) {
            Scales next;
            barrier_wait(barriers + stage * 16, parity);
            add_output(done * STAGE_BYTES, scale, to_unit);
            score(stage * STAGE_BYTES, next);
            __syncwarp();
            warp_arrive(barriers + done * 16 + 8, lane);  // before the scores it would keep the two apart
            scale = next;
        } else {
            add_output(done * STAGE_BYTES, scale, to_unit);  // whose stage nobody waits for
        }
    }

    // ---- one sum for a head, then one state for all groups, then for all splits
    total = sum_of_lanes<LANES_PER_HEAD>(total);
#if VISIBLE && GROUPS > 1  // racecheck follows a barrier of all groups where each group met as often before
    if (mine < (tiles + GROUPS - 1) / GROUPS) group_barrier(group), group_barrier(group);
#endif
    consumers_barrier();  // the stages are free; their barriers stay what they are
    Merged merge(smem, Q_AT);
    if (lane % LANES_PER_HEAD == 0) merge.leave(group, own_head, m, total);
    consumers_barrier();
    const float from_unit = power(max(top_e - (P_EXPONENT + UNIT_EXPONENT), -126));
    const float from_unit_last = last ? power(-P_EXPONENT) : from_unit;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = mt * 16 + half * 8 + t;
            const float weight = merge.factor(group, head, group == 0 && warp == 0 && c == 0);
            const float factors[2] = {weight * from_unit, weight * from_unit_last};  // of the halves of the columns
            constexpr int APIECE = SCALE_GROUP / 32;  // float4s of a lane side by side
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                const int first = (group * HT + head) * 128 + warp * 32 + (2 * c + (i & 1)) * APIECE;
#pragma unroll
                for (int j = 0; j < 16; j += 4) {
                    const float factor = factors[j / 8];
                    const int at_float4 = first + j / 4 / APIECE * (SCALE_GROUP / 4) + j / 4 % APIECE;
                    *reinterpret_cast<float4*>(merge.outputs + place<MERGE_STRIDE, MERGE_SWIZZLE>(at_float4)) =
                        make_float4(acc[mt][j][i] * factor, acc[mt][j + 1][i] * factor, acc[mt][j + 2][i] * factor,
                                    acc[mt][j + 3][i] * factor);
                }
            }
        }
    merge.finish<GROUPS + 1>(out, lse_out, st, here, work, num_heads, own_sink, thread);
}
