// SPDX-License-Identifier: Apache-2.0
// What the sparse attention kernels share: which row a block has and which of its keys, the copying of rows, the softmax, and the
// end of a row that is split.
//
// Compiled with LAYOUT defined, the header of a row's bytes (layout_*.cuh), and LISTS: of how many lists a row has its keys, each
// with a cache of its own. An includer defines TILE, the tokens of a tile.

#include "attention.cuh"
#include LAYOUT

#define MAX_SPLITS 16             // blocks of a cluster
#ifndef PLACE                     // where a token of a warp's eight lies in a stage, in rows from the first of them
#define PLACE(token) (token)
#endif
#ifndef READ_INDEX                // a plain load, of memory that changes while a kernel lives that starts early
#define READ_INDEX(at) (*(at))
#endif
#define FILLED (VISIBLE ? 32 : APART ? 9 : 1)  // arrivals of a warp that copies, at the barrier that a stage is full

// the bytes of shared memory that a source lays out, which its build is launched with; an error names both
template <int LAID_OUT, int OF_BUILD>
struct SharedMemory {
    static_assert(LAID_OUT == OF_BUILD, "SHARED: not what the source lays out");
    static constexpr int BYTES = LAID_OUT;
};

struct Strides {
    i64 q_b, q_s, q_h;  // elements
    i64 indices_b, indices_s;
    i64 lengths_b, lengths_s;
    i64 extra_indices_b, extra_indices_s;
    i64 extra_lengths_b, extra_lengths_s;
    i64 out_b, out_s, out_h;
    i64 lse_b, lse_s, lse_h;
};
struct Cache {
    const u8* rows;
    int num_slots, block_size;  // block_size 0: blocks are side by side
    i64 block_stride;           // bytes
};

// ---- rows
// what a block works on: a row's head tile, row * head_tiles + tile, or one of its splits. The blocks of the first
// `whole_clusters` have one each to themselves; those of a later cluster share one.
struct Work {
    u32 unit;
    int split, splits;
};
// later: of the block that comes so many after this one
__device__ __forceinline__ Work own_work(int whole_clusters, u32 later = 0) {
    u32 cluster, block, blocks;  // read again where it is wanted again, to keep no registers meanwhile
    asm volatile("mov.u32 %0, %%ctaid.x;\n mov.u32 %1, %%ctaid.y;\n mov.u32 %2, %%nctaid.y;"
                 : "=r"(cluster), "=r"(block), "=r"(blocks));
    if (later) {
        later += cluster * blocks + block;
        cluster = later / blocks, block = later % blocks;
    }
    if (cluster < whole_clusters) return {cluster * blocks + block, 0, 1};
    return {cluster + whole_clusters * (blocks - 1), (int)block, (int)blocks};
}
__device__ __forceinline__ u32 clusters_launched() {
    u32 clusters;
    asm("mov.u32 %0, %%nctaid.x;" : "=r"(clusters));
    return clusters;
}
__device__ __forceinline__ u32 blocks_of_cluster() {
    u32 blocks;
    asm("mov.u32 %0, %%nctaid.y;" : "=r"(blocks));
    return blocks;
}
__device__ __forceinline__ u32 multiprocessors() {
    u32 count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}
// which row and heads a unit of work is
struct Place {
    int head0;
    i64 b, s;
};
template <int HEADS>
__device__ __forceinline__ Place place_of(u32 unit, int head_tiles, int query_len) {
    const u32 row = unit / head_tiles;
    return {(int)(unit % head_tiles) * HEADS, (i64)(row / query_len), (i64)(row % query_len)};
}

// ---- keys: a row's are those of its lists, one behind the other, each from the start of a tile on
struct List {
    Cache cache;
    const int* indices;  // of the row
    const int* length;   // of the row, or null: all of `most`
    int most;
};
// what a call says of its first list and of its second, for one of its rows
__device__ __forceinline__ List first_list(
    const Cache& cache, const int* indices, const int* lengths, int most, const Place row, const Strides& st) {
    return {cache, indices + row.b * st.indices_b + row.s * st.indices_s,
            lengths ? lengths + row.b * st.lengths_b + row.s * st.lengths_s : nullptr, most};
}
__device__ __forceinline__ List second_list(
    const Cache& cache, const int* indices, const int* lengths, int most, const Place row, const Strides& st) {
    return {cache, indices + row.b * st.extra_indices_b + row.s * st.extra_indices_s,
            lengths ? lengths + row.b * st.extra_lengths_b + row.s * st.extra_lengths_s : nullptr, most};
}
__device__ __forceinline__ int keys_of(const List& list) {
    if (!list.length) return list.most;
    return LISTS > 1 ? max(min(list.most, *list.length), 0) : min(list.most, *list.length);
}
struct Keys {
    int count[LISTS];
    __device__ __forceinline__ int second() const {  // where those of the second list begin
        return LISTS > 1 ? (count[0] + TILE - 1) / TILE * TILE : count[0];
    }
    __device__ __forceinline__ int all() const { return LISTS > 1 ? second() + count[LISTS - 1] : count[0]; }
};
// the cache of the tile that begins at a key
__device__ __forceinline__ Cache cache_of(const List (&lists)[LISTS], const Keys& keys, int key) {
    if (LISTS > 1 && key >= keys.second()) return lists[LISTS - 1].cache;
    return lists[0].cache;
}
struct Span {
    int begin, end;
};
// a block's share of a row's keys, in whole steps
__device__ __forceinline__ Span share(int keys, int step, const Work work) {
    const int split_len = ((max(keys, 1) - 1) / (step * work.splits) + 1) * step, begin = work.split * split_len;
    return {begin, max(min(begin + split_len, keys), begin)};
}
// the index of a key; -1 of those at `end` and behind it, and between two lists. Where it is known, it is not read.
__device__ __forceinline__ int index_of(
    const List (&lists)[LISTS], const Keys& keys, int key, int end, bool is_known = false, int known = 0) {
    if (LISTS > 1 && key >= keys.second())
        return key >= end ? -1 : is_known ? known : READ_INDEX(lists[LISTS - 1].indices + (key - keys.second()));
    return key >= (LISTS > 1 ? min(end, keys.count[0]) : end) ? -1 : is_known ? known : READ_INDEX(lists[0].indices + key);
}

// ---- copying
// where a row begins in its cache, and where what lies apart of it does
__device__ __forceinline__ i64 row_at(const Cache& cache, int slot) {
    if (!APART && cache.block_size == 0) return (i64)slot * PITCH;
    return slot / cache.block_size * cache.block_stride + (i64)(slot % cache.block_size) * PITCH;
}
__device__ __forceinline__ i64 apart_at(const Cache& cache, int slot) {
    return slot / cache.block_size * cache.block_stride + (i64)cache.block_size * PITCH + slot % cache.block_size * APART;
}
// a place for a tile: where the rows of a warp's eight tokens go, where the byte of their presence; barriers that it is empty, from
// the phase of this parity on, and that it is full
struct Stage {
    u32 rows, mask, empty, parity, full;
};
// brings what lies there to L2, before somebody copies it
template <int BYTES>
__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void prefetch_row(const Cache& cache, int slot) {
    if (slot >= 0 && slot < cache.num_slots) prefetch<ROW>(cache.rows + row_at(cache, slot));
}
// eight tokens of a tile by a warp, lanes 0 to 7 one each, once the stage is empty; `full` expects their bytes. An absent token
// (negative, not below num_slots) becomes zeros and a 0 in the byte of presence.
__device__ __forceinline__ void copy_rows(u8* smem, const Stage to, const Cache& cache, int slot, int lane) {
    const bool valid = lane < 8 && slot >= 0 && slot < cache.num_slots;
    const u32 mask = __ballot_sync(~0u, valid);
    barrier_wait(to.empty, to.parity);
    if (mask != 0xffu) {
        for (int k = 0; k < 8; ++k)
            if (!((mask >> k) & 1))
                for (int n = lane; n < ROW / 16; n += 32)
                    at<uint4>(smem, to.rows + PLACE(k) * ROW_STRIDE + n * 16) = make_uint4(0, 0, 0, 0);
        async_fence();  // before a later copy writes here
        __syncwarp();
    }
#if VISIBLE
    if (lane == 0) at<u8>(smem, to.mask) = (u8)mask;
    for (int k = 0; k < 8; ++k) {
        const uint4* row = reinterpret_cast<const uint4*>(cache.rows + row_at(cache, max(__shfl_sync(~0u, slot, k), 0)));
        if ((mask >> k) & 1)
            for (int n = lane; n < ROW / 16; n += 32) at<uint4>(smem, to.rows + PLACE(k) * ROW_STRIDE + n * 16) = row[n];
    }
    if (APART && lane < 8) {
        const uint2 none = make_uint2(0, 0);
        at<uint2>(smem, to.rows + PLACE(lane) * ROW_STRIDE + ROW) =
            valid ? *reinterpret_cast<const uint2*>(cache.rows + apart_at(cache, slot)) : none;
    }
    barrier_arrive(to.full);
#else
    if (lane == 0) {
        at<u8>(smem, to.mask) = (u8)mask;
        barrier_expect(to.full, ROW * __popc(mask));
    }
    __syncwarp();
    if (valid)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         smem_u32(smem) + to.rows + PLACE(lane) * ROW_STRIDE),
                     "l"(cache.rows + row_at(cache, slot)), "n"(ROW), "r"(to.full)
                     : "memory");
#if APART
    static_assert(APART == 8, "less than a bulk copy takes: one of a thread, which arrives by itself when it has come");
    if (lane < 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%3];" ::"r"(
                         smem_u32(smem) + to.rows + PLACE(lane) * ROW_STRIDE + ROW),
                     "l"(cache.rows + (valid ? apart_at(cache, slot) : 0)), "r"(valid ? APART : 0), "r"(to.full)
                     : "memory");
#endif
#endif
}

// ---- clusters: every thread of every block takes part, in both
__device__ __forceinline__ void cluster_publish() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// no memory ordering: the remote loads before it have returned, because their values were used in arithmetic
__device__ __forceinline__ void cluster_leave() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float2 own2(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
// shared memory of block `rank` of the cluster, at the address that it has in this block
__device__ __forceinline__ float2 remote2(u32 at, int rank) {
    float2 v;
    asm volatile("{.reg .u32 a;\n mapa.shared::cluster.u32 a, %2, %3;\n ld.shared::cluster.v2.f32 {%0,%1}, [a];}"
                 : "=f"(v.x), "=f"(v.y) : "r"(at), "r"(rank) : "memory");
    return v;
}
__device__ __forceinline__ float4 remote4(u32 at, int rank) {
    float4 v;
    asm volatile("{.reg .u32 a;\n mapa.shared::cluster.u32 a, %4, %5;\n ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(rank) : "memory");
    return v;
}

// ---- the warps that copy: each reads the indices of its eight tokens of four tiles at a time, a lane of a warp one of them
struct Row {
    Keys keys;
    Span own;   // this block's share of them
    int next;   // this lane's first index; whether or not it is one of the block's
    bool known;  // it is, unless there is none
};
__device__ __forceinline__ int own_key(int begin, int warp, int lane) {
    return begin + (lane >> 3) * TILE + warp * 8 + (lane & 7);
}
// the keys of a row in steps of STEP. The first indices are read where they lie if the row has all of its keys, before its length
// is known.
template <int STEP>
__device__ __forceinline__ Row begin_row(const List (&lists)[LISTS], const Work work, bool copies, int warp, int lane) {
    Keys most, keys;
#pragma unroll
    for (int k = 0; k < LISTS; ++k) most.count[k] = lists[k].most;
    const Span all = share(most.all(), STEP, work);
    const int key = own_key(all.begin, warp, lane);
    const int next = copies ? index_of(lists, most, key, all.end) : 0;
#pragma unroll
    for (int k = 0; k < LISTS; ++k) keys.count[k] = keys_of(lists[k]);
    const Span own = share(keys.all(), STEP, work);
    const bool alike = LISTS == 1 || keys.second() == most.second() || key < keys.second();
    return {keys, own, next, own.begin == all.begin && alike};
}
// copies `tiles` tiles in their order, each to where `stage()` says, then does `behind()`, and takes part in the cluster's end
template <typename NextStage, typename Behind>
__device__ __forceinline__ void produce(
    u8* smem, const List (&lists)[LISTS], const Row& row, int tiles, int splits, int warp, int lane, NextStage stage,
    Behind behind) {
    int key = own_key(row.own.begin, warp, lane);
    int next = index_of(lists, row.keys, key, row.own.end, row.known, row.next);
    for (int first = 0; first < tiles; first += 4) {
        const int slots = next;
        key += 4 * TILE;
        next = index_of(lists, row.keys, key, row.own.end);
        for (int j = 0; j < 4 && first + j < tiles; ++j) {
            const int slot = __shfl_sync(~0u, slots, j * 8 + (lane & 7));
            copy_rows(smem, stage(), cache_of(lists, row.keys, row.own.begin + (first + j) * TILE), slot, lane);
        }
    }
    behind();
    if (splits > 1) {
        cluster_publish();
        cluster_leave();
    }
}
template <typename NextStage>
__device__ __forceinline__ void produce(
    u8* smem, const List (&lists)[LISTS], const Row& row, int tiles, int splits, int warp, int lane, NextStage stage) {
    produce(smem, lists, row, tiles, splits, warp, lane, stage, [] {});
}

// ---- q: operand registers of a head for the eight steps of 16 latent columns that a warp has, and one of rope
#define Q_STEPS (ROPE ? 9 : 8)
__device__ __forceinline__ void load_q(u32 (&q_op)[Q_STEPS][4], int half, const u16* q_row, bool on, int warp) {
#pragma unroll
    for (int k = 0; k < Q_STEPS; ++k) {
        const u32* from = reinterpret_cast<const u32*>(q_row + (k < 8 ? warp * 128 + k * 16 : 512 + warp * 16));
        q_op[k][half] = on ? from[0] : 0;
        q_op[k][half + 2] = on ? from[4] : 0;
    }
    u32 nothing = 0;  // NaN where q is not finite: an infinity alone would score -inf against a negative key
#pragma unroll
    for (int k = 0; k < Q_STEPS; ++k) nothing = add_nothing(q_op[k][half], add_nothing(q_op[k][half + 2], nothing));
    q_op[0][half] = add_bf162(q_op[0][half], nothing);
}

// ---- softmax of a quarter of the heads: LANES lanes have one, TOKENS tokens each
// the scores of TOKENS tokens: those of four warps' columns, [4][HEADS][STRIDE] from `from` on
template <int TOKENS, int HEADS, int STRIDE>
__device__ __forceinline__ void sum_scores(float (&x)[TOKENS], u8* smem, u32 from) {
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) x[k] = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int k = 0; k < TOKENS; k += 4) {
            const float4 v = at<float4>(smem, from + (w * HEADS * STRIDE + k) * 4);
            x[k] += v.x, x[k + 1] += v.y, x[k + 2] += v.z, x[k + 3] += v.w;
        }
}
// scores become probabilities against the largest score so far, m; `total` is over this lane's tokens alone. Returns what has been
// summed before decays by.
template <int LANES, int TOKENS, typename Present>
__device__ __forceinline__ float softmax_quarter(float (&x)[TOKENS], Present present, float scale, float& m, float& total) {
    float top = -1.0e30f;
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) {
        x[k] = present(k) ? x[k] * scale : minus_infinity();
        top = fmaxf(top, x[k]);
    }
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float m_new = fmaxf(m, top), decay = exp2_(m - m_new);
    m = m_new;
    total *= decay;
#pragma unroll
    for (int k = 0; k < TOKENS; ++k) {
        x[k] = exp2_(x[k] - m_new);
        total += x[k];
    }
    return decay;
}
template <int LANES>
__device__ __forceinline__ float sum_of_lanes(float total) {
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) total += __shfl_xor_sync(~0u, total, d);
    return total;
}

// ---- the end of a row
// what a thread of the first HEADS adds to the sum of its head, as an exponent of 2
__device__ __forceinline__ float sink_of(const float* sink, int thread, int heads, int head0, int num_heads) {
    return sink && thread < heads && head0 + thread < num_heads ? sink[head0 + thread] * LOG2_E : minus_infinity();
}
// what each split's output counts for one head, [splits] in steps of HEADS; `state` is where every block has (level, sum) of
// it. splits 1: this block alone, whichever of its cluster it is. sink: as an exponent of 2, -inf where there is none. lse: where
// to write it, or null.
template <int HEADS>
__device__ __forceinline__ void weigh_splits(float* weights, u32 state, int splits, float sink, float* lse) {
    float2 of[MAX_SPLITS];
    float level = -1.0e30f, sum = 0.f;
#pragma unroll
    for (int p = 0; p < MAX_SPLITS; ++p)
        if (p < splits) of[p] = splits > 1 ? remote2(state, p) : own2(state);
#pragma unroll
    for (int p = 0; p < MAX_SPLITS; ++p)
        if (p < splits) level = fmaxf(level, of[p].x);
#pragma unroll
    for (int p = 0; p < MAX_SPLITS; ++p)
        if (p < splits) {
            of[p].x = exp2_(of[p].x - level);
            sum += of[p].y * of[p].x;
        }
    const bool empty = sum == 0.f;  // a NaN sum is not empty, it has to be seen
    if (lse) *lse = empty ? minus_infinity() : (level + __log2f(sum)) * LN_2;
    const float factor = empty ? 0.f : 1.f / (sum + exp2_(sink - level));
#pragma unroll
    for (int p = 0; p < MAX_SPLITS; ++p)
        if (p < splits) weights[p * HEADS] = of[p].x * factor;
}
// four columns, k, of [HEADS][512], where the head exists
__device__ __forceinline__ void store_columns(u16* out, i64 head_stride, int heads, int k, const float4 value) {
    if (k >> 7 < heads)
        *reinterpret_cast<uint2*>(out + (k >> 7) * head_stride + (k & 127) * 4) =
            make_uint2(to_bf162(value.x, value.y), to_bf162(value.z, value.w));
}
// where four columns, k, of [HEADS][512] lie, in floats: a head is STRIDE of them, and of each eight the order differs by SWIZZLE
template <int STRIDE, int SWIZZLE>
__device__ __forceinline__ int place(int k) { return (k >> 7) * STRIDE + ((k & 127) ^ (k >> 3 & SWIZZLE)) * 4; }
// the sum of the splits, each block a share of the columns; `outputs` is [HEADS][STRIDE] in every block. A thread has eight
// loads in flight: of AT_ONCE splits, for several of its columns.
template <int HEADS, int STRIDE, int THREADS, int SWIZZLE, int AT_ONCE>
__device__ __forceinline__ void sum_shares(
    u16* out, i64 head_stride, int heads, u32 outputs, const float* weights, int split, int splits, int thread) {
    constexpr int COLUMNS = 8 / AT_ONCE, ALL = HEADS * 128;
    const int step = splits * THREADS;
    for (int k = split * THREADS + thread; k < ALL; k += step * COLUMNS) {
        float4 value[COLUMNS];
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) value[n] = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int first = 0; first < splits; first += AT_ONCE) {
            float4 part[COLUMNS][AT_ONCE];
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                const int at = k + n * step;
#pragma unroll
                for (int p = 0; p < AT_ONCE; ++p)
                    if (at < ALL && first + p < splits)
                        part[n][p] = remote4(outputs + place<STRIDE, SWIZZLE>(at) * 4, first + p);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                for (int p = 0; p < AT_ONCE; ++p)
                    if (k + n * step < ALL && first + p < splits)
                        add(value[n], part[n][p], weights[(first + p) * HEADS + (k + n * step >> 7)]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
            if (k + n * step < ALL) store_columns(out, head_stride, heads, k + n * step, value[n]);
    }
}
template <int HEADS, int STRIDE, int THREADS, int SWIZZLE = 0>
__device__ __forceinline__ void sum_splits(
    u16* out, i64 head_stride, int heads, u32 outputs, const float* weights, int split, int splits, int thread) {
    if (splits <= 2)
        sum_shares<HEADS, STRIDE, THREADS, SWIZZLE, 2>(out, head_stride, heads, outputs, weights, split, splits, thread);
    else if (splits <= 4)
        sum_shares<HEADS, STRIDE, THREADS, SWIZZLE, 4>(out, head_stride, heads, outputs, weights, split, splits, thread);
    else
        sum_shares<HEADS, STRIDE, THREADS, SWIZZLE, 8>(out, head_stride, heads, outputs, weights, split, splits, thread);
    cluster_leave();  // nobody does while its shared memory is read
}

// ---- groups: TURNS of them have taken turns at a row's tiles, each with a softmax of its own; THREADS threads of all groups
// memory of the block for what they leave, from byte `at` on
template <int TURNS, int HEADS, int STRIDE, int SWIZZLE, int THREADS>
struct Merge {
    static constexpr int BYTES = HEADS * ((TURNS + 1) * 8 + TURNS * STRIDE * 4 + MAX_SPLITS * 4);
    static_assert(HEADS * 128 % THREADS == 0, "a thread has as many columns as the others");
    float* states;   // [TURNS][HEADS][2]: maximum, sum
    float* whole;    // [HEADS][2]: of the block
    float* outputs;  // [TURNS][HEADS][STRIDE]; the first becomes the block's
    float* weights;  // [MAX_SPLITS][HEADS]: what a split's output counts

    __device__ __forceinline__ Merge(u8* smem, u32 at_byte) {
        states = &at<float>(smem, at_byte), whole = states + TURNS * HEADS * 2, outputs = whole + HEADS * 2;
        weights = outputs + TURNS * HEADS * STRIDE;
    }
    __device__ __forceinline__ void leave(int turn, int head, float m, float total) {
        states[(turn * HEADS + head) * 2] = m;
        states[(turn * HEADS + head) * 2 + 1] = total;
    }
    // what the output of a group counts in a head of the block, whose state one thread writes
    __device__ __forceinline__ float factor(int turn, int head, bool writes) {
        float top = -1.0e30f, sum = 0.f;
#pragma unroll
        for (int g = 0; g < TURNS; ++g) top = fmaxf(top, states[(g * HEADS + head) * 2]);
#pragma unroll
        for (int g = 0; g < TURNS; ++g) sum += states[(g * HEADS + head) * 2 + 1] * exp2_(states[(g * HEADS + head) * 2] - top);
        if (writes) whole[head * 2] = top, whole[head * 2 + 1] = sum;
        return exp2_(states[(turn * HEADS + head) * 2] - top);
    }
    // one output of all groups, then of all splits; BARRIER is the number at which the groups meet
    template <int BARRIER>
    __device__ __forceinline__ void finish(
        u16* __restrict__ out, float* __restrict__ lse_out, const Strides& st, const Place where, const Work work, int num_heads,
        float sink, int thread) {
        constexpr int SHARE = HEADS * 128 / THREADS;  // of a thread, in float4s of a block's output
        const int splits = work.splits, heads = num_heads - where.head0;
        meet<THREADS>(BARRIER);
        if (TURNS > 1 && splits > 1) {  // once here instead of once for each reader in the cluster
#pragma unroll 4
            for (int n = 0; n < SHARE; ++n) {
                const int k = n * THREADS + thread;
                float* to = outputs + (k >> 7) * STRIDE + (k & 127) * 4;
                float4 sum = *reinterpret_cast<float4*>(to);
#pragma unroll
                for (int g = 1; g < TURNS; ++g) add(sum, *reinterpret_cast<float4*>(to + g * HEADS * STRIDE), 1.f);
                *reinterpret_cast<float4*>(to) = sum;
            }
        }
        const u32 whole_at = smem_u32(whole), outputs_at = smem_u32(outputs);
        if (splits > 1) cluster_publish();
        if (thread < HEADS) {
            float* lse = lse_out + where.b * st.lse_b + where.s * st.lse_s + (where.head0 + thread) * st.lse_h;
            const bool tells = work.split == 0 && thread < heads;
            weigh_splits<HEADS>(weights + thread, whole_at + thread * 8, splits, sink, tells ? lse : nullptr);
        }
        meet<THREADS>(BARRIER);
        u16* out_row = out + where.b * st.out_b + where.s * st.out_s + where.head0 * st.out_h;
        if (splits > 1) {
            sum_splits<HEADS, STRIDE, THREADS, SWIZZLE>(
                out_row, st.out_h, heads, outputs_at, weights, work.split, splits, thread);
            return;
        }
#pragma unroll 4
        for (int n = 0; n < SHARE; ++n) {
            const int k = n * THREADS + thread;
            float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int g = 0; g < TURNS; ++g) {
                const float* from = outputs + g * HEADS * STRIDE + place<STRIDE, SWIZZLE>(k);
                add(value, *reinterpret_cast<const float4*>(from), weights[k >> 7]);
            }
            store_columns(out_row, st.out_h, heads, k, value);
        }
    }
};
