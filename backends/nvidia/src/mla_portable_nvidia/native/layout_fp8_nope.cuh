// SPDX-License-Identifier: Apache-2.0
// A row of `fp8_nope`: that of `fp8_ds_mla` without rope, which is not there.

#define WITHOUT_ROPE
#define PITCH 528
#include "layout_v32.cuh"
