// SPDX-License-Identifier: Apache-2.0
// The end of a row that was split (sparse_decode_sm80.cu): a block sums the splits' outputs of one head, weighted by their lse. A
// split without an entry (-inf) has no output.

#define ROW 0                     // nothing of the cache is read here
#define ROW_STRIDE 0
#include "sparse_decode.cuh"

#define THREADS 128               // four columns each

struct Results {
    i64 out_b, out_s, out_h;      // elements
    i64 lse_b, lse_s, lse_h;
};

extern "C" __global__ void __launch_bounds__(THREADS) merge_splits(
    u16* __restrict__ out, float* __restrict__ lse_out, const float* __restrict__ partial_out,
    const float* __restrict__ partial_lse, const float* __restrict__ sink, int splits, int num_heads, int query_len,
    Results st) {
    const int lane = threadIdx.x & 31, head = blockIdx.x % num_heads;
    const i64 row = blockIdx.x / num_heads, b = row / query_len, s = row % query_len;
    const i64 apart = gridDim.x;  // [splits][rows * heads]
    const float* lses = partial_lse + blockIdx.x;
    const float4* outs = reinterpret_cast<const float4*>(partial_out) + (i64)blockIdx.x * 128 + threadIdx.x;

    float level = -1.0e30f, sum = 0.f;  // every warp for itself
    for (int p = lane; p < splits; p += 32) level = fmaxf(level, lses[p * apart]);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) level = fmaxf(level, __shfl_xor_sync(~0u, level, d));
    for (int p = lane; p < splits; p += 32) sum += exp2_(lses[p * apart] - level);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const bool empty = sum == 0.f;  // a NaN sum is not empty, it has to be seen
    const float factor = empty ? 0.f : 1.f / (sum + (sink ? exp2_(sink[head] * LOG2_E - level) : 0.f));
    if (threadIdx.x == 0)
        lse_out[b * st.lse_b + s * st.lse_s + head * st.lse_h] = empty ? minus_infinity() : (level + __log2f(sum)) * LN_2;

    float4 value = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < splits; first += 8) {
        float lse[8];
        float4 part[8];
#pragma unroll
        for (int p = 0; p < 8; ++p) {
            lse[p] = first + p < splits ? lses[(first + p) * apart] : minus_infinity();
            if (lse[p] != minus_infinity()) part[p] = __ldg(outs + (first + p) * apart * 128);
        }
#pragma unroll
        for (int p = 0; p < 8; ++p)
            if (lse[p] != minus_infinity()) add(value, part[p], exp2_(lse[p] - level) * factor);
    }
    *reinterpret_cast<uint2*>(out + b * st.out_b + s * st.out_s + head * st.out_h + threadIdx.x * 4) =
        make_uint2(to_bf162(value.x, value.y), to_bf162(value.z, value.w));
}
