// SPDX-License-Identifier: Apache-2.0
// The source of pack_selection on a CPU. KERNEL is the source, its shared memory replaced (test_nvidia_prompts.py).

#include "cuda_on_cpu.h"

struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static struct { int x, y; } blockIdx, gridDim;

#include KERNEL

static struct { u32* words; const int *positions, *starts; int vectors, topk, width, span; i64 position_stride, word_stride; } call;

static void run() {
    pack_selection(call.words, call.positions, call.starts, call.vectors, call.topk, call.width, call.span, call.position_stride,
                   call.word_stride);
    next_thread();
}

// Blocks [first, last) of a launch of so many a row, in the order of their rows.
extern "C" void launch(u32* words, const int* positions, const int* starts, int vectors, int topk, int width, int span,
                       i64 position_stride, i64 word_stride, int blocks, int first, int last, int stride, const char* begin,
                       const char* end) {
    call = {words, positions, starts, vectors, topk, width, span, position_stride, word_stride};
    readable = {{begin, end}};
    gridDim.y = blocks;
    for (int block = first; block < last; ++block) {
        blockIdx = {block / blocks, block % blocks};
        run_blocks(1, THREADS, span, stride, run);
    }
}
