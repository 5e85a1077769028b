// SPDX-License-Identifier: Apache-2.0
// The source of indexer_logits_prefill or indexer_logits_decode (FUNCTION) on a CPU, built with VISIBLE. KERNEL is the source
// without the functions that are inline
// assembly (indexer_model.py); here is what they do. Products are computed where they are begun, from what shared memory has then;
// a copy arrives when it is waited for, and not before.

#define __CUDA_ARCH__ 900
#define VISIBLE 1
#define ARRIVALS 32
#include "sm90_on_cpu.h"

#include <array>

static i64 min(i64 a, i64 b) { return a < b ? a : b; }
static i64 __shfl_sync(unsigned, i64 value, int lane) {
    return warp(value, [=](const long long* of) { return of[lane]; });
}
static float minus_infinity() { return -INFINITY; }

struct Block { operator int() const { return (int)value; } u32 value; };
static struct { Block x; } blockIdx;
static struct { int x; } gridDim;

template <typename T>
static T& at(u8* smem, u32 offset) {
    if (offset % alignof(T) || offset + sizeof(T) > shared_bytes) fail("an access outside of shared memory");
    return *reinterpret_cast<T*>(smem + offset);
}
static void warp_arrive(u32 barrier, int) { barrier_arrive(barrier); }
static float positive(float product) { return product < 0.f ? 0.f : product; }
static void let_next_start() {}

struct Copy { u32 to; const void* from; int size; };
static std::vector<std::vector<Copy>> copies;  // of each thread
static void copy16(u32 to, const void* from) { copies[current].push_back({to, from, 16}); }
static void copy4(u32 to, const void* from) { copies[current].push_back({to, from, 4}); }
static void await_copies() {
    for (const Copy& copy : copies[current]) {
        if (copy.to % copy.size || copy.to + copy.size > shared_bytes || (size_t)copy.from % copy.size) fail("a copy to or from an odd place");
        std::memcpy(&memory[copy.to], copy.from, copy.size);
    }
    copies[current].clear();
}

struct Page { u32 to; const u8* from; u32 bytes; };
static std::map<u32, std::vector<Page>> pages;  // by barrier
static u64 read_once() { return 0; }
static bool copy_for(u32 barrier) {
    auto& all = pages[barrier];
    if (all.empty()) return false;
    const Page page = all.front();
    all.erase(all.begin());
    std::memcpy(&memory[page.to], page.from, page.bytes);
    barrier_count(barrier, 0, -(int)page.bytes);
    return true;
}
static void copy_bytes(u32 to, const u8* from, u32 barrier, u32 bytes) {
    if (to % 16 || (size_t)from % 16 || to + bytes > shared_bytes) fail("a copy to or from an odd place");
    std::memset(&memory[to], 0xEE, bytes);
    pages[barrier].push_back({to, from, bytes});
}
#define copy_page(to, from, barrier, policy) copy_bytes(to, from, barrier, PAGE_BYTES)

static float of_e4m3(u32 code) {
    const int exponent = code >> 3 & 15;
    const float size = (code & 127) == 127 ? NAN : std::ldexp((float)((code & 7) + (exponent ? 8 : 0)), max(exponent, 1) - 10);
    return code & 128 ? -size : size;
}
static float numbers[256];
static std::vector<std::array<u32, 16>> operands;
template <int HALF>
static void begin_products(float (&c)[HALF], const u32 (&keys)[16], u32 at) {
    const int g = current % 32 / 4, t = current % 4, first = current / 32 * 32;
    for (int i = 0; i < 16; ++i) operands[current][i] = keys[i];
    __syncwarp();
    float rows[2][128];
    for (int i = 0; i < 128; ++i)
        for (int row = 0; row < 2; ++row)
            rows[row][i] = numbers[operands[first + g * 4 + i % 16 / 4][i / 16 * 2 + row] >> i % 4 * 8 & 255];
    __syncwarp();
    for (int j = 0; j < HALF / 4; ++j)
        for (int odd = 0; odd < 2; ++odd) {
            const int head = 8 * j + 2 * t + odd;
            float sums[2] = {0, 0};
            for (int i = 0; i < 128; ++i) {
                const float value = numbers[(u8)memory[at + head * 128 + (((i / 16) ^ (head & 7)) << 4) + i % 16]];
                sums[0] += rows[0][i] * value, sums[1] += rows[1][i] * value;
            }
            c[4 * j + odd] = sums[0], c[4 * j + 2 + odd] = sums[1];
        }
}
template <int HALF>
static void end_products(float (&)[HALF]) {}

#include KERNEL

static void run() {
    apply(FUNCTION);
    next_thread();
}

// Blocks one after another; stride: see cuda_on_cpu.h.
extern "C" void launch(const char* arguments, int blocks, int threads, int shared, int stride) {
    packed = arguments, copy_arrives = copy_for;
    readable = {{nullptr, (const char*)~0ull}};
    for (int i = 0; i < 256; ++i) numbers[i] = of_e4m3(i);
    operands.resize(threads), copies.assign(threads, {});
    gridDim.x = blocks;
    for (blockIdx.x.value = 0; (int)blockIdx.x.value < blocks; ++blockIdx.x.value) {
        phases.clear(), named.clear(), pages.clear();
        run_blocks(1, threads, shared, stride, run);
        for (const auto& each : pages)
            if (!each.second.empty()) fail("a copy that nobody waits for");
    }
}
