// SPDX-License-Identifier: Apache-2.0
// What every native kernel of compute capability 9.0 shares: types, shared memory and its barriers.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifndef VISIBLE
#define VISIBLE 0                 // 1: every lane arrives at the barriers, and copies by itself; see ci/gpu_sanitize
#endif
#define ARRIVALS (VISIBLE ? 32 : 1)  // of a warp at a barrier

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
// ---- shared memory and its barriers
__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
template <typename T>
__device__ __forceinline__ T& at(u8* smem, u32 offset) { return *reinterpret_cast<T*>(smem + offset); }
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// one arrival for all lanes, which have met: what they did before they met is done before it
__device__ __forceinline__ void warp_arrive(u32 barrier, int lane) {
    if (VISIBLE || lane == 0) barrier_arrive(barrier);
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
// A launch may let a kernel start before the one in front of it in the stream has ended. All threads wait here for its end, and until
// then none reads or writes global memory. What that kernel writes changes during the life of this one, so behind here loads are
// plain ones: of memory that never changes (__ldg, __restrict__) a load may be moved to before the wait, or read an old line.
__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// what was written to shared memory, before copies and tensor cores that work beside the thread see it
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// COUNT threads of the block meet, by number
template <int COUNT>
__device__ __forceinline__ void meet(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void set_registers_up() {
    if (!VISIBLE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void set_registers_down() {
    if (!VISIBLE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
