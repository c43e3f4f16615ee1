// All layers of a decoder and its head in one launch, for up to 16 rows of activations.
//
// One program per multiprocessor. Four warps fetch weights, and nothing but weights: they go through all products of all
// layers without waiting for any result, as far ahead as the ring in shared memory lets them, so memory is busy while the
// other eight warps wait for each other. Those multiply (16 weight rows by 16 tokens; a token's column of the tensor
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

template <Kind kind> __device__ __forceinline__ void fetch(const u16* w, Ring& ring, int& start) {
    using C = Cut<kind>;
    int warp = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32;
    Share share(C::UNITS, start);
    for (int unit = share.first; unit < share.end; unit++) {
        int tile = unit % C::TILES, chunk = unit / C::TILES * C::PER, end = min(chunk + C::PER, C::CHUNKS);
        const u16* from[4];
#pragma unroll
        for (int i = 0; i < 4; i++) from[i] = w + (i64)weight_row<kind>(tile, warp * 4 + i) * C::K + chunk * CHUNK + lane * 8;
        for (; chunk < end; chunk++) {
            bool real = C::K % CHUNK == 0 || chunk * CHUNK + lane * 8 < C::K;
            barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
            u32 to = ring.data + ring.stage * STAGE_BYTES + warp * 4 * ROW_BYTES + lane * 16;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                copy16(to + i * ROW_BYTES, real ? from[i] : w, real);
                from[i] += CHUNK;
            }
            barrier_arrive_after_copies(ring.full + ring.stage * 8);
            ring.advance();
        }
    }
}

struct Shared {  // of the multiplying warps, beside the ring and the activations
    float sums[2][WARPS][TOKENS][17];
    Sequences seqs;
    int flags[32];
    u64 barriers[2 * STAGES];
};

// Activations [rows, K] as bf16 rows of `stride` bytes in shared memory, RMS-normed. A warp takes one row of each eight;
// where registers allow, both rows of 16 are on their way at once.
template <int K, int ROWS> __device__ __forceinline__ void load_normed(const u16* x, const u16* norm, int first, int rows, float eps, u32 to, int stride) {
    constexpr int EACH = (K + 255) / 256;
    int lane = threadIdx.x % 32;
    uint4 v[ROWS][EACH];
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int k = i * 256 + lane * 8, at = first + row * WARPS;
            v[row][i] = make_uint4(0, 0, 0, 0);
            if (k < K && at < rows) v[row][i] = load_fresh(x + (i64)at * K + k);
        }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u32 pairs[4] = {v[row][i].x, v[row][i].y, v[row][i].z, v[row][i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float a = low_float(pairs[j]), b = high_float(pairs[j]);
                square += a * a + b * b;
            }
        }
#pragma unroll
        for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
        float scale = rsqrtf(square / K + eps);
        if (first + row * WARPS >= rows) return;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            uint4 w = *(const uint4*)(norm + min(i * 256 + lane * 8, K - 8));
            u32 pairs[4] = {v[row][i].x, v[row][i].y, v[row][i].z, v[row][i].w}, by[4] = {w.x, w.y, w.z, w.w}, out[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                out[j] = to_pair(low_float(pairs[j]) * scale * low_float(by[j]), high_float(pairs[j]) * scale * high_float(by[j]));
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + (first + row * WARPS) * stride + i * 512 + lane * 16),
                         "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
        }
    }
}

template <int K> __device__ __forceinline__ void load_plain(const u16* x, int first, int count, int rows, u32 to, int stride) {
    int pieces = count / 8;
    for (int row = threadIdx.x / 32; row < rows; row += WARPS)
        for (int i = threadIdx.x % 32; i < pieces; i += 32) {
            bool real = first + i * 8 < K;
            copy16(to + row * stride + i * 16, x + (real ? (i64)row * K + first + i * 8 : 0), real);
        }
    copies_done();
    meet();
}

// The sums of one unit: every warp multiplies its 32 columns of each chunk, then thread (token, r) adds the warps' sums
// of rows r and r + 8.
__device__ __forceinline__ void unit_sums(Ring& ring, int chunks, u32 x, int stride, float (&sums)[WARPS][TOKENS][17], float& low, float& high) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[2][2][4];
    for (int i = 0; i < 16; i++) acc[i / 8][i / 4 % 2][i % 4] = 0.f;
    u32 w_at = ring.data + lane % 16 * ROW_BYTES + warp * 64 + lane / 16 * 16;
    u32 x_at = x + (lane / 16 * 8 + lane % 8) * stride + warp * 64 + lane / 8 % 2 * 16;
    for (int chunk = 0; chunk < chunks; chunk++) {
        u32 b[2][4], a[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) matrix4(b[k], x_at + chunk * CHUNK * 2 + k * 32);
        barrier_wait(ring.full + ring.stage * 8, ring.parity);
#pragma unroll
        for (int k = 0; k < 2; k++) matrix4(a[k], w_at + ring.stage * STAGE_BYTES + k * 32);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            multiply(acc[k][0], a[k], b[k][0], b[k][1]);
            multiply(acc[k][1], a[k], b[k][2], b[k][3]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty + ring.stage * 8);
        ring.advance();
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[warp][n * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = acc[0][n][i] + acc[1][n][i];
    meet();
    low = high = 0.f;
    if (threadIdx.x < 128) {
        int token = threadIdx.x / 8, r = threadIdx.x % 8;
#pragma unroll
        for (int w = 0; w < WARPS; w++) low += sums[w][token][r], high += sums[w][token][r + 8];
    }
}

struct Best {
    float value;
    int at;
    __device__ __forceinline__ void see(float v, int i) {
        if (v > value || (v == value && i < at)) value = v, at = i;
    }
};

// What becomes of rows r and r + 8 of a tile, for one token.
template <Kind kind> struct Finish {
    const Params& p;
    const Layer& layer;
    const Sequences& seqs;
    int token, r;
    bool mine;
    float before[2], turn[2];
    __device__ __forceinline__ void prepare(int tile) {  // loads that do not wait for the product
        before[0] = before[1] = turn[1] = 0.f, turn[0] = 1.f;
        if (!mine) return;
        int low = weight_row<kind>(tile, r), high = weight_row<kind>(tile, r + 8);
        if (kind == O) {
            before[0] = to_float(load_fresh_bf16(p.x + (i64)token * HIDDEN + low));
            before[1] = to_float(load_fresh_bf16(p.x + (i64)token * HIDDEN + high));
        }
        if (kind == QKV) {
            if (layer.bias) before[0] = to_float(layer.bias[low]), before[1] = to_float(layer.bias[high]);
            if (low < (HEADS + KV_HEADS) * HEAD_DIM) {
                const float* at = p.rotations + (i64)seqs.position[token] * HEAD_DIM + low % HEAD_DIM;
                turn[0] = at[0], turn[1] = at[HEAD_DIM / 2];
            }
        }
    }
    __device__ __forceinline__ void store(int tile, float low, float high, Best& best) {
        if (!mine) return;
        int at = weight_row<kind>(tile, r), at_high = weight_row<kind>(tile, r + 8);
        low += before[0], high += before[1];
        if (kind == O) {
            p.x[(i64)token * HIDDEN + at] = to_bf16(low);
            p.x[(i64)token * HIDDEN + at_high] = to_bf16(high);
        } else if (kind == GATE_UP) {
            float inner = GELU ? 1.5957691216057308f * (low + 0.044715f * low * low * low) : low;
            p.gated[(i64)token * INTER + at] = to_bf16(low / (1.f + __expf(-inner)) * high);
        } else if (kind == HEAD) {
            p.logits[(i64)token * VOCAB + at] = low;
            p.logits[(i64)token * VOCAB + at_high] = high;
            best.see(low, at), best.see(high, at_high);
        } else if (kind == QKV) {
            float turned = low * turn[0] - high * turn[1];
            high = high * turn[0] + low * turn[1], low = turned;
            int head = at / HEAD_DIM, d = at % HEAD_DIM, slot = seqs.slot[token];
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

// A split product: every unit leaves its sums, and whoever finds a tile complete adds them in order.
__device__ __forceinline__ void add_slices(const Params& p, const Share& share, Shared& sh, int token, int r, bool mine) {
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
        for (int i = 0; i < count; i++) {
            if (!sh.flags[i] || !mine) continue;
            int tile = (done + i) % TILES;
            u16* x = p.x + (i64)token * HIDDEN + tile * 16 + r;
            float low = to_float(load_fresh_bf16(x)), high = to_float(load_fresh_bf16(x + 8));
#pragma unroll
            for (int slice = 0; slice < DOWN_SPLIT; slice++) {
                const float* sums = p.sums + ((i64)(slice * TILES + tile) * TOKENS + token) * 16 + r;
                low += load_fresh_float(sums), high += load_fresh_float(sums + 8);
            }
            x[0] = to_bf16(low), x[8] = to_bf16(high);
        }
    }
}

template <Kind kind> __device__ __forceinline__ void product(const Params& p, const Layer& layer, Ring& ring, Shared& sh,
                                                             u32 x, int& start, int& turn, Best& best) {
    using C = Cut<kind>;
    constexpr int STRIDE = C::PER * CHUNK * 2 + 16;
    Share share(C::UNITS, start);
    if (share.first == share.end) return;
    if (kind == QKV || kind == GATE_UP || kind == HEAD) {
        constexpr int AT_ONCE = HIDDEN <= 2048 ? 2 : 1;
        const u16* norm = kind == QKV ? layer.attn_norm : kind == HEAD ? p.final_norm : layer.mlp_norm;
        for (int row = threadIdx.x / 32; row < p.rows; row += WARPS * AT_ONCE)
            load_normed<C::K, AT_ONCE>(p.x, norm, row, p.rows, p.eps, x, STRIDE);
        meet();
    }
    int token = threadIdx.x / 8, r = threadIdx.x % 8, loaded = -1;
    Finish<kind> finish = {p, layer, sh.seqs, token, r, token < p.rows && threadIdx.x < 128};
    for (int unit = share.first; unit < share.end; unit++) {
        int tile = unit % C::TILES, slice = unit / C::TILES;
        if ((kind == O || kind == DOWN) && slice != loaded) {
            if (loaded >= 0) meet();
            load_plain<C::K>(kind == O ? p.attended : p.gated, slice * C::PER * CHUNK, C::PER * CHUNK, p.rows, x, STRIDE);
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
    if (kind == DOWN) add_slices(p, share, sh, token, r, finish.mine);
}
