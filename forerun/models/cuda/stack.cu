// All layers of a decoder and its head in one launch, for up to TOKENS rows of activations.
//
// One program per multiprocessor. Four warps fetch weights, and nothing but weights: they go through all products of all
// layers without waiting for any result, as far ahead as the ring in shared memory lets them, so memory is busy while the
// other eight warps wait for each other. Those multiply (16 weight rows by 16 or 32 tokens; a token's column of the tensor
// cores' output does not depend on the other columns, so a token's result does not depend on its neighbours), and all
// programs meet after each of the five steps of a layer: q/k/v with rotation and KV write, attention, o, gate and up, down.

enum Kind { QKV, O, GATE_UP, DOWN, HEAD };

template <Kind kind> struct Shape;
template <> struct Shape<QKV> { static constexpr int K = HIDDEN, TILES = (HEADS + 2 * KV_HEADS) * HEAD_DIM / 16, SPLIT = 1; };
template <> struct Shape<O> { static constexpr int K = HEADS * HEAD_DIM, TILES = HIDDEN / 16, SPLIT = 1; };
template <> struct Shape<GATE_UP> { static constexpr int K = HIDDEN, TILES = INTER / 8, SPLIT = 1; };
template <> struct Shape<DOWN> { static constexpr int K = INTER, TILES = HIDDEN / 16, SPLIT = DOWN_SPLIT; };
template <> struct Shape<HEAD> { static constexpr int K = HIDDEN, TILES = VOCAB / 16, SPLIT = 1; };

template <Kind kind> struct Cut : Shape<kind> {
    static constexpr int CHUNKS = (Shape<kind>::K + CHUNK - 1) / CHUNK;
    static constexpr int PER = (CHUNKS + Shape<kind>::SPLIT - 1) / Shape<kind>::SPLIT;
    static constexpr int UNITS = Shape<kind>::TILES * Shape<kind>::SPLIT;
};

// The weight row behind row r of a tile. Rows r and r + 8 end in one thread: the two that a rotation, or a gate, joins.
template <Kind kind> __device__ __forceinline__ int weight_row(int tile, int r) {
    if (kind == QKV) {
        int head = tile / (HEAD_DIM / 16), part = tile % (HEAD_DIM / 16);
        return head * HEAD_DIM + r / 8 * (HEAD_DIM / 2) + part * 8 + r % 8;
    }
    if (kind == GATE_UP) return r / 8 * INTER + tile * 8 + r % 8;
    return tile * 16 + r;
}

// True: the programs stopped before these weights were needed.
template <Kind kind> __device__ __forceinline__ bool fetch(const Params& p, const u16* w, Ring& ring, int& start, const volatile int* stop) {
    using C = Cut<kind>;
    constexpr int ROWS = 16 / PRODUCERS;
    int warp = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32;
    u64 policy = evict_first();
    Share share(kind == HEAD ? p.head_tiles : C::UNITS, start);
    for (int unit = share.first; unit < share.end; unit++) {
        int tile = unit % C::TILES, chunk = unit / C::TILES * C::PER, end = min(chunk + C::PER, C::CHUNKS);
        const u16* from[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) from[i] = w + (i64)weight_row<kind>(tile, warp * ROWS + i) * C::K + chunk * CHUNK + lane * 8;
        for (; chunk < end; chunk++) {
            bool real = C::K % CHUNK == 0 || chunk * CHUNK + lane * 8 < C::K;
            barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
            if (stop && *stop) return true;
            u32 to = ring.data + ring.stage * STAGE_BYTES + warp * ROWS * ROW_BYTES + lane * 16;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                copy16_once(to + i * ROW_BYTES, real ? from[i] : w, real, policy);
                from[i] += CHUNK;
            }
            barrier_arrive_after_copies(ring.full + ring.stage * 8);
            ring.advance();
        }
    }
    return false;
}

struct Shared {  // of the multiplying warps, beside the ring and the activations
    float sums[2][WARPS][TOKENS][17];
    Sequences seqs;
    int flags[32], stop;
    float scales[TOKENS];
    u64 barriers[2 * STAGES];
};
static_assert(sizeof(Shared) <= OWN_BYTES, "the host keeps less shared memory for it");

// The norm's factor of each row, from the sums of squares that the tiles left. It multiplies the product's result, so
// nothing waits for it before that.
__device__ __forceinline__ void find_scales(const Params& p, Shared& sh) {
    constexpr int TILES = HIDDEN / 16, EACH = (TILES + 31) / 32;
    int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < sh.seqs.rows; row += WARPS) {
        float part[EACH], square = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            part[i] = i * 32 + lane < TILES ? load_fresh_float(p.squares + row * TILES + i * 32 + lane) : 0.f;
#pragma unroll
        for (int i = 0; i < EACH; i++) square += part[i];
#pragma unroll
        for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
        if (lane == 0) sh.scales[row] = rsqrtf(square / HIDDEN + p.eps);
    }
}

// Two elements of the residual stream, with what the next norm needs of them. All threads of a warp come here.
__device__ __forceinline__ void keep(const Params& p, int tile, int token, int r, bool mine, float low, float high, u16 next_low, u16 next_high) {
    u16 a = to_bf16(low), b = to_bf16(high);
    low = to_float(a), high = to_float(b);
    i64 at = (i64)token * HIDDEN + tile * 16 + r;
    if (mine) {
        p.x[at] = a, p.x[at + 8] = b;
        p.y[at] = to_bf16(low * to_float(next_low)), p.y[at + 8] = to_bf16(high * to_float(next_high));
    }
    float square = low * low + high * high;
#pragma unroll
    for (int far = 4; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
    if (mine && r == 0) p.squares[token * (HIDDEN / 16) + tile] = square;
}

// Activations [rows, K] from column `first` as rows of `stride` bytes in shared memory.
template <int K> __device__ __forceinline__ void load_plain(const u16* x, int first, int count, int rows, u32 to, int stride) {
    int pieces = count / 8;
    for (int row = threadIdx.x / 32; row < rows; row += WARPS)
        for (int i = threadIdx.x % 32; i < pieces; i += 32) {
            bool real = first + i * 8 < K;
            copy16(to + row * stride + i * 16, x + (real ? (i64)row * K + first + i * 8 : 0), real);
        }
}

// The sums of one unit: every warp multiplies its 32 columns of each chunk, then thread (token, r) adds the warps' sums
// of rows r and r + 8.
__device__ __forceinline__ void unit_sums(Ring& ring, int chunks, u32 x, int stride, float (&sums)[WARPS][TOKENS][17], float& low, float& high) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[2][TOKENS / 8][4];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) acc[i / (TOKENS / 2)][i / 4 % (TOKENS / 8)][i % 4] = 0.f;
    u32 w_at = ring.data + lane % 16 * ROW_BYTES + warp * 64 + lane / 16 * 16;
    u32 x_at = x + (lane / 16 * 8 + lane % 8) * stride + warp * 64 + lane / 8 % 2 * 16;
    for (int chunk = 0; chunk < chunks; chunk++) {
        u32 b[2][TOKENS / 16][4], a[2][4];
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++)
            matrix4(b[i % 2][i / 2], x_at + i / 2 * 16 * stride + chunk * CHUNK * 2 + i % 2 * 32);
        barrier_wait(ring.full + ring.stage * 8, ring.parity);
#pragma unroll
        for (int k = 0; k < 2; k++) matrix4(a[k], w_at + ring.stage * STAGE_BYTES + k * 32);
#pragma unroll
        for (int i = 0; i < TOKENS / 4; i++) {
            const u32(&column)[4] = b[i % 2][i / 4];
            multiply(acc[i % 2][i / 2], a[i % 2], column[i / 2 % 2 * 2], column[i / 2 % 2 * 2 + 1]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + ring.stage * 8);
        ring.advance();
    }
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[warp][n * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = acc[0][n][i] + acc[1][n][i];
    meet();
    low = high = 0.f;
    if (threadIdx.x < WORKERS) {
        int token = threadIdx.x / 8, r = threadIdx.x % 8;
#pragma unroll
        for (int w = 0; w < WARPS; w++) low += sums[w][token][r], high += sums[w][token][r + 8];
    }
}

// What becomes of rows r and r + 8 of a tile, for one token.
template <Kind kind> struct Finish {
    const Params& p;
    const Layer& layer;
    const Shared& sh;
    int token, r;
    bool mine;
    u16 before[2], next[2];
    float turn[2];
    __device__ __forceinline__ void prepare(int tile) {  // loads that do not wait for the product
        before[0] = before[1] = 0, turn[0] = 1.f, turn[1] = 0.f;
        if (!mine) return;
        int low = weight_row<kind>(tile, r), high = weight_row<kind>(tile, r + 8);
        if (kind == O) {
            before[0] = load_fresh_bf16(p.x + (i64)token * HIDDEN + low);
            before[1] = load_fresh_bf16(p.x + (i64)token * HIDDEN + high);
            next[0] = layer.mlp_norm[low], next[1] = layer.mlp_norm[high];
        }
        if (kind == QKV) {
            if (layer.bias) before[0] = layer.bias[low], before[1] = layer.bias[high];
            if (low < (HEADS + KV_HEADS) * HEAD_DIM) {
                const float* at = p.rotations + (i64)sh.seqs.position[token] * HEAD_DIM + low % HEAD_DIM;
                turn[0] = at[0], turn[1] = at[HEAD_DIM / 2];
            }
        }
    }
    __device__ __forceinline__ void store(int tile, float low, float high, Best& best) {
        if (threadIdx.x >= WORKERS) return;
        if (kind != O) low *= sh.scales[token], high *= sh.scales[token];
        low += to_float(before[0]), high += to_float(before[1]);
        if (kind == O) keep(p, tile, token, r, mine, low, high, next[0], next[1]);
        if (!mine) return;
        int at = weight_row<kind>(tile, r), at_high = weight_row<kind>(tile, r + 8);
        if (kind == GATE_UP) {
            float inner = GELU ? 1.5957691216057308f * (low + 0.044715f * low * low * low) : low;
            p.gated[(i64)token * INTER + at] = to_bf16(low / (1.f + __expf(-inner)) * high);
        } else if (kind == HEAD) {
            if (p.logits) {
                p.logits[(i64)token * VOCAB + at] = low;
                p.logits[(i64)token * VOCAB + at_high] = high;
            }
            best.see(low, 1.f, at), best.see(high, 1.f, at_high);
        } else if (kind == QKV) {
            float turned = low * turn[0] - high * turn[1];
            high = high * turn[0] + low * turn[1], low = turned;
            int head = at / HEAD_DIM, d = at % HEAD_DIM, slot = sh.seqs.slot[token];
            u16* to = p.q + ((i64)token * HEADS + head) * HEAD_DIM;
            if (head >= HEADS) {
                if (slot < 0) return;
                bool key = head < HEADS + KV_HEADS;
                to = (key ? layer.k : layer.v) + ((i64)slot * KV_HEADS + head - HEADS - (key ? 0 : KV_HEADS)) * HEAD_DIM;
            }
            to[d] = to_bf16(low), to[d + HEAD_DIM / 2] = to_bf16(high);
        }
    }
};

// A split product: every unit leaves its sums, and the unit that finds a tile complete adds them in order.
__device__ __forceinline__ void add_slices(const Params& p, const Share& share, Shared& sh, const u16* next_norm, int token, int r, bool mine) {
    constexpr int TILES = Shape<DOWN>::TILES;
    for (int done = share.first; done < share.end; done += 32) {
        int count = min(32, share.end - done);
        meet();
        if (threadIdx.x < count) {
            u32* counter = p.arrived + (done + threadIdx.x) % TILES;
            bool last = count_up(counter) == DOWN_SPLIT - 1;
            if (last) *counter = 0;
            sh.flags[threadIdx.x] = last;
        }
        meet();
        if (threadIdx.x >= WORKERS) continue;
        for (int i = 0; i < count; i++) {
            if (!sh.flags[i]) continue;
            int tile = (done + i) % TILES, row = mine ? token : 0;
            const u16* x = p.x + (i64)row * HIDDEN + tile * 16 + r;
            u16 x_low = load_fresh_bf16(x), x_high = load_fresh_bf16(x + 8);
            float low[DOWN_SPLIT], high[DOWN_SPLIT];
#pragma unroll
            for (int slice = 0; slice < DOWN_SPLIT; slice++) {
                const float* sums = p.sums + ((i64)(slice * TILES + tile) * TOKENS + row) * 16 + r;
                low[slice] = load_fresh_float(sums), high[slice] = load_fresh_float(sums + 8);
            }
            u16 next_low = next_norm[tile * 16 + r], next_high = next_norm[tile * 16 + r + 8];
            float sum_low = to_float(x_low), sum_high = to_float(x_high);
#pragma unroll
            for (int slice = 0; slice < DOWN_SPLIT; slice++) sum_low += low[slice], sum_high += high[slice];
            keep(p, tile, token, r, mine, sum_low, sum_high, next_low, next_high);
        }
    }
}

// One product: `from` are its activations, `next_norm` the norm after a sum into the residual stream.
template <Kind kind> __device__ __forceinline__ void product(const Params& p, const Layer& layer, Ring& ring, Shared& sh, u32 x,
                                                             const u16* from, const u16* next_norm, int& start, int& turn, Best& best) {
    using C = Cut<kind>;
    constexpr int STRIDE = C::PER * CHUNK * 2 + 16;
    Share share(kind == HEAD ? p.head_tiles : C::UNITS, start);
    int token = threadIdx.x / 8, r = threadIdx.x % 8, loaded = -1;
    Finish<kind> finish = {p, layer, sh, token, r, token < sh.seqs.rows && threadIdx.x < WORKERS};
    for (int unit = share.first; unit < share.end; unit++) {
        int tile = unit % C::TILES, slice = unit / C::TILES;
        if (slice != loaded) {
            if (loaded >= 0) meet();
            load_plain<C::K>(from, slice * C::PER * CHUNK, C::PER * CHUNK, sh.seqs.rows, x, STRIDE);
            if (kind != O && kind != DOWN) find_scales(p, sh);
            copies_done();
            meet();
            loaded = slice;
        }
        finish.prepare(tile);
        float low, high;
        unit_sums(ring, min(C::PER, C::CHUNKS - slice * C::PER), x, STRIDE, sh.sums[turn], low, high);
        turn ^= 1;
        if (kind == DOWN) {
            float* sums = p.sums + ((i64)unit * TOKENS + token) * 16 + r;
            if (finish.mine) sums[0] = low, sums[8] = high;
        } else
            finish.store(tile, low, high, best);
    }
    if (kind == DOWN) add_slices(p, share, sh, next_norm, token, r, finish.mine);
}

// Before the first layer: the embeddings, and what its norm needs of them.
__device__ __forceinline__ void keep_embeddings(const Params& p, const Sequences& q, const u16* next_norm) {
    int token = threadIdx.x / 8, r = threadIdx.x % 8;
    bool mine = token < q.rows;
    if (threadIdx.x >= WORKERS) return;
    int row = mine ? token : 0;
    const u16* x = p.embed ? p.embed + (i64)q.token[row] * HIDDEN : p.x + (i64)row * HIDDEN;
    for (int tile = blockIdx.x; tile < HIDDEN / 16; tile += gridDim.x) {
        int at = tile * 16 + r;
        keep(p, tile, token, r, mine, to_float(x[at]), to_float(x[at + 8]), next_norm[at], next_norm[at + 8]);
    }
}
