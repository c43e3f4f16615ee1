#pragma once
#include "attention.h"

typedef struct { int32_t type, per; int64_t rows, cols; const uint8_t *packed; int64_t bytes; } Part;
typedef struct { const Part *parts; int64_t num_parts, rows; const float *bias; } Matrix; /* parts one above the other */

typedef struct {
    Matrix qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm; /* q_norm and k_norm may be null */
    const float *rope;
    Cache kv;
    int64_t window; /* 0: none */
} Layer;
typedef struct { int64_t hidden; float eps, scale; int32_t gate, rough; } Shape; /* rough: attention as for drafts */

void fr_linear(const Matrix *m, const float *x, const float *norm, float eps, int64_t count, const float *add, float *y);
void fr_layers(const Shape *shape, const Layer *layers, int64_t from, int64_t to, const Batch *b, float *x, uint8_t *scratch);
