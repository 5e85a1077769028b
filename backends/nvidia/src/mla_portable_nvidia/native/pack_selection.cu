// SPDX-License-Identifier: Apache-2.0
// A row of positions as a bit mask: word w of row t has bit j where position starts[t] + 32 w + j is listed.
//
// A block packs SPAN positions of one row. Positions may come in any order and repeatedly: each sets a byte of shared memory,
// which takes no atomic operation, and 32 bytes then become a word. Cost: the listed positions are read once for each SPAN, the
// words written once.

#define SPAN 16384                // positions of a block: bytes of shared memory
#define THREADS 256

typedef unsigned int u32;
typedef long long i64;

extern "C" __global__ void __launch_bounds__(THREADS) pack_selection(
    u32* __restrict__ words, const int* __restrict__ positions, const int* __restrict__ starts, int topk, int num_words,
    int span, int vectors, i64 position_stride, i64 word_stride) {
    extern __shared__ __align__(16) unsigned char smem[];
    const i64 row = blockIdx.x;
    const int first = blockIdx.y * span;                        // of the row's positions
    const int here = min(span, num_words * 32 - first);         // positions of this block; a multiple of 32
    for (int i = threadIdx.x; i < here / 16; i += THREADS) reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
    const int* listed = positions + row * position_stride;
    const u32 base = (starts ? (u32)starts[row] : 0u) + (u32)first;
    const u32 start = starts ? (u32)starts[row] : 0u;
    __syncthreads();
    auto set = [&](int position) {
        // positions below `start`, negative ones among them, wrap to large numbers and are left out
        const u32 offset = (u32)position - base;
        if (position >= 0 && position >= (int)start && offset < (u32)here) smem[offset] = 1;
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
    for (int w = threadIdx.x; w < here / 32; w += THREADS) {
        const uint4 low = reinterpret_cast<const uint4*>(smem)[w * 2], high = reinterpret_cast<const uint4*>(smem)[w * 2 + 1];
        // four bytes of 0 or 1 times 2^24 + 2^17 + 2^10 + 2^3: their bits side by side in the top byte
        auto four = [](u32 bytes) { return bytes * 0x01020408u >> 24; };
        out[w] = four(low.x) | four(low.y) << 4 | four(low.z) << 8 | four(low.w) << 12 | four(high.x) << 16 | four(high.y) << 20 |
                 four(high.z) << 24 | four(high.w) << 28;
    }
}
