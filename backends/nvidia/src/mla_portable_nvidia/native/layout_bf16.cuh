// SPDX-License-Identifier: Apache-2.0
// A row of `bf16`: 512 bfloat16 of the latent, 64 of rope.

#define FP8 0
#define PITCH 1152                // bytes between rows of a block of the cache
#define ROW 1152                  // bytes of a row that are copied
#define ROW_STRIDE (ROW + 16)     // bytes between rows of a stage: an odd number of pieces of 16
#define ROPE 64                   // columns of a key behind the 512 of its value
#define APART 0                   // bytes of a row that lie behind the rows of its block
