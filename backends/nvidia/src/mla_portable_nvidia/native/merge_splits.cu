// SPDX-License-Identifier: Apache-2.0
// The end of a row that was split (sparse_decode_sm80.cu): the sum of the splits' outputs of a head, weighted by their lse. A
// split without an entry (-inf) has no output.
//
// Compiled at run time (NVRTC) with MERGED defined, the heads of a block: 1 is for many splits of few rows, 4 for few splits of
// many rows. A thread reads 128 bytes side by side, of 8 / MERGED splits.

#include "attention.cuh"

#define THREADS 128
#define LANES (THREADS / MERGED)   // of a head
#define PIECES (128 / LANES)      // of a head's output, four columns each, that a thread has
#define AT_ONCE (8 / PIECES)      // splits that it reads side by side

static_assert(MERGED == 1 || MERGED == 4, "no such build");

struct Results {
    i64 out_b, out_s, out_h;      // elements
    i64 lse_b, lse_s, lse_h;
};

extern "C" __global__ void __launch_bounds__(THREADS) merge_splits(
    u16* __restrict__ out, float* __restrict__ lse_out, const float* __restrict__ partial_out,
    const float* __restrict__ partial_lse, const float* __restrict__ sink, int splits, int all_heads, int num_heads,
    int query_len, Results st) {  // all_heads: of all rows
    const u32 lane = threadIdx.x & 31, column = threadIdx.x % LANES, one = blockIdx.x * MERGED + threadIdx.x / LANES;
    if (one >= all_heads) return;  // a whole warp
    const u32 row = one / num_heads, head = one % num_heads, b = row / query_len, s = row % query_len;
    const i64 apart = all_heads;  // [splits][rows * heads]
    const float* lses = partial_lse + one;
    const float4* outs = reinterpret_cast<const float4*>(partial_out) + (i64)one * 128 + column;
    float4 part[AT_ONCE][PIECES], value[PIECES];
    auto read = [&](int first) {
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p)
            if (first + p < splits)
#pragma unroll
                for (int k = 0; k < PIECES; ++k) part[p][k] = __ldg(outs + (first + p) * apart * 128 + k * LANES);
    };
    auto lse_of = [&](int p) { return p < splits ? lses[p * apart] : minus_infinity(); };

    read(0);  // while it is not known which of them have an entry
    float lse = lse_of(lane), level = fmaxf(lse, -1.0e30f);  // every warp for itself; a lane has a split of 32
#pragma unroll 1
    for (int p = lane + 32; p < splits; p += 32) level = fmaxf(level, lse_of(p));
#pragma unroll
    for (int d = 1; d < 32; d *= 2) level = fmaxf(level, __shfl_xor_sync(~0u, level, d));
    float sum = exp2_(lse - level);
#pragma unroll 1
    for (int p = lane + 32; p < splits; p += 32) sum += exp2_(lse_of(p) - level);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const bool empty = sum == 0.f;  // a NaN sum is not empty, it has to be seen
    const float factor = empty ? 0.f : 1.f / (sum + (sink ? exp2_(sink[head] * LOG2_E - level) : 0.f));
    if (column == 0)
        lse_out[b * st.lse_b + s * st.lse_s + head * st.lse_h] = empty ? minus_infinity() : (level + __log2f(sum)) * LN_2;

#pragma unroll
    for (int k = 0; k < PIECES; ++k) value[k] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < splits; first += AT_ONCE) {
        if (first > 0) read(first);
        if (first > 0 && first % 32 == 0) lse = lse_of(first + lane);
        const float weight = lse == minus_infinity() ? -1.f : exp2_(lse - level) * factor;  // below 0: it has no output
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p) {
            const float its = __shfl_sync(~0u, weight, (first + p) & 31);
            if (!(its < 0.f))
#pragma unroll
                for (int k = 0; k < PIECES; ++k) add(value[k], part[p][k], its);
        }
    }
    u16* to = out + b * st.out_b + s * st.out_s + head * st.out_h + column * 4;
#pragma unroll
    for (int k = 0; k < PIECES; ++k)
        *reinterpret_cast<uint2*>(to + k * LANES * 4) =
            make_uint2(to_bf162(value[k].x, value[k].y), to_bf162(value[k].z, value[k].w));
}
