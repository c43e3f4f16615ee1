#pragma once
#include <stdint.h>

/* Tokens of some sequences, as `TokenBatch` has them. Token t sees the entries before kv_lens[t] and then those on its
 * path through a draft tree, itself last. */
typedef struct {
    int64_t tokens, heads, kv_heads, dim, page_size, table_stride;
    int64_t share; /* whether pages that several sequences have are read for all of them at once */
    const int64_t *positions, *slots;
    const int32_t *kv_lens, *rows, *tables;      /* rows: which of the block tables is a token's */
    const int32_t *path_starts, *paths;          /* paths[path_starts[t] .. path_starts[t + 1]]: entries */
} Batch;
typedef struct { float *k, *v; int64_t slot_stride, head_stride; } Cache; /* of one layer; strides in floats */

void fr_store(const Batch *b, const float *qkv, float *q, Cache kv, const float *rope, const float *q_norm,
              const float *k_norm, float eps);
int64_t fr_attend_scratch(const Batch *b);
int64_t fr_attend_draft_scratch(const Batch *b);
void fr_attend_draft(const Batch *b, const float *q, Cache kv, int64_t window, float scale, void *scratch, float *out);
void fr_attend(const Batch *b, const float *q, Cache kv, int64_t window, float scale, float *scratch, float *out);
