/* Scores and weighted sums of ROWS rows, with AMX. A piece of draft_attention.c: its packed queries, K and V are what tiles
 * want, pairs of bfloat16.
 */
#pragma once
#include "amx.h"

static const Tiles PAIR_TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* s [ROWS, BLOCK] = q [ROWS, dim] . keys of a block */
INLINE void tile_scores(const uint32_t *q, const uint32_t *keys, int64_t dim, float *s) {
    const int64_t row = dim / 2 * sizeof *q, step = BLOCK * sizeof *keys;
    IN_MEMORY;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim / 2; d += 16) {
        const uint32_t *k = keys + d * BLOCK;
        _tile_loadd(4, q + d, row);
        _tile_loadd(5, k, step);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, k + 16, step);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, k + 32, step);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, k + 48, step);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, s, step);
    _tile_stored(1, s + 16, step);
    _tile_stored(2, s + 32, step);
    _tile_stored(3, s + 48, step);
    IN_MEMORY;
}

/* acc [ROWS, dim] += p [ROWS, BLOCK] . values of a block; dim is a multiple of 32 */
INLINE void tile_weigh(const uint32_t *p, const uint32_t *values, int64_t dim, float *acc) {
    const int64_t row = dim * sizeof *values;
    IN_MEMORY;
    _tile_loadd(4, p, PAIRS * sizeof *p);
    _tile_loadd(5, p + 16, PAIRS * sizeof *p);
    for (int64_t d = 0; d < dim; d += 32) {
        _tile_loadd(0, acc + d, row);
        _tile_loadd(1, acc + d + 16, row);
        _tile_loadd(6, values + d, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + d + 16, row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, values + 16 * dim + d, row);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, values + 16 * dim + d + 16, row);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, acc + d, row);
        _tile_stored(1, acc + d + 16, row);
    }
    IN_MEMORY;
}
