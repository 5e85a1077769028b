// SPDX-License-Identifier: Apache-2.0
// A row of `fp8_v4`: 448 e4m3 and 64 bfloat16, all of them key and value; behind the rows of a block its scales, seven e8m0 of 64
// columns each and a byte of padding. In a stage these stand behind the row.

#define FP8 1
#define PITCH 576                 // bytes between rows of a block of the cache
#define ROW 576                   // bytes of a row that are copied
#define ROPE 0                    // columns of a key behind the 512 of its value
#define ROW_STRIDE 592            // bytes between rows of a stage: an odd number of pieces of 16
#define APART 8                   // bytes of a row that lie behind the rows of its block
#define CODES 448                 // columns that are e4m3
#define PLAIN_COLUMN 448          // bytes into a row: of the columns behind them, bfloat16
#define SCALE_COLUMN ROW          // bytes into a row of a stage
#define SCALE_GROUP 64            // columns that share a scale

// a scale, 2^(it - 127), NaN if it is 255; twice as bfloat16, by itself and times 2^120, which is finite where it is not large
using Scale = u32;
__device__ __forceinline__ Scale scale_of(u8* smem, u32 row, int group) { return at<u8>(smem, row + SCALE_COLUMN + group); }
__device__ __forceinline__ bool is_large(Scale scale) { return scale >= 135; }
__device__ __forceinline__ u32 as_bf162(Scale scale) {
    const u32 bits = scale == 255 ? 0x7fff : scale == 0 ? 0x40 : scale << 7;  // 2^-127 is no normal number
    return bits | bits << 16;
}
__device__ __forceinline__ u32 as_bf162_up(Scale scale) { return (scale + 120) * 0x00800080u; }
// 2^(exponent - 127) for exponents of 0 to 255: 0 at 0, which no row of a writer has, NaN at 255
__device__ __forceinline__ float as_float(u32 exponent) { return __uint_as_float(exponent << 23 | (exponent + 1 & 256) << 14); }
