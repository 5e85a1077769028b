// SPDX-License-Identifier: Apache-2.0
// Sparse MLA attention on the FP8 cache for many heads: 64 heads of one query row over one split of its indices.
//
// Compiled at run time (NVRTC) with LAYOUT, LISTS, SHARED (bytes) and STAGES defined. The splits of a row are the blocks of a cluster; the first `whole_clusters` have rows that are not
// split, one for each block.
//
// A block is two warpgroups, and four warps that copy for them. A step is 128 tokens, two halves of 64: each warpgroup scores a half,
// then adds both to its 256 output columns. The second half's softmax comes after the first half's, so that one warpgroup multiplies
// while the other has its softmax; barriers of a half are all that orders them. Both products put the cache first: tokens x columns times q transposed, columns
// x tokens times the probabilities transposed. So the cache is always the operand in registers, made from the e4m3 bytes in
// shared memory by the warps that multiply it, and never written back: what a tile costs beside its multiplications is one
// conversion and one scaling for two numbers of it, twice.
//   scores: lane (t, c) holds tokens t and t + 8 of its warp's 16 and takes 32 consecutive bytes of 128 columns; q stands in
//   shared memory in that order of columns.
//   output: lane (t, c) holds eight columns, 8 t of its warp's 64, and tokens 2c, 2c + 1, 2c + 8, 2c + 9 of 16; byte permutes
//   transpose the codes of two tokens while they unpack.
// Rows with a scale for 64 columns (fp8_v4): the last 64 columns are bfloat16, key and value. Their product comes first, because
// their size counts for the scale of the token; the last warp converts them to float16 as values. Of the 64 columns before
// them a lane takes 16 bytes.
// The 656 bytes of a row shift it by one 16-byte chunk against the row before, so that neither reading order meets a bank twice.
//
// Range of float16: q is scaled for all heads together, to a power of two below 2^(Q_EXPONENT + 1) (its rope part too, which stays bfloat16);
// where the largest values of two heads are further apart than 2^FAR, or one is not finite, for each head by itself, and its
// scores are scaled back before the softmax. A head whose q is not finite scores NaN.
// A token's values are scaled by 2^-e, e the exponent of its largest scale, or as much as its bfloat16 values need. Its probabilities carry 2^e: softmax runs over
// score + e, and a token adds p 2^-e to the sum. They are taken against a level 6 below the largest exponent seen when
// the level was last set; it is set again when one would pass 2^14, which after the first half is rare. Then the half leaves what
// earlier halves count from there on, and each warpgroup applies that to its sums before it adds this half.
//
// An absent token (negative, not below num_slots, past its length) is zeros in shared memory and scores -inf.

#define TILE 32                   // tokens of a stage
#include "sparse_decode.cuh"

#define HT 64                     // heads of a block
#define STEP_STAGES 4
#define CONSUMERS 256
#define THREADS (CONSUMERS + 128)
#define CONSUMER_REGISTERS 240
#define PRODUCER_REGISTERS 24
#define STEP (STEP_STAGES * TILE) // tokens
#define STAGE_BYTES (TILE * ROW_STRIDE)
#define Q_CHUNK 8192              // 64 heads x 64 columns, swizzled by 128 bytes; those of codes, one of bfloat16
#define Q_CHUNKS (ROPE ? 9 : 8)
#define CODE_CHUNKS (CODES / 64)
#define HAS_PLAIN (ROPE || CODES < 512)          // keys have columns that are bfloat16, the last chunk
#define PLAIN_FIRST (CODES < 512)                // they are values as well
#define PLAIN_EXPONENT 14                        // their size in float16 is below 2^(it + 1)
#define UNITS (512 / SCALE_GROUP)
#define PROB_AT (Q_CHUNKS * Q_CHUNK)  // [128 tokens][64 heads] float16, likewise
#define KV_AT (PROB_AT + 16384)
#define LEVEL_AT (KV_AT + STAGES * STAGE_BYTES)  // [HT]: what probabilities are taken against, as an exponent of 2
#define TOP_AT (LEVEL_AT + HT * 4)               // [8][HT]: of a warp's tokens; later its sums
#define STATE_AT (TOP_AT + 8 * HT * 4)           // [HT][2]: level and sum of the block
#define BACK_AT STATE_AT                         // [HT], until then: what scores are scaled by, where heads are far apart
#define SINK_AT (STATE_AT + HT * 8)              // [HT]: as an exponent of 2
#define UNIT_AT (SINK_AT + HT * 4)               // [2 steps][UNITS][128] float16: scales over 2^e; bfloat16 of columns without
#define MASK_AT (UNIT_AT + 2 * UNITS * 128 * 2)      // a byte for eight tokens of a stage
#define RISEN_AT (MASK_AT + (STAGES + 1) / 2 * 8)  // [2]: the last half of either parity that needs another level
#define QTOP_AT (RISEN_AT + 8)                   // [8][2]: the largest and the least |q| of a warp's heads, as bits
#define FULL_AT (QTOP_AT + 64)                   // a barrier for each stage
#define EMPTY_AT (FULL_AT + STAGES * 8)          // likewise: its readers have left it
#define SPENT_AT (EMPTY_AT + STAGES * 8)         // a barrier for each half of a step: its probabilities have been read
#define READY_AT (SPENT_AT + 16)                 // likewise: they are there, and their level
#define DECAY_AT (READY_AT + 16)                 // [2][HT]: what earlier sums count where a half has another level
#define SHARED_BYTES (DECAY_AT + 2 * HT * 4)
#define NEXT_STEPS 2              // of a block one wave later, whose rows are brought to L2
#define MERGE_STRIDE 516          // floats between heads of a split's output
#define WEIGHT_AT (HT * MERGE_STRIDE * 4)        // [MAX_SPLITS][HT], behind it: what a split's output counts
#define Q_EXPONENT 13             // q of the block's largest head is below 2^(it + 1)
#define FAR 16                    // largest values of heads that share a scale are at most 2^FAR apart
#define HEADROOM 6.f              // a level below the largest exponent
#define LIMIT 14.f                // the largest exponent of a probability

static_assert(FP8 && (SCALE_GROUP == 128 ? CODES == 512 : SCALE_GROUP == 64 && CODES == 448), "no such build");
static_assert(SharedMemory<SHARED_BYTES, SHARED>::BYTES <= 227 << 10, "no such build");
static_assert(WEIGHT_AT + MAX_SPLITS * HT * 4 <= LEVEL_AT, "what the end of a row still reads would be overwritten");

__device__ __forceinline__ void consumers_barrier() { meet<CONSUMERS>(1); }
// an operand in shared memory, swizzled by 128 bytes, its groups of eight rows 1,024 bytes apart
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3ffffu) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// an operand's registers stay as they are until here
__device__ __forceinline__ void hold(u32 (&a)[4]) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])); }
// d = a b + d, or a b where not `keep`: 64 rows, 64 columns, depth 16; a in registers, b by its descriptor
#define WGMMA(NAME, TYPES, TRANSPOSED)                                                                                         \
    __device__ __forceinline__ void NAME(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {                                 \
        asm volatile(                                                                                                          \
            "{.reg .pred p;\n setp.ne.b32 p, %37, 0;\n"                                                                        \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"      \
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, " TRANSPOSED ";}" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),       \
              "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),            \
              "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),           \
              "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                         \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                                  \
    }
WGMMA(wgmma_latent, "f16.f16", "0")   // b is [64 columns][16]
WGMMA(wgmma_rope, "bf16.bf16", "0")
WGMMA(wgmma_output, "f16.f16", "1")   // b is [16][64 columns]

// the thread's number, read again to keep no register meanwhile
__device__ __forceinline__ int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// merges the warps' sums and the splits' outputs, and writes; all consumers of a block come here
__device__ __forceinline__ void finish(
    u8* smem, const float (&acc)[4][32], const float (&total)[2], u16* __restrict__ out, float* __restrict__ lse_out,
    int num_heads, const Work work, const Place where, const Strides& st) {
    const int thread = thread_again(), warp8 = thread >> 5, t = (thread & 31) >> 2, c = thread & 3;
    const int column0 = warp8 * 64 + t * 8;
    at<float2>(smem, TOP_AT + (warp8 * HT + t * 8 + 2 * c) * 4) = make_float2(total[0], total[1]);
    consumers_barrier();  // nobody reads q, probabilities or stages any more
    if (thread < HT) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < 8; ++w) sum += at<float>(smem, TOP_AT + (w * HT + thread) * 4);
        at<float2>(smem, STATE_AT + thread * 8) = make_float2(at<float>(smem, LEVEL_AT + thread * 4), sum);
    }
    if (work.splits > 1) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int n = k >> 1, i = n * 4 + (k & 1);
            const u32 to = ((n * 8 + 2 * c + (k & 1)) * MERGE_STRIDE + column0) * 4;
            at<float4>(smem, to) = make_float4(acc[0][i], acc[0][i + 2], acc[1][i], acc[1][i + 2]);
            at<float4>(smem, to + 16) = make_float4(acc[2][i], acc[2][i + 2], acc[3][i], acc[3][i + 2]);
        }
        cluster_publish();
    }

    if (thread < HT) {
        const int h = where.head0 + thread;
        float* lse = lse_out + where.b * st.lse_b + where.s * st.lse_s + h * st.lse_h;
        float& weight = at<float>(smem, WEIGHT_AT + thread * 4);
        const float sink = at<float>(smem, SINK_AT + thread * 4);
        if (work.splits == 1) {
            const float2 own = at<float2>(smem, STATE_AT + thread * 8);
            const bool empty = own.y == 0.f;  // a NaN sum is not empty, it has to be seen
            if (h < num_heads) *lse = empty ? minus_infinity() : (own.x + __log2f(own.y)) * LN_2;
            weight = empty ? 0.f : 1.f / (own.y + exp2_(sink - own.x));
        } else {
            weigh_splits<HT>(&weight, smem_u32(smem) + STATE_AT + thread * 8, work.splits, sink,
                             work.split == 0 && h < num_heads ? lse : nullptr);
        }
    }
    consumers_barrier();

    u16* out_row = out + where.b * st.out_b + where.s * st.out_s + (i64)where.head0 * st.out_h;
    if (work.splits == 1) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int n = k >> 1, i = n * 4 + (k & 1), head = n * 8 + 2 * c + (k & 1);
            if (where.head0 + head >= num_heads) continue;
            const float factor = at<float>(smem, WEIGHT_AT + head * 4);
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = to_bf162(acc[j][i] * factor, acc[j][i + 2] * factor);
            uint2* to = reinterpret_cast<uint2*>(out_row + (i64)head * st.out_h + column0);
            to[0] = make_uint2(w[0], w[1]), to[1] = make_uint2(w[2], w[3]);
        }
        return;
    }
    sum_splits<HT, MERGE_STRIDE, CONSUMERS>(
        out_row, st.out_h, num_heads - where.head0, smem_u32(smem), &at<float>(smem, WEIGHT_AT), work.split, work.splits, thread);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_decode_wide(
    u16* out, float* lse_out, const u16* q, const u8* kv, const int* indices, const int* lengths, const float* sink,
    const u8* extra_kv, const int* extra_indices, const int* extra_lengths, float scale_log2,
    int topk, int whole_clusters, int num_slots, int num_heads, int head_tiles, int query_len, int block_size, int extra_topk,
    int extra_slots, int extra_block_size, i64 block_stride, i64 extra_block_stride, Strides st) {
    extern __shared__ __align__(1024) u8 smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
    const int group = __shfl_sync(~0u, thread >> 7, 0);  // the warpgroup; 2: the warps that copy
    const u32 shared = smem_u32(smem);

    const Work work = own_work(whole_clusters);
    const Place here = place_of<HT>(work.unit, head_tiles, query_len);
    const List lists[LISTS] = {
        first_list({kv, num_slots, block_size, block_stride}, indices, lengths, topk, here, st),
#if LISTS > 1
        second_list({extra_kv, extra_slots, extra_block_size, extra_block_stride}, extra_indices, extra_lengths, extra_topk, here,
                    st),
#endif
    };
    if (thread < STAGES) {
        barrier_init(shared + FULL_AT + thread * 8, 4 * FILLED);
        barrier_init(shared + EMPTY_AT + thread * 8, 8 * ARRIVALS);
    }
    if (thread < 2) {
        barrier_init(shared + SPENT_AT + thread * 8, 8 * ARRIVALS);
        barrier_init(shared + READY_AT + thread * 8, 4 * ARRIVALS);
    }
    if (thread == 0) at<u32>(smem, RISEN_AT) = at<u32>(smem, RISEN_AT + 4) = 0;
    if (thread < HT) at<float>(smem, LEVEL_AT + thread * 4) = -1.0e30f;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    wait_for_kernel_in_front();

    const Row row = begin_row<STEP>(lists, work, group == 2, warp, lane);
    const int steps = (row.own.end - row.own.begin + STEP - 1) / STEP;
    if (thread < HT)
        at<float>(smem, SINK_AT + thread * 4) = sink_of(sink, thread, HT, here.head0, num_heads);
    __syncthreads();

    // ---- the warps that copy: eight tokens of a stage each
    if (group == 2) {
        set_registers_down<PRODUCER_REGISTERS>();
        int stage = 0;
        u32 parity = 1;  // stages begin empty
        const auto next_stage = [&] {
            const Stage to = {KV_AT + stage * STAGE_BYTES + warp * 8 * ROW_STRIDE, MASK_AT + stage * 4 + warp,
                              shared + EMPTY_AT + stage * 8, parity, shared + FULL_AT + stage * 8};
            if (++stage == STAGES) stage = 0, parity ^= 1;
            return to;
        };
        // Behind the last copy these warps have nothing to do. They bring to L2 what the block one wave later reads first: its q and
        // the rows of its first steps. Nothing depends on it, so a device whose waves are of another size only gains less.
        const auto bring_next = [&] {
            const Work later = own_work(whole_clusters, multiprocessors());
            if (later.unit >= clusters_launched() + whole_clusters * (blocks_of_cluster() - 1)) return;
            const Place there = place_of<HT>(later.unit, head_tiles, query_len);
            const int own = thread_again(), lane = own & 31, warp = own >> 5 & 3, head = there.head0 + warp * 16 + lane;
            if (lane < 16 && head < num_heads)
                prefetch<(512 + ROPE) * 2>(q + there.b * st.q_b + there.s * st.q_s + (i64)head * st.q_h);
            if (there.head0 > 0) return;  // the block of the row's first heads brings the same rows
            const List lists[LISTS] = {
                first_list({kv, num_slots, block_size, block_stride}, indices, lengths, topk, there, st),
#if LISTS > 1
                second_list({extra_kv, extra_slots, extra_block_size, extra_block_stride}, extra_indices, extra_lengths, extra_topk,
                            there, st),
#endif
            };
            Keys most;
#pragma unroll
            for (int k = 0; k < LISTS; ++k) most.count[k] = lists[k].most;
            const Span all = share(most.all(), STEP, later);
            for (int n = 0; n < NEXT_STEPS; ++n) {
                const int key = own_key(all.begin + n * 4 * TILE, warp, lane);
                prefetch_row(cache_of(lists, most, key), index_of(lists, most, key, all.end));
            }
        };
        produce(smem, lists, row, steps * STEP_STAGES, work.splits, warp, lane, next_stage, bring_next);
        return;
    }
    set_registers_up<CONSUMER_REGISTERS>();

    // ---- q, four threads a head: its largest size, then in the order of columns that the lanes of a score take
    float score_scale;
    bool far;  // for all of the block
    {
        const int warp8 = group * 4 + warp, head = thread >> 2, part = thread & 3;
        const bool on = here.head0 + head < num_heads;
        const u16* q_row = q + here.b * st.q_b + here.s * st.q_s + (i64)(here.head0 + head) * st.q_h;
        constexpr int WORDS = Q_CHUNKS * 2, OF_CODES = CODE_CHUNKS * 2, OF_128 = CODES / 128 * 4;
        uint4 w[WORDS];
#pragma unroll
        for (int j = 0; j < WORDS; ++j)
            w[j] = on ? *reinterpret_cast<const uint4*>(q_row + (j * 4 + part) * 8) : make_uint4(0, 0, 0, 0);
        u32 top = 0;
#pragma unroll
        for (int j = 0; j < OF_CODES; ++j) top = max(top, largest_size(w[j]));
        if (HAS_PLAIN) {
            const u32 plain = max(largest_size(w[WORDS - 2]), largest_size(w[WORDS - 1]));
            if (plain >= NOT_FINITE) top = plain;
        }
        top = max(top, __shfl_xor_sync(~0u, top, 1));
        top = max(top, __shfl_xor_sync(~0u, top, 2));  // of the head
        u32 most = __reduce_max_sync(~0u, top), least = __reduce_min_sync(~0u, top ? top : ~0u);  // zeros have any scale
        if (lane == 0) at<uint2>(smem, QTOP_AT + warp8 * 8) = make_uint2(most, least);
        consumers_barrier();
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const uint2 of = at<uint2>(smem, QTOP_AT + w * 8);
            most = max(most, of.x), least = min(least, of.y);
        }
        far = most >= NOT_FINITE || (int)(most >> 23) - (int)(least >> 23) > FAR;
        const int exponent = size_exponent(far ? top : most);
        const float shrink = power(Q_EXPONENT - exponent), back = scale_log2 * power(exponent - Q_EXPONENT);
        if (far && part == 0) at<float>(smem, BACK_AT + head * 4) = top >= NOT_FINITE ? not_a_number() : back;
        score_scale = far ? 1.f : back;
        // of 128 columns of codes (64 of the last, or of bfloat16) a lane of a score takes 32 (16) that follow each other, four at
        // each depth of 16. w[j] are columns 32 j + 8 part .., so what the four lanes take at one place are words of four w.
        const auto word = [&](int j, int k) { return k == 0 ? w[j].x : k == 1 ? w[j].y : k == 2 ? w[j].z : w[j].w; };
        const auto place = [&](int k) { return (((part & 1) * 4 + k) ^ (head & 7)) << 4; };
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 to = head * 128 + place(k);
#pragma unroll
            for (int j = 0; j < OF_128; j += 4) {
                u32 four[4];
#pragma unroll
                for (int lane = 0; lane < 4; ++lane) {
                    const u32 both = word(j + lane, k);
                    four[lane] = to_half2(low_bf16(both) * shrink, high_bf16(both) * shrink);
                }
                at<uint4>(smem, to + ((j >> 2) * 2 + (part >> 1)) * Q_CHUNK) = make_uint4(four[0], four[1], four[2], four[3]);
            }
#pragma unroll
            for (int j = OF_128; j < WORDS; ++j) {
                const u32 both = word(j, k);
                const float low = low_bf16(both) * shrink, high = high_bf16(both) * shrink;
                at<u32>(smem, to + (j >> 1) * Q_CHUNK + ((j & 1) * 2 + (part >> 1)) * 4) =
                    j < OF_CODES ? to_half2(low, high) : to_bf162(low, high);
            }
        }
        async_fence();
        consumers_barrier();
    }

    float acc[4][32];  // columns 8 t + 2 j and the next of this warp's, heads 8 n + 2 c and the next
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int k = 0; k < 32; ++k) acc[j][k] = 0.f;
    float total[2] = {0.f, 0.f};  // of heads 8 t + 2 c and the next, over this warp's tokens
    const u64 q_operand = descriptor(shared), prob_operand = descriptor(shared + PROB_AT);

    int stage = 0;
    u32 parity = 0;
    const auto scorers_barrier = [&] { meet<128>(2 + group); };  // the four warps that score a half
    for (int step = 0; step < steps; ++step) {
        float sum[2];  // of this warp's tokens of this step, as `total`
        float x[32];  // scores of tokens t and t + 8, heads 8 n + 2 c and the next
        float back[2];  // 2^-e of the tokens
        u32 mask;
        // ---- scores
        {
            const int thread = thread_again(), warp8 = thread >> 5, t = (thread & 31) >> 2, c = thread & 3;
            int own = stage + (warp8 >> 1);
            const bool wrapped = own >= STAGES;
            if (wrapped) own -= STAGES;
            barrier_wait(shared + FULL_AT + own * 8, parity ^ (u32)wrapped);
            const u32 from = KV_AT + own * STAGE_BYTES + ((warp8 & 1) * 16 + t) * ROW_STRIDE;
            mask = at<u32>(smem, MASK_AT + own * 4) >> ((warp8 & 1) * 16 + t);
            uint4 v[2], next[2];  // 16 columns of either token, four steps of depth 16, and the ones after them
            // where this lane's bytes of 64 columns begin in a row
            const auto place = [&](int n) {
                if (n == CODE_CHUNKS) return PLAIN_COLUMN + c * 32;
                return n < CODES / 128 * 2 ? (n >> 1) * 128 + c * 32 + (n & 1) * 16 : n * 64 + c * 16;
            };
#pragma unroll
            for (int k = 0; k < 2; ++k) next[k] = at<uint4>(smem, from + k * 8 * ROW_STRIDE + place(PLAIN_FIRST ? CODE_CHUNKS : 0));
#if PLAIN_FIRST
            u32 exponents[2][2];  // of the scales that this lane multiplies by: of columns 0, 128, 256 and their 64th, and of 384
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint2 own = at<uint2>(smem, from + k * 8 * ROW_STRIDE + SCALE_COLUMN);
                const u32 even = __vmaxu2(own.x & 0x00ff00ffu, own.y & 0x00ff00ffu);
                const u32 odd = __vmaxu2(own.x >> 8 & 0x00ff00ffu, own.y >> 8 & 0x000000ffu), two = __vmaxu2(even, odd);
                const uint4 behind = at<uint4>(smem, from + k * 8 * ROW_STRIDE + place(CODE_CHUNKS) + 16);
                const auto larger = [](u32 x, u32 y) { return __vmaxu2(x & 0x7fff7fffu, y & 0x7fff7fffu); };
                u32 plain = __vmaxu2(__vmaxu2(larger(next[k].x, next[k].y), larger(next[k].z, next[k].w)),
                                     __vmaxu2(larger(behind.x, behind.y), larger(behind.z, behind.w)));
                plain = max(plain & 0xffffu, plain >> 16);
                plain = max(plain, __shfl_xor_sync(~0u, plain, 1));
                plain = max(plain, __shfl_xor_sync(~0u, plain, 2));
                const int needed = (int)(plain >> 7) - PLAIN_EXPONENT, largest = max(two & 0xffffu, two >> 16);
                const int exponent = min(max(max(largest, needed) - 127, -64), 64);
                back[k] = power(-exponent);
                const u32 both = (c & 2 ? own.y : own.x) >> (c & 1) * 16;
                const float first = as_float(both & 255) * back[k], second = as_float(both >> 8 & 255) * back[k];
                const u32 to = UNIT_AT + ((step & 1) * UNITS + c * 2) * 256 + (warp8 * 16 + k * 8 + t) * 2;
                at<u16>(smem, to) = (u16)to_half2(first, first);
                at<u16>(smem, to + 256) = c == 3 ? (u16)(__float_as_uint(back[k]) >> 16) : (u16)to_half2(second, second);
                const u32 shift = (c >> 1) * 8;
                exponents[k][0] = own.x >> shift;
                exponents[k][1] = own.y >> shift & 255 | own.y & 0x00ff0000u;
            }
            const auto scale_of_token = [&](int k, int group) {
                return as_float(exponents[k][group >> 1] >> (group & 1) * 16 & 255) * back[k];
            };
#else
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float4 scale = at<float4>(smem, from + k * 8 * ROW_STRIDE + SCALE_COLUMN);
                const float largest = fmaxf(fmaxf(fabsf(scale.x), fabsf(scale.y)), fmaxf(fabsf(scale.z), fabsf(scale.w)));
                const int exponent = min(max((int)(__float_as_uint(largest) >> 23) - 126, -64), 64);
                back[k] = power(-exponent);
                const float mine = at<float>(smem, from + k * 8 * ROW_STRIDE + SCALE_COLUMN + c * 4) * back[k];
                at<u16>(smem, UNIT_AT + ((step & 1) * UNITS + c) * 256 + (warp8 * 16 + k * 8 + t) * 2) = (u16)to_half2(mine, mine);
            }
            const auto scale_of_token = [&](int k, int group) {
                return at<float>(smem, from + k * 8 * ROW_STRIDE + SCALE_COLUMN + group * 4) * back[k];
            };
#endif
            u32 a[2][2][4], unit[2];
            const auto add_plain = [&] {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        v[k] = next[k];
                        if (half == 0) next[k] = at<uint4>(smem, from + k * 8 * ROW_STRIDE + PLAIN_COLUMN + c * 32 + 16);
                        if (half == 1 && PLAIN_FIRST) next[k] = at<uint4>(smem, from + k * 8 * ROW_STRIDE + place(0));
                    }
                    if (!PLAIN_FIRST) {
                        wgmma_wait<1>();
                        hold(a[half][0]), hold(a[half][1]);
                    }
                    a[half][0][0] = v[0].x, a[half][0][2] = v[0].y, a[half][1][0] = v[0].z, a[half][1][2] = v[0].w;
                    a[half][0][1] = v[1].x, a[half][0][3] = v[1].y, a[half][1][1] = v[1].z, a[half][1][3] = v[1].w;
#pragma unroll
                    for (int k = 0; k < 2; ++k)
#pragma unroll
                        for (int r = 0; r < 4; ++r) a[half][k][r] = mul_bf162(a[half][k][r], to_bf162(back[r & 1], back[r & 1]));
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        wgmma_rope(x, a[half][k], q_operand + CODE_CHUNKS * (Q_CHUNK / 16) + (half * 2 + k) * 2,
                                   !PLAIN_FIRST || half + k > 0);
                    wgmma_commit();
                }
            };
            if (PLAIN_FIRST) add_plain();
#pragma unroll
            for (int n = 0; n < CODE_CHUNKS; ++n) {  // 64 columns
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    v[k] = next[k];
                    if (n < CODE_CHUNKS - 1 || (HAS_PLAIN && !PLAIN_FIRST))
                        next[k] = at<uint4>(smem, from + k * 8 * ROW_STRIDE + place(n + 1));
                    if ((n & 1) == 0) {
                        const float scale = scale_of_token(k, n >> 1);
                        unit[k] = to_half2(scale, scale);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (PLAIN_FIRST || n * 2 + half >= 2) {
                        wgmma_wait<1>();
                        hold(a[half][0]), hold(a[half][1]);
                    }
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        decode4(half ? (k ? v[0].w : v[0].z) : (k ? v[0].y : v[0].x), a[half][k][0], a[half][k][2]);
                        decode4(half ? (k ? v[1].w : v[1].z) : (k ? v[1].y : v[1].x), a[half][k][1], a[half][k][3]);
#pragma unroll
                        for (int r = 0; r < 4; ++r) a[half][k][r] = mul_half2(a[half][k][r], unit[r & 1]);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        wgmma_latent(x, a[half][k], q_operand + n * (Q_CHUNK / 16) + (half * 2 + k) * 2,
                                     PLAIN_FIRST || n + half + k > 0);
                    wgmma_commit();
                }
            }
            if (HAS_PLAIN && !PLAIN_FIRST) add_plain();
            wgmma_wait<0>();
#pragma unroll
            for (int half = 0; half < 2; ++half) hold(a[half][0]), hold(a[half][1]);
        }
        if (far) {
            const u32 from = BACK_AT + (thread_again() & 3) * 8;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const float2 own = at<float2>(smem, from + n * 32);
                x[n * 4] *= own.x, x[n * 4 + 1] *= own.y, x[n * 4 + 2] *= own.x, x[n * 4 + 3] *= own.y;
            }
        }

        // ---- probabilities
        float f[2], e[2];  // score + e = x f + e
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const bool present = (mask >> (k * 8)) & 1;
            const int exponent = 127 - (int)(__float_as_uint(back[k]) >> 23);
            f[k] = present ? score_scale * power(exponent) : 0.f;
            e[k] = present ? (float)exponent : minus_infinity();
        }
        auto probabilities = [&](bool set_level) {
            float top = -1.0e30f, part[4][2];
            const int thread = thread_again(), l = thread & 31;
            // a store takes four matrices of eight tokens and eight heads: its second is the next tokens, its third heads + 32
            const u32 to = shared + PROB_AT + ((thread >> 5) * 16 + (l & 15)) * 128 + ((l >> 4) * 4 ^ (l & 7)) * 16;
#pragma unroll
            for (int n = 0; n < 4; ++n) {  // heads of n and of n + 4
                u32 p[4];
                float given[2];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const float2 level = at<float2>(smem, LEVEL_AT + (l & 3) * 8 + (n + m * 4) * 32);
                    float y[4];
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        y[k] = x[(n + m * 4) * 4 + k] * f[k >> 1] + e[k >> 1] - (k & 1 ? level.y : level.x);
                        top = fmaxf(top, y[k]);
                        y[k] = exp2_(y[k]);
                    }
                    p[m * 2] = to_half2(y[0], y[1]);
                    p[m * 2 + 1] = to_half2(y[2], y[3]);
#pragma unroll
                    for (int k = 0; k < 2; ++k) {  // every lane keeps half of its heads, and takes another's sums of them
                        const float mine = y[k] * back[0] + y[k + 2] * back[1];
                        if (m == 0) part[n][k] = mine;
                        given[k] = l & 16 ? part[n][k] : mine;
                        part[n][k] = l & 16 ? mine : part[n][k];
                    }
                }
                stmatrix4(to ^ n << 4, p);
#pragma unroll
                for (int k = 0; k < 2; ++k) part[n][k] += __shfl_xor_sync(~0u, given[k], 16);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float given = __shfl_xor_sync(~0u, l & 8 ? part[n][k] : part[n + 2][k], 8);
                    part[n][k] = (l & 8 ? part[n + 2][k] : part[n][k]) + given;
                }
#pragma unroll
            for (int k = 0; k < 2; ++k)
                sum[k] = (l & 4 ? part[1][k] : part[0][k]) + __shfl_xor_sync(~0u, l & 4 ? part[0][k] : part[1][k], 4);
            if (!set_level && top > LIMIT) at<u32>(smem, RISEN_AT + group * 4) = step * 2 + group;
            async_fence();
            scorers_barrier();
        };
        const int half = step * 2 + group;
        bool rises = half == 0;  // for all of the warpgroup
        if (half > 0) {
            barrier_wait(shared + READY_AT + (group ^ 1) * 8, ((half - 1) >> 1) & 1);  // the level is that of the half before
            if (step > 0) barrier_wait(shared + SPENT_AT + group * 8, (step - 1) & 1);
            probabilities(false);
            rises = at<u32>(smem, RISEN_AT + group * 4) == half;
        }
        if (rises) {
            const int own = thread_again(), t = (own & 31) >> 2, c = own & 3, warp8 = own >> 5;
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const int n = k >> 1, i = k & 1;
                float top = fmaxf(x[n * 4 + i] * f[0] + e[0], x[n * 4 + i + 2] * f[1] + e[1]);
#pragma unroll
                for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
                if (t == 0) at<float>(smem, TOP_AT + (warp8 * HT + n * 8 + 2 * c + i) * 4) = top;
            }
            scorers_barrier();
            const u32 head = own & 127;
            if (head < HT) {
                const float old = at<float>(smem, LEVEL_AT + head * 4);
                float top = -1.0e30f;
#pragma unroll
                for (int w = 0; w < 4; ++w) top = fmaxf(top, at<float>(smem, TOP_AT + ((group * 4 + w) * HT + head) * 4));
                const float level = fmaxf(old, top - HEADROOM);
                at<float>(smem, LEVEL_AT + head * 4) = level;
                at<float>(smem, DECAY_AT + (group * HT + head) * 4) = exp2_(old - level);
            }
            scorers_barrier();
            probabilities(true);
        }
        warp_arrive(shared + READY_AT + group * 8, lane);

        // ---- output: a half, 16 tokens at a time
#pragma unroll 1
        for (int add = step * 2; add < step * 2 + 2; ++add) {
            constexpr int DEPTHS = 4;
            const u32 units_at = (step & 1) * UNITS * 256 + (add & 1) * 128, prob_at = (add & 1) * DEPTHS * 128;
            const bool own_half = (add & 1) == group;
            if (!own_half) barrier_wait(shared + READY_AT + (group ^ 1) * 8, step & 1);
            if (at<u32>(smem, RISEN_AT + (add & 1) * 4) == add) {  // what was summed before counts less
                const int own = thread_again(), t = (own & 31) >> 2, c = own & 3;
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    const float decay = at<float>(smem, DECAY_AT + ((add & 1) * HT + (k >> 1) * 8 + 2 * c + (k & 1)) * 4);
                    if (k >> 1 == t) total[k & 1] *= decay;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        acc[j][(k >> 1) * 4 + (k & 1)] *= decay;
                        acc[j][(k >> 1) * 4 + (k & 1) + 2] *= decay;
                    }
                }
            }
            // with the half, so that it decays in the same order
            if (own_half) total[0] += sum[0], total[1] += sum[1];
            const int thread = thread_again(), warp8 = thread >> 5, t = (thread & 31) >> 2, c = thread & 3;
            const u32 units = UNIT_AT + units_at + (UNITS == 8 ? warp8 : warp8 >> 1) * 256 + 2 * c * 2;
            const bool plain = PLAIN_FIRST && warp8 == 7;  // values are bfloat16
            const u32 output_from = KV_AT + 2 * c * ROW_STRIDE + warp8 * 64 + t * (plain ? 16 : 8);
            static_assert(!PLAIN_FIRST || PLAIN_COLUMN == 7 * 64, "where those of the last warp begin");
            u32 a[2][4][4], unit01, unit89;
            uint2 w[4], behind[4];  // behind: of bfloat16s, the other four columns
            auto read = [&](int k16, int from_stage) {
                const u32 from = output_from + from_stage * STAGE_BYTES + (k16 & 1) * 16 * ROW_STRIDE;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const u32 row = from + ((k >> 1) * 8 + (k & 1)) * ROW_STRIDE;
                    if (plain) {
                        const uint4 all = at<uint4>(smem, row);
                        w[k] = make_uint2(all.x, all.y), behind[k] = make_uint2(all.z, all.w);
                    } else {
                        w[k] = at<uint2>(smem, row);
                    }
                }
                unit01 = at<u32>(smem, units + k16 * 32), unit89 = at<u32>(smem, units + k16 * 32 + 16);
            };
            barrier_wait(shared + FULL_AT + stage * 8, parity);
            read(0, stage);
#pragma unroll
            for (int k16 = 0; k16 < DEPTHS; ++k16) {
                u32 (&v)[4][4] = a[k16 & 1];
                if (k16 >= 2) {
                    wgmma_wait<1>();
#pragma unroll
                    for (int j = 0; j < 4; ++j) hold(v[j]);
                }
                if (plain) {
#pragma unroll
                    for (int side = 0; side < 2; ++side) {  // tokens 2c and the next; 2c + 8 and the next
                        const u32 both = side ? unit89 : unit01;
                        const float first = low_bf16(both), second = high_bf16(both);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const auto word = [&](int k) {
                                const uint2 of = j < 2 ? w[k] : behind[k];
                                return j & 1 ? of.y : of.x;
                            };
                            const u32 x = word(side * 2), y = word(side * 2 + 1);
                            v[j][side * 2] = to_half2(low_bf16(x) * first, low_bf16(y) * second);
                            v[j][side * 2 + 1] = to_half2(high_bf16(x) * first, high_bf16(y) * second);
                        }
                    }
                } else {
#pragma unroll
                    for (int word = 0; word < 2; ++word) {
                        const u32 w0 = word ? w[0].y : w[0].x, w1 = word ? w[1].y : w[1].x;
                        const u32 w2 = word ? w[2].y : w[2].x, w3 = word ? w[3].y : w[3].x;
                        decode4(__byte_perm(w0, w1, 0x5140), v[word * 2][0], v[word * 2][1]);
                        decode4(__byte_perm(w0, w1, 0x7362), v[word * 2 + 1][0], v[word * 2 + 1][1]);
                        decode4(__byte_perm(w2, w3, 0x5140), v[word * 2][2], v[word * 2][3]);
                        decode4(__byte_perm(w2, w3, 0x7362), v[word * 2 + 1][2], v[word * 2 + 1][3]);
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int r = 0; r < 4; ++r) v[j][r] = mul_half2(v[j][r], r < 2 ? unit01 : unit89);
                }
                if (k16 & 1) {
                    __syncwarp();
                    warp_arrive(shared + EMPTY_AT + stage * 8, lane);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                    if (k16 < DEPTHS - 1) barrier_wait(shared + FULL_AT + stage * 8, parity);
                }
                if (k16 < DEPTHS - 1) read(k16 + 1, stage);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; ++j) wgmma_output(acc[j], v[j], prob_operand + prob_at + k16 * 128, 1);
                wgmma_commit();
            }
            wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < 4; ++j) hold(a[0][j]), hold(a[1][j]);
            warp_arrive(shared + SPENT_AT + (add & 1) * 8, lane);
        }
    }

    const Work done = own_work(whole_clusters);
    const Place where = place_of<HT>(done.unit, head_tiles, query_len);
    finish(smem, acc, total, out, lse_out, num_heads, done, where, st);
}
