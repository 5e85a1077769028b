// SPDX-License-Identifier: Apache-2.0
// The sources of the SM80 attention kernels on a CPU. KERNEL is a source without the functions that are inline assembly
// (attention_model.py); here is what they do. A copy arrives when it is waited for, and not before.

#define __CUDA_ARCH__ 800
#include "attention_on_cpu.h"

#include <array>
#include <deque>

static bool __all_sync(unsigned, bool value) {
    return warp(value, [](const long long* of) { bool all = true; for (int i = 0; i < 32; ++i) all = all && of[i]; return all; });
}
static unsigned __cvta_generic_to_shared(const void* p) { return (unsigned)((const char*)p - memory.data()); }

template <unsigned ORDER>
static unsigned permute(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned digit = ORDER >> 4 * i & 15, byte = x >> (digit & 7) * 8 & 255;
        result |= (digit & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return result;
}
static unsigned fma_bf162(unsigned a, unsigned b, unsigned c) {
    auto one = [](unsigned a, unsigned b, unsigned c) { return bf16(of_bf16(a & 0xffff) * of_bf16(b & 0xffff) + of_bf16(c & 0xffff)); };
    return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
static unsigned scale_bf162(unsigned x, unsigned by) { return fma_bf162(x, by, 0x80008000u); }
static unsigned add_bf162(unsigned a, unsigned b) { return fma_bf162(a, 0x3f803f80u, b); }
static unsigned add_nothing(unsigned x, unsigned sum) { return fma_bf162(x, 0, sum); }

static std::vector<Barrier> named(16);
template <int COUNT>
static void meet(int number) { named[number].meet(COUNT); }

struct Copy { unsigned to; const unsigned char* from; unsigned bytes, size; };
static std::vector<std::deque<std::vector<Copy>>> copies;  // of each thread; the last group is open
static const unsigned char* const* caches;  // where each begins and ends
static int count_of_caches;
static void copy(unsigned to, const unsigned char* from, unsigned bytes, unsigned size) {
    if (to % size || to + size > memory.size() || (size_t)from % size) fail("a copy to or from an odd place");
    bool inside = bytes == 0;
    for (int k = 0; k < count_of_caches; ++k) inside = inside || (from >= caches[2 * k] && from + size <= caches[2 * k + 1]);
    if (!inside) fail("a copy from outside of the caches");
    copies[current].back().push_back({to, from, bytes, size});
}
static void copy16(unsigned to, const unsigned char* from, unsigned bytes) { copy(to, from, bytes, 16); }
static void copy8(unsigned to, const unsigned char* from, unsigned bytes) { copy(to, from, bytes, 8); }
static void copies_end() { copies[current].emplace_back(); }
template <int LATER>
static void copies_wait() {
    for (auto& groups = copies[current]; (int)groups.size() > LATER + 1; groups.pop_front())
        for (const Copy& copy : groups.front()) {
            std::memset(&memory[copy.to], 0, copy.size);
            std::memcpy(&memory[copy.to], copy.from, copy.bytes);
        }
}

static unsigned short half_at(unsigned at) {
    if (at + 2 > memory.size()) fail("a matrix outside of shared memory");
    unsigned short x;
    std::memcpy(&x, &memory[at], 2);
    return x;
}
static void matrices(unsigned (&r)[4], unsigned at, bool transposed) {
    const int t = current % 32 / 4, c = current % 4;
    if (at % 16) fail("a matrix at an odd place");
    const auto all = warp(at, [=](const long long* of) {
        std::array<unsigned, 4> found;
        for (int m = 0; m < 4; ++m) {
            auto element = [&](int row, int column) { return (unsigned)half_at((unsigned)of[m * 8 + row] + column * 2); };
            found[m] = transposed ? element(2 * c, t) | element(2 * c + 1, t) << 16 : element(t, 2 * c) | element(t, 2 * c + 1) << 16;
        }
        return found;
    });
    for (int m = 0; m < 4; ++m) r[m] = all[m];
}
static void ldmatrix4(unsigned (&r)[4], unsigned at) { matrices(r, at, false); }
static void ldmatrix4_transposed(unsigned (&r)[4], unsigned at) { matrices(r, at, true); }

static std::vector<std::array<unsigned, 6>> operands;
static void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    operands[current] = {a[0], a[1], a[2], a[3], b0, b1};
    const int first = current / 32 * 32, t = current % 32 / 4, c = current % 4;
    __syncwarp();
    auto pick = [](unsigned pair, int odd) { return of_bf16(odd ? pair >> 16 : pair & 0xffff); };
    for (int i = 0; i < 4; ++i) {
        const int row = t + i / 2 * 8, column = 2 * c + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const int lane = k % 8 / 2;
            sum += (double)pick(operands[first + row % 8 * 4 + lane][row / 8 + k / 8 * 2], k % 2) *
                   pick(operands[first + column * 4 + lane][4 + k / 8], k % 2);
        }
        d[i] = (float)sum;
    }
    __syncwarp();
}

struct Two { unsigned x, y; };
static Two blockIdx, gridDim;

#include KERNEL

static void run() {
    apply(NAME);
    next_thread();
}

extern "C" void launch(const char* arguments, unsigned blocks, unsigned splits, int shared, int stride,
                       const unsigned char* const* of_caches, int count) {
    packed = arguments, caches = of_caches, count_of_caches = count;
    readable = {{nullptr, (const char*)~0ull}};
    gridDim = {blocks, splits};
    for (blockIdx.y = 0; blockIdx.y < splits; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            copies.assign(THREADS, std::deque<std::vector<Copy>>(1)), operands.resize(THREADS), named.assign(16, {});
            run_blocks(1, THREADS, shared, stride, run);
        }
}
