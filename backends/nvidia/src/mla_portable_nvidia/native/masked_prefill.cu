// SPDX-License-Identifier: Apache-2.0
// Attention of prompts over per-head keys, causal and under a selection of keys (a bit for each query and key): 128 queries of
// one head of one request, over tiles of KEYS keys.
//
// Compiled at run time (NVRTC) for compute capability 9.0. Blocks are persistent: each takes the next piece of work from a
// counter, those with the most keys first, so that the last ones to end are short. Where all requests have as many pieces as the
// longest may have, a group of streams (a head of a request) that stays in L2 goes from its longest pieces to its shortest ones.
// Other batches are counted by each block when it starts, a lane for each request: requests follow one another, each in groups of
// heads, so that no number of the counter stands for an empty piece.
//
// A block is two warpgroups that compute, 64 queries each, and one warp that copies for them: queries, keys and values by the
// tensor copy engine, the selection's words by plain loads one tile ahead. It leaves out a tile of which no query selects a
// key. Keys go from the last tile to the first, so the tile that is cut by causality or by the request's end comes first.
//   scores: queries x keys transposed, both from shared memory.
//   output: probabilities in registers x values; the scores of the next tile are computed beside it, and its softmax while
//   the values of this one are multiplied. The two warpgroups take turns in issuing, so that one computes its softmax while
//   the tensor cores work for the other.
// A row's words are read from shared memory once a tile, cut by causality, and shifted by the lane's column; then a score costs
// one test and one select.
//
// Values of a key that no query may see are multiplied by probabilities of 0; where one is not finite, that makes the row NaN.
// Such rows are computed again, over their own keys alone (`repair`).

#include "instructions.cuh"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define QUERIES 128               // of a block
#define STAGES 2                  // of keys, and of values
#define WORDS (KEYS / 32)         // of the selection, of a query in a tile
#define CONSUMERS 256
#define THREADS (CONSUMERS + 128)
#define CONSUMER_REGISTERS 232
#define PRODUCER_REGISTERS 40
#define K_STEPS (DQK / 16)
#define MOST_CHUNKS 1024                         // of 32 requests; in longer batches empty pieces are numbered too
#define GROUP_ROWS (GROUP_BYTES / ((DQK + DV) * 2))  // keys of the streams of a group, together
#define CHUNK(rows) ((rows) * 128)               // bytes of 64 columns of a tile, swizzled by 128 bytes
#define Q_BYTES (DQK / 64 * CHUNK(QUERIES))
#define K_BYTES (DQK / 64 * CHUNK(KEYS))
#define V_BYTES (DV / 64 * CHUNK(KEYS))
#define MASK_BYTES (QUERIES * WORDS * 4)
#define K_AT Q_BYTES
#define V_AT (K_AT + STAGES * K_BYTES)
#define MASK_AT (V_AT + STAGES * V_BYTES)
#define WORK_AT (MASK_AT + STAGES * MASK_BYTES)  // a piece of work, as `Work` is
#define TILE_AT (WORK_AT + 32)                   // [STAGES]: the first key of the tile, -1 behind the last
#define K_FULL (TILE_AT + STAGES * 4)            // barriers
#define K_EMPTY (K_FULL + STAGES * 8)
#define V_FULL (K_EMPTY + STAGES * 8)
#define V_EMPTY (V_FULL + STAGES * 8)
#define Q_FULL (V_EMPTY + STAGES * 8)
#define Q_EMPTY (Q_FULL + 8)
#define REQUESTS_AT ((Q_EMPTY + 8 + 15) / 16 * 16)  // [32]: first query, queries, first key, keys of the requests of a chunk
#define BEFORE_AT (REQUESTS_AT + 32 * 16)           // [MOST_CHUNKS + 1]: tiles of queries of one head in front of a chunk
#define SHARED_BYTES (BEFORE_AT + (MOST_CHUNKS + 1) * 4)

static_assert(K_FULL % 8 == 0 && K_AT % 1024 == 0 && V_AT % 1024 == 0, "the copy engine's and barriers' alignment");

struct __align__(64) TensorMap {
    u64 opaque[16];
};
struct Strides {
    i64 q_t, q_h, k_n, k_h, v_n, v_h, selection_t, out_t, out_h, lse_t, lse_h;  // elements
};
// queries [q0, q0 + rows) of the request, whose queries start at `q_start`; key j of the request is at k_start + j
struct Work {
    int head, q_start, k_start, q0, rows, num_keys;
    int first_limit;  // query q0 sees keys below this, each further query one more; the request's end bounds all
};

__device__ __forceinline__ float exp2_(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ u32 to_bf162(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// ---- copies
// a tile of `64 columns x 1 head x rows` into shared memory; zeros beyond the tensor
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 barrier, int column, int head, int row) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
        : "memory");
}

// ---- products
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// an operand swizzled by 128 bytes, groups of eight rows 1,024 bytes apart; 64 columns further, `leading` bytes
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading) {
    return (u64)((address & 0x3ffffu) >> 4) | (u64)(leading >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(u32 (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
#define D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(d, i) D8(d, i), D8(d, i + 8), D8(d, i + 16), D8(d, i + 24)
#define R32_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R32_1 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R32_2 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define R32_3 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// d = a b, or a b + d where `keep`: 64 queries x 64 or 128 keys, depth 16; both in shared memory, rows of 64 columns
__device__ __forceinline__ void score_step(float (&d)[32], u64 a, u64 b, int keep) {
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32_0 "}, %32, %33, p, 1, 1, 0, 0;}"
                 : D32(d, 0) : "l"(a), "l"(b), "r"(keep));
}
__device__ __forceinline__ void score_step(float (&d)[64], u64 a, u64 b, int keep) {
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R32_0 "," R32_1 "}, %64, %65, p, 1, 1, 0, 0;}"
                 : D32(d, 0), D32(d, 32) : "l"(a), "l"(b), "r"(keep));
}
// d += p v: 64 queries x 128 or 256 columns, depth 16 keys; p in registers, v with its columns side by side
__device__ __forceinline__ void output_step(float (&d)[64], const u32* p, u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R32_0 "," R32_1 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : D32(d, 0), D32(d, 32) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}
__device__ __forceinline__ void output_step(float (&d)[128], const u32* p, u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R32_0 "," R32_1 "," R32_2 "," R32_3
                 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
                 : D32(d, 0), D32(d, 32), D32(d, 64), D32(d, 96) : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// ---- the two warpgroups take turns in issuing products; `turn` of one is given by the other
__device__ __forceinline__ void wait_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 1) : "memory"); }

// bits [0, keys) of a tile's word
__device__ __forceinline__ u32 low_bits(int keys) { return keys >= 32 ? ~0u : keys <= 0 ? 0u : (1u << keys) - 1; }

// a row's output again, over the keys that it sees and selects alone: lanes share the columns. Slow, and rarely needed.
__device__ __noinline__ void repair(
    const Work& work, int query, u16* __restrict__ out, float* __restrict__ lse, const u16* __restrict__ q, const u16* __restrict__ k,
    const u16* __restrict__ v, const u32* __restrict__ selection, float scale_log2, int causal, int words_in_row, const Strides& st) {
    const int lane = threadIdx.x & 31;
    const u16* q_row = q + (i64)(work.q_start + query) * st.q_t + (i64)work.head * st.q_h;
    const u32* words = selection ? selection + (i64)(work.q_start + query) * st.selection_t : nullptr;
    float own[DQK / 32], sum = 0.f, level = minus_infinity(), acc[DV / 32];
#pragma unroll
    for (int i = 0; i < DQK / 32; ++i) own[i] = __uint_as_float((u32)q_row[i * 32 + lane] << 16);
#pragma unroll
    for (int i = 0; i < DV / 32; ++i) acc[i] = 0.f;
    int limit = causal ? min(work.num_keys, work.first_limit + query - work.q0) : work.num_keys;
    if (words) limit = min(limit, words_in_row * 32);  // keys behind the row's words are not selected
    for (int key = 0; key < limit; ++key) {
        if (words && !(words[key >> 5] >> (key & 31) & 1)) continue;
        const u16* k_row = k + (i64)(work.k_start + key) * st.k_n + (i64)work.head * st.k_h;
        const u16* v_row = v + (i64)(work.k_start + key) * st.v_n + (i64)work.head * st.v_h;
        float x = 0.f;
#pragma unroll
        for (int i = 0; i < DQK / 32; ++i) x += own[i] * __uint_as_float((u32)k_row[i * 32 + lane] << 16);
#pragma unroll
        for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
        x *= scale_log2;
        const float risen = fmaxf(level, x), decay = level == risen ? 1.f : exp2_(level - risen);
        const float p = x == risen ? 1.f : exp2_(x - risen);
        level = risen, sum = sum * decay + p;
#pragma unroll
        for (int i = 0; i < DV / 32; ++i) acc[i] = acc[i] * decay + p * __uint_as_float((u32)v_row[i * 32 + lane] << 16);
    }
    u16* out_row = out + (i64)(work.q_start + query) * st.out_t + (i64)work.head * st.out_h;
    const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int i = 0; i < DV / 32; ++i) out_row[i * 32 + lane] = (u16)to_bf162(acc[i] * factor, 0.f);
    if (lane == 0)
        lse[(i64)(work.q_start + query) * st.lse_t + (i64)work.head * st.lse_h] =
            sum == 0.f ? minus_infinity() : (level + __log2f(sum)) * LN_2;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) masked_prefill(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    u16* __restrict__ out, float* __restrict__ lse_out, const u16* __restrict__ q, const u16* __restrict__ k,
    const u16* __restrict__ v, const int* __restrict__ q_starts, const int* __restrict__ k_starts,
    const u32* __restrict__ selection, int* __restrict__ counter, float scale_log2, int causal, int num_heads, int num_requests,
    int query_tiles, int group_streams, int words_in_row, Strides st) {
    extern __shared__ __align__(1024) u8 smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) & 3;
    const int group = __shfl_sync(~0u, thread >> 7, 0);  // the warpgroup; 2: that of the warp that copies
    const u32 shared = smem_u32(smem);
    if (thread < STAGES) {
        barrier_init(shared + K_FULL + thread * 8, 1);
        barrier_init(shared + K_EMPTY + thread * 8, 8 * ARRIVALS);
        barrier_init(shared + V_FULL + thread * 8, 1);
        barrier_init(shared + V_EMPTY + thread * 8, 8 * ARRIVALS);
    }
    if (thread == 0) {
        barrier_init(shared + Q_FULL, 1);
        barrier_init(shared + Q_EMPTY, 8 * ARRIVALS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();

    // ---- the warp that copies
    if (group == 2) {
        set_registers_down<PRODUCER_REGISTERS>();
        if (warp != 0) return;
        int stage = 0, v_stage = 0;
        u32 parity = 1, v_parity = 1, q_parity = 1;  // stages begin empty
        const bool whole_words = WORDS == 4 && st.selection_t % 4 == 0 && (u64)selection % 16 == 0;
        auto take = [&] { return lane == 0 ? atomicAdd(counter, 1) : 0; };
        int piece = take();  // while requests are counted
        const int chunks = (num_requests + 31) / 32;
        // requests of a chunk into shared memory; returns their tiles of queries up to the lane's own
        auto hold_chunk = [&](int chunk) {
            const int request = chunk * 32 + lane;
            int4 own = make_int4(0, 0, 0, 0);
            if (request < num_requests) {
                own.x = __ldg(q_starts + request), own.z = __ldg(k_starts + request);
                own.y = __ldg(q_starts + request + 1) - own.x, own.w = __ldg(k_starts + request + 1) - own.z;
            }
            __syncwarp();
            at<int4>(smem, REQUESTS_AT + lane * 16) = own;
            int tiles = (own.y + QUERIES - 1) / QUERIES;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, tiles, d);
                if (lane >= d) tiles += other;
            }
            __syncwarp();
            return tiles;
        };
        int held = -1, upto = 0, total = num_requests * query_tiles;
        if (chunks <= MOST_CHUNKS) {
            total = 0;
            for (int chunk = 0; chunk < chunks; ++chunk) {
                if (lane == 0) at<int>(smem, BEFORE_AT + chunk * 4) = total;
                upto = hold_chunk(held = chunk);
                total += __shfl_sync(~0u, upto, 31);
            }
            if (lane == 0) at<int>(smem, BEFORE_AT + chunks * 4) = total;
            __syncwarp();
            if (chunks > 1) held = -1;
        }
        const bool uniform = total == num_requests * query_tiles;
        const int pieces = num_heads * total;
        for (;; piece = take()) {
            if (lane == 0 && piece == pieces + (int)gridDim.x - 1) *counter = 0;  // the last one to ask: ready for the next launch
            piece = __shfl_sync(~0u, piece, 0);
            Work work = {-1, 0, 0, 0, 0, 0, 0};
            if (piece < pieces) {
                int head, tile;
                int4 own;
                if (uniform) {
                    const int first = piece / (group_streams * query_tiles) * group_streams, rest = piece - first * query_tiles;
                    const int streams = min(group_streams, num_heads * num_requests - first);
                    const int stream = first + rest % streams, request = stream / num_heads;
                    tile = query_tiles - 1 - rest / streams, head = stream % num_heads;
                    if (held >= 0) {
                        own = at<int4>(smem, REQUESTS_AT + request * 16);
                    } else {
                        own.x = __ldg(q_starts + request), own.z = __ldg(k_starts + request);
                        own.y = __ldg(q_starts + request + 1) - own.x, own.w = __ldg(k_starts + request + 1) - own.z;
                    }
                    if (tile * QUERIES >= own.y) continue;  // of a batch that was not counted
                } else {
                    int chunk = max(held, 0);  // numbers only grow
                    while (at<int>(smem, BEFORE_AT + (chunk + 1) * 4) * num_heads <= piece) ++chunk;
                    if (chunk != held) upto = hold_chunk(held = chunk);
                    const int rest = piece - at<int>(smem, BEFORE_AT + chunk * 4) * num_heads;
                    const int of = __ffs(__ballot_sync(~0u, upto * num_heads > rest)) - 1;
                    own = at<int4>(smem, REQUESTS_AT + of * 16);
                    const int tiles = (own.y + QUERIES - 1) / QUERIES;
                    const int in_request = rest - (__shfl_sync(~0u, upto, of) - tiles) * num_heads;
                    const int most = max(1, min(num_heads, GROUP_ROWS / max(own.w, 1)));
                    const int groups = (num_heads + most - 1) / most, heads = (num_heads + groups - 1) / groups;
                    const int first = in_request / (heads * tiles) * heads, in_group = in_request - first * tiles;
                    const int its = min(heads, num_heads - first);
                    tile = tiles - 1 - in_group / its, head = first + in_group % its;
                }
                const int q0 = tile * QUERIES;
                work = {head, own.x, own.z, q0, min(QUERIES, own.y - q0), own.w, causal ? q0 + 1 + own.w - own.y : own.w};
            }
            barrier_wait(shared + Q_EMPTY, q_parity);
            q_parity ^= 1;
            if (lane == 0) {
                at<int4>(smem, WORK_AT) = make_int4(work.head, work.q_start, work.k_start, work.q0);
                at<int4>(smem, WORK_AT + 16) = make_int4(work.rows, work.num_keys, work.first_limit, 0);
                if (work.head >= 0) {
                    barrier_expect(shared + Q_FULL, Q_BYTES);
#pragma unroll 1
                    for (int c = 0; c < DQK / 64; ++c)
                        copy_tile(shared + c * CHUNK(QUERIES), &q_map, shared + Q_FULL, c * 64, work.head, work.q_start + work.q0);
                } else {
                    barrier_arrive(shared + Q_FULL);
                }
            }
            if (work.head < 0) return;
            // values are wanted after the keys of the next tile: copied in that order
            auto copy_values = [&](int key0) {
                if (lane == 0) {
                    barrier_wait(shared + V_EMPTY + v_stage * 8, v_parity);
                    barrier_expect(shared + V_FULL + v_stage * 8, V_BYTES);
#pragma unroll 1
                    for (int c = 0; c < DV / 64; ++c)
                        copy_tile(shared + V_AT + v_stage * V_BYTES + c * CHUNK(KEYS), &v_map, shared + V_FULL + v_stage * 8, c * 64,
                                  work.head, work.k_start + key0);
                }
                if (++v_stage == STAGES) v_stage = 0, v_parity ^= 1;
            };
            const int seen = min(work.num_keys, work.first_limit + work.rows - 1);
            const u32* row = selection + (i64)(work.q_start + work.q0 + lane) * st.selection_t;
            int previous = -1;
            for (int tile = (seen + KEYS - 1) / KEYS - 1; tile >= 0; --tile) {
                u32 word[4][WORDS];
                if (selection) {
                    u32 any = 0;
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const bool there = lane + r * 32 < work.rows;
                        const u32* from = row + r * 32 * st.selection_t + tile * WORDS;
                        if (whole_words && tile * WORDS + WORDS <= words_in_row) {
                            const uint4 four = there ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
                            word[r][0] = four.x, word[r][1] = four.y;
                            if (WORDS == 4) word[r][WORDS - 2] = four.z, word[r][WORDS - 1] = four.w;
                        } else {
#pragma unroll
                            for (int w = 0; w < WORDS; ++w)
                                word[r][w] = there && tile * WORDS + w < words_in_row ? __ldg(from + w) : 0u;
                        }
#pragma unroll
                        for (int w = 0; w < WORDS; ++w) any |= word[r][w];
                    }
                    if (!__any_sync(~0u, any != 0)) continue;
                }
                barrier_wait(shared + K_EMPTY + stage * 8, parity);
                if (selection)
#pragma unroll
                    for (int r = 0; r < 4; ++r)
#pragma unroll
                        for (int w = 0; w < WORDS; ++w)
                            at<u32>(smem, MASK_AT + stage * MASK_BYTES + ((lane + r * 32) * WORDS + w) * 4) = word[r][w];
                __syncwarp();
                if (lane == 0) {
                    at<int>(smem, TILE_AT + stage * 4) = tile * KEYS;
                    barrier_expect(shared + K_FULL + stage * 8, K_BYTES);
#pragma unroll 1
                    for (int c = 0; c < DQK / 64; ++c)
                        copy_tile(shared + K_AT + stage * K_BYTES + c * CHUNK(KEYS), &k_map, shared + K_FULL + stage * 8, c * 64,
                                  work.head, work.k_start + tile * KEYS);
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
                if (previous >= 0) copy_values(previous);
                previous = tile * KEYS;
                __syncwarp();
            }
            barrier_wait(shared + K_EMPTY + stage * 8, parity);
            if (lane == 0) {
                at<int>(smem, TILE_AT + stage * 4) = -1;
                barrier_arrive(shared + K_FULL + stage * 8);
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (previous >= 0) copy_values(previous);
            __syncwarp();
        }
    }

    // ---- the warps that compute
    set_registers_up<CONSUMER_REGISTERS>();
    const int t = lane >> 2, c = lane & 3;  // rows t and t + 8 of the warp's 16, columns 8 n + 2 c and the next
    const u64 q_operand = descriptor(shared + group * 64 * 128, 0);
    if (group == 1) give_turn(0);
    int stage = 0, v_stage = 0;
    u32 parity = 0, v_parity = 0, q_parity = 0;
    for (;;) {
        barrier_wait(shared + Q_FULL, q_parity);
        q_parity ^= 1;
        const int4 w0 = at<int4>(smem, WORK_AT), w1 = at<int4>(smem, WORK_AT + 16);
        const Work work = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z};
        if (work.head < 0) return;
        const int own_row = group * 64 + warp * 16 + t;                         // and 8 further
        const int limit = work.first_limit + own_row;                           // keys that the first of them sees
        const int cut_from = min(work.num_keys, work.first_limit + group * 64);  // keys that all rows of the warpgroup see

        float acc[DV / 2], x[KEYS / 2], level[2], sum[2] = {0.f, 0.f};
        u32 p[KEYS / 4];
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) acc[i] = 0.f;
        level[0] = level[1] = -1.0e30f;

        auto scores = [&](int stage) {
            const u64 keys = descriptor(shared + K_AT + stage * K_BYTES, 0);
            hold(x);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s)
                score_step(x, q_operand + (s >> 2) * (CHUNK(QUERIES) / 16) + (s & 3) * 2,
                           keys + (s >> 2) * (CHUNK(KEYS) / 16) + (s & 3) * 2, s > 0);
            wgmma_commit();
        };
        auto output = [&](int stage) {
            const u64 values = descriptor(shared + V_AT + stage * V_BYTES, CHUNK(KEYS));
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < KEYS / 16; ++s) output_step(acc, p + s * 4, values + s * 128);
            wgmma_commit();
        };
        auto masked = [&](int stage, int key0) {
            if (!selection && key0 + KEYS <= cut_from) return;
            u32 word[2][WORDS];
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
                    word[r][w] = selection ? at<u32>(smem, MASK_AT + stage * MASK_BYTES + ((own_row + r * 8) * WORDS + w) * 4) : ~0u;
            if (key0 + KEYS > cut_from) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int w = 0; w < WORDS; ++w)
                        word[r][w] &= low_bits(min(work.num_keys, limit + r * 8) - key0 - w * 32);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    const u32 mine = word[r][w] >> (2 * c);
#pragma unroll
                    for (int n = 0; n < 4; ++n)
#pragma unroll
                        for (int b = 0; b < 2; ++b) {
                            float& score = x[(w * 4 + n) * 4 + r * 2 + b];
                            score = mine & (1u << (n * 8 + b)) ? score : minus_infinity();
                        }
                }
        };
        // x becomes probabilities; what the output of the tiles before is to be multiplied by
        auto softmax = [&](float (&decay)[2]) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float top = level[r];
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n) top = fmaxf(top, fmaxf(x[n * 4 + r * 2], x[n * 4 + r * 2 + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                decay[r] = exp2_((level[r] - top) * scale_log2);
                level[r] = top;
                const float base = -top * scale_log2;
                float part = 0.f;
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        float& score = x[n * 4 + r * 2 + b];
                        score = exp2_(fmaf(score, scale_log2, base));
                        part += score;
                    }
                sum[r] = sum[r] * decay[r] + part;
            }
        };
        auto pack = [&] {
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) p[i] = to_bf162(x[i * 2], x[i * 2 + 1]);
        };
        auto leave = [&](u32 barriers, int stage) {
            __syncwarp();
            warp_arrive(shared + barriers + stage * 8, lane);
        };
        auto next_key0 = [&] {  // the tile that the stage holds
            barrier_wait(shared + K_FULL + stage * 8, parity);
            return at<int>(smem, TILE_AT + stage * 4);
        };
        auto advance = [&](int& stage, u32& parity) {
            if (++stage == STAGES) stage = 0, parity ^= 1;
        };

        int key0 = next_key0();
        if (key0 >= 0) {
            float decay[2];
            scores(stage);
            wgmma_wait<0>();
            hold(x);
            masked(stage, key0);
            leave(K_EMPTY, stage);
            advance(stage, parity);
            softmax(decay);
            pack();
            while ((key0 = next_key0()) >= 0) {
                wait_turn(group);
                scores(stage);
                barrier_wait(shared + V_FULL + v_stage * 8, v_parity);
                output(v_stage);
                give_turn(group ^ 1);
                wgmma_wait<1>();
                hold(x);
                masked(stage, key0);
                leave(K_EMPTY, stage);
                advance(stage, parity);
                softmax(decay);
                wgmma_wait<0>();
                hold(acc);
                hold(p);
                leave(V_EMPTY, v_stage);
                advance(v_stage, v_parity);
#pragma unroll
                for (int i = 0; i < DV / 2; ++i) acc[i] *= decay[i >> 1 & 1];
                pack();
            }
            leave(Q_EMPTY, 0);
            barrier_wait(shared + V_FULL + v_stage * 8, v_parity);
            output(v_stage);
            wgmma_wait<0>();
            hold(acc);
            hold(p);
            leave(V_EMPTY, v_stage);
            advance(v_stage, v_parity);
        } else {
            leave(Q_EMPTY, 0);
        }
        leave(K_EMPTY, stage);  // the mark behind the last tile
        advance(stage, parity);

        bool spoiled[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
            const float factor = sum[r] == 0.f ? 0.f : 1.f / sum[r];
            float check = 0.f;
#pragma unroll
            for (int n = 0; n < DV / 8; ++n) {
                check += acc[n * 4 + r * 2] * 0.f + acc[n * 4 + r * 2 + 1] * 0.f;
                acc[n * 4 + r * 2] *= factor, acc[n * 4 + r * 2 + 1] *= factor;
            }
            check += __shfl_xor_sync(~0u, check, 1);
            check += __shfl_xor_sync(~0u, check, 2);
            spoiled[r] = !(check == 0.f);
            const int query = work.q0 + own_row + r * 8;
            const bool on = own_row + r * 8 < work.rows;
            u16* out_row = out + (i64)(work.q_start + query) * st.out_t + (i64)work.head * st.out_h;
#pragma unroll
            for (int g = 0; g < DV / 32; ++g) {  // lane c takes the eight columns of n = 4 g + c
                u32 own[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int n = g * 4 + j;
                    own[j] = to_bf162(acc[n * 4 + r * 2], acc[n * 4 + r * 2 + 1]);
                }
                // a transpose of 4 x 4 words over four lanes: own[i] of lane c becomes word c of lane i
                u32 got[4];
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    const int give = c ^ d;
                    const u32 word = give == 0 ? own[0] : give == 1 ? own[1] : give == 2 ? own[2] : own[3];
                    got[d] = d ? __shfl_xor_sync(~0u, word, d) : word;  // own[c] of lane c ^ d
                }
                const bool odd = c & 1, high = c & 2;
                const u32 a0 = odd ? got[1] : got[0], a1 = odd ? got[0] : got[1], a2 = odd ? got[3] : got[2], a3 = odd ? got[2] : got[3];
                const uint4 line = high ? make_uint4(a2, a3, a0, a1) : make_uint4(a0, a1, a2, a3);
                if (on) *reinterpret_cast<uint4*>(out_row + (g * 4 + c) * 8) = line;
            }
            if (on && c == 0)
                lse_out[(i64)(work.q_start + query) * st.lse_t + (i64)work.head * st.lse_h] =
                    sum[r] == 0.f ? minus_infinity() : (level[r] * scale_log2 + __log2f(sum[r])) * LN_2;
        }
#pragma unroll 1
        for (int r = 0; r < 2; ++r) {
            u32 rows = __ballot_sync(~0u, spoiled[r] && c == 0 && own_row + r * 8 < work.rows);
            while (rows) {
                const int of = __ffs(rows) - 1;
                rows &= rows - 1;
                repair(work, work.q0 + group * 64 + warp * 16 + (of >> 2) + r * 8, out, lse_out, q, k, v, selection, scale_log2, causal, words_in_row, st);
            }
        }
    }
}
