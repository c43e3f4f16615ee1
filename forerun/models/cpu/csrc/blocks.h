#pragma once
#include <stdint.h>
#define ROWS 16 /* weight rows that are interleaved */
#define TILE_ROWS 16 /* rows of prepared activations that lie side by side, at most */
int64_t fr_prepared_bytes(int64_t count, int64_t cols, int per); /* of so many rows of activations */
void fr_prepare(const float *x, const float *norm, float eps, int64_t cols, int per, int64_t t, int64_t count, uint8_t *out);
void fr_product(int type, const uint8_t *w, int64_t cols, int64_t from, int64_t to, const uint8_t *x, int64_t count, float *y);
