/* A linear layer on packed blocks: normalise and round the rows, multiply, add bias and residual, gate. */
#include "pool.h"

#include <math.h>
#include <string.h>

int64_t fr_row_bytes(int64_t cols, int per);
void fr_prepare(const float *x, int64_t stride, const float *weight, float eps, int64_t cols, int per, int64_t rows, uint8_t *out);
void fr_product(int type, const uint8_t *w, int64_t rows, int64_t cols, int64_t from, int64_t to, const uint8_t *x, int64_t count, float *y, int64_t ldy);

#define ROWS 16
#define CHUNK_BYTES (48 << 10) /* of weights that a thread takes at a time: a few microseconds of reading */

typedef struct { int32_t type, per; int64_t rows, cols; const uint8_t *packed; int64_t bytes; } Part; /* one matrix of several, one above the other */
typedef struct {
    const Part *parts; int64_t num_parts;
    const float *x; int64_t stride; const float *weight; float eps; int64_t count;
    uint8_t *scratch[2]; /* prepared rows by 32 and by 256 */
    const float *bias, *add; float *y; int64_t ldy;
    int64_t first[8], groups[8]; /* chunk at which a part begins, row groups of its chunks */
} Call;

static void prepare_chunk(void *arg, int64_t t) {
    Call *c = arg;
    int64_t cols = c->parts->cols;
    for (int i = 0; i < 2; i++)
        if (c->scratch[i]) {
            int per = i ? 256 : 32;
            fr_prepare(c->x + t * c->stride, c->stride, c->weight, c->eps, cols, per, 1, c->scratch[i] + t * fr_row_bytes(cols, per));
        }
}

static void product_chunk(void *arg, int64_t chunk) {
    Call *c = arg;
    int64_t p = 0, column = 0;
    while (p + 1 < c->num_parts && chunk >= c->first[p + 1]) column += c->parts[p++].rows;
    const Part *part = c->parts + p;
    int64_t all = (part->rows + ROWS - 1) / ROWS, from = (chunk - c->first[p]) * c->groups[p];
    int64_t to = from + c->groups[p] < all ? from + c->groups[p] : all;
    float *y = c->y + column;
    fr_product(part->type, part->packed, part->rows, part->cols, from, to, c->scratch[part->per == 256], c->count, y, c->ldy);
    int64_t lo = from * ROWS, hi = to * ROWS < part->rows ? to * ROWS : part->rows;
    for (int64_t t = 0; t < c->count; t++) {
        float *row = y + t * c->ldy;
        if (c->bias)
            for (int64_t i = lo; i < hi; i++) row[i] += c->bias[column + i];
        if (c->add)
            for (int64_t i = lo; i < hi; i++) row[i] += c->add[t * c->ldy + column + i];
    }
}

/* y [count, sum of rows] = rms_norm(x) @ W.T + bias + add; eps < 0: no norm. scratch: room for the prepared rows. */
void fr_linear(const Part *parts, int64_t num_parts, const float *x, int64_t stride, const float *weight, float eps,
               int64_t count, uint8_t *scratch32, uint8_t *scratch256, const float *bias, const float *add, float *y) {
    Call c = {parts, num_parts, x, stride, weight, eps, count, {scratch32, scratch256}, bias, add, y, 0, {0}, {0}};
    int64_t chunks = 0;
    for (int64_t p = 0; p < num_parts; p++) {
        int64_t all = (parts[p].rows + ROWS - 1) / ROWS, bytes = parts[p].bytes / all;
        int64_t groups = count > 32 ? 4 : CHUNK_BYTES / bytes;
        c.first[p] = chunks, c.groups[p] = groups < 1 ? 1 : groups;
        chunks += (all + c.groups[p] - 1) / c.groups[p];
        c.ldy += parts[p].rows;
    }
    if (count < 4)
        for (int64_t t = 0; t < count; t++) prepare_chunk(&c, t);
    else
        pool_run(prepare_chunk, &c, count);
    pool_run(product_chunk, &c, chunks);
}
