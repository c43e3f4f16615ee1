// The instructions that the persistent decoder is made of, and how its programs wait for each other.
// Compiled at run time without headers; the model's sizes are macros given on the command line, as is TOKENS: the rows of
// activations, padded. stack_batch.cu comes before it.

#define INF __int_as_float(0x7f800000)
#define WARPS 8          // that multiply; PRODUCERS others fetch weights
#define PRODUCERS 4
#define THREADS (WARPS * 32)
#define WORKERS (TOKENS * 8)  // threads that finish a tile: one for each of its tokens and pairs of rows
#define CHUNK 256        // weights of a row in one stage of the ring
#define ROW_BYTES (CHUNK * 2 + 16)  // 16 bytes more: eight rows then lie in different banks
#define STAGE_BYTES (16 * ROW_BYTES)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float to_float(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u16 to_bf16(float x) { return (u16)to_pair(x, 0.0f); }

// Activations are written by other multiprocessors, so they are read from L2, never from L1.
__device__ __forceinline__ uint4 load_fresh(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float load_fresh_float(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u16 load_fresh_bf16(const u16* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 16 bytes from global to shared memory, or 16 zero bytes.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// The same for weights, which are read once: marked to be evicted first, so that L2 keeps what programs tell each other.
__device__ __forceinline__ void copy16_once(u32 to, const void* from, bool real, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(real ? 16 : 0), "l"(policy) : "memory");
}
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void groups_done_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ void matrix4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void matrix2_turned(u32& a, u32& b, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Barriers within a program: the multiplying warps alone, and one pair per stage of the ring.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void barrier_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Between programs. The launch is cooperative, so all of them run and waiting cannot starve one that is awaited.
// A release after `meet` covers what all threads of the program have written.
__device__ __forceinline__ u32 count_up(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
__device__ __forceinline__ void all_programs_meet(u32* counter, u32& target) {
    meet();
    target += gridDim.x;
    if (threadIdx.x == 0) {
        u32 now;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while (now < target);
    }
    meet();
}

// One matrix product's work: tiles of 16 weight rows, each cut into `split` slices of K, dealt out over the programs.
// `start` goes round the chip from product to product, so that the programs with one tile more are others each time.
struct Share {
    int first, end;
    __device__ __forceinline__ Share(int units, int& start) {
        int programs = gridDim.x, me = (int)blockIdx.x - start;
        if (me < 0) me += programs;
        int base = units / programs, extra = units % programs;
        first = me * base + min(me, extra);
        end = first + base + (me < extra);
        start = (start + extra) % programs;
    }
};

struct Ring {
    u32 data, full, empty;  // shared addresses
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The likeliest of some tokens, and all their exponentials' sum, divided by its own.
struct Best {
    float value, sum;
    int at;
    __device__ __forceinline__ void see(float v, float s, int i) {
        if (v == -INF) return;
        float gap = __expf(-fabsf(v - value));  // 0 where nothing was seen before
        sum = v > value ? sum * gap + s : sum + s * gap;
        if (v > value || (v == value && i < at)) value = v, at = i;
    }
    // Of eight threads that follow each other; all get the same.
    __device__ __forceinline__ void join() {
        for (int far = 4; far; far /= 2) {
            float v = __shfl_xor_sync(~0u, value, far), s = __shfl_xor_sync(~0u, sum, far);
            see(v, s, __shfl_xor_sync(~0u, at, far));
        }
    }
};

static_assert(sizeof(Batch) == BATCH_BYTES, "the host lays it out otherwise");

// What a launch is given; the same fields in the same order are in stack.py.
struct Params {
    const u64* layers;     // [LAYERS, 9] addresses, in the order of `Layer`
    const u16* final_norm;
    const u16* head;       // [VOCAB, HIDDEN]
    const u16* embed;      // [VOCAB, HIDDEN]; 0: the embeddings are in x
    const float* rotations;  // [positions, HEAD_DIM]: cosines, then sines
    const Batch* batch;
    u16* x;                // [TOKENS, HIDDEN] the residual stream
    u16* y;                // [TOKENS, HIDDEN] x times the weight of the norm that comes next
    float* squares;        // [TOKENS, HIDDEN / 16] sums of x * x over the columns of a tile
    u16* q;                // [TOKENS, HEADS * HEAD_DIM]
    u16* attended;         // [TOKENS, HEADS * HEAD_DIM]
    u16* gated;            // [TOKENS, INTER]
    float* part;           // [attention units, 16, HEAD_DIM]
    float* part_ml;        // [attention units, 16, 2]
    float* sums;           // [DOWN_SPLIT, HIDDEN / 16, TOKENS, 16]
    float* logits;         // [TOKENS, VOCAB]; 0: not wanted
    float* top;            // [programs, TOKENS] best logit of each program
    float* top_sum;        // [programs, TOKENS] its logits' exponentials, divided by the best one's
    int* top_at;           // [programs, TOKENS]
    i64* greedy;           // [STEPS, TOKENS]; negative: the step did not follow
    float* probs;        // [STEPS, TOKENS] probabilities of the greedy tokens
    i64* chosen;           // the greedy tokens of the last steps, in the device's memory
    u16* states;           // [depths of TAPS, TOKENS, HIDDEN] the residual stream there, for drafters; 0 without TAPS
    u32* joins;            // [attention units], zero between launches, as are the two below
    u32* arrived;          // [HIDDEN / 16]
    u32* meeting;          // [2]: barrier, programs that are through
    int head_tiles;        // of 16 rows of the head, from its first
    float eps, scale_log2;
};

struct Layer {
    const u16 *attn_norm, *qkv, *bias, *o, *mlp_norm, *gate_up, *down;
    u16 *k, *v;
};
