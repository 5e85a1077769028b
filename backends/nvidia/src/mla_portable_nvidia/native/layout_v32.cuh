// SPDX-License-Identifier: Apache-2.0
// A row of `fp8_ds_mla`: 512 e4m3 of the latent, four float32 scales of 128 columns each, 64 bfloat16 of rope.

#define FP8 1
#define PITCH 656                 // bytes between rows of a block of the cache
#define ROW 656                   // bytes of a row that are copied
#define ROW_STRIDE 656            // bytes between rows of a stage: an odd number of pieces of 16
#define ROPE 64                   // columns of a key behind the 512 of its value
#define LISTS 1                   // of keys, each with its own cache
#define SCALE_COLUMN 512          // bytes into a row
#define ROPE_COLUMN 528
