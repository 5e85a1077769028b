// SPDX-License-Identifier: Apache-2.0
// The source of masked_prefill on a CPU, built with VISIBLE. KERNEL is the source without the functions that are inline assembly
// (masked_model.py); here is what they do. A product is computed when it is waited for, from what shared memory and registers have
// then, and not before. So is a tile copied, or where it is issued: launches say which.

#define __CUDA_ARCH__ 900
#define VISIBLE 1
#include "sm90_on_cpu.h"

#include <array>
#include <deque>
#include <utility>

#define __grid_constant__

struct int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static struct { u32 x; } gridDim;
static bool __any_sync(unsigned all, bool value) { return !__all_sync(all, !value); }
extern "C" { int taken; }  // numbers of pieces of work, and one for each block behind the last piece
static int atomicAdd(int* at, int value) { return ++taken, std::exchange(*at, *at + value); }

// ---- copies of tiles by a map, which has what the driver was passed for it
struct Map { u64 address, sizes[3], strides[2]; u32 box[3]; };
struct Copy { u32 to; Map map; int column, head, row; };
static std::map<std::pair<int, u32>, std::deque<Copy>> copies;  // by the barrier that counts their bytes
static bool late;
static void arrives(u32 barrier) {  // the next copy of a barrier, swizzled by 128 bytes
    std::deque<Copy>& waiting = copies[{block(), barrier}];
    const Copy copy = waiting.front();
    const Map& map = copy.map;
    waiting.pop_front();
    if (map.box[0] != 64 || map.box[1] != 1) fail("a box that is no tile");
    if (copy.to % 1024 || copy.to + map.box[2] * 128 > shared_bytes) fail("a copy to an odd place");
    for (u32 row = 0; row < map.box[2]; ++row)
        for (u32 column = 0; column < 64; column += 8) {
            u32 to = copy.to + row * 128 + column * 2;
            to ^= (to >> 7 & 7) << 4;
            char* at = shared_of(block()) + to;
            std::memset(at, 0, 16);
            if ((u64)copy.column + column >= map.sizes[0] || (u64)copy.head >= map.sizes[1] || (u64)(copy.row + (i64)row) >= map.sizes[2]) continue;
            const u64 columns = std::min<u64>(8, map.sizes[0] - copy.column - column);
            std::memcpy(at, (const char*)map.address + (copy.column + column) * 2 + copy.head * map.strides[0] + (copy.row + row) * map.strides[1], columns * 2);
        }
    barrier_count(barrier, 0, -(int)(map.box[2] * 128));
}
template <typename TensorMap>
static void copy_tile(u32 to, const TensorMap* map, u32 barrier, int column, int head, int row) {
    Copy copy = {to, {}, column, head, row};
    std::memcpy(&copy.map, map, sizeof(Map));
    copies[{block(), barrier}].push_back(copy);
    if (!late) arrives(barrier);
}
static bool copy_for(u32 barrier) {
    const auto waiting = copies.find({block(), barrier});
    if (waiting == copies.end() || waiting->second.empty()) return false;
    arrives(barrier);
    return true;
}

// ---- products of a warpgroup; b, and a of scores, in shared memory, swizzled by 128 bytes
struct Product { float* d; const u32* p; u64 a, b; int columns, keep; };
static std::vector<std::deque<std::vector<Product>>> products;  // of each thread; the last group is open
static const char* shared_at(u32 at) {
    if (at % 4 || at + 4 > shared_bytes) fail("an operand outside of shared memory");
    return shared_of(block()) + (at ^ (at >> 7 & 7) << 4);
}
static u32 start_of(u64 operand) {
    if ((operand >> 32 & 0x3fff) != 64 || operand >> 62 != 1) fail("an operand that is not swizzled by 128 bytes");
    return (u32)(operand & 0x3fff) << 4;
}
static u32 word_of(u32 at) { u32 word; std::memcpy(&word, shared_at(at), 4); return word; }
static void row_of(float (&to)[16], u32 at) {
    for (int k = 0; k < 16; k += 2) {
        const u32 pair = word_of(at + k * 2);
        to[k] = of_bf16(pair & 0xffff), to[k + 1] = of_bf16(pair >> 16);
    }
}
static void compute(const Product& of) {
    const int t = current % 32 / 4, c = current % 4, warp_of_group = current / 32 % 4;
    float rows[2][16];
    if (of.p) {  // p is in the registers of the four lanes that share a row
        static std::vector<const u32*> held;
        held.resize(count_of_threads);
        held[current] = of.p;
        __syncwarp();
        for (int r = 0; r < 2; ++r)
            for (int k = 0; k < 16; k += 2) {
                const u32 pair = held[current / 4 * 4 + k % 8 / 2][r + k / 8 * 2];
                rows[r][k] = of_bf16(pair & 0xffff), rows[r][k + 1] = of_bf16(pair >> 16);
            }
        __syncwarp();
    } else {
        for (int r = 0; r < 2; ++r) row_of(rows[r], start_of(of.a) + (warp_of_group * 16 + t + r * 8) * 128);
    }
    const u32 from = start_of(of.b), leading = (u32)(of.b >> 16 & 0x3fff) << 4;
    for (int n = 0; n < of.columns / 8; ++n) {
        float sums[4] = {0, 0, 0, 0}, columns[2][16];
        const int column = n * 8 + 2 * c;
        if (of.p) {
            for (int k = 0; k < 16; ++k) {
                const u32 pair = word_of(from + column / 64 * leading + k * 128 + column % 64 * 2);
                columns[0][k] = of_bf16(pair & 0xffff), columns[1][k] = of_bf16(pair >> 16);
            }
        } else {
            for (int b = 0; b < 2; ++b) row_of(columns[b], from + (column + b) * 128);
        }
        for (int k = 0; k < 16; ++k)
            for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2][k] * columns[i % 2][k];
        for (int i = 0; i < 4; ++i) of.d[n * 4 + i] = of.keep ? of.d[n * 4 + i] + sums[i] : sums[i];
    }
}
template <int N>
static void hold(float (&)[N]) {}
template <int N>
static void hold(u32 (&)[N]) {}
static void wgmma_fence() {}
static void wgmma_commit() { products[current].emplace_back(); }
template <int LEFT>
static void wgmma_wait() {
    for (auto& groups = products[current]; (int)groups.size() > LEFT + 1; groups.pop_front())
        for (const Product& product : groups.front()) compute(product);
}
template <int N>
static void score_step(float (&d)[N], u64 a, u64 b, int keep) {
    products[current].back().push_back({d, nullptr, a, b, 2 * N, keep});
}
template <int N>
static void output_step(float (&d)[N], const u32* p, u64 v) { products[current].back().push_back({d, p, 0, v, 2 * N, 1}); }

// ---- the two warpgroups take turns
static void wait_turn(int group) { named[{block(), group + 1}].meet(256); }
static void give_turn(int group) { named[{block(), group + 1}].arrive(256); }

#include KERNEL

static void run() {
    apply(masked_prefill);
    if (!products[current].empty() && (products[current].size() > 1 || !products[current][0].empty())) fail("a product that nobody waits for");
    next_thread();
}

// All blocks run together; stride: see cuda_on_cpu.h. copies_late: tiles arrive when they are waited for. ranges: `count` pairs of
// the begin and the end of what plain loads may read.
extern "C" void launch(const char* arguments, int blocks, int shared, int stride, int copies_late, const Range* ranges, int count) {
    packed = arguments, late = copies_late, gridDim.x = blocks, taken = 0;
    readable.assign(ranges, ranges + count);
    phases.clear(), named.clear(), copies.clear();
    copy_arrives = copy_for;
    products.assign(blocks * THREADS, std::deque<std::vector<Product>>(1));
    run_blocks(blocks, THREADS, (shared + 1023) / 1024 * 1024, stride, run);
    for (const auto& each : copies)
        if (!each.second.empty()) fail("a copy that nobody waits for");
}
