// SPDX-License-Identifier: Apache-2.0
// A CPU that runs a kernel's own source: every thread of a cluster is a coroutine that runs until it has to wait for others.
//
// Threads take turns in an order that `step` decides, so that a missing barrier shows in some order; with 0 a warp goes as far
// as it can before the next one does, with -1 a block of a cluster before those in front of it. Reads by __ldg are held
// against what may be read; a barrier that not all reach aborts. An includer says how many threads a block has, and calls
// run_blocks() for blocks that run together.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

using std::max;
static inline unsigned min(unsigned a, int b) { return a < (unsigned)b ? a : (unsigned)b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline unsigned long long min(unsigned long long a, int b) { return a < (unsigned long long)b ? a : b; }

static const int STACK = 48 << 10;
static int current, count_of_threads, block_threads, step, idle;
static std::vector<ucontext_t> contexts;
static std::vector<char> ended, memory, stacks;
static ucontext_t outside;
static size_t shared_bytes;

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "%s in thread %d\n", what, current);
    std::abort();
}
static int spins;  // of a warp or a block that has come no further
static int in_block(int block, int mine) {  // the next thread of a block, or of the nearest one in front, whose turn it is
    for (const int blocks = count_of_threads / block_threads; ; block = (block + blocks - 1) % blocks)
        for (int i = 1; i <= block_threads; ++i) {
            const int next = block * block_threads + (mine + i) % block_threads;
            if (!ended[next]) return next;
        }
}
static void turn_to(int next) {
    const int mine = current;
    if (next == mine) return;
    current = next;
    swapcontext(&contexts[mine], &contexts[next]);
}
static void others() {  // until it is this thread's turn again
    const int mine = current;
    int next = mine;
    if (step < 0) {
        const int blocks = count_of_threads / block_threads, stuck = ++spins > 2 * block_threads;
        if (stuck) spins = 0;
        if (++idle > 100 * count_of_threads) fail("a barrier that not all reach");
        return turn_to(in_block((mine / block_threads + blocks - stuck) % blocks, mine));
    }
    if (step == 0 && ++spins > 64) next = mine / 32 * 32 + 31, spins = 0;  // on to the next warp
    do next = step ? (next + step) % count_of_threads : spins ? next / 32 * 32 + (next + 1) % 32 : (next + 1) % count_of_threads;
    while (ended[next] && next != mine);
    if (++idle > 100 * count_of_threads) fail("a barrier that not all reach");
    turn_to(next);
}
struct Barrier {
    int arrived = 0, phase = 0;
    void arrive(int all) {
        if (++arrived == all) arrived = 0, ++phase, idle = spins = 0;
    }
    void wait(int before) {
        while (phase == before) others();
    }
    void meet(int all) {
        const int before = phase;
        arrive(all);
        wait(before);
    }
};
static std::vector<Barrier> blocks_met, warps_met;
static Barrier cluster_met;
static std::vector<int> cluster_phase;
static std::vector<long long> lanes;

static int block() { return current / block_threads; }
static void __syncthreads() { blocks_met[block()].meet(block_threads); }
static void emulated_arrive() {
    cluster_phase[current] = cluster_met.phase;
    cluster_met.arrive(count_of_threads);
    if (step < 0 && cluster_met.phase != cluster_phase[current]) turn_to(in_block(count_of_threads / block_threads - 1, current));
}
static void emulated_wait() { cluster_met.wait(cluster_phase[current]); }
template <typename T>
static unsigned long long emulated_first(T* mine) {
    return (unsigned long long)mine - block() * shared_bytes;
}

template <typename Join>
static auto warp(long long value, Join join) {  // of the values of a warp's lanes
    Barrier& met = warps_met[current / 32];
    lanes[current] = value;
    met.meet(32);
    const auto result = join(&lanes[current / 32 * 32]);
    met.meet(32);
    return result;
}
static int __shfl_sync(unsigned, int value, int lane) {
    return warp(value, [=](const long long* of) { return (int)of[lane]; });
}
static int __shfl_up_sync(unsigned, int value, int by) {
    const int lane = current % 32;
    return warp(value, [=](const long long* of) { return (int)of[lane < by ? lane : lane - by]; });
}
static int __reduce_add_sync(unsigned, int value) {
    return warp(value, [](const long long* of) { int sum = 0; for (int i = 0; i < 32; ++i) sum += (int)of[i]; return sum; });
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    return warp(value, [](const long long* of) { return (unsigned)*std::max_element(of, of + 32); });
}
static unsigned __ballot_sync(unsigned, bool value) {
    return warp(value, [](const long long* of) { unsigned bits = 0; for (int i = 0; i < 32; ++i) bits |= (unsigned)of[i] << i; return bits; });
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }

struct float4 { float x, y, z, w; };
struct Range { const char *begin, *end; };
static std::vector<Range> readable;
template <typename T>
static T __ldg(const T* from) {
    const char* at = (const char*)from;
    const auto inside = [=](const Range& of) { return at >= of.begin && at + sizeof(T) <= of.end; };
    if (!std::any_of(readable.begin(), readable.end(), inside) || (size_t)at % sizeof(T)) fail("a read outside of what may be read");
    return *from;
}
template <typename T, typename U>
static T atomicAdd(T* at, U value) { const T old = *at; *at += value; return old; }
template <typename T, typename U>
static T atomicOr(T* at, U value) { const T old = *at; *at |= value; return old; }
template <typename T, typename U>
static T atomicMax(T* at, U value) { const T old = *at; *at = max(old, (T)value); return old; }

struct Axis { operator unsigned() const { return (unsigned)(current % block_threads); } };
static struct { Axis x; } threadIdx;

static void next_thread() {  // when one has ended
    ended[current] = 1, idle = 0;
    for (int i = 0, next = current; i < count_of_threads; ++i) {
        next = (next + max(step, 1)) % count_of_threads;
        if (!ended[next]) {
            current = next;
            setcontext(&contexts[next]);
        }
    }
    setcontext(&outside);
}
// `blocks` blocks, each with its shared memory; `run` is a thread. stride: odd where the threads are a power of two, so that every
// one has its turn
static void run_blocks(int blocks, int threads, size_t shared, int stride, void (*run)()) {
    block_threads = threads, count_of_threads = blocks * threads, step = stride, shared_bytes = shared;
    contexts.resize(count_of_threads), ended.resize(count_of_threads), lanes.resize(count_of_threads);
    stacks.resize((size_t)count_of_threads * STACK), memory.resize(blocks * shared_bytes), cluster_phase.resize(count_of_threads);
    spins = 0;
    blocks_met.assign(blocks, {}), warps_met.assign(count_of_threads / 32, {}), cluster_met = {}, idle = 0;
    std::memset(memory.data(), 0xEE, memory.size());
    for (int i = 0; i < count_of_threads; ++i) {
        ended[i] = 0;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = &stacks[(size_t)i * STACK];
        contexts[i].uc_stack.ss_size = STACK;
        makecontext(&contexts[i], run, 0);
    }
    current = step < 0 ? count_of_threads - block_threads : 0;
    swapcontext(&outside, &contexts[current]);
}
