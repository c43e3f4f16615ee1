/* Runs the kernels on made-up numbers and writes what they give: lines of "name count", each before its floats.
 * The numbers are the same on every machine, so what two builds give can be compared: they are drawn one statement at a
 * time, because C leaves the order within one open. */
#include "layers.c"

#include <stdio.h>
#include <stdlib.h>

int64_t fr_packed_bytes(int type, int64_t rows, int64_t cols);
void fr_pack(int type, const uint8_t *src, int64_t rows, int64_t cols, const int32_t *order, int64_t from, int64_t to, uint8_t *out);
void fr_set_threads(int threads);
const char *fr_isa(void);

static uint32_t seed = 1;
static uint32_t next(void) { return (seed = seed * 1664525u + 1013904223u) >> 8; }
static float *numbers(int64_t n, float size) {
    float *out = malloc(n * sizeof *out);
    for (int64_t i = 0; i < n; i++) out[i] = size * ((int32_t)next() - (1 << 23)) / (1 << 23);
    return out;
}
static void *zeros(int64_t n) { return calloc(n, 1); }
static void emit(const char *name, const float *x, int64_t n) {
    printf("%s %lld\n", name, (long long)n);
    fwrite(x, sizeof *x, n, stdout);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

typedef struct { const char *name; int type, per, bytes, scales, scale_at; } Format; /* scales: float16 numbers of a block */
static const Format FORMATS[] = {
    {"F16", 1, 1, 2, 1, 0}, {"Q4_0", 2, 32, 18, 1, 0}, {"Q4_1", 3, 32, 20, 2, 0},
    {"Q5_0", 6, 32, 22, 1, 0}, {"Q5_1", 7, 32, 24, 2, 0}, {"Q8_0", 8, 32, 34, 1, 0},
    {"Q4_K", 12, 256, 144, 2, 0}, {"Q5_K", 13, 256, 176, 2, 0}, {"Q6_K", 14, 256, 210, 1, 208},
};
enum { F16_, Q4_0_, Q4_1_, Q5_0_, Q5_1_, Q8_0_, Q4_K_, Q5_K_, Q6_K_, NUM_FORMATS };

static Part matrix(int format, int64_t rows, int64_t cols) {
    const Format *f = FORMATS + format;
    int64_t blocks = rows * cols / f->per;
    uint8_t *raw = malloc(blocks * f->bytes);
    for (int64_t i = 0; i < blocks * f->bytes; i++) raw[i] = (uint8_t)next();
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < f->scales; i++) { /* so that weights are about 0.1; now and then 0 or less than a normal number */
            uint32_t drawn = next();
            uint16_t half = (drawn & 0x83ff) | ((f->per == 1 ? 10 : 1) + (drawn >> 10) % 4) << 10;
            if (drawn >> 16 < 5) half &= 0x8003;
            memcpy(raw + b * f->bytes + f->scale_at + 2 * i, &half, 2);
        }
    int64_t bytes = fr_packed_bytes(f->type, rows, cols);
    uint8_t *packed = aligned_alloc(64, (bytes + 63) / 64 * 64);
    fr_pack(f->type, raw, rows, cols, 0, 0, (rows + ROWS - 1) / ROWS, packed);
    free(raw);
    return (Part){f->type, f->per, rows, cols, packed, bytes};
}

enum { ALL = 37, OUT = 70, IN = 768 }; /* the last group of 16 weight rows is not full */
static float *activations(void) {
    float *x = numbers(ALL * IN, 1.0f);
    for (int i = 0; i < IN; i++) x[i] *= 50.0f, x[9 * IN + i] *= 1e-33f, x[(ALL - 1) * IN + i] = 0;
    for (int i = 0; i < 64; i++) x[10 * IN + i] = 0;
    x[7 * IN + 300] = 900.0f, x[8 * IN + 5] = -40000.0f;
    return x;
}

static void products(void) {
    static const int CUTS[][2] = {{0, ALL}, {3, 1}, {3, 2}, {3, 3}, {3, 4}, {3, 5}, {3, 8}, {3, 32}, {7, 1}, {8, 1}, {9, 1}, {10, 1}};
    float *x = activations(), *y = numbers(ALL * OUT, 1);
    char name[64];
    for (int f = 0; f < NUM_FORMATS; f++) {
        Part part = matrix(f, OUT, IN);
        Matrix m = {&part, 1, OUT, 0};
        for (unsigned i = 0; i < sizeof CUTS / sizeof *CUTS; i++) {
            snprintf(name, sizeof name, "product-%s-%d-%d", FORMATS[f].name, CUTS[i][0], CUTS[i][1]);
            fr_linear(&m, x + CUTS[i][0] * IN, 0, -1, CUTS[i][1], 0, y);
            emit(name, y, CUTS[i][1] * OUT);
        }
        fr_set_threads(3);
        fr_linear(&m, x, 0, -1, ALL, 0, y);
        fr_set_threads(1);
        snprintf(name, sizeof name, "threads-%s", FORMATS[f].name);
        emit(name, y, ALL * OUT);
    }
    static const int64_t FORMAT_OF[] = {Q4_K_, Q6_K_, Q8_0_, F16_}, ROWS_OF[] = {OUT, 33, 16, 5};
    const int64_t rows = OUT + 33 + 16 + 5;
    Part parts[4];
    for (int p = 0; p < 4; p++) parts[p] = matrix(FORMAT_OF[p], ROWS_OF[p], IN);
    float *bias = numbers(rows, 1), *norm = numbers(IN, 2), *add = numbers(ALL * rows, 1);
    y = numbers(ALL * rows, 1);
    fr_linear(&(Matrix){parts, 4, rows, bias}, x, norm, 1e-5f, ALL, add, y);
    emit("mixed", y, ALL * rows);
    y = numbers(ALL * IN / 2, 1);
    fr_gate(x, ALL, IN / 2, SILU, y), emit("silu", y, ALL * IN / 2);
    fr_gate(x, ALL, IN / 2, GELU, y), emit("gelu", y, ALL * IN / 2);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

enum { PAGE = 16, PAGES = 128, COLUMNS = 50, SEQUENCES = 4, TOKENS = 9 };
static int32_t tables[SEQUENCES * COLUMNS];
/* Two sequences that share 40 pages, a short one, and one with a tree of drafts: entries 20 to 22, of which 21 and 22
 * both follow 20. */
static const int32_t sequence_of[TOKENS] = {0, 1, 1, 1, 2, 2, 3, 3, 3}, seen_before[TOKENS] = {790, 640, 641, 642, 1, 2, 20, 20, 20};
static const int32_t path_starts[TOKENS + 1] = {0, 0, 0, 0, 0, 0, 0, 1, 3, 5}, paths[] = {20, 20, 21, 20, 22};
static const int64_t entries[TOKENS] = {789, 639, 640, 641, 0, 1, 20, 21, 22};

static Batch batch_of(int64_t heads, int64_t kv_heads, int64_t dim) {
    static int64_t slots[TOKENS];
    for (int s = 0, own = 40; s < SEQUENCES; s++)
        for (int i = 0; i < COLUMNS; i++) /* scattered: 45 i mod 128 has each page once */
            tables[s * COLUMNS + i] = (s < 2 && i < 40 ? i : i < (s < 2 ? COLUMNS : 3) ? own++ : 0) * 45 % PAGES;
    for (int t = 0; t < TOKENS; t++)
        slots[t] = tables[sequence_of[t] * COLUMNS + entries[t] / PAGE] * PAGE + entries[t] % PAGE;
    return (Batch){TOKENS, heads, kv_heads, dim, PAGE, COLUMNS, 1, entries, slots, seen_before, sequence_of, tables, path_starts, paths};
}

static Cache cache(int64_t kv_heads, int64_t dim) {
    float *k = numbers(PAGES * PAGE * kv_heads * dim, 1), *v = numbers(PAGES * PAGE * kv_heads * dim, 1);
    return (Cache){k, v, kv_heads * dim, dim};
}

static void attention(int64_t heads, int64_t kv_heads, int64_t dim, int64_t window) {
    Batch b = batch_of(heads, kv_heads, dim);
    int64_t width = heads * dim;
    Cache kv = cache(kv_heads, dim);
    float *qkv = numbers(TOKENS * (heads + 2 * kv_heads) * dim, 3), *rope = numbers(COLUMNS * PAGE * dim, 1);
    float *q = zeros(TOKENS * width * 4), *out = zeros(TOKENS * width * 4), *scratch = zeros(fr_attend_scratch(&b) * 4);
    float *norm = window ? 0 : numbers(dim, 2);
    char name[64];
    fr_store(&b, qkv, q, kv, rope, norm, norm, 1e-6f);
    snprintf(name, sizeof name, "stored-%d-%d", (int)dim, (int)window), emit(name, q, TOKENS * width);
    fr_attend(&b, q, kv, window, 0.2f, scratch, out);
    snprintf(name, sizeof name, "attended-%d-%d", (int)dim, (int)window), emit(name, out, TOKENS * width);
    for (int t = 0; t < TOKENS; t++) {
        Batch one = b;
        one.tokens = 1, one.positions += t, one.slots += t, one.kv_lens += t, one.rows += t, one.path_starts += t;
        fr_attend(&one, q + t * width, kv, window, 0.2f, scratch, out + t * width);
    }
    snprintf(name, sizeof name, "alone-%d-%d", (int)dim, (int)window), emit(name, out, TOKENS * width);
}

static void layers(void) {
    enum { HIDDEN = 256, HEADS = 4, KV_HEADS = 2, DIM = 64, INNER = 512, LAYERS = 2 };
    Batch b = batch_of(HEADS, KV_HEADS, DIM);
    static const int64_t FORMAT_OF[] = {Q4_K_, Q6_K_, Q5_K_, Q8_0_}, COLS_OF[] = {HIDDEN, HEADS * DIM, HIDDEN, INNER};
    static const int64_t ROWS_OF[] = {(HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 2 * INNER, HIDDEN};
    Layer made[LAYERS];
    Part parts[LAYERS][4];
    for (int i = 0; i < LAYERS; i++) {
        Matrix m[4];
        for (int p = 0; p < 4; p++) {
            parts[i][p] = matrix(FORMAT_OF[p], ROWS_OF[p], COLS_OF[p]);
            m[p] = (Matrix){parts[i] + p, 1, ROWS_OF[p], 0};
        }
        float *attn_norm = numbers(HIDDEN, 1), *mlp_norm = numbers(HIDDEN, 1), *rope = numbers(COLUMNS * PAGE * DIM, 1);
        made[i] = (Layer){m[0], m[1], m[2], m[3], attn_norm, mlp_norm, 0, 0, rope, cache(KV_HEADS, DIM), 0};
    }
    Shape shape = {HIDDEN, 1e-5f, 0.125f, SILU};
    float *x = numbers(TOKENS * HIDDEN, 1);
    fr_layers(&shape, made, 0, LAYERS, &b, x, zeros(fr_layers_scratch(&shape, made, &b)));
    emit("layers", x, TOKENS * HIDDEN);
}

int main(void) {
    printf("%s 0\n", fr_isa());
    products();
    attention(6, 2, 64, 0), attention(4, 2, 128, 40), attention(5, 1, 80, 0), attention(3, 3, 16, 700), attention(2, 1, 256, 0);
    layers();
}
