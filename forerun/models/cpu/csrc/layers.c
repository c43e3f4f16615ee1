/* Linear layers on packed blocks, and whole decoder layers of them: one call for all layers of a forward.
 *
 * Knows matrices, norms and caches by their addresses; no file, no request.
 */
#include "layers.h"
#include "blocks.h"
#include "pool.h"
#include "vec.h"

#include <math.h>

/* Weights that a thread takes at a time. A chunk begins with memory's latency: 512 KB are read a quarter faster than 48.
 * The last ones of a product are short, so that threads end together. */
#define CHUNK_BYTES (48 << 10)
#define LONG_CHUNK_BYTES (512 << 10)
#define LONG_CHUNKS 4          /* that a thread has at least, of a small matrix */
#define PROMPT_ROWS 32         /* more rows: compute counts, not reading; a chunk is PROMPT_GROUPS of weight rows */
#define PROMPT_GROUPS 4
/* Values of activations that one thread prepares sooner than several agree to: some microseconds. A gate takes longer. */
#ifndef SERIAL_VALUES
#define SERIAL_VALUES (16 << 10)
#endif
#define GATED_WORK 4

/* What the rows of a product come from: x, rms_norm(x), act(gate) * up for x = [gate, up], or several matrices side by
 * side, the rows of each RMS-normalised by themselves. */
typedef struct { int64_t count; const float *const *x; const int64_t *widths; } Pieces;
typedef struct { const float *x; int64_t stride; const float *norm; float eps; int gate; const Pieces *pieces; } Input;
enum { NONE = 0, SILU = 1, GELU = 2 };

#define MAX_PARTS 8
static const int PERS[] = {1, 32, 256}; /* values of a block: what a row of activations is prepared for */
static int per_index(const Part *part) { return (part->per > 1) + (part->per > 32); }
typedef struct {
    const Part *parts; int64_t num_parts, ldy; Input in; int64_t count;
    uint8_t *prepared[3]; /* rows for formats of each of PERS */
    const float *bias, *add; float *y;
    int64_t first[MAX_PARTS], groups[MAX_PARTS]; /* chunk at which a part begins, row groups of its chunks */
    int64_t prepared_rows; /* of a chunk */
    int64_t tail_chunk, tail_from, tail_groups;  /* of the last part: the first short chunk, where it begins, groups of each */
} Call;

/* act(gate) * up for gate, up = the halves of a row of 2 n */
static void gate_row(const float *x, int64_t n, int gate, float *out) {
    const Vec one = v_set(1.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        Vec g = v_load(x + i), z = g;
        if (gate == GELU) /* 0.5 g (1 + tanh(u)) is g / (1 + e**(-2 u)) */
            z = v_mul(v_set(1.5957691216f), v_fma(v_mul(v_mul(g, g), g), v_set(0.044715f), g));
        Vec act = v_div(g, v_add(one, v_exp(v_sub(v_set(0), z))));
        v_store(out + i, v_mul(act, v_load(x + n + i)));
    }
}

/* Row t of all pieces, each divided by its own root mean square. */
static void join_row(const Pieces *p, float eps, int64_t t, float *out) {
    for (int64_t i = 0; i < p->count; out += p->widths[i++]) {
        const float *x = p->x[i] + t * p->widths[i];
        Vec total = v_set(0);
        for (int64_t j = 0; j < p->widths[i]; j += LANES) total = v_fma(v_load(x + j), v_load(x + j), total);
        Vec factor = v_set(1.0f / sqrtf(v_sum(total) / p->widths[i] + eps));
        for (int64_t j = 0; j < p->widths[i]; j += LANES) v_store(out + j, v_mul(v_load(x + j), factor));
    }
}

static void prepare_row(const Call *c, int64_t t) {
    int64_t cols = c->parts->cols;
    const float *x = c->in.x + t * c->in.stride;
    float made[c->in.gate || c->in.pieces ? cols : 1] __attribute__((aligned(64)));
    if (c->in.gate) gate_row(x, cols, c->in.gate, made), x = made;
    if (c->in.pieces) join_row(c->in.pieces, c->in.eps, t, made), x = made;
    for (int i = 0; i < 3; i++)
        if (c->prepared[i])
            fr_prepare(x, c->in.norm, c->in.pieces ? -1.0f : c->in.eps, cols, PERS[i], t, c->count, c->prepared[i]);
}
static void prepare_chunk(const void *arg, int64_t chunk, void *none) {
    const Call *c = arg;
    (void)none;
    int64_t end = (chunk + 1) * c->prepared_rows;
    for (int64_t t = chunk * c->prepared_rows; t < end && t < c->count; t++) prepare_row(c, t);
}

typedef struct { const Part *part; int64_t column, from, to, lo, hi; } Place; /* row groups from..to, rows lo..hi */
static Place place_of(const Call *c, int64_t chunk) {
    int64_t p = 0, column = 0;
    while (p + 1 < c->num_parts && chunk >= c->first[p + 1]) column += c->parts[p++].rows;
    const Part *part = c->parts + p;
    int64_t all = (part->rows + ROWS - 1) / ROWS, groups = c->groups[p], from = (chunk - c->first[p]) * groups;
    if (chunk >= c->tail_chunk) groups = c->tail_groups, from = c->tail_from + (chunk - c->tail_chunk) * groups;
    int64_t to = from + groups < all ? from + groups : all;
    return (Place){part, column, from, to, from * ROWS, to * ROWS < part->rows ? to * ROWS : part->rows};
}

/* A chunk of the product, [count, (to - from) ROWS]. Reads weights and prepared rows alone. */
static void product_chunk(const void *arg, int64_t chunk, void *buffer) {
    const Call *c = arg;
    Place at = place_of(c, chunk);
    fr_product(at.part->type, at.part->packed, at.part->cols, at.from, at.to, c->prepared[per_index(at.part)], c->count, buffer);
}

static void commit_chunk(const void *arg, int64_t chunk, const void *buffer) {
    const Call *c = arg;
    Place at = place_of(c, chunk);
    int64_t ldy = c->ldy, width = (at.to - at.from) * ROWS, size = at.hi - at.lo, column = at.column + at.lo;
    for (int64_t t = 0; t < c->count; t++) {
        const float *row = (const float *)buffer + t * width, *add = c->add ? c->add + t * ldy + column : 0;
        const float *bias = c->bias ? c->bias + column : 0;
        float *y = c->y + t * ldy + column;
        if (bias && add)
            for (int64_t i = 0; i < size; i++) y[i] = row[i] + bias[i] + add[i];
        else if (bias || add)
            for (int64_t i = 0; i < size; i++) y[i] = row[i] + (bias ? bias : add)[i];
        else
            memcpy(y, row, size * sizeof(float));
    }
}

static void product(const Matrix *m, Input in, int64_t count, const float *add, float *y) {
    Call c = {m->parts, m->num_parts, m->rows, in, count, {0}, m->bias, add, y, {0}, {0}, 1, 0, 0, 0};
    int64_t chunks = 0, widest = 0, cols = m->parts->cols, bytes_of[3] = {0}, threads = pool_threads(), length = 0;
    for (int64_t p = 0; p < m->num_parts; p++) length += m->parts[p].bytes;
    length /= LONG_CHUNKS * threads;
    length = length < CHUNK_BYTES ? CHUNK_BYTES : length > LONG_CHUNK_BYTES ? LONG_CHUNK_BYTES : length;
    for (int64_t p = 0; p < m->num_parts; p++) {
        const Part *part = m->parts + p;
        int64_t all = (part->rows + ROWS - 1) / ROWS, bytes = part->bytes / all, tail = 0;
        int64_t groups = count > PROMPT_ROWS ? PROMPT_GROUPS : length > bytes ? length / bytes : 1;
        if (p + 1 == m->num_parts && count <= PROMPT_ROWS) /* about a long chunk of each thread */
            tail = all - (all > groups * threads ? (all - groups * threads) / groups * groups : 0);
        c.first[p] = chunks, c.groups[p] = groups;
        chunks += (all - tail + groups - 1) / groups;
        c.tail_chunk = chunks, c.tail_from = all - tail, c.tail_groups = CHUNK_BYTES > bytes ? CHUNK_BYTES / bytes : 1;
        chunks += (tail + c.tail_groups - 1) / c.tail_groups;
        widest = groups > widest ? groups : widest;
        bytes_of[per_index(part)] = fr_prepared_bytes(count, cols, part->per);
    }
    Arena *arena;
    uint8_t *prepared = arena_take(bytes_of[0] + bytes_of[1] + bytes_of[2], &arena);
    for (int i = 0; i < 3; prepared += bytes_of[i++])
        if (bytes_of[i]) c.prepared[i] = prepared;
    if (count < 4 || count * cols * (in.gate ? GATED_WORK : 1) < SERIAL_VALUES)
        for (int64_t t = 0; t < count; t++) prepare_row(&c, t);
    else {
        if (count > PROMPT_ROWS) c.prepared_rows = TILE_ROWS; /* rows of a tile lie side by side, in the same cache lines */
        pool_run(&(Job){prepare_chunk, 0, &c, sizeof c, 0, (count + c.prepared_rows - 1) / c.prepared_rows});
    }
    pool_run(&(Job){product_chunk, commit_chunk, &c, sizeof c, count * widest * ROWS * sizeof(float), chunks});
    arena_give(arena);
}

/* y [count, rows of m] = rms_norm(x) @ m.T + bias + add; eps < 0: no norm. */
void fr_linear(const Matrix *m, const float *x, const float *norm, float eps, int64_t count, const float *add, float *y) {
    product(m, (Input){x, m->parts->cols, norm, eps, NONE, 0}, count, add, y);
}

/* As `fr_linear` of pieces [count, widths[i]] side by side, the rows of each divided by their root mean square. Widths
 * are multiples of LANES. */
void fr_linear_joined(const Matrix *m, const float *const *x, const int64_t *widths, int64_t pieces, float eps, int64_t count,
                      float *y) {
    Pieces p = {pieces, x, widths};
    product(m, (Input){x[0], 0, 0, eps, NONE, &p}, count, 0, y);
}

typedef struct { const float *x; int64_t size; int gate; float *out; } Gate;
static void gate_chunk(const void *arg, int64_t t, void *none) {
    const Gate *c = arg;
    (void)none;
    gate_row(c->x + 2 * t * c->size, c->size, c->gate, c->out + t * c->size);
}
/* out [count, size] for rows [gate, up] of x [count, 2 size] */
void fr_gate(const float *x, int64_t count, int64_t size, int gate, float *out) {
    Gate c = {x, size, gate, out};
    pool_run(&(Job){gate_chunk, 0, &c, sizeof c, 0, count});
}

static int64_t align64(int64_t n) { return (n + 63) & ~(int64_t)63; }
static int64_t attend_bytes(const Shape *shape, const Batch *b) {
    int64_t rough = shape->rough ? fr_attend_draft_scratch(b) : 0;
    return rough ? rough : fr_attend_scratch(b) * 4;
}
/* Bytes of scratch that `fr_layers` needs. */
int64_t fr_layers_scratch(const Shape *shape, const Layer *layer, const Batch *b) {
    int64_t n = b->tokens;
    return align64(n * layer->qkv.rows * 4) + 2 * align64(n * b->heads * b->dim * 4) + align64(n * layer->gate_up.rows * 4) +
           align64(n * shape->hidden * 4) + attend_bytes(shape, b) + 64;
}

/* x [tokens, hidden] through layers from..to, in place; leaves their K/V. */
void fr_layers(const Shape *shape, const Layer *layers, int64_t from, int64_t to, const Batch *b, float *x, uint8_t *scratch) {
    int64_t n = b->tokens, rough = shape->rough && fr_attend_draft_scratch(b);
    const Layer *l = layers + from;
    scratch = (uint8_t *)align64((int64_t)scratch);
    float *qkv = (float *)scratch, *q = (float *)(scratch += align64(n * l->qkv.rows * 4));
    float *a = (float *)(scratch += align64(n * b->heads * b->dim * 4)), *h = (float *)(scratch += align64(n * b->heads * b->dim * 4));
    float *y = (float *)(scratch += align64(n * l->gate_up.rows * 4)), *parts = (float *)(scratch += align64(n * shape->hidden * 4));
    for (; from < to; from++, l++) {
        product(&l->qkv, (Input){x, shape->hidden, l->attn_norm, shape->eps, NONE, 0}, n, 0, qkv);
        fr_store(b, qkv, q, l->kv, l->rope, l->q_norm, l->k_norm, shape->eps);
        if (rough) fr_attend_draft(b, q, l->kv, l->window, shape->scale, parts, a);
        else fr_attend(b, q, l->kv, l->window, shape->scale, parts, a);
        product(&l->o, (Input){a, b->heads * b->dim, 0, -1, NONE, 0}, n, x, y);
        product(&l->gate_up, (Input){y, shape->hidden, l->mlp_norm, shape->eps, NONE, 0}, n, 0, h);
        product(&l->down, (Input){h, l->gate_up.rows, 0, -1, shape->gate, 0}, n, y, x);
    }
}
