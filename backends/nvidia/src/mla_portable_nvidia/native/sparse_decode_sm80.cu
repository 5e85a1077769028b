// SPDX-License-Identifier: Apache-2.0
// Sparse MLA attention without what compute capability 9.0 brought: 16 * MT * GROUPS heads of one query row over one split of
// its indices, on the FP8 cache or on BF16 rows.
//
// Compiled at run time (NVRTC) with LAYOUT, LISTS, MT, GROUPS, TILE, STAGES, BLOCKS_PER_SM and SHARED (bytes) defined.
//
// A block is GROUPS groups of four warps. A group has 16 * MT of the heads, and every group reads the same tile of TILE tokens.
// Within a group, warp w owns columns [128 w, 128 w + 128) of the latent and 16 of the 64 rope columns, for the scores and the
// same columns of the latent for the output. The partial scores of the four warps meet in shared memory, where each warp sums
// and exponentiates a quarter of the heads, and hands the probabilities to all.
//
// All warps copy: a few lanes a row, 16 bytes each (cp.async), into a ring of STAGES tiles. BF16 rows are multiplied where they
// arrive. FP8 rows are converted once for all heads, each by the warp that copied it, to a tile of bfloat16 beside the ring;
// their place is free for the next copy then. Tokens of a bfloat16 tile lie 16 bytes further apart than they are long, one more
// than a whole number of banks: `ldmatrix` meets no bank twice, for the scores as it is (a token a row), for the output
// transposed.
//
// e4m3 becomes bfloat16 by moving bits: the code's exponent and mantissa in the place of a bfloat16's are its value times
// 2^-120, exactly, subnormals included: a permutation, a shift and a mask for two codes. One multiplication by the scale times 2^120 follows, the scale rounded to bfloat16.
//
// An absent token (negative, not below num_slots, past its length) is zeros in shared memory and scores -inf. A head whose q is
// not finite scores NaN. The splits of a row leave their outputs and lse (base 2) in `partial_out` and `partial_lse`, for
// merge_splits.cu.

#define READ_INDEX(at) __ldg(at)  // it never starts early
#include "sparse_decode.cuh"

#define TOKEN (FP8 ? (512 + ROPE) * 2 + 16 : ROW_STRIDE)  // bytes between tokens of a bfloat16 tile
#define HT (16 * MT)              // heads of a group
#define HEADS (HT * GROUPS)       // of a block
#define GROUP 128                 // threads of a group
#define THREADS (GROUP * GROUPS)
#define ROWS_PER_WARP (TILE * 32 / THREADS)              // that it copies
#define LANES_PER_ROW (ROWS_PER_WARP < 4 ? 16 : 8)
#define ROUNDS (ROWS_PER_WARP * LANES_PER_ROW / 32)      // of rows that a warp copies at once
#define AHEAD (FP8 ? STAGES : STAGES - 1)                // tiles between the one that is copied and the one that is used
#define LANES_PER_HEAD (128 / HT) // in the softmax
#define TOKENS_PER_LANE (TILE / LANES_PER_HEAD)
#define LEAST 64                  // keys of a split, where a row has them; merging more of them takes longer than they save
#define RUN (TOKENS_PER_LANE < 4 ? TOKENS_PER_LANE : 4)  // of them side by side
#define TOKENS_AT_ONCE (MT > 1 ? 2 : TILE / 8)           // of the scores, in eights: what the registers hold
#define Q_APART (MT > 1 && (GROUPS > 1 || !ROPE))                 // registers do not hold all of q's operands: not the last step's
#define AT_ONCE (MT == 1 ? 4 : CODES == 512 && __CUDA_ARCH__ < 1000 ? 2 : 1)  // rows that a warp reads before it converts them: no spills
#define PLAIN_EARLY (MT == 1 || CODES == 512)            // before the codes: elsewhere registers would not suffice
#define PIECES ((ROWS_PER_WARP + 3) / 4)                 // of 16 bytes, of what is bfloat16 already, that a lane moves
#define STAGE_BYTES (TILE * ROW_STRIDE)
#define SCORE_STRIDE (TILE + 8)   // floats between heads of the partial scores
#define P_STRIDE (TILE + 8)       // bfloat16s between heads of the probabilities
#define TILE_AT (STAGES * STAGE_BYTES)                   // what FP8 rows become
#define PRESENT_AT (TILE_AT + (FP8 ? TILE * TOKEN : 0))  // [STAGES + 1][TILE] 1 for a token that is there
#define GROUPS_AT (PRESENT_AT + (STAGES + 1) * TILE * 4)
#define PROB_AT (4 * HT * SCORE_STRIDE * 4)              // in the memory of a group, after the partial scores
#define DECAY_AT (PROB_AT + HT * P_STRIDE * 2)
#define Q_LAST_AT (DECAY_AT + HT * 4)                      // the operands of q's last step, where registers do not hold them
#define GROUP_BYTES (Q_LAST_AT + (Q_APART ? 4 * MT * 32 * 16 : 0))
#define SHARED_BYTES (GROUPS_AT + GROUPS * GROUP_BYTES)

static_assert(TILE % 16 == 0 && TOKENS_PER_LANE % 2 == 0 && AHEAD > 0, "no such build");
static_assert(SharedMemory<SHARED_BYTES, SHARED>::BYTES <= 227 << 10, "no such build");
static_assert(ROUNDS * 32 == ROWS_PER_WARP * LANES_PER_ROW, "no such build");

__device__ __forceinline__ void copy16(u32 to, const u8* from, u32 bytes) {  // bytes: 16, or 0 for zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const u8* from, u32 bytes) {  // bytes: 8, or 0 for zeros
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>  // groups of copies that may still be under way
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }
// the bytes of a word in another order, from the lowest digit up: a byte's number, or 8 more for its sign in all bits
template <u32 ORDER>
__device__ __forceinline__ u32 permute(u32 x) {
    u32 r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "n"(ORDER));
    return r;
}
__device__ __forceinline__ u32 scale_bf162(u32 x, u32 by) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(by), "r"(0x80008000u));
    return r;
}
__device__ __forceinline__ uint4 scale_eight(const uint4 v, u32 by) {
    return make_uint4(scale_bf162(v.x, by), scale_bf162(v.y, by), scale_bf162(v.z, by), scale_bf162(v.w, by));
}
// a lane's words of a row of TILE, in runs of RUN
__device__ __forceinline__ void read(u32 (&x)[TOKENS_PER_LANE], u8* smem, u32 from) {
#pragma unroll
    for (int k = 0; k < TOKENS_PER_LANE; k += RUN) {
        if (RUN == 2) {
            const uint2 v = at<uint2>(smem, from);
            x[k] = v.x, x[k + 1] = v.y;
        } else {
            const uint4 v = at<uint4>(smem, from + k * LANES_PER_HEAD * 4);
            x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
        }
    }
}
// four e4m3 codes times 2^-120, as bfloat16s in their order: the sign of each fills the byte above it, the other bits move up by four
__device__ __forceinline__ uint2 spread4(u32 codes) {
    return make_uint2(permute<0x9180>(codes) << 4 & 0x87f087f0u, permute<0xb3a2>(codes) << 4 & 0x87f087f0u);
}

#if FP8
// this warp's FP8 rows of a stage to the tile; a lane has twice eight columns of each row, so that neither its loads nor its stores
// meet a bank twice, and reads several rows before it writes any
__device__ __forceinline__ void convert(u8* smem, u32 stage_at, int first_row, int lane) {
    const u32 of_eight = lane >> 3, eight = of_eight * 16 + (of_eight & 1) * 8 + (lane & 7);
    const u32 from = stage_at + first_row * ROW_STRIDE, to = TILE_AT + first_row * TOKEN;
    constexpr int PLAIN = 512 + ROPE - CODES;  // columns that are bfloat16s already
    static_assert(PLAIN == 0 || PLAIN == 64, "eight pieces of a row");
    uint4 plain[PIECES];
    auto read_plain = [&] {
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const int k = n * 32 + lane;
            if (PLAIN && (ROWS_PER_WARP >= 4 || k < ROWS_PER_WARP * 8))
                plain[n] = at<uint4>(smem, from + (k >> 3) * ROW_STRIDE + PLAIN_COLUMN + (k & 7) * 16);
        }
    };
    if (PLAIN_EARLY) read_plain();
#pragma unroll
    for (int row = 0; row < ROWS_PER_WARP; row += AT_ONCE) {
        uint2 codes[AT_ONCE][2];
        Scale scales[AT_ONCE][2];
        bool large = false;  // some scale would be infinite times 2^120
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const u32 own = side ? eight ^ 8 : eight;
                codes[n][side] = at<uint2>(smem, from + (row + n) * ROW_STRIDE + own * 8);
                // two groups of eight columns are of one scale where it is of 128
                const u32 group = SCALE_GROUP == 128 ? of_eight : own * 8 / SCALE_GROUP;
                scales[n][side] = scale_of(smem, from + (row + n) * ROW_STRIDE, group);
                large = large || is_large(scales[n][side]);
            }
        auto write = [&](bool twice) {  // by 2^120 first, where that and the scale do not fit one factor
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const Scale scale = scales[n][side];
                    const u32 by = twice ? to_bf162(power(120), power(120)) : as_bf162_up(scale), then = as_bf162(scale);
                    const uint2 a = spread4(codes[n][side].x), b = spread4(codes[n][side].y);
                    const uint4 v = scale_eight(make_uint4(a.x, a.y, b.x, b.y), by);
                    const u32 own = side ? eight ^ 8 : eight;
                    if (CODES == 512 || own * 8 < CODES)
                        at<uint4>(smem, to + (row + n) * TOKEN + own * 16) = twice ? scale_eight(v, then) : v;
                }
        };
        if (large)
            write(true);
        else
            write(false);
    }
    if (!PLAIN_EARLY) read_plain();
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
        const int k = n * 32 + lane;
        if (PLAIN && (ROWS_PER_WARP >= 4 || k < ROWS_PER_WARP * 8))
            at<uint4>(smem, to + (k >> 3) * TOKEN + CODES * 2 + (k & 7) * 16) = plain[n];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sparse_decode_sm80(
    u16* __restrict__ out, float* __restrict__ lse_out, const u16* __restrict__ q, const u8* __restrict__ kv,
    const int* __restrict__ indices, const int* __restrict__ lengths, const float* __restrict__ sink, const u8* __restrict__ extra_kv,
    const int* __restrict__ extra_indices, const int* __restrict__ extra_lengths,
    float* __restrict__ partial_out, float* __restrict__ partial_lse, float scale_log2,
    int topk, int splits, int num_slots, int num_heads, int head_tiles, int query_len, int block_size, int extra_topk,
    int extra_slots, int extra_block_size, i64 block_stride, i64 extra_block_stride, Strides st) {  // block_stride: bytes
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
    const int group = __shfl_sync(~0u, thread >> 7, 0);
    const int t = lane >> 2, c = lane & 3;
    const Place here = place_of<HEADS>(blockIdx.x, head_tiles, query_len);
    const int head0 = here.head0 + group * HT;  // of the group
    const u32 row = blockIdx.x / head_tiles;
    const u32 shared = smem_u32(smem), base = GROUPS_AT + group * GROUP_BYTES;

    const List lists[LISTS] = {
        first_list({kv, num_slots, block_size, block_stride}, indices, lengths, topk, here, st),
#if LISTS > 1
        second_list({extra_kv, extra_slots, extra_block_size, extra_block_stride}, extra_indices, extra_lengths, extra_topk, here,
                    st),
#endif
    };
    Keys keys;
#pragma unroll
    for (int k = 0; k < LISTS; ++k) keys.count[k] = keys_of(lists[k]);
    const Span own = share(keys.all(), LEAST, {0, (int)blockIdx.y, splits});
    const int begin = own.begin, end = own.end;
    const int tiles = end > begin ? (end - begin + TILE - 1) / TILE : 0;
    auto partial = [&](int h) { return (i64)(blockIdx.y * (gridDim.x / head_tiles) + row) * num_heads + h; };
    if (tiles == 0 && splits > 1) {  // nothing to merge
        const int h = head0 + (thread & (GROUP - 1));
        if (h < min(head0 + HT, num_heads)) partial_lse[partial(h)] = minus_infinity();
        return;
    }

    // ---- copying: this lane's rows of a tile, and its 16-byte pieces of each
    const int first_row = (thread >> 5) * ROWS_PER_WARP + lane / LANES_PER_ROW, first_piece = lane % LANES_PER_ROW;
    int slots[ROUNDS];
    Cache cache;  // that they are of
    auto load_slots = [&](int tile) {
        const int first = begin + tile * TILE;
        cache = cache_of(lists, keys, first);
#pragma unroll
        for (int n = 0; n < ROUNDS; ++n)
            slots[n] = index_of(lists, keys, first + first_row + n * (32 / LANES_PER_ROW), end);
    };
    auto copy_tile = [&](int stage, int present) {
#pragma unroll
        for (int n = 0; n < ROUNDS; ++n) {
            const int slot = slots[n], at_row = first_row + n * (32 / LANES_PER_ROW);
            const bool valid = slot >= 0 && slot < cache.num_slots;
            const u8* from = cache.rows + (valid ? row_at(cache, slot) : 0) + first_piece * 16;
            const u32 to = shared + stage * STAGE_BYTES + at_row * ROW_STRIDE + first_piece * 16;
#pragma unroll
            for (int piece = 0; piece < ROW / 16; piece += LANES_PER_ROW)
                if (piece + LANES_PER_ROW <= ROW / 16 || first_piece < ROW / 16 - piece)
                    copy16(to + piece * 16, from + piece * 16, valid ? 16 : 0);
#if APART
            static_assert(APART == 8, "one copy");
            if (first_piece == 1) copy8(to - 16 + ROW, cache.rows + (valid ? apart_at(cache, slot) : 0), valid ? APART : 0);
#endif
            if (first_piece == 0) at<u32>(smem, PRESENT_AT + (present * TILE + at_row) * 4) = valid;
        }
    };
    load_slots(0);
    for (int tile = 0; tile < AHEAD; ++tile) {
        if (tile < tiles) copy_tile(tile, tile);
        copies_end();
        load_slots(tile + 1);
    }

    // ---- q: operand registers of eight steps of 16 latent columns and one of rope
    u32 q_op[MT][Q_STEPS][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int h = head0 + mt * 16 + half * 8 + t;
            load_q(q_op[mt], half, q + here.b * st.q_b + here.s * st.q_s + (i64)h * st.q_h + 2 * c, h < num_heads, warp);
        }
    const u32 q_last = base + Q_LAST_AT + (warp * MT * 32 + lane) * 16;
#if Q_APART
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
        at<uint4>(smem, q_last + mt * 512) = make_uint4(q_op[mt][Q_STEPS - 1][0], q_op[mt][Q_STEPS - 1][1],
                                                        q_op[mt][Q_STEPS - 1][2], q_op[mt][Q_STEPS - 1][3]);
#endif

    float acc[MT][16][4];  // heads t and t + 8, columns 8 j + 2c and the next
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[mt][j][i] = 0.f;
    float m = -1.0e30f, total = 0.f;  // of this lane's head; total only over this lane's tokens
    int own_head = lane / LANES_PER_HEAD;  // of the softmax
    // lanes beside each other have heads two apart, for the banks; with more heads later targets would spill
#if TILE == 16 && MT == 1 || MT > 1 && __CUDA_ARCH__ < 1000
    own_head = (own_head & 4) | (own_head & 1) << 1 | (own_head >> 1 & 1);
#endif
    own_head += warp * (HT / 4);
    const int own_token = lane % LANES_PER_HEAD * RUN;

    // where this lane points ldmatrix: eight tokens of a chunk of 16 bytes are one of its four matrices
    const u32 score_from = shared + ((lane >> 4) * 8 + (lane & 7)) * TOKEN + (lane >> 3 & 1) * 16;
    const u32 output_from = shared + (lane & 15) * TOKEN + warp * 256 + (lane >> 4) * 16;
    const u32 prob_from = shared + base + PROB_AT + ((lane & 15) * P_STRIDE + (lane >> 4) * 8) * 2;
    const u32 score_to = base + ((warp * HT + t) * SCORE_STRIDE + 2 * c) * 4;

    int stage = 0, present = 0, next_present = AHEAD;
    for (int i = 0; i < tiles; ++i) {
        copies_wait<AHEAD - 1>();
        __syncthreads();  // all copies of this tile have arrived, and nobody reads the tile before it any more
#if FP8
        convert(smem, stage * STAGE_BYTES, (thread >> 5) * ROWS_PER_WARP, lane);  // the rows that this warp has copied
        __syncwarp();
        const u32 tile_at = TILE_AT;
        if (i + AHEAD < tiles) copy_tile(stage, next_present);
#else
        const u32 tile_at = stage * STAGE_BYTES;
        if (i + AHEAD < tiles) copy_tile(stage == 0 ? STAGES - 1 : stage - 1, next_present);
#endif
        copies_end();
        load_slots(i + AHEAD + 1);
        if (FP8) __syncthreads();

        // ---- scores of this warp's columns: tokens 8 n .. of heads t and t + 8
#pragma unroll
        for (int n0 = 0; n0 < TILE / 8; n0 += TOKENS_AT_ONCE) {
            float part[TOKENS_AT_ONCE][MT][4];
#pragma unroll
            for (int n = 0; n < TOKENS_AT_ONCE; ++n)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int k = 0; k < 4; ++k) part[n][mt][k] = 0.f;
#pragma unroll
            for (int k = 0; k < Q_STEPS; ++k) {
#if Q_APART
                if (k == Q_STEPS - 1)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        const uint4 v = at<uint4>(smem, q_last + mt * 512);
                        q_op[mt][Q_STEPS - 1][0] = v.x, q_op[mt][Q_STEPS - 1][1] = v.y, q_op[mt][Q_STEPS - 1][2] = v.z, q_op[mt][Q_STEPS - 1][3] = v.w;
                    }
#endif
                const u32 column = k < 8 ? warp * 256 + k * 32 : 1024 + warp * 32;  // bytes
#pragma unroll
                for (int n = 0; n < TOKENS_AT_ONCE; n += 2) {
                    u32 keys[4];
                    ldmatrix4(keys, score_from + tile_at + (n0 + n) * 8 * TOKEN + column);
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        mma_bf16(part[n][mt], q_op[mt][k], keys[0], keys[1]);
                        mma_bf16(part[n + 1][mt], q_op[mt][k], keys[2], keys[3]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < TOKENS_AT_ONCE; ++n)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    const u32 to = score_to + (mt * 16 * SCORE_STRIDE + (n0 + n) * 8) * 4;
                    at<float2>(smem, to) = make_float2(part[n][mt][0], part[n][mt][1]);
                    at<float2>(smem, to + 8 * SCORE_STRIDE * 4) = make_float2(part[n][mt][2], part[n][mt][3]);
                }
        }
        meet<GROUP>(group + 1);

        // ---- softmax of a quarter of the heads
        {
            u32 word[TOKENS_PER_LANE];
            float x[TOKENS_PER_LANE];
#pragma unroll
            for (int k = 0; k < TOKENS_PER_LANE; ++k) x[k] = 0.f;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                read(word, smem, base + ((w * HT + own_head) * SCORE_STRIDE + own_token) * 4);
#pragma unroll
                for (int k = 0; k < TOKENS_PER_LANE; ++k) x[k] += __uint_as_float(word[k]);
            }
            read(word, smem, PRESENT_AT + (present * TILE + own_token) * 4);
            const float decay =
                softmax_quarter<LANES_PER_HEAD>(x, [&](int k) { return word[k] != 0; }, scale_log2, m, total);
            if (lane % LANES_PER_HEAD == 0) at<float>(smem, base + DECAY_AT + own_head * 4) = decay;
#pragma unroll
            for (int k = 0; k < TOKENS_PER_LANE; k += 2) {
                const int token = own_token + k / RUN * RUN * LANES_PER_HEAD + k % RUN;
                at<u32>(smem, base + PROB_AT + (own_head * P_STRIDE + token) * 2) = to_bf162(x[k], x[k + 1]);
            }
        }
        meet<GROUP>(group + 1);

        // ---- output columns of this warp
        float decay[MT][2];
        bool same = true;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                decay[mt][half] = at<float>(smem, base + DECAY_AT + (mt * 16 + half * 8 + t) * 4);
                same = same && decay[mt][half] == 1.f;
            }
        if (!__all_sync(~0u, same)) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    acc[mt][j][0] *= decay[mt][0], acc[mt][j][1] *= decay[mt][0];
                    acc[mt][j][2] *= decay[mt][1], acc[mt][j][3] *= decay[mt][1];
                }
        }
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            u32 p[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) ldmatrix4(p[mt], prob_from + (mt * 16 * P_STRIDE + k * 16) * 2);
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                u32 values[4];
                ldmatrix4_transposed(values, output_from + tile_at + k * 16 * TOKEN + j * 16);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    mma_bf16(acc[mt][j], p[mt], values[0], values[1]);
                    mma_bf16(acc[mt][j + 1], p[mt], values[2], values[3]);
                }
            }
        }
        if (++stage == STAGES) stage = 0;
        if (++present > STAGES) present = 0;
        if (++next_present > STAGES) next_present = 0;
    }

    // ---- one sum for a head, and what its output is multiplied by
    total = sum_of_lanes<LANES_PER_HEAD>(total);
    meet<GROUP>(group + 1);  // all have read what the last tile decays
    if (lane % LANES_PER_HEAD == 0) {
        const int h = head0 + own_head;
        const bool empty = total == 0.f;  // a NaN sum is not empty, it has to be seen
        const float lse = empty ? minus_infinity() : m + __log2f(total);
        float weight = total;
        if (h < num_heads) {
            if (splits > 1) {
                partial_lse[partial(h)] = lse;
            } else {
                lse_out[here.b * st.lse_b + here.s * st.lse_s + h * st.lse_h] = lse * LN_2;
                if (sink) weight += exp2_(sink[h] * LOG2_E - m);
            }
        }
        at<float>(smem, base + DECAY_AT + own_head * 4) = empty ? 0.f : 1.f / weight;
    }
    meet<GROUP>(group + 1);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = mt * 16 + half * 8 + t, h = head0 + own, i = 2 * half;
            const float factor = at<float>(smem, base + DECAY_AT + own * 4);
            if (splits > 1) {
                float* to = partial_out + partial(h) * 512 + warp * 128 + 2 * c;
#pragma unroll
                for (int j = 0; j < 16; ++j)
                    if (h < num_heads)
                        *reinterpret_cast<float2*>(to + j * 8) =
                            make_float2(acc[mt][j][i] * factor, acc[mt][j][i + 1] * factor);
            } else {  // two lanes trade halves, so that each has four columns side by side
                u16* to = out + here.b * st.out_b + here.s * st.out_s + h * st.out_h + warp * 128 + (c & 1) * 8 + (c >> 1) * 4;
#pragma unroll
                for (int j = 0; j < 16; j += 2) {
                    const u32 first = to_bf162(acc[mt][j][i] * factor, acc[mt][j][i + 1] * factor);
                    const u32 second = to_bf162(acc[mt][j + 1][i] * factor, acc[mt][j + 1][i + 1] * factor);
                    const u32 other = __shfl_xor_sync(~0u, c & 1 ? first : second, 1);
                    if (h < num_heads)
                        *reinterpret_cast<uint2*>(to + j * 8) = c & 1 ? make_uint2(other, second) : make_uint2(first, other);
                }
            }
        }
}
