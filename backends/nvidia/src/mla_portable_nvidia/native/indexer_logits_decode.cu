// SPDX-License-Identifier: Apache-2.0
// Scores of cached FP8 keys for few tokens of a request: a block keeps the queries of one or two, and pages pass.
//
// Compiled at run time (NVRTC) with HEADS, TOKENS (1 or 2), STAGES and BLOCKS_PER_SM defined. Warps 0 to 3 multiply; warp 4
// copies pages into a ring. The pages of every request, once for each TOKENS of its tokens, make one list, of which each block
// takes an equal share: runs of pages of one request.
//
// Pages are copied as they lie. A thread loads 16 bytes of a key at a time, 16 t and 64 + 16 t on, so word i of these is what
// product i takes of the thread; queries lie in that order.
//
// begins null: every score of the row is written, -inf where the token does not see. Otherwise only what it sees, and its bounds;
// and a request whose last token sees at most `all_chosen` positions is not scored: its tokens' scores are 0 where there is a
// page, and -inf elsewhere.

#include "instructions.cuh"
#include "indexer_logits.cuh"

#define CONSUMERS 128
#define WEIGHTS_AT (TOKENS * QUERY_BYTES)
#define STAGES_AT (WEIGHTS_AT + TOKENS * WEIGHTS_BYTES)
#define BARRIERS_AT (STAGES_AT + STAGES * PAGE_BYTES)  // full, then empty
#define THERE_AT (BARRIERS_AT + 16 * STAGES)           // whether the page is in the cache, bytes

struct Pages {         // of one request that is scored; none of another
    int token, count;  // the tokens that there are of it
    int pages;         // that the last of them sees some of
    i64 after_own;     // added to a token, its own position

    __device__ __forceinline__ Pages(const Arguments& a, const Bounds& of, int all_chosen) {
        const i64 length = min(max(of.length, 0), a.table_width * PAGE);
        const int first = max(of.begin, a.first_token), last = min(of.end, a.first_token + a.num_rows);
        const i64 seen = min(last + length - of.end, (i64)a.num_logits);
        const bool any = first < last && seen > all_chosen;
        token = first, count = any ? last - first : 0, pages = any ? (int)((seen + PAGE - 1) / PAGE) : 0;
        after_own = length - of.end;
    }
    __device__ __forceinline__ int listed() const { return pages * ((count + TOKENS - 1) / TOKENS); }
};

// Call take(request, token, count, after_own, page, stop) for each run of this block's share: pages [page, stop) of the request,
// for `count` tokens, at most TOKENS, from `token` on. All lanes of a warp take part.
template <typename Take>
__device__ __forceinline__ void for_runs(const Arguments& a, int all_chosen, int lane, Take take) {
    int total = 0;
    for (int first = 0; first < a.num_requests; first += 64) {
        const Bounds low(a, first + lane), high(a, first + 32 + lane);  // loads that do not wait for each other
        total += Pages(a, low, all_chosen).listed() + Pages(a, high, all_chosen).listed();
    }
    total = __reduce_add_sync(~0u, total);
    const int blocks = gridDim.x, each = total / blocks, rest = total % blocks;
    const auto begin_of = [&](int block) { return each * block + (int)((u32)(rest * block) / blocks); };
    int next = begin_of(blockIdx.x), before = 0;  // in the list; of the requests in front of these 32
    const int end = begin_of(blockIdx.x + 1);
    for (int first = 0; next < end; first += 32) {
        const Pages own(a, Bounds(a, first + lane), all_chosen);
        const int to_here = sum_to(own.listed(), lane) + before;
        before = __shfl_sync(~0u, to_here, 31);
        while (next < min(end, before)) {
            const int of = __ffs(__ballot_sync(~0u, to_here > next)) - 1, pages = __shfl_sync(~0u, own.pages, of);
            const int at = next - __shfl_sync(~0u, to_here - own.listed(), of), group = at / pages, page = at % pages;
            const int stop = min(pages, page + end - next), left = __shfl_sync(~0u, own.count, of) - group * TOKENS;
            take(first + of, __shfl_sync(~0u, own.token, of) + group * TOKENS, min(left, TOKENS), __shfl_sync(~0u, own.after_own, of),
                 page, stop);
            next += stop - page;
        }
    }
}

// The L2 policy of pages: they are read once.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_page(u32 to, const u8* from, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "n"(PAGE_BYTES), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_pages(const Arguments& a, u8* smem, int all_chosen, u32 full, u32 empty, int lane) {
    const u32 stages = smem_u32(smem) + STAGES_AT;
    const u64 policy = read_once();
    Stage stage = {0, 0};
    for_runs(a, all_chosen, lane, [&](int request, int, int, i64, int page, int stop) {
        const int* blocks = a.table + request * a.table_stride;
        int block = 0;
        for (int k = 0; page + k < stop; ++k, stage.next()) {
            if (k % 32 == 0) block = page + k + lane < stop ? __ldg(blocks + page + k + lane) : -1;
            const int from = __shfl_sync(~0u, block, k % 32), s = stage.number;
            barrier_wait(empty + 8 * s, stage.parity ^ 1);
            if (lane == 0) {
                const bool there = from >= 0 && from < a.num_blocks;
                at<u8>(smem, THERE_AT + s) = there;
                if (there) {
                    barrier_expect(full + 8 * s, PAGE_BYTES);
                    copy_page(stages + s * PAGE_BYTES, a.cache + from * a.block_stride, full + 8 * s, policy);
                } else {
                    barrier_arrive(full + 8 * s);
                }
            }
            __syncwarp();
        }
    });
}

// The queries and weights of `count` tokens, in the order of the products; a token that is not there is the last one again.
__device__ __forceinline__ void load_queries(const Arguments& a, u8* smem, int token, int count) {
    for (int i = threadIdx.x; i < TOKENS * HEADS * 2; i += CONSUMERS) {
        const int n = i / (HEADS * 2), head = i / 2 % HEADS, half = i % 2;
        const i64 of = token + min(n, count - 1);
        const uint4* from = reinterpret_cast<const uint4*>(a.q + of * a.q_stride_t + head * a.q_stride_h + half * (KEY / 2));
        const uint4 c[4] = {__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3)};
        const u32 to = n * QUERY_BYTES;
        at<uint4>(smem, to + chunk_at(head, half)) = make_uint4(c[0].x, c[1].x, c[2].x, c[3].x);
        at<uint4>(smem, to + chunk_at(head, 2 + half)) = make_uint4(c[0].y, c[1].y, c[2].y, c[3].y);
        at<uint4>(smem, to + chunk_at(head, 4 + half)) = make_uint4(c[0].z, c[1].z, c[2].z, c[3].z);
        at<uint4>(smem, to + chunk_at(head, 6 + half)) = make_uint4(c[0].w, c[1].w, c[2].w, c[3].w);
        if (half == 0)
            at<float>(smem, WEIGHTS_AT + n * WEIGHTS_BYTES + weight_at(head) * 4) = __ldg(a.weights + of * a.weight_stride + head);
    }
}

__device__ __forceinline__ void score_pages(
    const Arguments& a, u8* smem, int all_chosen, u32 full, u32 empty, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3, key = 16 * warp + g, own = key + 8 * (t & 1);
    const float* weights = &at<float>(smem, WEIGHTS_AT);
    Stage stage = {0, 0};
    for_runs(a, all_chosen, lane, [&](int, int token, int count, i64 after_own, int page, int stop) {
        meet<CONSUMERS>(1);  // nobody multiplies by the queries before
        load_queries(a, smem, token, count);
        async_fence();
        meet<CONSUMERS>(1);
        const int of = token + (t >> 1);  // whose scores this lane writes
        const int seen = t >> 1 < count ? (int)min(max(of + after_own + 1, (i64)0), (i64)a.num_logits) : 0;
        float* scores = a.out + (of - a.first_token) * a.out_stride;
        for (; page < stop; ++page, stage.next()) {
            const int s = stage.number;
            const u8* keys = smem + STAGES_AT + s * PAGE_BYTES;
            barrier_wait(full + 8 * s, stage.parity);
            const bool there = at<u8>(smem, THERE_AT + s);
            const uint4* low = reinterpret_cast<const uint4*>(keys + key * KEY + 16 * t);
            const uint4 w = low[0], x = low[8 * KEY / 16], y = low[4], z = low[8 * KEY / 16 + 4];
            const float scale = *reinterpret_cast<const float*>(keys + PAGE * KEY + own * 4);
            const u32 words[16] = {w.x, x.x, y.x, z.x, w.y, x.y, y.y, z.y, w.z, x.z, y.z, z.z, w.w, x.w, y.w, z.w};
            float products[TOKENS * HEADS / 2];
            begin_products(products, words, smem_u32(smem));
            __syncwarp();
            warp_arrive(empty + 8 * s, lane);
            end_products(products);
            float2 sums = sum_own_heads(products, weights, t);
            float half = add_across(sums.x, sums.y, 1, lane), other = half;
#if TOKENS == 2
            sums = sum_own_heads(products + HEADS / 2, weights + WEIGHTS_BYTES / 4, t);
            other = add_across(sums.x, sums.y, 1, lane);
#endif
            const float score = add_across(half, other, 2, lane) * scale;
            const int position = page * PAGE + own;
            if (position < seen) scores[position] = written(score, there);
        }
    });
}

// -inf where a token sees nothing. Blocks share the tokens, or more of them one token.
__device__ __forceinline__ void fill_rows(const Arguments& a, int lane) {
    const int blocks = gridDim.x, parts = max(blocks / a.num_rows, 1), part = blockIdx.x / a.num_rows;
    if (part >= parts) return;
    for (int row = blockIdx.x % a.num_rows; row < a.num_rows; row += blocks) {
        const int seen = find_owner(a, a.first_token + row, lane).seen(a, a.first_token + row);
        for (int position = seen + part * CONSUMERS + threadIdx.x; position < a.num_logits; position += parts * CONSUMERS)
            a.out[row * a.out_stride + position] = minus_infinity();
    }
}

// The bounds of the tokens, and the scores of those of requests that are not scored. Blocks share the tokens, or more of them one
// token.
__device__ __forceinline__ void write_rows(const Arguments& a, int all_chosen, int lane) {
    const int blocks = gridDim.x, parts = max(blocks / a.num_rows, 1), part = blockIdx.x / a.num_rows;
    if (part >= parts) return;
    for (int row = blockIdx.x % a.num_rows; row < a.num_rows; row += blocks) {
        const int token = a.first_token + row;
        const Owner owner = find_owner(a, token, lane);
        const int seen = owner.seen(a, token);
        if (lane == 0 && part == 0) a.begins[row] = 0, a.ends[row] = seen;
        const int last = (int)min(owner.end, (i64)a.first_token + a.num_rows) - 1;  // of the request's tokens here
        if (owner.seen(a, last) > all_chosen) continue;
        const int* table = a.table + owner.request * a.table_stride;
        for (int position = part * 32 + lane; position < seen; position += parts * 32) {
            const int block = __ldg(table + position / PAGE);
            a.out[row * a.out_stride + position] = block >= 0 && block < a.num_blocks ? 0.f : minus_infinity();
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, BLOCKS_PER_SM) indexer_logits_decode(const Arguments a, int all_chosen) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 full = smem_u32(smem) + BARRIERS_AT, empty = full + 8 * STAGES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    let_next_start();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CONSUMERS / 32 * ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == CONSUMERS / 32) {
        copy_pages(a, smem, all_chosen, full, empty, lane);
        if (a.begins) write_rows(a, all_chosen, lane);  // while the last pages arrive
    } else {
        score_pages(a, smem, all_chosen, full, empty, warp, lane);
        if (!a.begins) fill_rows(a, lane);
    }
}
