// SPDX-License-Identifier: Apache-2.0
// A row of `fp8_ds_mla`: 512 e4m3 of the latent, four float32 scales of 128 columns each, 64 bfloat16 of rope, which is not read
// where WITHOUT_ROPE is defined.

#define FP8 1
#ifndef PITCH
#define PITCH 656                 // bytes between rows of a block of the cache
#endif
#ifdef WITHOUT_ROPE
#define ROW 528                   // bytes of a row that are copied
#define ROPE 0                    // columns of a key behind the 512 of its value
#else
#define ROW 656
#define ROPE 64
#endif
#define ROW_STRIDE ROW            // bytes between rows of a stage: an odd number of pieces of 16
#define APART 0                   // bytes of a row that lie behind the rows of its block
#define CODES 512                 // columns that are e4m3
#define PLAIN_COLUMN 528          // bytes into a row: of the columns behind them, bfloat16
#define SCALE_COLUMN 512          // bytes into a row
#define SCALE_GROUP 128           // columns that share a scale

// a scale; twice as bfloat16, by itself and times 2^120, which is finite where it is not large
using Scale = float;
__device__ __forceinline__ Scale scale_of(u8* smem, u32 row, int group) {
    return at<float>(smem, row + SCALE_COLUMN + group * 4);
}
__device__ __forceinline__ bool is_large(Scale scale) { return scale >= 128.f; }
__device__ __forceinline__ u32 as_bf162(Scale scale) { return to_bf162(scale, scale); }
__device__ __forceinline__ u32 as_bf162_up(Scale scale) { return as_bf162(scale * power(120)); }
