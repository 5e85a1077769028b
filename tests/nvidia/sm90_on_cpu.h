// SPDX-License-Identifier: Apache-2.0
// What the sources for SM90 have in common on a CPU: types, shared memory, its barriers and those by number. The includer has
// defined __CUDA_ARCH__ and VISIBLE.

#include "attention_on_cpu.h"

#include <map>

#define __align__(bytes)
#define __restrict__

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;
static bool __all_sync(unsigned, bool value) {
    return warp(value, [](const long long* of) { return std::all_of(of, of + 32, [](long long each) { return each != 0; }); });
}

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
struct Phases { int count, left, bytes; u32 phase; };  // bytes: of copies that this phase waits for too
static std::map<std::pair<int, u32>, Phases> phases;
static Phases& phases_of(u32 barrier) {
    const auto found = phases.find({block(), barrier});
    if (found == phases.end()) fail("a barrier that is none");
    return found->second;
}
static void barrier_init(u32 barrier, u32 count) { phases[{block(), barrier}] = {(int)count, (int)count, 0, 0}; }
static void barrier_count(u32 barrier, int arrivals, int bytes) {
    Phases& of = phases_of(barrier);
    of.left -= arrivals, of.bytes += bytes;
    if (of.left < 0 || (of.left == 0 && of.bytes < 0)) fail("more at a barrier than it waits for");
    if (of.left == 0 && of.bytes == 0) of.left = of.count, ++of.phase, idle = spins = 0;
}
static void barrier_arrive(u32 barrier) { barrier_count(barrier, 1, 0); }
static void barrier_expect(u32 barrier, u32 bytes) { barrier_count(barrier, 1, (int)bytes); }
static bool (*copy_arrives)(u32);  // the next one for a barrier, if any: where copies arrive when they are waited for
static void barrier_wait(u32 barrier, u32 parity) {
    const Phases& of = phases_of(barrier);
    if (parity > 1) fail("a parity that is none");
    const u32 before = of.phase;
    while ((of.phase & 1) == parity)
        if (of.left || !copy_arrives || !copy_arrives(barrier)) others();
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
