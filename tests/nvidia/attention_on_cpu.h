// SPDX-License-Identifier: Apache-2.0
// What the sources of the attention kernels have in common on a CPU: CUDA's small vectors and the exchanges of a warp, numbers of
// 16 bits, and the arguments of a launch. The includer has defined __CUDA_ARCH__.

#include "cuda_on_cpu.h"

#include <tuple>

#define __log2f log2f

struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = a | (unsigned long long)b << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
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
static float __shfl_sync(unsigned all, float value, int lane) {
    return __uint_as_float((unsigned)__shfl_sync(all, (int)__float_as_uint(value), lane));
}
static void __syncwarp() { warps_met[current / 32].meet(32); }

static float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
static unsigned bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned to_bf162(float low, float high) { return bf16(low) | bf16(high) << 16; }
static float exp2_(float x) { return std::exp2(x); }

// ---- the arguments of a launch, one behind the other as they are packed
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
