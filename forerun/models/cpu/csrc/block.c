/* A drafter's block on the target's hidden states, in a few calls: vectors of tokens, K/V of its context, a pass.
 *
 * Right after a forward of the target everything is cold, and each small operator takes as long as a product. Knows
 * matrices and caches by their addresses; no tree and no request.
 */
#include "layers.h"
#include "vec.h"

#include <math.h>

typedef struct {
    const Shape *shape; const Layer *layers; /* with their caches */
    int64_t num_layers, taps;
    Matrix fc, state_in, head;
    const Matrix *context; /* K and V of each layer, made of vectors */
    const float *hidden_norm, *final_norm, *depths; /* depths: [rows, hidden] what a row of a block adds */
} Block;

static void norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    Vec squares = v_set(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares = v_fma(v_load(x + i), v_load(x + i), squares);
    float sum = v_sum(squares);
    for (; i < n; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / n + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* Of `count` tokens, hidden states [count, hidden] at each depth, to vectors [count, hidden]. joined: scratch. */
void fr_vectors(const Block *m, int64_t count, const float *const *states, float *joined, float *vectors) {
    int64_t h = m->shape->hidden;
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < m->taps; i++) memcpy(joined + (t * m->taps + i) * h, states[i] + t * h, h * sizeof(float));
    fr_linear(&m->fc, joined, 0, -1, count, 0, vectors);
    for (int64_t t = 0; t < count; t++) norm_row(vectors + t * h, m->hidden_norm, m->shape->eps, h, vectors + t * h);
}

/* K/V of the batch's tokens in every layer, made of their vectors. made: scratch for one layer's. */
void fr_context(const Block *m, const Batch *b, const float *vectors, float *made) {
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *l = m->layers + i;
        fr_linear(m->context + i, vectors, 0, -1, b->tokens, 0, made);
        fr_store(b, made, 0, l->kv, l->rope, 0, l->k_norm, m->shape->eps);
    }
}

/* A block behind a token with this embedding, and the vector of the token before it: rows [tokens, hidden] that the head
 * reads, and their logits [tokens, head's rows]. x: scratch as large as rows. */
void fr_block(const Block *m, const Batch *b, const float *embedding, const float *vector, float *x, float *rows,
              float *logits, uint8_t *scratch) {
    int64_t h = m->shape->hidden, n = b->tokens;
    fr_linear(&m->state_in, vector, 0, -1, 1, embedding, rows);
    for (int64_t t = 0; t < n; t++)
        for (int64_t i = 0; i < h; i++) x[t * h + i] = rows[i] + m->depths[t * h + i];
    fr_layers(m->shape, m->layers, 0, m->num_layers, b, x, scratch);
    for (int64_t t = 0; t < n; t++) norm_row(x + t * h, m->final_norm, m->shape->eps, h, rows + t * h);
    fr_linear(&m->head, rows, 0, -1, n, 0, logits);
}
