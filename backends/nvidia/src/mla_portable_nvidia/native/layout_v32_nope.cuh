// SPDX-License-Identifier: Apache-2.0
// A row of `fp8_ds_mla` for queries without rope.

#define WITHOUT_ROPE
#include "layout_v32.cuh"
