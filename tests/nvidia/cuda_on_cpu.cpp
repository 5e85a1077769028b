// SPDX-License-Identifier: Apache-2.0
// The source of topk_select on a CPU. KERNEL is the source, its inline assembly replaced (topk_model.py).

#define __CUDA_ARCH__ 900
#include "cuda_on_cpu.h"

struct Block { operator int() const { return block(); } };
static struct { int x; Block y; } blockIdx;
static struct { int x, y; } gridDim;

#include KERNEL

static struct { int* out; const float* logits; const int *starts, *ends; int topk, num_logits; i64 logits_stride, out_stride; } call;

static void run() {
    topk_select(call.out, call.logits, call.starts, call.ends, call.topk, call.num_logits, call.logits_stride, call.out_stride);
    next_thread();
}

extern "C" int shared_size() { return sizeof(Shared); }

extern "C" void launch(int* out, const float* logits, const int* starts, const int* ends, int topk, int num_logits, i64 logits_stride,
                       i64 out_stride, int rows, int blocks, int stride, const char* begin, const char* end) {
    call = {out, logits, starts, ends, topk, num_logits, logits_stride, out_stride};
    readable = {{begin, end}};
    gridDim = {rows, blocks};
    for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x) run_blocks(blocks, THREADS, (sizeof(Shared) + 63) / 64 * 64, stride, run);
}
