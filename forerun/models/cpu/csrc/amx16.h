/* Products of 16 weight rows and 16 rows of activations, with AMX. A piece of blocks.c: its formats and its prepared
 * activations.
 *
 * Whole sums of a group come from a tile product, offsets of signed formats taken off the weights before. What is done
 * with them in floats is what tiles16.h does, in the same order, so a row has the same bits here and there.
 */
#pragma once
#include "amx.h"

#define AMX "amx_int8"
#define STRIP 8 /* groups of 32 that are unpacked together: a superblock's */
#define WIDE_GROUPS 4 /* groups of weight rows whose strips stay in a core's first cache, 6 KB each; 2 are as fast */

/* Tiles of this thread: 0 to 3 sums, 4 activations and 5 weights of 32 columns, 6 and 7 of 16. */
static const Tiles TILES_OF_16 = {
    1, 0, {0}, {64, 64, 64, 64, 32, 64, 16, 64}, {WIDE, WIDE, WIDE, WIDE, WIDE, 8, WIDE, 4},
};

/* What a strip of 16 weight rows is, unpacked. */
typedef struct {
    int8_t q[STRIP][GROUP * ROWS];
    float scale[2 * STRIP][ROWS], min[STRIP][ROWS]; /* of a group, with Q6_K of half of one; K formats: minima as int16 */
    float d[ROWS], dm[ROWS]; /* of a superblock */
} Strip __attribute__((aligned(64)));

INLINE void unpack_strip(const Kind *k, int bits, int offset, const uint8_t *w, int groups, Strip *out) {
    const int super = k->per == SUPER, group = bits == 8 ? 512 : 256 + (bits == 5 ? 64 : bits == 6 ? 128 : 0);
    const uint8_t *body = w + (super ? bits == 6 ? 18 * ROWS : 20 * ROWS : k->mins ? 4 * ROWS : 2 * ROWS);
    if (super) _mm512_store_ps(out->d, half16(w));
    if (super && bits != 6) {
        _mm512_store_ps(out->dm, half16(w + 2 * ROWS));
        for (int p = 0; p < 4; p++)
            _mm512_store_si512(out->min[p], _mm512_cvtepu8_epi16(
                _mm256_loadu_si256((const __m256i *)(w + 12 * ROWS + 2 * ROWS * p))));
    }
    for (int j = 0; j < groups; j++) {
        const uint8_t *head = w + j * k->packed_bytes;
        if (!super) {
            _mm512_store_ps(out->scale[j], half16(head));
            if (k->mins) _mm512_store_ps(out->min[j], half16(head + 2 * ROWS));
        } else if (bits == 6)
            for (int h = 2 * j; h < 2 * j + 2; h++)
                _mm512_store_ps(out->scale[h], _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(
                    _mm_loadu_si128((const __m128i *)(w + 2 * ROWS + ROWS * h)))));
        else
            _mm512_store_ps(out->scale[j], _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
                _mm_loadu_si128((const __m128i *)(w + 4 * ROWS + ROWS * j)))));
        const uint8_t *own = body + j * (super ? group : k->packed_bytes);
        UNROLL for (int s = 0; s < 8; s++)
            _mm512_store_si512(out->q[j] + 64 * s, _mm512_sub_epi8(quants(own, bits, s), _mm512_set1_epi8(offset)));
    }
}

#define SUMS_TILE(c) \
    _tile_zero(c); \
    if (halves) { \
        _tile_loadd(6, x, GROUP); \
        _tile_loadd(7, q, 64); \
        _tile_dpbssd(c, 6, 7); \
    } else { \
        _tile_loadd(4, x, GROUP); \
        _tile_loadd(5, q, 64); \
        _tile_dpbssd(c, 4, 5); \
    }
/* sums [16 rows of activations, 16 of weights] of a group, or of half of one, into tile i % 4. */
INLINE void dot_tile(int i, int halves, const uint8_t *x, const int8_t *q) {
    switch (i & 3) {
    case 0: SUMS_TILE(0) break;
    case 1: SUMS_TILE(1) break;
    case 2: SUMS_TILE(2) break;
    case 3: SUMS_TILE(3) break;
    }
}
INLINE void store_tile(int i, int32_t (*sums)[WIDE * ROWS]) {
    switch (i & 3) {
    case 0: _tile_stored(0, sums[0], 64); break;
    case 1: _tile_stored(1, sums[1], 64); break;
    case 2: _tile_stored(2, sums[2], 64); break;
    case 3: _tile_stored(3, sums[3], 64); break;
    }
}

/* A strip's place among the sums: 16 rows of activations by 16 of weights. */
typedef struct { const uint8_t *x; const Strip *strip; float *y; } Cell;

/* Sums number i of a cell: of group i, with Q6_K of half i. The rows of the groups lie `step` bytes apart. Those beyond
 * a last short strip are made of anything and not used. */
INLINE void dot_cell(const Cell *c, int i, int halves, int groups, int step) {
    if (halves) dot_tile(i, 1, c->x + i / 2 * step + i % 2 * 16, c->strip->q[i / 2] + i % 2 * 256);
    else dot_tile(i, 0, c->x + (i < groups ? i : 0) * step, c->strip->q[i]);
}

INLINE __m512 floats_of(const int32_t *sums) { return _mm512_cvtepi32_ps(_mm512_load_si512(sums)); }

/* One cell. Tile products are begun four sums ahead, into the next cell, and stored one ahead: a product into a tile waits
 * for the store of what is in it. At 256 rows 352 GMAC/s (Q4_K) and 262 (Q6_K), with one tile for sums 280 and 166. */
INLINE void plain_cell(const Cell *c, const Cell *next, int mins, int groups, int32_t (*sums)[WIDE * ROWS], int64_t ldy) {
    __m512 acc[WIDE];
    for (int t = 0; t < WIDE; t++) acc[t] = _mm512_loadu_ps(c->y + t * ldy);
    UNROLL for (int j = 0; j < STRIP; j++) {
        const int32_t *own = sums[j & 3];
        const uint8_t *x = c->x + j * BLOCK_BYTES * WIDE;
        dot_cell(j + 4 < STRIP ? c : next, (j + 4) % STRIP, 0, groups, BLOCK_BYTES * WIDE);
        store_tile(j + 1, sums);
        if (j >= groups) continue;
        __m512 d = _mm512_load_ps(c->strip->scale[j]), m = mins ? _mm512_load_ps(c->strip->min[j]) : d;
        UNROLL16 for (int t = 0; t < WIDE; t++) {
            if (mins) acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(*real(x, WIDE, TOTAL, t)), acc[t]);
            acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(floats_of(own + ROWS * t), d), _mm512_set1_ps(*real(x, WIDE, SCALE, t)), acc[t]);
        }
    }
    for (int t = 0; t < WIDE; t++) _mm512_storeu_ps(c->y + t * ldy, acc[t]);
}

/* Of a superblock. */
INLINE void super_cell(const Cell *c, const Cell *next, int mins, int halves, int32_t (*sums)[WIDE * ROWS], int64_t ldy) {
    __m512 part[WIDE], d = _mm512_load_ps(c->strip->d);
    const int parts = halves ? 16 : 8;
    for (int t = 0; t < WIDE; t++) part[t] = _mm512_setzero_ps();
    UNROLL16 for (int i = 0; i < parts; i++) {
        const int32_t *own = sums[i & 3];
        dot_cell(i + 4 < parts ? c : next, (i + 4) % parts, halves, STRIP, GROUP * WIDE);
        store_tile(i + 1, sums);
        __m512 sc = _mm512_load_ps(c->strip->scale[i]);
        UNROLL16 for (int t = 0; t < WIDE; t++) {
            int32_t power = *field(c->x, WIDE, POWERS, halves ? i / 2 : i, t);
            part[t] = _mm512_fmadd_ps(floats_of(own + ROWS * t), times_power(sc, power), part[t]);
        }
    }
    __m512i m[4];
    for (int p = 0; p < 4 && mins; p++) m[p] = _mm512_load_si512(c->strip->min[p]);
    UNROLL16 for (int t = 0; t < WIDE; t++) {
        __m512 f = _mm512_mul_ps(part[t], d);
        if (mins) {
            __m512i min = _mm512_setzero_si512();
            for (int p = 0; p < 4; p++)
                min = _mm512_dpwssd_epi32(min, m[p], _mm512_set1_epi32(word(field(c->x, WIDE, SUMS, p, t))));
            __m512 dm = times_power(_mm512_load_ps(c->strip->dm), *field(c->x, WIDE, SHIFT, 0, t));
            f = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min), dm, f);
        }
        float *y = c->y + t * ldy;
        _mm512_storeu_ps(y, _mm512_fmadd_ps(f, _mm512_set1_ps(*real(c->x, WIDE, SUPER_SCALE, t)), _mm512_loadu_ps(y)));
    }
}

/* Up to WIDE_GROUPS groups of weight rows, `stride` bytes apart, times `count` rows of activations, a multiple of WIDE. */
INLINE void wide_tile(const Kind *k, int bits, int mins, int offset, const uint8_t *w, int64_t stride, int n, int64_t blocks,
                      const uint8_t *x, int64_t count, float *y, int64_t ldy) {
    const int super = k->per == SUPER, halves = bits == 6, per_strip = super ? 1 : STRIP;
    const int64_t block_bytes = (super ? SUPER_BYTES : BLOCK_BYTES) * WIDE, cells = n * (count / WIDE);
    Strip strips[WIDE_GROUPS];
    int32_t sums[4][WIDE * ROWS] __attribute__((aligned(64)));
    for (int64_t t = 0; t < count; t++) memset(y + t * ldy, 0, n * ROWS * sizeof(float));
    for (int64_t b = 0; b < blocks; b += per_strip) {
        int64_t left = blocks - b, used = left < per_strip ? left : per_strip, groups = super ? STRIP : used;
        for (int g = 0; g < n; g++) {
            const uint8_t *from = w + g * stride + b * k->packed_bytes;
            unpack_strip(k, bits, offset, from, groups, strips + g);
            if (left > used) fetch(from + used * k->packed_bytes, used * k->packed_bytes);
        }
        IN_MEMORY;
        Cell cell = {x + b * block_bytes, strips, y};
        for (int i = 0; i < 4; i++) dot_cell(&cell, i, halves, (int)groups, super ? GROUP * WIDE : BLOCK_BYTES * WIDE);
        store_tile(0, sums);
        for (int64_t i = 1; i <= cells; i++) {
            int64_t g = i % n, t = i / n, last = i == cells; /* the last one's sums are made once more, for nothing */
            Cell next = last ? cell : (Cell){x + (t * blocks + b) * block_bytes, strips + g, y + t * WIDE * ldy + g * ROWS};
            if (super) super_cell(&cell, &next, mins, halves, sums, ldy);
            else plain_cell(&cell, &next, mins, (int)groups, sums, ldy);
            cell = next;
        }
    }
}

typedef void Wide(const Kind *, const uint8_t *, int64_t, int, int64_t, const uint8_t *, int64_t, float *, int64_t);
#define WIDE_KIND(name, bits, mins, offset) \
static __attribute__((noinline)) void wide_##name(const Kind *k, const uint8_t *w, int64_t stride, int n, int64_t blocks, \
                                                  const uint8_t *x, int64_t count, float *y, int64_t ldy) { \
    Kind fixed = {name, name >= Q4_K ? SUPER : GROUP, bits, k->file_bytes, k->packed_bytes, mins}; \
    wide_tile(&fixed, bits, mins, offset, w, stride, n, blocks, x, count, y, ldy); }
WIDE_KIND(Q4_0, 4, 0, 8) WIDE_KIND(Q4_1, 4, 1, 0) WIDE_KIND(Q5_0, 5, 0, 16) WIDE_KIND(Q5_1, 5, 1, 0)
WIDE_KIND(Q8_0, 8, 0, 128) WIDE_KIND(Q4_K, 4, 1, 0) WIDE_KIND(Q5_K, 5, 1, 0) WIDE_KIND(Q6_K, 6, 0, 32)
static Wide *const WIDES[] = {
    [Q4_0] = wide_Q4_0, [Q4_1] = wide_Q4_1, [Q5_0] = wide_Q5_0, [Q5_1] = wide_Q5_1,
    [Q8_0] = wide_Q8_0, [Q4_K] = wide_Q4_K, [Q5_K] = wide_Q5_K, [Q6_K] = wide_Q6_K,
};

/* Row groups from..to times the first `count` prepared rows, which lie WIDE side by side. */
static void wide_product(const Kind *k, const uint8_t *w, int64_t blocks, int64_t from, int64_t to, const uint8_t *x, int64_t count,
                         float *y) {
    const int64_t stride = blocks * k->packed_bytes;
    _tile_loadconfig(&TILES_OF_16);
    for (int64_t g = from; g < to; g += WIDE_GROUPS) {
        int n = to - g < WIDE_GROUPS ? (int)(to - g) : WIDE_GROUPS;
        WIDES[k->type](k, w + g * stride, stride, n, blocks, x, count, y + (g - from) * ROWS, (to - from) * ROWS);
    }
    _tile_release(); /* a thread that has tiles in use is dearer to switch */
}
