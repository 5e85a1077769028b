// SPDX-License-Identifier: Apache-2.0
// The source of sparse_decode_wide on a CPU, built with VISIBLE. KERNEL is the source without the functions that are inline
// assembly (wide_model.py); here is what they do. `wgmma` is computed where it is issued, from what shared memory has then.

#define __CUDA_ARCH__ 900
#define VISIBLE 1
#include "cuda_on_cpu.h"

#include <array>
#include <cmath>
#include <map>
#include <tuple>

#define __log2f log2f
#define __align__(bytes)
#define __restrict__

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;
struct float2 { float x, y; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __int_as_float(int bits) { return __uint_as_float((u32)bits); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 both = a | (u64)b << 32;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int by) {
    long long bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    const int lane = current % 32;
    const long long other = warp(bits, [=](const long long* of) { return of[lane ^ by]; });
    std::memcpy(&value, &other, sizeof(T));
    return value;
}
static void __syncwarp() { warps_met[current / 32].meet(32); }
static u32 __reduce_min_sync(unsigned, u32 value) {
    return warp(value, [](const long long* of) { return (u32)*std::min_element(of, of + 32); });
}

// ---- numbers
static float of_bf16(u32 bits) { return __uint_as_float(bits << 16); }
static u32 bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
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
static u32 to_bf162(float low, float high) { return bf16(low) | bf16(high) << 16; }
static u32 mul_half2(u32 a, u32 b) {
    return to_half2(of_half(a & 0xffff) * of_half(b & 0xffff), of_half(a >> 16) * of_half(b >> 16));
}
static u32 mul_bf162(u32 a, u32 b) {
    return to_bf162(of_bf16(a & 0xffff) * of_bf16(b & 0xffff), of_bf16(a >> 16) * of_bf16(b >> 16));
}
static u32 of_e4m3(u32 code) {
    const int exponent = code >> 3 & 15;
    const float size = (code & 127) == 127 ? NAN : std::ldexp((float)((code & 7) + (exponent ? 8 : 0)), max(exponent, 1) - 10);
    return half(code & 128 ? -size : size);
}
static void decode4(u32 codes, u32& low, u32& high) {
    low = of_e4m3(codes & 255) | of_e4m3(codes >> 8 & 255) << 16;
    high = of_e4m3(codes >> 16 & 255) | of_e4m3(codes >> 24) << 16;
}
static float exp2_(float x) { return std::exp2(x); }

// ---- shared memory and its barriers
static char* shared_of(int of) { return memory.data() + of * shared_bytes; }
static u32 smem_u32(const void* p) { return (u32)((const char*)p - shared_of(block())); }
template <typename T>
static T read_shared(u32 at, int of) {
    if (at % alignof(T) || at + sizeof(T) > shared_bytes) fail("a read outside of shared memory");
    T value;
    std::memcpy(&value, shared_of(of) + at, sizeof(T));
    return value;
}
struct Phases { int count, left; u32 phase; };
static std::map<std::pair<int, u32>, Phases> phases;
static Phases& phases_of(u32 barrier) {
    const auto found = phases.find({block(), barrier});
    if (found == phases.end()) fail("a barrier that is none");
    return found->second;
}
static void barrier_init(u32 barrier, u32 count) { phases[{block(), barrier}] = {(int)count, (int)count, 0}; }
static void barrier_arrive(u32 barrier) {
    Phases& of = phases_of(barrier);
    if (--of.left == 0) of.left = of.count, ++of.phase, idle = spins = 0;
}
static void barrier_wait(u32 barrier, u32 parity) {
    const Phases& of = phases_of(barrier);
    if (parity > 1) fail("a parity that is none");
    const u32 before = of.phase;
    while ((of.phase & 1) == parity) others();
    if (of.phase > before + 1) fail("a phase that was missed");
}
static void async_fence() {}
static std::map<std::pair<int, int>, Barrier> named;
template <int COUNT>
static void meet(int number) { named[{block(), number}].meet(COUNT); }
template <int COUNT>
static void set_registers_up() {}
template <int COUNT>
static void set_registers_down() {}
static int thread_again() { return current % block_threads; }
static void stmatrix4(u32 to, const u32 (&r)[4]) {
    const int t = current % 32 / 4, c = current % 4;
    const auto rows = warp(to, [=](const long long* of) {
        return std::array<u32, 4>{(u32)of[t], (u32)of[8 + t], (u32)of[16 + t], (u32)of[24 + t]};
    });
    for (int m = 0; m < 4; ++m) std::memcpy(shared_of(block()) + rows[m] + c * 4, &r[m], 4);
}

// ---- clusters
static u32 cluster;
static int cluster_blocks;
static void cluster_publish() {
    __syncwarp();
    emulated_arrive();
    emulated_wait();
}
static void cluster_leave() { cluster_publish(); }
static float2 own2(u32 at) { return read_shared<float2>(at, block()); }
static float2 remote2(u32 at, int rank) { return read_shared<float2>(at, rank); }
static float4 remote4(u32 at, int rank) { return read_shared<float4>(at, rank); }

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

template <typename T>
static T argument(const char*& at) {
    at = (const char*)(((size_t)at + alignof(T) - 1) / alignof(T) * alignof(T));
    T value;
    std::memcpy(&value, at, sizeof(T));
    at += sizeof(T);
    return value;
}
static const char* packed;
template <typename... T>
static void apply(void (*kernel)(T...)) {
    const char* at = packed;
    std::tuple<T...> arguments{argument<T>(at)...};
    std::apply(kernel, arguments);
}
static void run() {
    apply(sparse_decode_wide);
    next_thread();
}

// Clusters one after another, whose blocks run together; stride: see cuda_on_cpu.h.
extern "C" void launch(const char* arguments, int clusters, int blocks, int shared, int stride) {
    packed = arguments;
    readable = nullptr, readable_end = (const char*)~0ull;
    cluster_blocks = blocks;
    operands.resize(blocks * THREADS);
    for (cluster = 0; cluster < (u32)clusters; ++cluster) {
        phases.clear(), named.clear();
        run_blocks(blocks, THREADS, (shared + 1023) / 1024 * 1024, stride, run);
    }
}
