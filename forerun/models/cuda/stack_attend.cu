// Attention of a few new tokens of each sequence over the paged cache. A unit of work is 16 (token, head) pairs of one
// KV head and one lane of the keys: block b of 64 keys belongs to lane b % LANES. Eight warps share a unit: each scores
// 8 keys, then each sums HEAD_DIM / 8 columns of V. The last lane of a tile to finish joins all of them in lane order.

#define KEYS 64
#define HEAD_ROW ((HEAD_DIM + 8) * 2)  // bytes of a head in shared memory, padded
#define GROUP (HEADS / KV_HEADS)
#define COLUMNS (HEAD_DIM / 64)        // of 8, of V, a warp sums
#define SCORE_ROW (KEYS + 4)

struct AttendShared {
    unsigned char k[KEYS * HEAD_ROW], v[KEYS * HEAD_ROW], q[16 * HEAD_ROW];
    float score[16 * SCORE_ROW];
};

// What all layers share: found once, when the kernel starts.
struct Sequences {
    int start[TOKENS + 1], high[TOKENS], lanes[TOKENS], tiles[TOKENS], first_unit[TOKENS + 1];
    int limit[TOKENS], position[TOKENS], slot[TOKENS];
};

struct Unit {
    int s, kv_head, tile, lane, join;  // join: first unit of the lanes that belong together, also names their counter
};

__device__ __forceinline__ Unit find_unit(const Sequences& q, int unit) {
    Unit u;
    u.s = 0;
    while (unit >= q.first_unit[u.s + 1]) u.s++;
    int rest = unit - q.first_unit[u.s], lanes = q.lanes[u.s], tiles = q.tiles[u.s];
    u.lane = rest % lanes;
    u.tile = rest / lanes % tiles;
    u.kv_head = rest / lanes / tiles;
    u.join = unit - u.lane;
    return u;
}

__device__ __forceinline__ void fetch_block(const Params& p, const Sequences& seqs, const Unit& u, int block,
                                            const u16* k_cache, const u16* v_cache, AttendShared& sh) {
    constexpr int PIECES = HEAD_DIM / 8;  // of 16 bytes, per key
    u32 k_to = shared_address(sh.k), v_to = shared_address(sh.v);
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
        int key = i / PIECES, piece = i % PIECES, entry = block * KEYS + key;
        bool real = entry < seqs.high[u.s];  // beyond lies memory nobody wrote: 0 * NaN would be NaN
        int page = real ? p.tables[(i64)u.s * p.table_stride + (i64)(entry / PAGE) * p.page_stride] : 0;
        i64 cell = (((i64)page * PAGE + entry % PAGE) * KV_HEADS + u.kv_head) * HEAD_DIM + piece * 8;
        copy16(k_to + key * HEAD_ROW + piece * 16, k_cache + cell, real);
        copy16(v_to + key * HEAD_ROW + piece * 16, v_cache + cell, real);
    }
}

__device__ __forceinline__ void score_block(const Params& p, const Sequences& seqs, const Unit& u, int block, AttendShared& sh) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    u32 q_at = shared_address(sh.q) + lane % 16 * HEAD_ROW + lane / 16 * 16;
    u32 k_at = shared_address(sh.k) + (warp * 8 + lane % 8) * HEAD_ROW + lane / 8 * 16;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 32) {
        u32 k[4], a[4], b[4];
        matrix4(k, k_at + d * 2);
        matrix4(a, q_at + d * 2);
        matrix4(b, q_at + d * 2 + 32);
        multiply(c, a, k[0], k[1]);
        multiply(c, b, k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, key = warp * 8 + lane % 4 * 2 + i % 2;
        int pair = u.tile * 16 + row, token = seqs.start[u.s] + pair / GROUP;
        bool seen = token < seqs.start[u.s + 1] && block * KEYS + key < seqs.limit[token];
        sh.score[row * SCORE_ROW + key] = seen ? c[i] * p.scale_log2 : -INF;
    }
}

struct Softmax {
    float best[2], total[2], acc[COLUMNS][4];  // rows lane / 4 and 8 below
};

__device__ __forceinline__ void add_block(Softmax& soft, AttendShared& sh) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float s[2][KEYS / 8][2];
    float keep[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float* row = sh.score + (lane / 4 + half * 8) * SCORE_ROW + lane % 4 * 2;
        float most = soft.best[half];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            s[half][j][0] = row[j * 8], s[half][j][1] = row[j * 8 + 1];
            most = fmaxf(most, fmaxf(s[half][j][0], s[half][j][1]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        base[half] = most == -INF ? 0.f : most;  // a row that has seen nothing yet: no inf - inf
        keep[half] = exp2f(soft.best[half] - base[half]);
        soft.best[half] = most;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) sum += s[half][j][i] = exp2f(s[half][j][i] - base[half]);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        soft.total[half] = soft.total[half] * keep[half] + sum;
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
        float(&acc)[4] = soft.acc[n];
        acc[0] *= keep[0], acc[1] *= keep[0], acc[2] *= keep[1], acc[3] *= keep[1];
        u32 v_at = shared_address(sh.v) + lane % 16 * HEAD_ROW + (warp * COLUMNS + n) * 16;
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            u32 a[4] = {to_pair(s[0][2 * j][0], s[0][2 * j][1]), to_pair(s[1][2 * j][0], s[1][2 * j][1]),
                        to_pair(s[0][2 * j + 1][0], s[0][2 * j + 1][1]), to_pair(s[1][2 * j + 1][0], s[1][2 * j + 1][1])};
            u32 b0, b1;
            matrix2_turned(b0, b1, v_at + j * 16 * HEAD_ROW);
            multiply(acc, a, b0, b1);
        }
    }
}

// Every lane's sums are there: thread (row, eighth-of-16 columns) adds them in lane order.
__device__ __forceinline__ void join_lanes(const Params& p, const Sequences& seqs, const Unit& u) {
    constexpr int EACH = HEAD_DIM / 16;
    int row = threadIdx.x / 16, d = threadIdx.x % 16 * EACH;
    int pair = u.tile * 16 + row, token = seqs.start[u.s] + pair / GROUP;
    if (token >= seqs.start[u.s + 1]) return;
    int lanes = seqs.lanes[u.s];
    float top = -INF, whole = 0.f, acc[EACH];
    for (int l = 0; l < lanes; l++) top = fmaxf(top, load_fresh_float(p.part_ml + ((i64)(u.join + l) * 16 + row) * 2));
    for (int e = 0; e < EACH; e++) acc[e] = 0.f;
    for (int l = 0; l < lanes; l++) {
        i64 cell = (i64)(u.join + l) * 16 + row;
        float best = load_fresh_float(p.part_ml + cell * 2);
        float weight = best == -INF ? 0.f : exp2f(best - top);
        whole += weight * load_fresh_float(p.part_ml + cell * 2 + 1);
        for (int e = 0; e < EACH; e++) acc[e] += weight * load_fresh_float(p.part + cell * HEAD_DIM + d + e);
    }
    u16* out = p.attended + ((i64)token * HEADS + u.kv_head * GROUP + pair % GROUP) * HEAD_DIM + d;
    for (int e = 0; e < EACH; e++) out[e] = to_bf16(whole == 0.f ? 0.f : acc[e] / whole);
}

__device__ __forceinline__ void attend_unit(const Params& p, const Sequences& seqs, const Unit& u, int unit,
                                            const u16* k_cache, const u16* v_cache, AttendShared& sh, int* flag) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, lanes = seqs.lanes[u.s];
    if (threadIdx.x < 16 * (HEAD_DIM / 8)) {
        int row = threadIdx.x / (HEAD_DIM / 8), piece = threadIdx.x % (HEAD_DIM / 8), pair = u.tile * 16 + row;
        int token = seqs.start[u.s] + pair / GROUP;
        bool real = token < seqs.start[u.s + 1];
        i64 cell = real ? ((i64)token * HEADS + u.kv_head * GROUP + pair % GROUP) * HEAD_DIM + piece * 8 : 0;
        copy16(shared_address(sh.q) + row * HEAD_ROW + piece * 16, p.q + cell, real);
    }
    Softmax soft;
    for (int half = 0; half < 2; half++) soft.best[half] = -INF, soft.total[half] = 0.f;
    for (int n = 0; n < COLUMNS; n++)
        for (int i = 0; i < 4; i++) soft.acc[n][i] = 0.f;
    int blocks = (seqs.high[u.s] + KEYS - 1) / KEYS;
    for (int block = u.lane; block < blocks; block += LANES) {
        fetch_block(p, seqs, u, block, k_cache, v_cache, sh);
        copies_done();
        meet();
        score_block(p, seqs, u, block, sh);
        meet();
        add_block(soft, sh);
        meet();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = lane / 4 + half * 8;
        i64 cell = (i64)unit * 16 + row;
        for (int n = 0; n < COLUMNS; n++)
            for (int i = 0; i < 2; i++)
                p.part[cell * HEAD_DIM + (warp * COLUMNS + n) * 8 + lane % 4 * 2 + i] = soft.acc[n][half * 2 + i];
        if (warp == 0 && lane % 4 == 0) {
            p.part_ml[cell * 2] = soft.best[half];
            p.part_ml[cell * 2 + 1] = soft.total[half];
        }
    }
    meet();
    if (threadIdx.x == 0) {
        __threadfence();
        *flag = count_up(p.joins + u.join) == (u32)lanes - 1;
        if (*flag) p.joins[u.join] = 0;
        __threadfence();
    }
    meet();
    if (*flag) join_lanes(p, seqs, u);
    meet();
}
