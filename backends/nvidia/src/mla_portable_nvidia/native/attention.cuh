// SPDX-License-Identifier: Apache-2.0
// What the sparse attention kernels and the merge of their splits compute with: matrices of a warp, and numbers.

#include "instructions.cuh"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// ---- matrices
__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void ldmatrix4_transposed(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void stmatrix4(u32 to, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers
// e4m3 codes, the low and the high half of a word, to float16 pairs
__device__ __forceinline__ void decode4(u32 codes, u32& low, u32& high) {
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(codes));
}
__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 to_bf162(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 half2_to_bf162(u32 x) {
    u32 r;
    asm("{.reg .b16 l, h;\n .reg .f32 a, b;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 a, l;\n cvt.f32.f16 b, h;\n"
        "cvt.rn.bf16x2.f32 %0, b, a;}"
        : "=r"(r) : "r"(x));
    return r;
}
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 mul_bf162(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 add_bf162(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return r;
}
// 0 for finite bfloat16s, NaN for others, added to what `sum` has of those before
__device__ __forceinline__ u32 add_nothing(u32 x, u32 sum) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0u), "r"(sum));
    return r;
}
__device__ __forceinline__ float exp2_(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float low_bf16(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
// the largest magnitude of two bfloat16s, of eight: as the bits of a float
__device__ __forceinline__ u32 larger_size(u32 x) { return max((x & 0x7fffu) << 16, x & 0x7fff0000u); }
__device__ __forceinline__ u32 largest_size(const uint4 w) {
    return max(max(larger_size(w.x), larger_size(w.y)), max(larger_size(w.z), larger_size(w.w)));
}
#define NOT_FINITE 0x7f800000u    // sizes from here on are infinite or NaN
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }
// what the columns of a head of this largest size are scaled by is 2^(13 - it); at least -60, 128 where the size is not finite
__device__ __forceinline__ int size_exponent(u32 size) { return max((int)(size >> 23) - 127, -60); }
// 2^e for e in [-126, 127]
__device__ __forceinline__ float power(int e) { return __int_as_float((e + 127) << 23); }
__device__ __forceinline__ void add(float4& sum, const float4 v, float weight) {
    sum.x += v.x * weight, sum.y += v.y * weight, sum.z += v.z * weight, sum.w += v.w * weight;
}
