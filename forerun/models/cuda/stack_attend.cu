// Attention of a few new tokens of each sequence over the paged cache. A unit of work is 16 (token, head) pairs of one
// KV head and one lane of the keys: block b of 64 keys belongs to lane b % LANES. Eight warps share a unit: each scores
// 8 keys, then each sums HEAD_DIM / 8 columns of V. The last lane of a tile to finish joins all of them in lane order.
//
// The rows of a draft tree have a tile each, and read the keys of their ancestors at the entries where these would lie if
// the path were all there is: sums are cut and ordered as in plain decoding, so a drafted token gets the same bits.

#define KEYS 64
#define HEAD_ROW ((HEAD_DIM + 8) * 2)  // bytes of a head in shared memory, padded
#define GROUP (HEADS / KV_HEADS)
#define COLUMNS (HEAD_DIM / 64)        // of 8, of V, a warp sums
#define SCORE_ROW (KEYS + 4)
#define KEPT 32                        // units and blocks of a program whose places are kept for all layers
#define PAGES (KEYS / PAGE)            // of a block
#define TOKEN_TILES ((GROUP + 15) / 16)  // of a row of a tree

struct Tiles {  // of one block of keys
    unsigned char k[KEYS * HEAD_ROW], v[KEYS * HEAD_ROW], q[16 * HEAD_ROW];
};
struct AttendShared {
    Tiles tiles[2];
    float score[16 * SCORE_ROW];
};

// What all layers share: found once for each step.
struct Sequences {
    int start[TOKENS + 1], old[TOKENS], high[TOKENS], lanes[TOKENS], tiles[TOKENS], first_unit[TOKENS + 1];
    // old: entries written by earlier launches; high: entries that any row sees
    u64 bits[TOKENS];
    int tree[TOKENS];  // of each sequence: whether a row of it has bits
    int limit[TOKENS], position[TOKENS], slot[TOKENS], token[TOKENS];
    float prob[TOKENS], path[TOKENS];  // of each row's likeliest token; of all of a sequence's guesses so far
    int pages[KEPT][PAGES];  // of this program's first blocks
    int rows, count, page_stride, going;  // count: of sequences; going: whether another step is worth it
};

struct Unit {
    int number, s, kv_head, tile, lane;
    // The unit after this one; the caller knows there is one.
    __device__ __forceinline__ void advance(const Sequences& q) {
        number++;
        if (++lane < q.lanes[s]) return;
        lane = 0;
        if (++tile < q.tiles[s]) return;
        tile = 0;
        if (++kv_head < KV_HEADS) return;
        kv_head = 0;
        do s++;
        while (q.first_unit[s + 1] == q.first_unit[s]);
    }
    __device__ __forceinline__ int join() const { return number - lane; }  // first of the lanes that belong together
};

__device__ __forceinline__ Unit find_unit(const Sequences& q, int number) {
    Unit u;
    u.number = number, u.s = 0;
    while (number >= q.first_unit[u.s + 1]) u.s++;
    int rest = number - q.first_unit[u.s], lanes = q.lanes[u.s], tiles = q.tiles[u.s];
    u.lane = rest % lanes;
    u.tile = rest / lanes % tiles;
    u.kv_head = rest / lanes / tiles;
    return u;
}

// The token and the head of its group that row `row` of a unit stands for. False: none.
__device__ __forceinline__ bool find_pair(const Sequences& q, const Unit& u, int row, int& token, int& head) {
    int tree = q.tree[u.s], pair = (tree ? u.tile % TOKEN_TILES : u.tile) * 16 + row;
    token = q.start[u.s] + (tree ? u.tile / TOKEN_TILES : pair / GROUP);
    head = tree ? pair : pair % GROUP;
    return tree ? pair < GROUP : token < q.start[u.s + 1];
}

__device__ __forceinline__ int nth_bit(u64 bits, int n) {
    for (; n; n--) bits &= bits - 1;
    return __ffsll(bits) - 1;
}

__device__ __forceinline__ int page_at(const Params& p, const Sequences& seqs, int s, int entry) {
    return entry < seqs.high[s] ? ((const int*)(p.batch + 1))[(i64)(entry / PAGE) * seqs.page_stride + s] : 0;
}

// Copy a block's K and V: entries from `from` up, below `below`. Those that this launch writes wait for its q/k/v.
__device__ __forceinline__ void fetch_keys(const Params& p, const Sequences& seqs, const Unit& u, int item, int block,
                                           int from, int below, const Layer& layer, Tiles& to) {
    constexpr int PIECES = HEAD_DIM / 8, AT_ONCE = THREADS / PIECES;  // pieces of 16 bytes per key, keys at once
    u32 to_row = threadIdx.x / PIECES * HEAD_ROW + threadIdx.x % PIECES * 16;
    u32 k_to = shared_address(to.k) + to_row, v_to = shared_address(to.v) + to_row;
    // of a tree's row: from which entry on it reads its ancestors, and where they end
    int limit = 0x7fffffff, high = seqs.high[u.s];
    u64 bits = 0;
    if (seqs.tree[u.s]) {
        int token = seqs.start[u.s] + u.tile / TOKEN_TILES;
        limit = seqs.limit[token], bits = seqs.bits[token], high = limit + __popcll(bits);
    }
    int pages[PAGES];
#pragma unroll
    for (int i = 0; i < PAGES; i++)
        pages[i] = item < KEPT ? seqs.pages[item][i] : page_at(p, seqs, u.s, block * KEYS + i * PAGE);
#pragma unroll
    for (int i = 0; i < KEYS / AT_ONCE; i++) {
        int key = i * AT_ONCE + threadIdx.x / PIECES, entry = block * KEYS + key;
        if (entry < from || entry >= below) continue;
        bool real = entry < high;  // beyond lies memory that was never written: 0 * NaN would be NaN
        int page = pages[0], at = key % PAGE;
#pragma unroll
        for (int j = 1; j < PAGES; j++)
            if (key / PAGE == j) page = pages[j];
        if (real && entry >= limit) {
            int ancestor = limit + nth_bit(bits, entry - limit);
            page = ((const int*)(p.batch + 1))[(i64)(ancestor / PAGE) * seqs.page_stride + u.s], at = ancestor % PAGE;
        }
        i64 cell = (((i64)page * PAGE + at) * KV_HEADS + u.kv_head) * HEAD_DIM + threadIdx.x % PIECES * 8;
        copy16(k_to + i * AT_ONCE * HEAD_ROW, layer.k + (real ? cell : 0), real);
        copy16(v_to + i * AT_ONCE * HEAD_ROW, layer.v + (real ? cell : 0), real);
    }
}

__device__ __forceinline__ void fetch_queries(const Params& p, const Sequences& seqs, const Unit& u, Tiles& to) {
    int row = threadIdx.x / (HEAD_DIM / 8), piece = threadIdx.x % (HEAD_DIM / 8), token, head;
    if (row >= 16) return;
    bool real = find_pair(seqs, u, row, token, head);
    i64 cell = real ? ((i64)token * HEADS + u.kv_head * GROUP + head) * HEAD_DIM + piece * 8 : 0;
    copy16(shared_address(to.q) + row * HEAD_ROW + piece * 16, p.q + cell, real);
}

__device__ __forceinline__ void score_block(const Params& p, const Sequences& seqs, const Unit& u, int block, const Tiles& from, float* score) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    u32 q_at = shared_address(from.q) + lane % 16 * HEAD_ROW + lane / 16 * 16;
    u32 k_at = shared_address(from.k) + (warp * 8 + lane % 8) * HEAD_ROW + lane / 8 * 16;
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
        int row = lane / 4 + i / 2 * 8, key = warp * 8 + lane % 4 * 2 + i % 2, token, head;
        bool seen = find_pair(seqs, u, row, token, head);
        if (seen) seen = block * KEYS + key < seqs.limit[token] + __popcll(seqs.bits[token]);
        score[row * SCORE_ROW + key] = seen ? c[i] * p.scale_log2 : -INF;
    }
}

struct Softmax {
    float best[2], total[2], acc[COLUMNS][4];  // rows lane / 4 and 8 below
};

__device__ __forceinline__ void add_block(Softmax& soft, const Tiles& from, const float* score) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float s[2][KEYS / 8][2];
    float keep[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float* row = score + (lane / 4 + half * 8) * SCORE_ROW + lane % 4 * 2;
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
        u32 v_at = shared_address(from.v) + lane % 16 * HEAD_ROW + (warp * COLUMNS + n) * 16;
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

__device__ __forceinline__ void leave_part(const Params& p, const Unit& u, const Softmax& soft) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i64 cell = (i64)u.number * 16 + lane / 4 + half * 8;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
            *(float2*)(p.part + cell * HEAD_DIM + (warp * COLUMNS + n) * 8 + lane % 4 * 2) =
                make_float2(soft.acc[n][half * 2], soft.acc[n][half * 2 + 1]);
        if (warp == 0 && lane % 4 == 0) *(float2*)(p.part_ml + cell * 2) = make_float2(soft.best[half], soft.total[half]);
    }
}

// Every lane's part is there: thread (row, sixteenth of the columns) adds them in lane order.
__device__ __forceinline__ void join_lanes(const Params& p, const Sequences& seqs, const Unit& u, float* ml) {
    constexpr int EACH = HEAD_DIM / 16;
    int lanes = seqs.lanes[u.s], row = threadIdx.x / 16, d = threadIdx.x % 16 * EACH;
    for (int i = threadIdx.x; i < lanes * 32; i += THREADS) ml[i] = load_fresh_float(p.part_ml + (i64)u.join() * 32 + i);
    meet();
    float top = -INF, whole = 0.f, acc[EACH];
    for (int l = 0; l < lanes; l++) top = fmaxf(top, ml[l * 32 + row * 2]);
#pragma unroll
    for (int e = 0; e < EACH; e++) acc[e] = 0.f;
#pragma unroll 4
    for (int l = 0; l < lanes; l++) {
        float best = ml[l * 32 + row * 2], weight = best == -INF ? 0.f : exp2f(best - top);
        whole += weight * ml[l * 32 + row * 2 + 1];
        const float* from = p.part + ((i64)(u.join() + l) * 16 + row) * HEAD_DIM + d;
#pragma unroll
        for (int e = 0; e < EACH; e += 4) {
            uint4 v = load_fresh(from + e);
            acc[e] += weight * __uint_as_float(v.x), acc[e + 1] += weight * __uint_as_float(v.y);
            acc[e + 2] += weight * __uint_as_float(v.z), acc[e + 3] += weight * __uint_as_float(v.w);
        }
    }
    int token, head;
    if (find_pair(seqs, u, row, token, head)) {
        u16* out = p.attended + ((i64)token * HEADS + u.kv_head * GROUP + head) * HEAD_DIM + d;
        float by = whole == 0.f ? 0.f : 1.f / whole;
#pragma unroll
        for (int e = 0; e < EACH; e += 2) *(u32*)(out + e) = to_pair(acc[e] * by, acc[e + 1] * by);
    }
    meet();
}

// One program's units, their blocks one after the other in two buffers: while one is summed the next is on its way.
struct Attention {
    const Params& p;
    const Sequences& seqs;
    AttendShared& sh;
    int end;
    Unit first;  // none where its number is `end`

    // The next block of the unit, or the first of the next unit. False: there is none.
    __device__ __forceinline__ bool next(Unit& u, int& block) const {
        block += LANES;
        if (block * KEYS < seqs.high[u.s]) return true;
        if (u.number + 1 >= end) return false;
        u.advance(seqs);
        block = u.lane;
        return true;
    }
    // Before the first layer: where this program's first blocks lie.
    __device__ __forceinline__ void find_pages(Sequences& kept) const {
        Unit u = first;
        int block = u.lane;
        bool more = first.number < end;
        for (int item = 0; more && item < KEPT; item++) {
            if (threadIdx.x < PAGES) kept.pages[item][threadIdx.x] = page_at(p, seqs, u.s, block * KEYS + threadIdx.x * PAGE);
            more = next(u, block);
        }
        meet();
    }
    // Before q/k/v are there: what was there already.
    __device__ __forceinline__ void begin(const Layer& layer) const {
        if (first.number < end) fetch_keys(p, seqs, first, 0, first.lane, 0, seqs.old[first.s], layer, sh.tiles[0]);
    }
    __device__ __forceinline__ void run(const Layer& layer, int* flags) const {
        if (first.number >= end) return;
        Unit u = first, ahead = first;
        int block = u.lane, block_ahead = block, buffer = 0, item = 0;
        fetch_queries(p, seqs, u, sh.tiles[0]);
        fetch_keys(p, seqs, u, 0, block, seqs.old[u.s], 0x7fffffff, layer, sh.tiles[0]);
        end_of_group();
        Softmax soft;
        for (bool fresh = true, more = true; more;) {
            more = next(ahead, block_ahead);
            if (more) {
                fetch_keys(p, seqs, ahead, ++item, block_ahead, 0, 0x7fffffff, layer, sh.tiles[buffer ^ 1]);
                fetch_queries(p, seqs, ahead, sh.tiles[buffer ^ 1]);
            }
            end_of_group();
            if (fresh) {
#pragma unroll
                for (int half = 0; half < 2; half++) soft.best[half] = -INF, soft.total[half] = 0.f;
#pragma unroll
                for (int i = 0; i < COLUMNS * 4; i++) soft.acc[i / 4][i % 4] = 0.f;
            }
            groups_done_but_one();
            meet();
            score_block(p, seqs, u, block, sh.tiles[buffer], sh.score);
            meet();
            add_block(soft, sh.tiles[buffer], sh.score);
            fresh = !more || ahead.number != u.number;
            if (fresh) leave_part(p, u, soft);
            meet();
            u = ahead, block = block_ahead, buffer ^= 1;
        }
        join(flags);
    }
    // All parts of this program are written: count them, and join those tiles whose last lane was among them.
    __device__ __forceinline__ void join(int* flags) const {
        Unit u = first;
        for (int done = first.number; done < end; done += 32) {
            int count = min(32, end - done);
            if (threadIdx.x < count) {
                Unit mine = end - first.number == 1 ? first : find_unit(seqs, done + threadIdx.x);
                bool last = count_up(p.joins + mine.join()) == (u32)seqs.lanes[mine.s] - 1;
                if (last) p.joins[mine.join()] = 0;
                flags[threadIdx.x] = last;
            }
            meet();
            for (int i = 0; i < count; i++) {
                if (flags[i]) join_lanes(p, seqs, u, sh.score);
                if (u.number + 1 < end) u.advance(seqs);
            }
            meet();
        }
    }
};
