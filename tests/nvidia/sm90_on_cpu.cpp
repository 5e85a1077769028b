// SPDX-License-Identifier: Apache-2.0
// The sources of the FP8 attention kernels of SM90 on a CPU, built with VISIBLE. KERNEL is a source without the functions that are
// inline assembly (sm90_model.py); here is what they do. `wgmma` is computed where it is issued, from what shared memory has then.

#define __CUDA_ARCH__ 900
#define VISIBLE 1
#include "sm90_on_cpu.h"

#include <array>
#include <cmath>

static u32 __reduce_min_sync(unsigned, u32 value) {
    return warp(value, [](const long long* of) { return (u32)*std::min_element(of, of + 32); });
}

// ---- numbers
static float of_half(u32 bits) {
    const int exponent = bits >> 10 & 31;
    const float size = exponent == 31 ? (bits & 1023 ? NAN : INFINITY)
                                      : std::ldexp((float)((bits & 1023) + (exponent ? 1024 : 0)), max(exponent, 1) - 25);
    return bits & 0x8000 ? -size : size;
}
static u32 half(float x) {
    const u32 sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    if (x == 0) return sign;
    const int exponent = max(std::ilogb(x), -14);
    const float rounded = std::isinf(x) ? INFINITY : std::nearbyint(std::ldexp(std::fabs(x), 10 - exponent));  // ties to even
    const u32 bits = std::isinf(rounded) ? 31 << 10 : ((exponent + 14) << 10) + (u32)rounded;  // the implicit bit adds one
    return sign | (bits < 31 << 10 ? bits : 31 << 10);
}
static u32 to_half2(float low, float high) { return half(low) | half(high) << 16; }
static u32 mul_half2(u32 a, u32 b) {
    return to_half2(of_half(a & 0xffff) * of_half(b & 0xffff), of_half(a >> 16) * of_half(b >> 16));
}
static u32 mul_bf162(u32 a, u32 b) {
    return to_bf162(of_bf16(a & 0xffff) * of_bf16(b & 0xffff), of_bf16(a >> 16) * of_bf16(b >> 16));
}
static u32 half2_to_bf162(u32 x) { return to_bf162(of_half(x & 0xffff), of_half(x >> 16)); }
static u32 __vmaxu2(u32 x, u32 y) { return max(x & 0xffff, y & 0xffff) | max(x >> 16, y >> 16) << 16; }
static u32 of_e4m3(u32 code) {
    const int exponent = code >> 3 & 15;
    const float size = (code & 127) == 127 ? NAN : std::ldexp((float)((code & 7) + (exponent ? 8 : 0)), max(exponent, 1) - 10);
    return half(code & 128 ? -size : size);
}
static void decode4(u32 codes, u32& low, u32& high) {
    low = of_e4m3(codes & 255) | of_e4m3(codes >> 8 & 255) << 16;
    high = of_e4m3(codes >> 16 & 255) | of_e4m3(codes >> 24) << 16;
}

// ---- memory
template <int BYTES>
static void prefetch(const void* from) {
    if ((size_t)from % 16 || BYTES % 16) fail("a prefetch from an odd place");
    volatile char read = ((const char*)from)[0] ^ ((const char*)from)[BYTES - 1];
    (void)read;
}
static int thread_again() { return current % block_threads; }
static void stmatrix4(u32 to, const u32 (&r)[4]) {
    const int t = current % 32 / 4, c = current % 4;
    const auto rows = warp(to, [=](const long long* of) {
        return std::array<u32, 4>{(u32)of[t], (u32)of[8 + t], (u32)of[16 + t], (u32)of[24 + t]};
    });
    for (int m = 0; m < 4; ++m) std::memcpy(shared_of(block()) + rows[m] + c * 4, &r[m], 4);
}

// ---- the kernel in front, which ends when all threads of a cluster wait for it
static void (*ended_in_front)();
static Barrier waiting;
static void wait_for_kernel_in_front() {
    const int before = waiting.phase;
    if (waiting.arrived + 1 == count_of_threads && ended_in_front) ended_in_front(), ended_in_front = nullptr;
    waiting.arrive(count_of_threads);
    waiting.wait(before);
}

// ---- clusters
static u32 cluster;
static int cluster_blocks, clusters_of_launch;
static u32 clusters_launched() { return clusters_of_launch; }
static u32 blocks_of_cluster() { return cluster_blocks; }
static u32 multiprocessors() { return 1; }
static void cluster_publish() {
    __syncwarp();
    emulated_arrive();
    emulated_wait();
}
static void cluster_leave() { cluster_publish(); }
static float2 own2(u32 at) { return read_shared<float2>(at, block()); }
static float2 remote2(u32 at, int rank) { return read_shared<float2>(at, rank); }
static float4 remote4(u32 at, int rank) { return read_shared<float4>(at, rank); }

// ---- matrices of a warp, and products
static void ldmatrix4(u32 (&r)[4], u32 at) {
    const int t = current % 32 / 4, c = current % 4;
    if (at % 16) fail("a matrix at an odd place");
    const auto found = warp(at, [=](const long long* of) {
        std::array<u32, 4> words;
        for (int m = 0; m < 4; ++m) words[m] = read_shared<u32>((u32)of[m * 8 + t] + c * 4, block());
        return words;
    });
    for (int m = 0; m < 4; ++m) r[m] = found[m];
}
static std::vector<std::array<u32, 6>> of_mma;
template <typename Number>
static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Number number) {
    of_mma[current] = {a[0], a[1], a[2], a[3], b0, b1};
    const int first = current / 32 * 32, t = current % 32 / 4, c = current % 4;
    __syncwarp();
    const auto pick = [=](u32 pair, int odd) { return number(odd ? pair >> 16 : pair & 0xffff); };
    for (int i = 0; i < 4; ++i) {
        const int row = t + i / 2 * 8, column = 2 * c + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int lane = k % 8 / 2;
            d[i] += pick(of_mma[first + row % 8 * 4 + lane][row / 8 + k / 8 * 2], k % 2) *
                    pick(of_mma[first + column * 4 + lane][4 + k / 8], k % 2);
        }
    }
    __syncwarp();
}
static void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1, of_half); }
static void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1, of_bf16); }

// ---- products of a warpgroup: a in registers, b in shared memory, swizzled by 128 bytes
static std::vector<std::array<u32, 4>> operands;
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int LEFT>
static void wgmma_wait() {}
static void hold(u32 (&)[4]) {}
template <typename Number>
static void product(float (&d)[32], const u32 (&a)[4], u64 b, int keep, bool transposed, Number number) {
    const int first = current / 32 * 32, t = current % 32 / 4, c = current % 4;
    const u32 from = (u32)(b & 0x3fff) << 4;
    operands[current] = {a[0], a[1], a[2], a[3]};
    __syncwarp();
    float rows[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) {
            const u32 pair = operands[first + t * 4 + k % 8 / 2][i + k / 8 * 2];
            rows[i][k] = number(k % 2 ? pair >> 16 : pair & 0xffff);
        }
    for (int column = 0; column < 8; ++column)
        for (int odd = 0; odd < 2; ++odd) {
            const int n = column * 8 + 2 * c + odd;
            float sums[2] = {0, 0};
            for (int k = 0; k < 16; ++k) {
                const u32 at = from + (transposed ? k * 128 + n * 2 : n * 128 + k * 2);
                const float value = number(read_shared<u16>(at ^ (at >> 7 & 7) << 4, block()));
                for (int i = 0; i < 2; ++i) sums[i] += rows[i][k] * value;
            }
            for (int i = 0; i < 2; ++i) {
                float& to = d[column * 4 + i * 2 + odd];
                to = keep ? to + sums[i] : sums[i];
            }
        }
    __syncwarp();
}
static void wgmma_latent(float (&d)[32], const u32 (&a)[4], u64 b, int keep) { product(d, a, b, keep, false, of_half); }
static void wgmma_rope(float (&d)[32], const u32 (&a)[4], u64 b, int keep) { product(d, a, b, keep, false, of_bf16); }
static void wgmma_output(float (&d)[32], const u32 (&a)[4], u64 b, int keep) { product(d, a, b, keep, true, of_half); }

#include KERNEL

static void run() {
    apply(NAME);
    next_thread();
}

// Clusters one after another, whose blocks run together; stride: see cuda_on_cpu.h.
extern "C" void launch(const char* arguments, int clusters, int blocks, int shared, int stride, void (*in_front)()) {
    ended_in_front = in_front;
    packed = arguments;
    readable = {{nullptr, (const char*)~0ull}};
    cluster_blocks = blocks, clusters_of_launch = clusters;
    operands.resize(blocks * THREADS), of_mma.resize(blocks * THREADS);
    for (cluster = 0; cluster < (u32)clusters; ++cluster) {
        phases.clear(), named.clear(), waiting = {};
        run_blocks(blocks, THREADS, (shared + 1023) / 1024 * 1024, stride, run);
    }
}
