/* What a drafted block says of each of its positions: the likeliest tokens, and the likeliest after each token before.
 *
 * A head of low rank adds what the token before makes likely, for the likeliest tokens of both positions; a confidence
 * replaces the probability of the first. One call in place of some thirty small operators. Knows logits and matrices by
 * their addresses; no model and no tree.
 */
#include "pool.h"
#include "vec.h"

#include <math.h>

#define MOST 32 /* candidates of a position, a multiple of LANES */

typedef struct {
    int64_t depths, vocab, candidates, children, rank, width;
    float heat;            /* logits are multiplied by it */
    float bias, odds;      /* of the confidence: added; the weight of the likeliest token's odds */
    int64_t last;          /* the token before the first position */
    const float *logits;   /* [depths, vocab] */
    const int64_t *ids;    /* [vocab] the token of each column */
    const float *previous; /* [tokens, rank], null: positions do not depend on the token before */
    const float *next;     /* [vocab, rank] */
    const float *rows;     /* [depths, width] that the confidence reads */
    const float *sure;     /* [width], null: there is no confidence */
    const float *sure_previous; /* [rank] or null */
    int64_t *tokens;       /* [depths, candidates] */
    int64_t *found;        /* [depths, candidates, children] after each candidate of the position before */
    float *probs;          /* the same */
} Ranking;

static float dot(const float *a, const float *b, int64_t n) {
    Vec sums = v_set(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sums = v_fma(v_load(a + i), v_load(b + i), sums);
    float sum = v_sum(sums);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* The `count` largest of a row, best first; -> how many there are. */
static int64_t largest(const float *x, int64_t n, int64_t count, int64_t *places, float *values) {
    int64_t have = 0;
    for (int64_t i = 0; i < n; i++) {
        if (have == count) /* few are larger than those found already */
            while (i + LANES <= n && !(v_peak(v_load(x + i)) > values[have - 1])) i += LANES;
        if (i == n) break;
        if (have == count && !(x[i] > values[have - 1])) continue;
        int64_t at = have < count ? have++ : have - 1;
        for (; at > 0 && values[at - 1] < x[i]; at--) values[at] = values[at - 1], places[at] = places[at - 1];
        values[at] = x[i], places[at] = i;
    }
    return have;
}

static float exp_sum(const float *x, int64_t n, float heat, float top) {
    Vec sum = v_set(0);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = v_add(sum, v_exp(v_mul(v_sub(v_load(x + i), v_set(top)), v_set(heat))));
    float total = v_sum(sum);
    for (; i < n; i++) total += expf((x[i] - top) * heat);
    return total;
}

/* Children after one token before: probabilities of the candidates by `shifted` logits, the first by confidence. */
static void rank_place(const Ranking *c, const float *shifted, const float *row, float rest, const int64_t *tokens,
                       const float *before, int64_t *found, float *probs) {
    float p[MOST] __attribute__((aligned(64))), total = rest;
    for (int64_t i = 0; i < MOST; i += LANES) v_store(p + i, v_exp(v_load(shifted + i)));
    for (int64_t i = 0; i < c->candidates; i++) total += p[i];
    int64_t places[MOST];
    int64_t have = largest(p, c->candidates, c->children, places, probs);
    for (int64_t k = 0; k < have; k++) probs[k] /= total, found[k] = tokens[places[k]];
    if (!c->sure) return;
    float score = dot(row, c->sure, c->width) + c->bias, top = probs[0];
    if (c->sure_previous && before) score += dot(before, c->sure_previous, c->rank);
    if (c->odds != 0.0f) {
        float clipped = fminf(fmaxf(top, 1e-4f), 1.0f - 1e-4f);
        score += c->odds * logf(clipped / (1.0f - clipped));
    }
    float sure = 1.0f / (1.0f + expf(-score)), factor = (1.0f - sure) / fmaxf(1.0f - top, 1e-6f);
    probs[0] = sure;
    for (int64_t k = 1; k < have; k++) probs[k] = fminf(probs[k] * factor, sure);
}

/* Rows of logits, `stride` floats apart: of each the `count` likeliest tokens, best first, with their probabilities. */
typedef struct { const float *logits; int64_t stride, vocab, count; int64_t *tokens; float *probs; } Rows;
static void likeliest_row(const void *arg, int64_t row, void *none) {
    const Rows *c = arg;
    (void)none;
    const float *x = c->logits + row * c->stride;
    int64_t places[MOST];
    float values[MOST];
    int64_t have = largest(x, c->vocab, c->count, places, values);
    float total = exp_sum(x, c->vocab, 1.0f, values[0]);
    for (int64_t i = 0; i < have; i++)
        c->tokens[row * c->count + i] = places[i], c->probs[row * c->count + i] = expf(values[i] - values[0]) / total;
}
void fr_likeliest(const float *logits, int64_t rows, int64_t stride, int64_t vocab, int64_t count, int64_t *tokens, float *probs) {
    Rows c = {logits, stride, vocab, count, tokens, probs};
    pool_run(&(Job){likeliest_row, 0, &c, sizeof c, 0, rows});
}

void fr_rank(const Ranking *c) {
    for (int64_t d = 0; d < c->depths; d++) {
        const float *logits = c->logits + d * c->vocab, *row = c->rows + d * c->width;
        int64_t columns[MOST], *tokens = c->tokens + d * c->candidates;
        float values[MOST], shifted[MOST] __attribute__((aligned(64)));
        int64_t have = largest(logits, c->vocab, c->candidates, columns, values);
        float rest = exp_sum(logits, c->vocab, c->heat, values[0]);
        for (int64_t i = 0; i < MOST; i++) shifted[i] = i < have ? (values[i] - values[0]) * c->heat : -87.0f;
        for (int64_t i = 0; i < have; i++) rest -= expf(shifted[i]), tokens[i] = c->ids[columns[i]];
        rest = fmaxf(rest, 0.0f);
        int64_t count = c->previous && d ? c->candidates : 1;
        for (int64_t p = 0; p < count; p++) {
            float moved[MOST] __attribute__((aligned(64)));
            const float *before = 0;
            memcpy(moved, shifted, sizeof moved);
            if (c->previous) {
                before = c->previous + (d ? tokens[p - c->candidates] : c->last) * c->rank;
                for (int64_t i = 0; i < have; i++) moved[i] += c->heat * dot(before, c->next + columns[i] * c->rank, c->rank);
            }
            int64_t at = (d * c->candidates + p) * c->children;
            rank_place(c, moved, row, rest, tokens, before, c->found + at, c->probs + at);
        }
    }
}
