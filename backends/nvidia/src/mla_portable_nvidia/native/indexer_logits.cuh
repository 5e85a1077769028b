// SPDX-License-Identifier: Apache-2.0
// What the kernels of indexer_logits share: FP8 matrix products with keys as rows and heads as columns, the sum over heads, and
// the request of a token.
//
// An includer defines HEADS, 32 or 64, and STAGES before it includes this.
//
// A warpgroup multiplies 64 keys, in registers, by the queries of one or two tokens, in shared memory: 128 bytes a head, whose
// 16-byte chunks are swizzled by the head. Of a token's products a thread has two keys, g and g + 8 of its warp's 16, and
// HEADS / 4 heads of each: 8 j + 2 t and the next one, where g = lane / 4 and t = lane % 4.

#define PAGE 64
#define KEY 128                        // bytes
#define PAGE_BYTES (PAGE * (KEY + 4))  // keys, then float32 scales
#define QUERY_BYTES (HEADS * KEY)

struct Arguments {                     // of both kernels; strides in elements
    float* out;
    int *begins, *ends;
    const u8* q;
    const float* weights;
    const u8* cache;
    const int *starts, *lens, *table;
    int first_token, num_rows;         // the tokens whose scores are written
    int num_requests, num_blocks, table_width, num_logits;
    i64 block_stride, table_stride, out_stride, q_stride_t, q_stride_h, weight_stride;
};
// Let the kernel behind this one start once every block has, and wait there for this one's end. The scores' kernel is launched
// normally, so that all before it has ended. If it ever starts early, by the rule at `can_wait` (prepared_passes.py), all of its
// threads must wait (griddepcontrol.wait) before their first access to global memory, and load what the kernel in front writes by
// plain loads. topk_select behind it waits for this kernel alone, and writes positions that a kernel before it may still read.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The sum over the lanes of a warp up to this one. All of them take part.
__device__ __forceinline__ int sum_to(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

struct Stage {                         // a place in a ring, and the parity of its barriers
    int number, parity;
    __device__ __forceinline__ void next() {
        if (++number == STAGES) number = 0, parity ^= 1;
    }
};

struct Bounds {                        // of a request, as the caller gave them; 0 past the last request
    int begin, end, length;

    __device__ __forceinline__ Bounds(const Arguments& a, int request) : begin(0), end(0), length(0) {
        if (request < a.num_requests)
            begin = __ldg(a.starts + request), end = __ldg(a.starts + request + 1), length = __ldg(a.lens + request);
    }
};

struct Owner {                         // the request of a token
    int request;
    i64 end, after_own;                // end: of its tokens. after_own: added to a token, its own position
    // how many positions a token of it sees
    __device__ __forceinline__ int seen(const Arguments& a, int token) const {
        return (int)min(max(token + after_own + 1, (i64)0), (i64)a.num_logits);
    }
};
// The request of a token is how many end at or before it, since ends ascend. A token without one sees nothing and ends itself.
__device__ __forceinline__ Owner find_owner(const Arguments& a, int token, int lane) {
    int request = 0;
    for (int first = 0; first < a.num_requests; first += 32)
        request += __popc(__ballot_sync(~0u, first + lane < a.num_requests && __ldg(a.starts + first + lane + 1) <= token));
    const Owner none = {0, (i64)token + 1, -(i64)token - 1};
    if (request >= a.num_requests) return none;
    const int begin = __ldg(a.starts + request), end = __ldg(a.starts + request + 1);  // values that do not ascend: none
    if (token < begin || token >= end) return none;
    return {request, end, (i64)min(max(__ldg(a.lens + request), 0), a.table_width * PAGE) - end};
}

// where the 16-byte chunk of a head lies
__device__ __forceinline__ u32 chunk_at(int head, int chunk) { return head * KEY + ((chunk ^ (head & 7)) << 4); }

__device__ __forceinline__ u64 query_descriptor(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(8 * KEY >> 4) << 32 | (u64)1 << 62;  // 128-byte swizzle
}

#define LIST16(of) of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15)
#define LIST32(of) \
    LIST16(of), of(16), of(17), of(18), of(19), of(20), of(21), of(22), of(23), of(24), of(25), of(26), of(27), of(28), of(29), \
        of(30), of(31)
#define LIST64(of) \
    LIST32(of), of(32), of(33), of(34), of(35), of(36), of(37), of(38), of(39), of(40), of(41), of(42), of(43), of(44), of(45), \
        of(46), of(47), of(48), of(49), of(50), of(51), of(52), of(53), of(54), of(55), of(56), of(57), of(58), of(59), of(60), \
        of(61), of(62), of(63)
#define PRODUCT(i) "+f"(c[i])
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES32 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 \
    NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
            "%60,%61,%62,%63"
// multiply: begin to set the products of 64 keys and some heads to what 32 of the 128 numbers give, or to add it (ADDS).
// end_products: wait for them.
#define MULTIPLY(HALF, SHAPE, KEYS, QUERIES, ADDING)                                                                            \
    template <int ADDS>                                                                                                         \
    __device__ __forceinline__ void multiply(float (&c)[HALF], u32 a0, u32 a1, u32 a2, u32 a3, u64 queries) {                   \
        asm volatile("{.reg .pred adds;\n setp.ne.b32 adds, " ADDING ", 0;\n wgmma.mma_async.sync.aligned." SHAPE               \
                     ".f32.e4m3.e4m3 {" NAMES##HALF "}, {" KEYS "}, " QUERIES ", adds, 1, 1;}"                                  \
                     : LIST##HALF(PRODUCT) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(queries), "n"(ADDS));                      \
    }                                                                                                                           \
    __device__ __forceinline__ void end_products(float (&c)[HALF]) {                                                                     \
        asm volatile("wgmma.wait_group.sync.aligned 0;" : LIST##HALF(PRODUCT)::"memory");                                       \
    }
MULTIPLY(16, "m64n32k32", "%16,%17,%18,%19", "%20", "%21")
MULTIPLY(32, "m64n64k32", "%32,%33,%34,%35", "%36", "%37")
MULTIPLY(64, "m64n128k32", "%64,%65,%66,%67", "%68", "%69")

// Begin the products of keys and the queries at `at`. keys: the four words of each of four products.
template <int HALF>
__device__ __forceinline__ void begin_products(float (&c)[HALF], const u32 (&keys)[16], u32 at) {
    const u64 queries = query_descriptor(at);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply<0>(c, keys[0], keys[1], keys[2], keys[3], queries);
    multiply<1>(c, keys[4], keys[5], keys[6], keys[7], queries + 2);
    multiply<1>(c, keys[8], keys[9], keys[10], keys[11], queries + 4);
    multiply<1>(c, keys[12], keys[13], keys[14], keys[15], queries + 6);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Weights of a token, [4][WEIGHT_STRIDE]: those of the heads that a thread t has lie together; the gap keeps t apart in banks.
#define WEIGHT_STRIDE (HEADS / 4 + 4)
#define WEIGHTS_BYTES (4 * WEIGHT_STRIDE * 4)
__device__ __forceinline__ int weight_at(int head) { return ((head & 7) >> 1) * WEIGHT_STRIDE + (head >> 3) * 2 + (head & 1); }

// 0 where a product is negative; NaN where it is NaN, which fmaxf would make 0: the score is NaN then.
__device__ __forceinline__ float positive(float product) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(product));
    return product;
}
// A score as it is written: -inf where no page is there, and for NaN.
__device__ __forceinline__ float written(float score, bool there) {
    return there && score == score ? score : minus_infinity();
}
// What the heads of a thread add up to, those that are positive, for its two keys. c: of one token.
__device__ __forceinline__ float2 sum_own_heads(const float* c, const float* weights, int t) {
    const float4* own = reinterpret_cast<const float4*>(weights + t * WEIGHT_STRIDE);
    float low[2] = {0.f, 0.f}, high[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < HEADS / 16; ++j) {
        const float4 weight = own[j];
        low[0] += positive(c[8 * j]) * weight.x;
        low[1] += positive(c[8 * j + 1]) * weight.y;
        high[0] += positive(c[8 * j + 2]) * weight.x;
        high[1] += positive(c[8 * j + 3]) * weight.y;
        low[0] += positive(c[8 * j + 4]) * weight.z;
        low[1] += positive(c[8 * j + 5]) * weight.w;
        high[0] += positive(c[8 * j + 6]) * weight.z;
        high[1] += positive(c[8 * j + 7]) * weight.w;
    }
    return make_float2(low[0] + low[1], high[0] + high[1]);
}
// Add what the lane that differs in this bit has of the value that is this one's: the second where the bit is set.
__device__ __forceinline__ float add_across(float first, float second, int bit, int lane) {
    const bool set = lane & bit;
    return (set ? second : first) + __shfl_xor_sync(~0u, set ? first : second, bit);
}
