// SPDX-License-Identifier: Apache-2.0
// The source of union_rows on a CPU. KERNEL is the source, its shared memory replaced (test_nvidia_union.py).

#include "cuda_on_cpu.h"

static struct { int x; } blockIdx;

#include KERNEL

static struct { u32* lists; int* counts; const int *indices, *lengths; int tokens, topk, num_slots; i64 list_stride, index_stride, length_stride; } call;

static void run() {
    union_rows(call.lists, call.counts, call.indices, call.lengths, call.tokens, call.topk, call.num_slots, call.list_stride,
               call.index_stride, call.length_stride);
    next_thread();
}

extern "C" int shared_size() { return sizeof(Shared); }

extern "C" void launch(u32* lists, int* counts, const int* indices, const int* lengths, int tokens, int topk, int num_slots,
                       i64 list_stride, i64 index_stride, i64 length_stride, int blocks, int stride) {
    call = {lists, counts, indices, lengths, tokens, topk, num_slots, list_stride, index_stride, length_stride};
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_blocks(1, THREADS, sizeof(Shared), stride, run);
}
