#pragma once
#include <stdint.h>
#define ROWS 16 /* weight rows that are interleaved */
int64_t fr_row_bytes(int64_t cols, int per); /* of a prepared row of activations */
void fr_prepare(const float *x, const float *norm, float eps, int64_t cols, int per, uint8_t *out);
void fr_product(int type, const uint8_t *w, int64_t cols, int64_t from, int64_t to, const uint8_t *x, int64_t count, float *y);
