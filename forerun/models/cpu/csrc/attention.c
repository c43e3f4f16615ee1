/* Attention on paged K/V in float32: rotate and store K and V, then attend.
 *
 * A token's result is computed in one order whatever runs beside it: keys in the order of its own sequence, in blocks of
 * BLOCK within segments of SEGMENT, segments folded one after the other. Tokens that see the same pages are computed
 * side by side, so those pages are read once; that changes no order. Knows slots and block tables, no request.
 */
#include "attention.h"

#include "pool.h"
#include "vec.h"

#include <math.h>
#include <stdlib.h>

#define BLOCK 64     /* keys whose scores are computed before they are weighed */
#define SEGMENT 512  /* keys that are folded at a time: what threads share of one long sequence */
#define MAX_ROWS 32  /* query heads of a tile of tokens */
#define MAX_DIM 256
#define SERIAL_TOKENS 8 /* fewer are stored and folded by one thread; with 32, steps of 8 to 12 rows took the same time */
#define SPLIT_TOKENS 64 /* up to so many tokens the segments of one are work for several threads */
#define KEYS 4       /* keys of a register tile */
#define QUERIES (LANES / KEYS)
#define VALUES 4     /* vectors of a value row in a register tile */
#define WEIGHED (LANES == 16 ? 4 : 2) /* query rows of that tile */

/* ---- store ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const Batch *b; const float *qkv; float *q; Cache kv; const float *rope, *q_norm, *k_norm; float eps;
} Store;

static void rotate(const float *x, const float *norm, float eps, const float *rope, int64_t dim, float *out) {
    float factor = 1.0f;
    if (norm) {
        Vec sum = v_set(0);
        for (int64_t i = 0; i < dim; i += LANES) sum = v_fma(v_load(x + i), v_load(x + i), sum);
        factor = 1.0f / sqrtf(v_sum(sum) / dim + eps);
    }
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cosine = rope[i], sine = rope[i + half];
        if (norm) a *= factor * norm[i], b *= factor * norm[i + half];
        out[i] = a * cosine - b * sine, out[i + half] = b * cosine + a * sine;
    }
}

static void store_token(const void *arg, int64_t t, void *none) {
    const Store *c = arg;
    (void)none;
    const Batch *b = c->b;
    const float *row = c->qkv + t * (b->heads + 2 * b->kv_heads) * b->dim, *rope = c->rope + b->positions[t] * b->dim;
    for (int64_t h = 0; h < b->heads; h++)
        rotate(row + h * b->dim, c->q_norm, c->eps, rope, b->dim, c->q + (t * b->heads + h) * b->dim);
    for (int64_t h = 0; h < b->kv_heads; h++) {
        int64_t at = b->slots[t] * c->kv.slot_stride + h * c->kv.head_stride;
        rotate(row + (b->heads + h) * b->dim, c->k_norm, c->eps, rope, b->dim, c->kv.k + at);
        memcpy(c->kv.v + at, row + (b->heads + b->kv_heads + h) * b->dim, b->dim * sizeof(float));
    }
}

void fr_store(const Batch *b, const float *qkv, float *q, Cache kv, const float *rope, const float *q_norm,
              const float *k_norm, float eps) {
    Store c = {b, qkv, q, kv, rope, q_norm, k_norm, eps};
    if (b->tokens < SERIAL_TOKENS)
        for (int64_t t = 0; t < b->tokens; t++) store_token(&c, t, 0);
    else
        pool_run(&(Job){store_token, 0, &c, sizeof c, 0, b->tokens});
}

typedef struct { const Batch *b; const float *made; int64_t layers; const Cache *kv; const float *const *ropes; } StoreMade;

static void store_made(const void *arg, int64_t t, void *none) {
    const StoreMade *c = arg;
    (void)none;
    const Batch *b = c->b;
    int64_t size = b->kv_heads * b->dim;
    for (int64_t i = 0; i < c->layers; i++) {
        const float *row = c->made + (t * c->layers + i) * 2 * size, *rope = c->ropes[i] + b->positions[t] * b->dim;
        for (int64_t h = 0; h < b->kv_heads; h++) {
            int64_t at = b->slots[t] * c->kv[i].slot_stride + h * c->kv[i].head_stride;
            rotate(row + h * b->dim, 0, 0, rope, b->dim, c->kv[i].k + at);
            memcpy(c->kv[i].v + at, row + size + h * b->dim, b->dim * sizeof(float));
        }
    }
}

/* K, not rotated yet, and V that no layer computed, [tokens, layers, 2, kv_heads, dim], into the caches of these layers. */
void fr_store_made(const Batch *b, const float *made, int64_t layers, const Cache *kv, const float *const *ropes) {
    StoreMade c = {b, made, layers, kv, ropes};
    pool_run(&(Job){store_made, 0, &c, sizeof c, 0, b->tokens});
}

/* ---- attend ----------------------------------------------------------------------------------------------------- */

/* A query row's sum so far: e**(score - top) * value, the same of 1, and top. */
typedef struct { float top, total; } State;

typedef struct {
    const Batch *b; const float *q; Cache kv; int64_t window; float scale; float *out;
    int64_t tile, tiles, segments; /* tokens of a tile; segments: 0 where a tile folds its own */
    float *partial; /* [kv_heads, segments, tokens, group, 2 + dim] */
} Attend;

INLINE int64_t seen(const Batch *b, int64_t t) { return b->kv_lens[t] + b->path_starts[t + 1] - b->path_starts[t]; }
INLINE int64_t first_seen(const Attend *c, int64_t t) {
    int64_t n = seen(c->b, t);
    return c->window > 0 && n > c->window ? n - c->window : 0;
}

/* Slots of keys from..to of token t's sequence: entries before kv_lens, then those on its path through a tree. A page at
 * a time: a division for each key would take a quarter of what one row's attention takes. */
static void find_slots(const Batch *b, int64_t t, int64_t from, int64_t to, int64_t *slots) {
    const int32_t *table = b->tables + b->rows[t] * b->table_stride;
    int64_t size = b->page_size, page = from / size, i = from, end = to < b->kv_lens[t] ? to : b->kv_lens[t];
    for (; i < end; page++) {
        int64_t stop = (page + 1) * size < end ? (page + 1) * size : end, shift = (table[page] - page) * size;
        for (; i < stop; i++) slots[i - from] = i + shift;
    }
    for (; i < to; i++) {
        int64_t e = b->paths[b->path_starts[t] + i - b->kv_lens[t]];
        slots[i - from] = table[e / size] * size + e % size;
    }
}

INLINE int on_path(const Batch *b, int64_t t) { return b->path_starts[t] < b->path_starts[t + 1]; }

/* Whether two tokens have the same keys in a segment, as far as both see it; those of one sequence may part at a path. */
static int same_keys(const Batch *b, int64_t s, int64_t t, int64_t from, int64_t to) {
    if (b->rows[s] == b->rows[t]) return 1;
    if (!b->share || b->kv_lens[s] < to || b->kv_lens[t] < to) return 0;
    int64_t page = from / b->page_size, pages = (to + b->page_size - 1) / b->page_size - page;
    const int32_t *table = b->tables + page;
    return !memcmp(table + b->rows[s] * b->table_stride, table + b->rows[t] * b->table_stride, pages * sizeof(int32_t));
}

/* scores[r][k] = q[r] . keys[k] for n query rows and KEYS keys. */
INLINE void score_tile(const float *q, int n, const float *const *keys, int64_t dim, float *scores) {
    Vec acc[LANES];
    for (int i = 0; i < LANES; i++) acc[i] = v_set(0);
    for (int64_t d = 0; d < dim; d += LANES) {
        Vec k[KEYS];
        for (int j = 0; j < KEYS; j++) k[j] = v_held(v_load(keys[j] + d));
        for (int r = 0; r < n; r++) {
            Vec x = v_held(v_load(q + r * dim + d));
            for (int j = 0; j < KEYS; j++) acc[KEYS * r + j] = v_fma(x, k[j], acc[KEYS * r + j]);
        }
    }
    float sums[LANES];
    v_store(sums, v_sums(acc));
    for (int r = 0; r < n; r++) memcpy(scores + r * BLOCK, sums + KEYS * r, KEYS * sizeof(float));
}
static void score(const float *q, int64_t rows, const float *const *keys, int64_t count, int64_t dim, float *scores) {
    for (int64_t k = 0; k < count; k += KEYS)
        for (int64_t r = 0; r < rows; r += QUERIES) {
            const float *from = q + r * dim;
            float *to = scores + r * BLOCK + k;
            switch (rows - r) {
            case 1: score_tile(from, 1, keys + k, dim, to); break;
#if QUERIES == 4
            case 2: score_tile(from, 2, keys + k, dim, to); break;
            case 3: score_tile(from, 3, keys + k, dim, to); break;
#endif
            default: score_tile(from, QUERIES, keys + k, dim, to);
            }
        }
}

/* acc[r] += scores[r][k] * values[k], k in order, for n rows and m vectors of the value rows. */
INLINE void weigh_tile(const float *scores, int n, const float *const *values, int64_t count, int m, int64_t dim, float *acc) {
    Vec a[WEIGHED * VALUES];
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++) a[r * VALUES + j] = v_load(acc + r * dim + j * LANES);
    for (int64_t k = 0; k < count; k++) {
        Vec v[VALUES];
        for (int j = 0; j < m; j++) v[j] = v_held(v_load(values[k] + j * LANES));
        for (int r = 0; r < n; r++) {
            Vec p = v_held(v_set(scores[r * BLOCK + k]));
            for (int j = 0; j < m; j++) a[r * VALUES + j] = v_fma(p, v[j], a[r * VALUES + j]);
        }
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < m; j++) v_store(acc + r * dim + j * LANES, a[r * VALUES + j]);
}
/* The same for all rows, by columns: those of a block's values stay in the first cache. */
INLINE void weigh_columns(const float *scores, int64_t rows, const float *const *values, int64_t count, int m, int64_t dim, float *acc) {
    for (int64_t r = 0; r < rows; r += WEIGHED, scores += WEIGHED * BLOCK, acc += WEIGHED * dim)
        switch (rows - r) {
        case 1: weigh_tile(scores, 1, values, count, m, dim, acc); break;
#if LANES == 16
        case 2: weigh_tile(scores, 2, values, count, m, dim, acc); break;
        case 3: weigh_tile(scores, 3, values, count, m, dim, acc); break;
#endif
        default: weigh_tile(scores, WEIGHED, values, count, m, dim, acc);
        }
}
static void weigh(const float *scores, int64_t rows, const float *const *values, int64_t count, int64_t dim, float *acc) {
    const float *at[BLOCK];
    for (int64_t d = 0, step; d < dim; d += step) {
        step = dim - d >= VALUES * LANES ? VALUES * LANES : LANES;
        for (int64_t k = 0; k < count; k++) at[k] = values[k] + d;
        if (step > LANES) weigh_columns(scores, rows, at, count, VALUES, dim, acc + d);
        else weigh_columns(scores, rows, at, count, 1, dim, acc + d);
    }
}

/* Turn a block's scores into weights e**(score - top); what was summed under a lower top is scaled to the new one. */
static void weights_of(float *scores, int64_t lo, int64_t hi, State *state, float *acc, int64_t dim) {
    for (int64_t k = 0; k < lo && k < BLOCK; k++) scores[k] = -INFINITY;
    for (int64_t k = hi; k < BLOCK; k++) scores[k] = -INFINITY;
    Vec peak = v_load(scores);
    for (int k = LANES; k < BLOCK; k += LANES) peak = v_max(peak, v_load(scores + k));
    float top = v_peak(peak);
    if (top > state->top) {
        float e[LANES];
        v_store(e, v_exp(v_set(state->top - top)));
        float factor = state->top == -INFINITY ? 0.0f : e[0];
        state->total *= factor, state->top = top;
        for (int64_t d = 0; d < dim; d += LANES) v_store(acc + d, v_mul(v_load(acc + d), v_set(factor)));
    }
    Vec sum = v_set(0), shift = v_set(state->top);
    for (int k = 0; k < BLOCK; k += LANES) {
        Vec p = v_exp(v_sub(v_load(scores + k), shift));
        v_store(scores + k, p);
    }
    for (int64_t k = 0; k < lo && k < BLOCK; k++) scores[k] = 0;
    for (int64_t k = hi; k < BLOCK; k++) scores[k] = 0;
    for (int k = 0; k < BLOCK; k += LANES) sum = v_add(sum, v_load(scores + k));
    state->total += v_sum(sum);
}

INLINE void fetch(const float *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d, 0, 2);
}

/* Keys, then values. */
static void fetch_block(const Attend *c, int64_t h, const int64_t *slots, int64_t count) {
    for (int64_t k = 0; k < count; k++) fetch(c->kv.k + slots[k] * c->kv.slot_stride + h * c->kv.head_stride, c->b->dim);
    for (int64_t k = 0; k < count; k++) fetch(c->kv.v + slots[k] * c->kv.slot_stride + h * c->kv.head_stride, c->b->dim);
}

/* Tokens s..t over keys from..from + count, which lie in these slots. */
static void attend_block(const Attend *c, int64_t h, int64_t s, int64_t t, int64_t from, int64_t count,
                         const int64_t *slots, const float *q, State *state, float *acc) {
    const Batch *b = c->b;
    int64_t group = b->heads / b->kv_heads, dim = b->dim, rows = (t - s) * group;
    float scores[MAX_ROWS * BLOCK] __attribute__((aligned(64)));
    const float *keys[BLOCK], *values[BLOCK];
    for (int64_t k = 0; k < count; k++) {
        int64_t at = slots[k] * c->kv.slot_stride + h * c->kv.head_stride;
        keys[k] = c->kv.k + at, values[k] = c->kv.v + at;
    }
    for (int64_t k = count; k % KEYS; k++) keys[k] = keys[0];
    score(q, rows, keys, count, dim, scores);
    for (int64_t i = s; i < t; i++)
        for (int64_t g = 0; g < group; g++) {
            int64_t r = (i - s) * group + g, hi = seen(b, i) - from, lo = first_seen(c, i) - from;
            if (hi <= 0 || lo >= BLOCK) memset(scores + r * BLOCK, 0, BLOCK * sizeof(float)); /* sees none of them */
            else weights_of(scores + r * BLOCK, lo, hi < BLOCK ? hi : BLOCK, state + r, acc + r * dim, dim);
        }
    weigh(scores, rows, values, count, dim, acc);
}

/* Tokens s..t, which share their keys up to where one's path through a tree begins, over one segment: state and acc
 * [tokens, group(, dim)]. */
static void attend_segment(const Attend *c, int64_t h, int64_t s, int64_t t, int64_t segment, State *state, float *acc) {
    const Batch *b = c->b;
    int64_t group = b->heads / b->kv_heads, dim = b->dim, rows = (t - s) * group, lowest = INT64_MAX, widest = s;
    int64_t longest = 0, shared = INT64_MAX, to = (segment + 1) * SEGMENT;
    float q[MAX_ROWS * MAX_DIM] __attribute__((aligned(64)));
    for (int64_t i = s; i < t; i++) {
        int64_t n = seen(b, i), low = first_seen(c, i);
        if (n > longest) longest = n, widest = i;
        if (low < lowest) lowest = low;
        if (t - s > 1 && on_path(b, i) && b->kv_lens[i] < shared) shared = b->kv_lens[i];
        for (int64_t g = 0; g < group; g++) {
            const float *from = c->q + (i * b->heads + h * group + g) * dim;
            float *to = q + ((i - s) * group + g) * dim;
            for (int64_t d = 0; d < dim; d += LANES) v_store(to + d, v_mul(v_load(from + d), v_set(c->scale)));
            state[(i - s) * group + g] = (State){-INFINITY, 0};
        }
    }
    memset(acc, 0, rows * dim * sizeof(float));
    int64_t slots[2][BLOCK], from = segment * SEGMENT, end = to < longest ? to : longest, found = -1;
    while (from + BLOCK <= lowest) from += BLOCK;
    for (int now = 0; from < end; from += BLOCK, now ^= 1) {
        int64_t next = from + BLOCK, count = end - from < BLOCK ? end - from : BLOCK;
        if (from + count > shared) { /* each token has keys of its own */
            for (int64_t i = s; i < t; i++) {
                int64_t own = seen(b, i) - from < count ? seen(b, i) - from : count, r = (i - s) * group;
                if (own <= 0) continue;
                find_slots(b, i, from, from + own, slots[0]);
                attend_block(c, h, i, i + 1, from, own, slots[0], q + r * dim, state + r, acc + r * dim);
            }
            continue;
        }
        if (found != from) find_slots(b, widest, from, from + count, slots[now]), fetch_block(c, h, slots[now], count);
        if (next < end && next < shared) { /* what comes next is on its way meanwhile */
            int64_t ahead = end - next < BLOCK ? end - next : BLOCK;
            find_slots(b, widest, next, next + ahead, slots[now ^ 1]), found = next;
            fetch_block(c, h, slots[now ^ 1], ahead);
        }
        attend_block(c, h, s, t, from, count, slots[now], q, state, acc);
    }
}

/* What a segment gave joins what the segments before it gave. */
static void fold(State *into, float *total, const State *from, const float *part, int64_t dim) {
    if (from->top == -INFINITY) return;
    float top = from->top > into->top ? from->top : into->top, e[LANES] = {into->top - top, from->top - top}, f[LANES];
    v_store(f, v_exp(v_load(e)));
    float old = into->top == -INFINITY ? 0.0f : f[0], new = f[1];
    *into = (State){top, into->total * old + from->total * new};
    for (int64_t d = 0; d < dim; d += LANES)
        v_store(total + d, v_fma(v_load(part + d), v_set(new), v_mul(v_load(total + d), v_set(old))));
}

static void finish(const Attend *c, int64_t h, int64_t t, int64_t g, const State *state, const float *acc) {
    const Batch *b = c->b;
    float *out = c->out + (t * b->heads + h * (b->heads / b->kv_heads) + g) * b->dim;
    Vec inverse = v_set(1.0f / state->total);
    for (int64_t d = 0; d < b->dim; d += LANES) v_store(out + d, v_mul(v_load(acc + d), inverse));
}

/* One segment of one tile into `partial`. */
static void segment_chunk(const void *arg, int64_t chunk, void *none) {
    const Attend *c = arg;
    (void)none;
    const Batch *b = c->b;
    int64_t tile = chunk % c->tiles, segment = chunk / c->tiles % c->segments, h = chunk / c->tiles / c->segments;
    int64_t group = b->heads / b->kv_heads, dim = b->dim, end = (tile + 1) * c->tile < b->tokens ? (tile + 1) * c->tile : b->tokens;
    State state[MAX_ROWS];
    float acc[MAX_ROWS * MAX_DIM] __attribute__((aligned(64)));
    for (int64_t s = tile * c->tile, t; s < end; s = t) {
        for (t = s + 1; t < end && same_keys(b, s, t, segment * SEGMENT, (segment + 1) * SEGMENT); t++) {}
        attend_segment(c, h, s, t, segment, state, acc);
        for (int64_t r = 0; r < (t - s) * group; r++) {
            if (c->segments == 1) { /* there is nothing to fold it with: the same bits */
                finish(c, h, s + r / group, r % group, state + r, acc + r * dim);
                continue;
            }
            float *to = c->partial + (((h * c->segments + segment) * b->tokens + s) * group + r) * (2 + dim);
            memcpy(to, state + r, sizeof *state), memcpy(to + 2, acc + r * dim, dim * sizeof(float));
        }
    }
}
static void fold_chunk(const void *arg, int64_t t, void *none) {
    const Attend *c = arg;
    (void)none;
    const Batch *b = c->b;
    int64_t group = b->heads / b->kv_heads, dim = b->dim;
    float total[MAX_DIM] __attribute__((aligned(64)));
    for (int64_t h = 0; h < b->kv_heads; h++)
        for (int64_t g = 0; g < group; g++) {
            State state = {-INFINITY, 0};
            memset(total, 0, dim * sizeof(float));
            for (int64_t segment = 0; segment < c->segments; segment++) {
                const float *from = c->partial + (((h * c->segments + segment) * b->tokens + t) * group + g) * (2 + dim);
                State own;
                memcpy(&own, from, sizeof own);
                fold(&state, total, &own, from + 2, dim);
            }
            finish(c, h, t, g, &state, total);
        }
}

/* All segments of one tile of a long prompt. */
static void tile_chunk(const void *arg, int64_t chunk, void *none) {
    const Attend *c = arg;
    (void)none;
    const Batch *b = c->b;
    int64_t h = chunk % b->kv_heads, s = chunk / b->kv_heads * c->tile, group = b->heads / b->kv_heads, dim = b->dim;
    int64_t end = s + c->tile < b->tokens ? s + c->tile : b->tokens, longest = 0;
    State state[MAX_ROWS], own[MAX_ROWS];
    float total[MAX_ROWS * MAX_DIM] __attribute__((aligned(64))), acc[MAX_ROWS * MAX_DIM] __attribute__((aligned(64)));
    for (int64_t i = s; i < end; i++) longest = seen(b, i) > longest ? seen(b, i) : longest;
    for (int64_t r = 0; r < (end - s) * group; r++) state[r] = (State){-INFINITY, 0};
    memset(total, 0, (end - s) * group * dim * sizeof(float));
    for (int64_t segment = 0; segment * SEGMENT < longest; segment++)
        for (int64_t a = s, z; a < end; a = z) {
            for (z = a + 1; z < end && same_keys(b, a, z, segment * SEGMENT, (segment + 1) * SEGMENT); z++) {}
            attend_segment(c, h, a, z, segment, own, acc);
            for (int64_t r = 0; r < (z - a) * group; r++)
                fold(state + (a - s) * group + r, total + ((a - s) * group + r) * dim, own + r, acc + r * dim, dim);
        }
    for (int64_t r = 0; r < (end - s) * group; r++) finish(c, h, s + r / group, r % group, state + r, total + r * dim);
}

/* Floats that `fr_attend` needs beside its output. */
int64_t fr_attend_scratch(const Batch *b) {
    if (b->tokens > SPLIT_TOKENS) return 0;
    int64_t longest = 0;
    for (int64_t t = 0; t < b->tokens; t++) longest = seen(b, t) > longest ? seen(b, t) : longest;
    return (longest + SEGMENT - 1) / SEGMENT * b->tokens * b->heads * (2 + b->dim);
}

/* out [tokens, heads * dim] for q [tokens, heads, dim]; K and V of the tokens themselves have been stored. */
void fr_attend(const Batch *b, const float *q, Cache kv, int64_t window, float scale, float *scratch, float *out) {
    int64_t group = b->heads / b->kv_heads, tile = MAX_ROWS / group;
    Attend c = {b, q, kv, window, scale, out, tile, (b->tokens + tile - 1) / tile, 0, scratch};
    int64_t need = fr_attend_scratch(b);
    if (!need) {
        pool_run(&(Job){tile_chunk, 0, &c, sizeof c, 0, c.tiles * b->kv_heads});
        return;
    }
    c.segments = need / (b->tokens * b->heads * (2 + b->dim));
    pool_run(&(Job){segment_chunk, 0, &c, sizeof c, 0, b->kv_heads * c.segments * c.tiles});
    if (c.segments == 1) return;
    if (b->tokens < SERIAL_TOKENS)
        for (int64_t t = 0; t < b->tokens; t++) fold_chunk(&c, t, 0);
    else
        pool_run(&(Job){fold_chunk, 0, &c, sizeof c, 0, b->tokens});
}
