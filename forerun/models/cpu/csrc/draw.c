/* A token drawn from logits: two passes over them in place of some ten operators.
 *
 * Knows a row of logits, a temperature and a number; no request.
 */
#include "vec.h"

#include <math.h>

#define SPAN 256 /* logits whose weights are summed at once, a multiple of LANES */

/* The weights e**((x - top) / temperature) of up to SPAN logits, and their sum. Far below the top they are 0. */
static float weigh(const float *x, int64_t n, float top, float temperature, float *weights) {
    const Vec none = v_exp(v_set(-100.0f)), heat = v_set(temperature);
    float rest[LANES];
    Vec sum = v_set(0);
    for (int64_t i = 0; i < n; i += LANES) {
        const float *from = x + i;
        if (n - i < LANES) {
            for (int64_t j = 0; j < LANES; j++) rest[j] = i + j < n ? x[i + j] : -INFINITY;
            from = rest;
        }
        Vec v = v_sub(v_exp(v_div(v_sub(v_load(from), v_set(top)), heat)), none);
        v_store(weights + i, v);
        sum = v_add(sum, v);
    }
    return v_sum(sum);
}

/* The first token at which the weights up to it are more than `number` of all, for a number in [0, 1). */
int64_t fr_draw(const float *x, int64_t n, float temperature, double number) {
    int64_t spans = (n + SPAN - 1) / SPAN, i = 0, at = 0, found = 0;
    float weights[SPAN], top = -INFINITY;
    double sums[spans], left = 0;
    Vec peak = v_set(-INFINITY);
    for (; i + LANES <= n; i += LANES) peak = v_max(peak, v_load(x + i));
    for (top = v_peak(peak); i < n; i++) top = x[i] > top ? x[i] : top;
    for (int64_t s = 0; s < spans; s++) {
        sums[s] = weigh(x + s * SPAN, n - s * SPAN < SPAN ? n - s * SPAN : SPAN, top, temperature, weights);
        left += sums[s];
    }
    left *= number;
    int64_t last = spans - 1;
    while (last > 0 && !(sums[last] > 0)) last--;
    for (; at < last && left >= sums[at]; at++) left -= sums[at];
    int64_t count = n - at * SPAN < SPAN ? n - at * SPAN : SPAN;
    weigh(x + at * SPAN, count, top, temperature, weights);
    for (int64_t j = 0; j < count && left >= 0; j++)
        if (weights[j] > 0) left -= weights[j], found = j; /* the last one, where rounding leaves something */
    return at * SPAN + found;
}
