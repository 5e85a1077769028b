// SPDX-License-Identifier: Apache-2.0
// A row of positions as a bit mask: word w of row t has bit j where position starts[t] + 32 w + j is listed.
//
// A block packs `span` positions of one row in a turn. Positions may come in any order and repeatedly: each sets a byte of shared memory,
// which takes no atomic operation, and 32 bytes then become a word. Cost: the listed positions are read once for each `span`, the
// words written once.

typedef unsigned int u32;
typedef long long i64;

extern "C" __global__ void __launch_bounds__(THREADS) pack_selection(
    u32* __restrict__ words, const int* __restrict__ positions, const int* __restrict__ starts, int vectors, int topk, int width,
    int span, i64 position_stride, i64 word_stride) {
    extern __shared__ __align__(16) unsigned char smem[];
    const i64 row = blockIdx.x;
    const int* listed = positions + row * position_stride;
    const int start = starts ? starts[row] : 0;
    // first: of the row's positions. There may be 65,535 blocks along y: a wider row has its blocks take turns
    for (u32 first = blockIdx.y * (u32)span; first < (u32)width; first += gridDim.y * (u32)span) {
        const int here = min((u32)span, (u32)width - first);  // positions of this turn, a byte each
        const int num_words = (here + 31) / 32;
        for (int i = threadIdx.x; i < num_words * 2; i += THREADS) reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
        const u32 base = (u32)start + first;
        __syncthreads();
        auto set = [&](int position) {
            const u32 offset = (u32)position - base;  // of a position in front of the block's it wraps to a large number
            if (position >= 0 && position >= start && offset < (u32)here) smem[offset] = 1;
        };
        if (vectors) {
            for (int i = threadIdx.x; i < topk / 4; i += THREADS) {
                const int4 four = __ldg(reinterpret_cast<const int4*>(listed) + i);
                set(four.x), set(four.y), set(four.z), set(four.w);
            }
        } else {
            for (int i = threadIdx.x; i < topk; i += THREADS) set(__ldg(listed + i));
        }
        __syncthreads();
        u32* out = words + row * word_stride + first / 32;
        for (int w = threadIdx.x; w < num_words; w += THREADS) {
            const uint4 low = reinterpret_cast<const uint4*>(smem)[w * 2], high = reinterpret_cast<const uint4*>(smem)[w * 2 + 1];
            // four bytes of 0 or 1 times 2^24 + 2^17 + 2^10 + 2^3: their bits side by side in the top byte
            auto four = [](u32 bytes) { return bytes * 0x01020408u >> 24; };
            out[w] = four(low.x) | four(low.y) << 4 | four(low.z) << 8 | four(low.w) << 12 | four(high.x) << 16 | four(high.y) << 20 |
                     four(high.z) << 24 | four(high.w) << 28;
        }
        __syncthreads();  // the bytes are read before the next turn clears them
    }
}
