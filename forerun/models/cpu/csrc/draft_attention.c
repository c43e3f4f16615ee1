/* Attention for what only drafts: K, V, queries and weights rounded to bfloat16, sums in float32, where the CPU
 * multiplies pairs of those at once. A long piece of one sequence; no bits are promised. K and V of the whole context
 * are packed once for all rows: K so that 16 keys are a vector's lanes, V so that 16 of its numbers are.
 */
#include "attention.h"

#include "pool.h"
#include "vec.h"

#include <math.h>

#define BLOCK 64    /* keys at a time */
#define PAIRS (BLOCK / 2)
#define MAX_ROWS 64 /* query heads of a tile of tokens: what they have summed stays in the first cache */
#define MAX_DIM 128
#define ROWS 16     /* computed at a time */
#define REGISTER_ROWS 4
#define MIN_TOKENS 64
#define FAR_ABOVE 10.0f /* bits: weights of up to 1,024 are as exact as those of up to 1 */
#define UNSEEN (-1e30f) /* the top of a row that has seen nothing: not infinite, so that no difference is undefined */
#define LOG2_E 1.44269504f

#if LANES == 16 && defined(__AVX512BF16__)

typedef struct {
    const Batch *b; const float *q; Cache kv; int64_t window; float scale; float *out;
    int64_t tile, tiles, first, blocks; /* tokens of a tile; the first block that any token sees, how many there are */
    uint32_t *keys, *values; /* [kv_heads, blocks, dim / 2, BLOCK], [kv_heads, blocks, PAIRS, dim] pairs of bfloat16 */
} Draft;

INLINE __m512i rounded(Vec low, Vec high) { /* 32 numbers, those of `low` first */
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
INLINE __m512i halves(Vec low, Vec high) { /* each number of `low` with that of `high` */
    __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    __m512i b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}
INLINE void pack_row(const float *row, float scale, int64_t dim, uint32_t *out) {
    for (int64_t d = 0; d < dim; d += 32)
        _mm512_storeu_si512(out + d / 2, rounded(v_mul(v_load(row + d), v_set(scale)), v_mul(v_load(row + d + 16), v_set(scale))));
}
INLINE Vec dots(Vec sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

#ifdef __AMX_BF16__
#include "amx_attention.h"
#endif

INLINE __m512i counting(void) { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

static void pack_block(const void *arg, int64_t chunk, void *none) {
    const Draft *c = arg;
    (void)none;
    const Batch *b = c->b;
    int64_t h = chunk % b->kv_heads, n = chunk / b->kv_heads, dim = b->dim, from = (c->first + n) * BLOCK;
    int64_t end = b->kv_lens[b->tokens - 1];
    static const float zeros[MAX_DIM];
    const float *k[BLOCK], *v[BLOCK];
    uint32_t rows[BLOCK * MAX_DIM / 2] __attribute__((aligned(64)));
    for (int64_t i = 0; i < BLOCK; i++) {
        int64_t e = from + i;
        k[i] = v[i] = zeros;
        if (e >= end) continue;
        int64_t at = (b->tables[e / b->page_size] * b->page_size + e % b->page_size) * c->kv.slot_stride + h * c->kv.head_stride;
        k[i] = c->kv.k + at, v[i] = c->kv.v + at;
    }
    for (int64_t i = 0; i < BLOCK; i++)
        for (int64_t d = 0; d < dim; d += 32)
            _mm512_store_si512(rows + i * dim / 2 + d / 2, rounded(v_load(k[i] + d), v_load(k[i] + d + 16)));
    uint32_t *keys = c->keys + (h * c->blocks + n) * dim / 2 * BLOCK, *values = c->values + (h * c->blocks + n) * PAIRS * dim;
    __m512i steps = _mm512_mullo_epi32(counting(), _mm512_set1_epi32(dim / 2));
    for (int64_t d = 0; d < dim / 2; d++)
        for (int64_t i = 0; i < BLOCK; i += 16)
            _mm512_storeu_si512(keys + d * BLOCK + i, _mm512_i32gather_epi32(steps, rows + i * dim / 2 + d, 4));
    for (int64_t i = 0; i < PAIRS; i++)
        for (int64_t d = 0; d < dim; d += 16)
            _mm512_storeu_si512(values + i * dim + d, halves(v_load(v[2 * i] + d), v_load(v[2 * i + 1] + d)));
}

/* 2**x to 1.2 in 10,000, where rounding to bfloat16 leaves 20; 0 far below zero. */
INLINE Vec power2(Vec x) {
    x = v_max(x, v_set(-126.0f));
    Vec n = v_round(x), r = v_sub(x, n), p = v_set(5.5041e-2f);
    p = v_fma(p, r, v_set(2.4228e-1f));
    p = v_fma(p, r, v_set(6.9326e-1f));
    p = v_fma(p, r, v_set(9.99965e-1f));
    return _mm512_scalef_ps(p, n);
}

/* A row's scores of a block, minus infinity for keys that it does not see: it sees those from `lo` to `hi`. */
INLINE void load_seen(Vec *own, const float *s, int64_t lo, int64_t hi) {
    for (int j = 0; j < 4; j++) own[j] = v_load(s + 16 * j);
    if (lo <= 0 && hi >= BLOCK) return;
    int limit = hi < 0 ? 0 : hi < BLOCK ? hi : BLOCK, start = lo < 0 ? 0 : lo < BLOCK ? lo : BLOCK;
    for (int j = 0; j < 4; j++) {
        __m512i n = _mm512_add_epi32(counting(), _mm512_set1_epi32(16 * j));
        __mmask16 there = _mm512_cmplt_epi32_mask(n, _mm512_set1_epi32(limit)) & _mm512_cmpge_epi32_mask(n, _mm512_set1_epi32(start));
        own[j] = _mm512_mask_blend_ps(there, v_set(-INFINITY), own[j]);
    }
}

/* s [REGISTER_ROWS, BLOCK]: rows times a block's keys. */
INLINE void register_scores(const uint32_t *q, const uint32_t *keys, int64_t dim, float *s) {
    Vec sums[REGISTER_ROWS * 4];
    for (int i = 0; i < REGISTER_ROWS * 4; i++) sums[i] = v_set(0);
    for (int64_t d = 0; d < dim / 2; d++) {
        __m512i k[4];
        for (int j = 0; j < 4; j++) k[j] = _mm512_loadu_si512(keys + d * BLOCK + 16 * j);
        for (int r = 0; r < REGISTER_ROWS; r++) {
            __m512i x = _mm512_set1_epi32(q[r * dim / 2 + d]);
            for (int j = 0; j < 4; j++) sums[4 * r + j] = dots(sums[4 * r + j], x, k[j]);
        }
    }
    for (int i = 0; i < REGISTER_ROWS * 4; i++) v_store(s + 16 * i, sums[i]);
}

/* s [ROWS, BLOCK], by tiles where `tiles` says so. */
INLINE void scores(int tiles, const uint32_t *q, const uint32_t *keys, int64_t dim, float *s) {
#ifdef __AMX_BF16__
    if (tiles) {
        tile_scores(q, keys, dim, s);
        return;
    }
#endif
    (void)tiles;
    for (int r = 0; r < ROWS; r += REGISTER_ROWS) register_scores(q + r * dim / 2, keys, dim, s + r * BLOCK);
}

/* A row's scores become weights 2**(score - top), rounded; what earlier sums are scaled by is returned, mostly 1: `top`
 * follows the largest score only where that is far above it. */
INLINE float weigh_row(const Vec *s, float *top, float *total, uint32_t *out) {
    Vec peaks = v_max(v_max(s[0], s[1]), v_max(s[2], s[3])), sums = v_load(total), p[4];
    float scale = 1.0f;
    if (_mm512_cmp_ps_mask(peaks, v_set(*top + FAR_ABOVE), _CMP_GT_OQ)) {
        float now = v_peak(peaks);
        scale = *top == UNSEEN ? 0.0f : exp2f(*top - now);
        *top = now, sums = v_mul(sums, v_set(scale));
    }
    for (int j = 0; j < 4; j++) p[j] = power2(v_sub(s[j], v_set(*top)));
    v_store(total, v_add(sums, v_add(v_add(p[0], p[1]), v_add(p[2], p[3]))));
    for (int j = 0; j < 4; j += 2) _mm512_storeu_si512(out + 8 * j, rounded(p[j], p[j + 1]));
    return scale;
}

/* acc [REGISTER_ROWS, dim] += weights . values, 64 columns or 16 (`m` vectors) at a time. */
INLINE void register_weigh(const uint32_t *p, const uint32_t *values, int m, int64_t dim, float *acc) {
    Vec a[REGISTER_ROWS * 4];
    for (int r = 0; r < REGISTER_ROWS; r++)
        for (int j = 0; j < m; j++) a[4 * r + j] = v_load(acc + r * dim + 16 * j);
    for (int64_t k = 0; k < PAIRS; k++) {
        __m512i v[4];
        for (int j = 0; j < m; j++) v[j] = _mm512_loadu_si512(values + k * dim + 16 * j);
        for (int r = 0; r < REGISTER_ROWS; r++) {
            __m512i x = _mm512_set1_epi32(p[r * PAIRS + k]);
            for (int j = 0; j < m; j++) a[4 * r + j] = dots(a[4 * r + j], x, v[j]);
        }
    }
    for (int r = 0; r < REGISTER_ROWS; r++)
        for (int j = 0; j < m; j++) v_store(acc + r * dim + 16 * j, a[4 * r + j]);
}

/* acc [ROWS, dim] += weights p [ROWS, BLOCK] . a block's values, by tiles where `tiles` says so. */
INLINE void weigh(int tiles, const uint32_t *p, const uint32_t *values, int64_t dim, float *acc) {
#ifdef __AMX_BF16__
    if (tiles) {
        tile_weigh(p, values, dim, acc);
        return;
    }
#endif
    (void)tiles;
    for (int r = 0; r < ROWS; r += REGISTER_ROWS)
        for (int64_t d = 0; d < dim;) {
            int wide = dim - d >= 64;
            if (wide) register_weigh(p + r * PAIRS, values + d, 4, dim, acc + r * dim + d);
            else register_weigh(p + r * PAIRS, values + d, 1, dim, acc + r * dim + d);
            d += wide ? 64 : 16;
        }
}

/* Tiles for this thread where there are any; whether there are. `without_tiles` must follow. */
INLINE int with_tiles(void) {
#ifdef __AMX_BF16__
    if (amx_granted()) {
        _tile_loadconfig(&PAIR_TILES);
        return 1;
    }
#endif
    return 0;
}
INLINE void without_tiles(int tiles) {
#ifdef __AMX_BF16__
    if (tiles) _tile_release();
#endif
    (void)tiles;
}

/* A tile of tokens while blocks of keys pass by: its rows are the query heads of a KV head. */
typedef struct {
    uint32_t q[MAX_ROWS * MAX_DIM / 2] __attribute__((aligned(64)));
    float acc[MAX_ROWS * MAX_DIM] __attribute__((aligned(64))), total[MAX_ROWS * LANES] __attribute__((aligned(64)));
    float top[MAX_ROWS];
    int64_t seen[MAX_ROWS], low[MAX_ROWS], rows; /* a multiple of what is computed at once */
} Tokens;

/* One block of keys, `n` of the sequence, for all rows. */
INLINE void attend_block(Tokens *t, int tiles, const uint32_t *keys, const uint32_t *values, int64_t n, int64_t dim) {
    float s[ROWS * BLOCK] __attribute__((aligned(64)));
    uint32_t p[ROWS * PAIRS] __attribute__((aligned(64)));
    for (int64_t r = 0; r < t->rows; r += ROWS) {
        float *acc = t->acc + r * dim;
        scores(tiles, t->q + r * dim / 2, keys, dim, s);
        for (int i = 0; i < ROWS; i++) {
            Vec own[4];
            load_seen(own, s + i * BLOCK, t->low[r + i] - n * BLOCK, t->seen[r + i] - n * BLOCK);
            float scale = weigh_row(own, t->top + r + i, t->total + (r + i) * LANES, p + i * PAIRS);
            if (scale == 1.0f) continue;
            for (int64_t d = 0; d < dim; d += LANES) v_store(acc + i * dim + d, v_mul(v_load(acc + i * dim + d), v_set(scale)));
        }
        weigh(tiles, p, values, dim, acc);
    }
}

static void draft_tile(const void *arg, int64_t chunk, void *none) {
    const Draft *c = arg;
    (void)none;
    const Batch *b = c->b;
    int64_t h = chunk % b->kv_heads, s = (c->tiles - 1 - chunk / b->kv_heads) * c->tile, group = b->heads / b->kv_heads, dim = b->dim;
    int64_t end = s + c->tile < b->tokens ? s + c->tile : b->tokens, rows = (end - s) * group;
    Tokens own;
    own.rows = (rows + ROWS - 1) / ROWS * ROWS;
    for (int64_t r = 0; r < own.rows; r++) {
        int64_t which = r < rows ? r : rows - 1, t = s + which / group;
        const float *from = c->q + (t * b->heads + h * group + which % group) * dim;
        pack_row(from, c->scale, dim, own.q + r * dim / 2);
        own.seen[r] = b->kv_lens[t], own.low[r] = c->window > 0 && own.seen[r] > c->window ? own.seen[r] - c->window : 0;
        own.top[r] = UNSEEN;
    }
    memset(own.acc, 0, own.rows * dim * sizeof(float)), memset(own.total, 0, own.rows * LANES * sizeof(float));
    int tiles = with_tiles();
    for (int64_t n = own.low[0] / BLOCK; n * BLOCK < own.seen[own.rows - 1]; n++) {
        const uint32_t *keys = c->keys + (h * c->blocks + n - c->first) * dim / 2 * BLOCK;
        const uint32_t *values = c->values + (h * c->blocks + n - c->first) * PAIRS * dim;
        attend_block(&own, tiles, keys, values, n, dim);
    }
    without_tiles(tiles);
    for (int64_t r = 0; r < rows; r++) {
        float *out = c->out + ((s + r / group) * b->heads + h * group + r % group) * dim;
        Vec inverse = v_set(1.0f / v_sum(v_load(own.total + r * LANES)));
        for (int64_t d = 0; d < dim; d += LANES) v_store(out + d, v_mul(v_load(own.acc + r * dim + d), inverse));
    }
}

/* Whether this CPU can, and the batch is a piece of one sequence that is long enough. */
static int fits(const Batch *b) {
    if (b->tokens < MIN_TOKENS || b->dim % 32 || b->dim > MAX_DIM || b->heads / b->kv_heads > MAX_ROWS) return 0;
    if (b->path_starts[b->tokens]) return 0;
    for (int64_t t = 1; t < b->tokens; t++)
        if (b->rows[t] != b->rows[0] || b->kv_lens[t] <= b->kv_lens[t - 1]) return 0;
    return b->rows[0] == 0 && b->kv_lens[0] > 0;
}

/* Bytes that `fr_attend_draft` needs beside its output; 0: it cannot attend for this batch. */
int64_t fr_attend_draft_scratch(const Batch *b) {
    if (!fits(b)) return 0;
    return (b->kv_lens[b->tokens - 1] + BLOCK - 1) / BLOCK * BLOCK * b->kv_heads * b->dim * 2 * sizeof(uint16_t);
}

/* As `fr_attend`. */
void fr_attend_draft(const Batch *b, const float *q, Cache kv, int64_t window, float scale, void *scratch, float *out) {
    int64_t group = b->heads / b->kv_heads, tile = MAX_ROWS / group, low = b->kv_lens[0] - window;
    int64_t first = window > 0 && low > 0 ? low / BLOCK : 0, blocks = (b->kv_lens[b->tokens - 1] + BLOCK - 1) / BLOCK - first;
    uint32_t *keys = scratch, *values = keys + b->kv_heads * blocks * BLOCK * b->dim / 2;
    Draft c = {b, q, kv, window, scale * LOG2_E, out, tile, (b->tokens + tile - 1) / tile, first, blocks, keys, values};
    pool_run(&(Job){pack_block, 0, &c, sizeof c, 0, blocks * b->kv_heads});
    pool_run(&(Job){draft_tile, 0, &c, sizeof c, 0, c.tiles * b->kv_heads});
}

/* ---- what the rows of a batch look at ----------------------------------------------------------------------------- */

typedef struct {
    Draft draft;
    int64_t rows;   /* of a KV head, a multiple of ROWS */
    uint32_t *q;    /* [kv_heads, rows, dim / 2] */
    float *weighed; /* [kv_heads, rows] log2 of the sum of 2**score; infinite for rows that only fill up */
    float *out;     /* [kv_heads, blocks, BLOCK] */
} Tail;

INLINE void bounds(const Tail *c, int64_t r, int64_t n, int64_t *lo, int64_t *hi) {
    const Batch *b = c->draft.b;
    int64_t group = b->heads / b->kv_heads;
    for (int64_t i = 0; i < ROWS; i++) {
        int64_t t = (r + i) / group < b->tokens ? (r + i) / group : b->tokens - 1, seen = b->kv_lens[t];
        lo[i] = (c->draft.window > 0 && seen > c->draft.window ? seen - c->draft.window : 0) - n * BLOCK, hi[i] = seen - n * BLOCK;
    }
}

/* ROWS rows of one KV head over all keys. */
static void sum_rows(const void *arg, int64_t chunk, void *none) {
    const Tail *c = arg;
    (void)none;
    const Batch *b = c->draft.b;
    int64_t h = chunk % b->kv_heads, first = chunk / b->kv_heads * ROWS, group = b->heads / b->kv_heads, dim = b->dim;
    uint32_t *q = c->q + (h * c->rows + first) * dim / 2;
    float top[ROWS], *sums = c->weighed + h * c->rows + first;
    Vec total[ROWS];
    for (int64_t i = 0; i < ROWS; i++) {
        int64_t r = first + i < b->tokens * group ? first + i : b->tokens * group - 1;
        pack_row(c->draft.q + (r / group * b->heads + h * group + r % group) * dim, c->draft.scale, dim, q + i * dim / 2);
        top[i] = UNSEEN, total[i] = v_set(0);
    }
    int64_t lo[ROWS], hi[ROWS];
    float s[ROWS * BLOCK] __attribute__((aligned(64)));
    int tiles = with_tiles();
    for (int64_t n = c->draft.first; n < c->draft.first + c->draft.blocks; n++) {
        bounds(c, first, n, lo, hi);
        scores(tiles, q, c->draft.keys + (h * c->draft.blocks + n - c->draft.first) * dim / 2 * BLOCK, dim, s);
        for (int r = 0; r < ROWS; r++) {
            Vec own[4];
            load_seen(own, s + r * BLOCK, lo[r], hi[r]);
            Vec peaks = v_max(v_max(own[0], own[1]), v_max(own[2], own[3]));
            if (_mm512_cmp_ps_mask(peaks, v_set(top[r] + FAR_ABOVE), _CMP_GT_OQ)) {
                float now = v_peak(peaks);
                total[r] = v_mul(total[r], v_set(top[r] == UNSEEN ? 0.0f : exp2f(top[r] - now))), top[r] = now;
            }
            for (int j = 0; j < 4; j++) total[r] = v_add(total[r], power2(v_sub(own[j], v_set(top[r]))));
        }
    }
    without_tiles(tiles);
    for (int64_t i = 0; i < ROWS; i++) sums[i] = first + i < b->tokens * group ? top[i] + log2f(v_sum(total[i])) : INFINITY;
}

/* All rows of one KV head over one block of keys. */
static void sum_keys(const void *arg, int64_t chunk, void *none) {
    const Tail *c = arg;
    (void)none;
    const Batch *b = c->draft.b;
    int64_t h = chunk % b->kv_heads, n = chunk / b->kv_heads, dim = b->dim, lo[ROWS], hi[ROWS];
    const uint32_t *keys = c->draft.keys + (h * c->draft.blocks + n) * dim / 2 * BLOCK;
    Vec given[4] = {v_set(0), v_set(0), v_set(0), v_set(0)}, own[4];
    float s[ROWS * BLOCK] __attribute__((aligned(64)));
    int tiles = with_tiles();
    for (int64_t first = 0; first < c->rows; first += ROWS) {
        bounds(c, first, n + c->draft.first, lo, hi);
        scores(tiles, c->q + (h * c->rows + first) * dim / 2, keys, dim, s);
        for (int r = 0; r < ROWS; r++) {
            load_seen(own, s + r * BLOCK, lo[r], hi[r]);
            for (int j = 0; j < 4; j++)
                given[j] = v_add(given[j], power2(v_sub(own[j], v_set(c->weighed[h * c->rows + first + r]))));
        }
    }
    without_tiles(tiles);
    for (int j = 0; j < 4; j++) v_store(c->out + (h * c->draft.blocks + n) * BLOCK + 16 * j, given[j]);
}

static int64_t tail_rows(const Batch *b) { return (b->tokens * (b->heads / b->kv_heads) + ROWS - 1) / ROWS * ROWS; }

/* Bytes that `fr_tail_weights` needs; 0: it cannot weigh this batch. */
int64_t fr_tail_weights_scratch(const Batch *b) {
    int64_t rows = tail_rows(b), keys = (b->kv_lens[b->tokens - 1] + BLOCK - 1) / BLOCK * BLOCK;
    return fits(b) ? b->kv_heads * (keys * (2 * b->dim * sizeof(uint16_t) + sizeof(float)) + rows * (b->dim * sizeof(uint16_t) + sizeof(float))) : 0;
}

/* out [entries of the sequence] += the weights of attention that each entry is given, over all rows and heads. */
void fr_tail_weights(const Batch *b, const float *q, Cache kv, int64_t window, float scale, void *scratch, float *out) {
    int64_t low = b->kv_lens[0] - window, first = window > 0 && low > 0 ? low / BLOCK : 0, end = b->kv_lens[b->tokens - 1];
    int64_t blocks = (end + BLOCK - 1) / BLOCK - first, rows = tail_rows(b), packed = b->kv_heads * blocks * BLOCK * b->dim / 2;
    uint32_t *keys = scratch, *packed_q = keys + 2 * packed;
    float *weighed = (float *)(packed_q + b->kv_heads * rows * b->dim / 2), *given = weighed + b->kv_heads * rows;
    Tail c = {{b, q, kv, window, scale * LOG2_E, 0, 0, 0, first, blocks, keys, keys + packed}, rows, packed_q, weighed, given};
    pool_run(&(Job){pack_block, 0, &c.draft, sizeof c.draft, 0, blocks * b->kv_heads});
    pool_run(&(Job){sum_rows, 0, &c, sizeof c, 0, rows / ROWS * b->kv_heads});
    pool_run(&(Job){sum_keys, 0, &c, sizeof c, 0, blocks * b->kv_heads});
    for (int64_t h = 0; h < b->kv_heads; h++)
        for (int64_t e = first * BLOCK; e < end; e++) out[e] += given[h * blocks * BLOCK + e - first * BLOCK];
}

#else

int64_t fr_attend_draft_scratch(const Batch *b) {
    (void)b;
    return 0;
}
void fr_attend_draft(const Batch *b, const float *q, Cache kv, int64_t window, float scale, void *scratch, float *out) {
    (void)scratch;
    fr_attend(b, q, kv, window, scale, 0, out);
}

int64_t fr_tail_weights_scratch(const Batch *b) { return fr_attend_draft_scratch(b); }
void fr_tail_weights(const Batch *b, const float *q, Cache kv, int64_t window, float scale, void *scratch, float *out) {
    (void)b, (void)q, (void)kv, (void)window, (void)scale, (void)scratch, (void)out; /* never called: there is no scratch */
}

#endif
