// SPDX-License-Identifier: Apache-2.0
// What the native kernels share: instructions by their names, the copying of rows, and the end of a row that is split.
//
// An includer defines ROW and ROW_STRIDE, the bytes of a row of the cache and between rows of a stage, before it includes this.

#include "instructions.cuh"

#define TN 32                     // tokens of a tile
#define MAX_SPLITS 16             // blocks of a cluster
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

struct Strides {
    i64 q_b, q_s, q_h;  // elements
    i64 indices_b, indices_s;
    i64 lengths_b, lengths_s;
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
__device__ __forceinline__ Work own_work(int whole_clusters) {
    u32 cluster, block, blocks;  // read again where it is wanted again, to keep no registers meanwhile
    asm volatile("mov.u32 %0, %%ctaid.x;\n mov.u32 %1, %%ctaid.y;\n mov.u32 %2, %%nctaid.y;"
                 : "=r"(cluster), "=r"(block), "=r"(blocks));
    if (cluster < whole_clusters) return {cluster * blocks + block, 0, 1};
    return {cluster + whole_clusters * (blocks - 1), (int)block, (int)blocks};
}
struct Span {
    int begin, end;
};
// a block's share of a row's keys, in whole steps
__device__ __forceinline__ Span share(int keys, int step, const Work work) {
    const int split_len = ((max(keys, 1) - 1) / (step * work.splits) + 1) * step, begin = work.split * split_len;
    return {begin, max(min(begin + split_len, keys), begin)};
}
// a block's indices, read by the four warps that copy: four tiles at a time, a lane of a warp one of them; -1 behind the last
struct Indices {
    const int* next;  // this lane's
    int left;
    __device__ __forceinline__ int read() {
        const int index = left > 0 ? __ldg(next) : -1;
        next += 4 * TN, left -= 4 * TN;
        return index;
    }
    // the first, which may be known: `known` then is what was read there, whether or not it is one of these
    __device__ __forceinline__ int first(int known, bool is_known) {
        const int index = left <= 0 ? -1 : is_known ? known : __ldg(next);
        next += 4 * TN, left -= 4 * TN;
        return index;
    }
};
__device__ __forceinline__ Indices indices_of(const int* row, const Span span, int warp, int lane) {
    const int first = span.begin + (lane >> 3) * TN + warp * 8 + (lane & 7);
    return {row + first, span.end - first};
}

// ---- matrices
__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void ldmatrix4_transposed(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void stmatrix4(u32 to, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers
// e4m3 codes, the low and the high half of a word, to float16 pairs
__device__ __forceinline__ void decode4(u32 codes, u32& low, u32& high) {
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(codes));
}
__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 to_bf162(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 mul_bf162(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 add_bf162(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return r;
}
// 0 for finite bfloat16s, NaN for others, added to what `sum` has of those before
__device__ __forceinline__ u32 add_nothing(u32 x, u32 sum) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0u), "r"(sum));
    return r;
}
__device__ __forceinline__ float exp2_(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
// the largest magnitude of two bfloat16s, of eight: as the bits of a float
__device__ __forceinline__ u32 larger_size(u32 x) { return max((x & 0x7fffu) << 16, x & 0x7fff0000u); }
__device__ __forceinline__ u32 largest_size(const uint4 w) {
    return max(max(larger_size(w.x), larger_size(w.y)), max(larger_size(w.z), larger_size(w.w)));
}
#define NOT_FINITE 0x7f800000u    // sizes from here on are infinite or NaN
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }
// what the columns of a head of this largest size are scaled by is 2^(13 - it); at least -60, 128 where the size is not finite
__device__ __forceinline__ int size_exponent(u32 size) { return max((int)(size >> 23) - 127, -60); }
// 2^e for e in [-126, 127]
__device__ __forceinline__ float power(int e) { return __int_as_float((e + 127) << 23); }
__device__ __forceinline__ void add(float4& sum, const float4 v, float weight) {
    sum.x += v.x * weight, sum.y += v.y * weight, sum.z += v.z * weight, sum.w += v.w * weight;
}

// ---- copying: eight tokens of a tile by a warp, lanes 0 to 7 one each, into `rows` once `empty` is of this parity; `full`
// expects their bytes. An absent token (negative, not below num_slots) becomes zeros and a 0 in the byte at `mask_at`.
__device__ __forceinline__ void copy_rows(
    u8* smem, u32 rows, u32 mask_at, u32 empty, u32 parity, u32 full, const Cache& cache, int slot, int lane) {
    const bool valid = lane < 8 && slot >= 0 && slot < cache.num_slots;
    const u32 mask = __ballot_sync(~0u, valid);
    barrier_wait(empty, parity);
    if (mask != 0xffu) {
        for (int k = 0; k < 8; ++k)
            if (!((mask >> k) & 1))
                for (int n = lane; n < ROW / 16; n += 32) at<uint4>(smem, rows + k * ROW_STRIDE + n * 16) = make_uint4(0, 0, 0, 0);
        async_fence();  // before a later copy writes here
        __syncwarp();
    }
    auto begin = [&](int slot) {  // of its row in the cache
        return cache.block_size == 0 ? (i64)slot * ROW
                                     : slot / cache.block_size * cache.block_stride + (i64)(slot % cache.block_size) * ROW;
    };
#if VISIBLE
    if (lane == 0) at<u8>(smem, mask_at) = (u8)mask;
    for (int k = 0; k < 8; ++k) {
        const uint4* row = reinterpret_cast<const uint4*>(cache.rows + begin(max(__shfl_sync(~0u, slot, k), 0)));
        if ((mask >> k) & 1)
            for (int n = lane; n < ROW / 16; n += 32) at<uint4>(smem, rows + k * ROW_STRIDE + n * 16) = row[n];
    }
    barrier_arrive(full);
#else
    if (lane == 0) {
        at<u8>(smem, mask_at) = (u8)mask;
        barrier_expect(full, ROW * __popc(mask));
    }
    __syncwarp();
    if (valid)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         smem_u32(smem) + rows + lane * ROW_STRIDE),
                     "l"(cache.rows + begin(slot)), "n"(ROW), "r"(full)
                     : "memory");
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

// ---- the end of a row
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
