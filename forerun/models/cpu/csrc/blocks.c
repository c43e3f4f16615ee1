/* Matrix products on the blocks of GGUF files: Q4_K, Q5_K, Q6_K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and on float16.
 *
 * Weights are packed once: rows interleaved by 16, the blocks' own bits otherwise, so that a product needs no horizontal
 * sums. Activations are rounded to int8 with a scale for every 32 values; for K formats the eight scales of a superblock
 * are one scale times powers of two, which cost an integer addition to apply. With float16 they stay float32. A row's
 * result is computed in one order whatever rows run beside it, so its bits do not depend on the batch.
 * Knows no model: a matrix, rows of activations, a pool of threads.
 */
#include "blocks.h"

#include "vec.h"

#include <math.h>

#define SUPER 256 /* values of a superblock */
#define GROUP 32  /* values of a plain block */
#define PREFETCH_BYTES 6144 /* how far ahead of the products weights are fetched: without, 8 rows take 1.7 times as long, one 1.2 */
#define MAX_SHIFT 14 /* scales of a superblock's groups: at most 2**14 apart */

enum { F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; /* as in GGUF files */

typedef struct { int type, per, bits, file_bytes, packed_bytes, mins; } Kind; /* per: values of a block */
static const Kind KINDS[] = {
    {F16, 1, 16, 2, 2 * ROWS, 0},
    {Q4_0, 32, 4, 18, 2 * ROWS + 16 * ROWS, 0},
    {Q4_1, 32, 4, 20, 4 * ROWS + 16 * ROWS, 1},
    {Q5_0, 32, 5, 22, 2 * ROWS + 20 * ROWS, 0},
    {Q5_1, 32, 5, 24, 4 * ROWS + 20 * ROWS, 1},
    {Q8_0, 32, 8, 34, 2 * ROWS + 32 * ROWS, 0},
    {Q4_K, 256, 4, 144, (4 + 16 + 128) * ROWS, 1},
    {Q5_K, 256, 5, 176, (4 + 16 + 160) * ROWS, 1},
    {Q6_K, 256, 6, 210, (2 + 16 + 192) * ROWS, 0},
};
static const Kind *kind_of(int type) {
    for (unsigned i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (KINDS[i].type == type) return KINDS + i;
    return 0;
}

int64_t fr_packed_bytes(int type, int64_t rows, int64_t cols) {
    const Kind *k = kind_of(type);
    if (!k || cols % k->per) return -1;
    return (rows + ROWS - 1) / ROWS * (cols / k->per) * k->packed_bytes;
}

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* The quants of one file block as bytes, the offset that signed formats have left in. */
static void unpack_block(int type, const uint8_t *b, uint8_t *q) {
    switch (type) {
    case Q4_0: case Q4_1: {
        const uint8_t *s = b + (type == Q4_0 ? 2 : 4);
        for (int i = 0; i < 16; i++) q[i] = s[i] & 15, q[i + 16] = s[i] >> 4;
        break;
    }
    case Q5_0: case Q5_1: {
        const uint8_t *h = b + (type == Q5_0 ? 2 : 4), *s = h + 4;
        uint32_t high;
        memcpy(&high, h, 4);
        for (int i = 0; i < 16; i++) {
            q[i] = (s[i] & 15) | ((high >> i & 1) << 4);
            q[i + 16] = (s[i] >> 4) | ((high >> (i + 16) & 1) << 4);
        }
        break;
    }
    case Q8_0:
        for (int i = 0; i < 32; i++) q[i] = b[2 + i] ^ 128;
        break;
    case Q4_K: case Q5_K: {
        const uint8_t *high = b + 16, *s = type == Q4_K ? b + 16 : b + 48;
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 32; i++) {
                uint8_t lo = s[32 * j + i] & 15, hi = s[32 * j + i] >> 4;
                if (type == Q5_K) lo |= (high[i] >> (2 * j) & 1) << 4, hi |= (high[i] >> (2 * j + 1) & 1) << 4;
                q[64 * j + i] = lo, q[64 * j + 32 + i] = hi;
            }
        break;
    }
    case Q6_K:
        for (int n = 0; n < 2; n++) {
            const uint8_t *l = b + 64 * n, *h = b + 128 + 32 * n;
            uint8_t *o = q + 128 * n;
            for (int i = 0; i < 32; i++) {
                o[i] = (l[i] & 15) | (h[i] & 3) << 4;
                o[i + 32] = (l[i + 32] & 15) | (h[i] >> 2 & 3) << 4;
                o[i + 64] = (l[i] >> 4) | (h[i] >> 4 & 3) << 4;
                o[i + 96] = (l[i + 32] >> 4) | (h[i] >> 6) << 4;
            }
        }
        break;
    }
}

/* Scales and minima of a K block, 6 bits each. */
static void unpack_scales(const uint8_t *s, uint8_t *scale, uint8_t *min) {
    for (int j = 0; j < 4; j++) {
        scale[j] = s[j] & 63, min[j] = s[j + 4] & 63;
        scale[j + 4] = (s[j + 8] & 15) | (s[j] >> 6) << 4;
        min[j + 4] = (s[j + 8] >> 4) | (s[j + 4] >> 6) << 4;
    }
}

/* 32 quants of row r into the interleaved vectors of their bits. */
static void put_group(uint8_t *out, int bits, int r, const uint8_t *q) {
    for (int s = 0; s < 8; s++)
        for (int c = 0; c < 4; c++) {
            uint8_t v = q[4 * s + c];
            int at = 4 * r + c;
            if (bits == 8) { out[64 * s + at] = v; continue; }
            out[64 * (s & 3) + at] |= (v & 15) << (s < 4 ? 0 : 4);
            if (bits == 5) out[256 + at] |= (v >> 4) << s;
            if (bits == 6) out[256 + 64 * (s >> 2) + at] |= (v >> 4) << 2 * (s & 3);
        }
}

/* `src` has the file's rows of blocks, `order` (or null) says which of them becomes row i. */
void fr_pack(int type, const uint8_t *src, int64_t rows, int64_t cols, const int32_t *order, int64_t from, int64_t to,
             uint8_t *out) {
    const Kind *k = kind_of(type);
    int64_t blocks = cols / k->per, stride = blocks * k->file_bytes;
    uint8_t q[SUPER], scale[8], min[8];
    int group_bytes = k->bits == 8 ? 512 : 256 + (k->bits == 5 ? 64 : k->bits == 6 ? 128 : 0);
    for (int64_t g = from; g < to; g++)
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t *o = out + (g * blocks + b) * k->packed_bytes;
            memset(o, 0, k->packed_bytes);
            for (int r = 0; r < ROWS; r++) {
                int64_t row = g * ROWS + r;
                if (row >= rows) continue;
                const uint8_t *s = src + (order ? order[row] : row) * stride + b * k->file_bytes;
                unpack_block(type, s, q);
                uint8_t *body = o;
                switch (type) {
                case F16:
                    memcpy(o + 2 * r, s, 2);
                    break;
                case Q4_0: case Q5_0: case Q8_0:
                    memcpy(o + 2 * r, s, 2), body += 2 * ROWS;
                    break;
                case Q4_1: case Q5_1:
                    memcpy(o + 2 * r, s, 2), memcpy(o + 2 * ROWS + 2 * r, s + 2, 2), body += 4 * ROWS;
                    break;
                case Q4_K: case Q5_K:
                    memcpy(o + 2 * r, s, 2), memcpy(o + 2 * ROWS + 2 * r, s + 2, 2);
                    unpack_scales(s + 4, scale, min);
                    for (int j = 0; j < 8; j++)
                        o[4 * ROWS + ROWS * j + r] = scale[j], o[12 * ROWS + 2 * ROWS * (j / 2) + 2 * r + j % 2] = min[j];
                    body += 20 * ROWS;
                    break;
                case Q6_K:
                    memcpy(o + 2 * r, s + 208, 2);
                    for (int j = 0; j < 16; j++) o[2 * ROWS + ROWS * j + r] = s[192 + j];
                    body += 18 * ROWS;
                    break;
                }
                for (int j = 0; j < k->per / GROUP; j++) put_group(body + j * group_bytes, k->bits, r, q + GROUP * j);
            }
        }
}

/* ---- single rows ------------------------------------------------------------------------------------------------- */

static float half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t exponent = h >> 10 & 31, mantissa = h & 1023, bits = exponent == 31 ? 255u << 23 : (exponent + 112) << 23;
    float value;
    bits |= mantissa << 13;
    memcpy(&value, &bits, 4);
    if (!exponent) value = (float)mantissa * 0x1p-24f;
    return h >> 15 ? -value : value;
}
/* q * factor + shift, each rounded: compilers would make one operation of two. A shift of -0 changes nothing. */
INLINE float value_of(int q, float factor, float shift) {
    float value = (float)q * factor;
#ifdef __aarch64__
    __asm__("" : "+w"(value));
#else
    __asm__("" : "+x"(value));
#endif
    return value + shift;
}

/* Some rows of a file's matrix as floats, [count, cols]. */
void fr_rows(int type, const uint8_t *src, int64_t cols, const int64_t *which, int64_t count, float *out) {
    const Kind *k = kind_of(type);
    int64_t blocks = cols / k->per;
    uint8_t q[SUPER], scale[8], min[8];
    for (int64_t t = 0; t < count; t++) {
        const uint8_t *s = src + which[t] * blocks * k->file_bytes;
        for (int64_t b = 0; b < blocks; b++, s += k->file_bytes, out += k->per) {
            unpack_block(type, s, q);
            if (type == F16) *out = half(s);
            else if (type == Q4_K || type == Q5_K) {
                float d = half(s), dm = -half(s + 2);
                unpack_scales(s + 4, scale, min);
                for (int i = 0; i < SUPER; i++) out[i] = value_of(q[i], scale[i / 32] * d, min[i / 32] * dm);
            } else if (type == Q6_K) {
                float d = half(s + 208);
                for (int i = 0; i < SUPER; i++) out[i] = value_of(q[i] - 32, (int8_t)s[192 + i / 16] * d, -0.0f);
            } else {
                int zero = type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q8_0 ? 128 : 0;
                float d = half(s), m = k->mins ? half(s + 2) : -0.0f;
                for (int i = 0; i < GROUP; i++) out[i] = value_of(q[i] - zero, d, m);
            }
        }
    }
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

/* Prepared activations: a tile of up to TILE rows side by side, so that a kernel finds all of them at fixed distances from
 * one address. A block of n rows has q [n][32] and then n of each: */
#if LANES == 16
#define TILE 8 /* as many rows as there are registers for */
#else
#define TILE 4
#endif
#if LANES == 16 && defined(__AMX_INT8__)
#define WIDE 16 /* rows of an AMX tile; of a larger count whole tiles of these come first */
/* Rows from which AMX is faster: 16 rows take 0.79 (Q4_K), 0.82 (Q6_K), 0.97 (Q4_1), 1.1 (Q8_0) of VNNI's time, 32 rows
 * 0.66, 0.69, 0.85, 0.86 (one core, Sapphire Rapids, 2,048 x 1,536). */
#define WIDE_FROM 32
#define WIDE_FROM_SUPER 16
static int amx_granted(void);
static int64_t wide_rows(int64_t count, int per) {
    return per > 1 && count >= (per == SUPER ? WIDE_FROM_SUPER : WIDE_FROM) && amx_granted() ? count / WIDE * WIDE : 0;
}
#else
#define WIDE TILE
static int64_t wide_rows(int64_t count, int per) { return 0 * count * per; }
#endif
enum {
    SCALE = 32,  /* float */
    OFFSET = 36, /* -16 times the sum of the values */
    TOTAL = 40,  /* float: their sum, scaled */
    BLOCK_BYTES = 44,
};
/* A superblock has q [8][n][32] and then: */
enum {
    POWERS = 256,  /* [8][n] log2 of the group's scale to the superblock's, as an addition to a float's exponent */
    OFFSETS = 288, /* [8][2][n] -32 times the sum of 16, for Q6_K (with AVX2: a pair of int16 that adds up to it) */
    SUMS = 352,    /* [4][n] of two groups, an int16 each, times their powers of two, in units of 2**shift */
    SHIFT = 368,   /* [n] likewise an addition to an exponent */
    SUPER_SCALE = 372, /* [n] float */
    SUPER_BYTES = 376,
};
/* The number i of a field of row t; beside float16 a block is one float. */
INLINE int32_t *field(const uint8_t *x, int n, int offset, int i, int t) { return (int32_t *)(x + offset * n + 4 * (i * n + t)); }
INLINE float *real(const uint8_t *x, int n, int offset, int t) { return (float *)(x + offset * n + 4 * t); }

static int64_t row_bytes(int64_t cols, int per) { return cols / per * (per == 1 ? 4 : per == SUPER ? SUPER_BYTES : BLOCK_BYTES); }
int64_t fr_prepared_bytes(int64_t count, int64_t cols, int per) { return (count * row_bytes(cols, per) + 63) & ~(int64_t)63; }

#if LANES == 16 || defined(__aarch64__)
INLINE int32_t offset_of(int32_t sum) { return -32 * sum; }
#else
INLINE int32_t offset_of(int32_t sum) { return (int32_t)((-16 * sum & 0xffff) * 0x10001u); }
#endif

/* 32 values with a scale of their own, as row t of a tile. */
INLINE void quantise_group(const Vec *v, uint8_t *out, int n, int t) {
    Vec peak = v_abs(v[0]);
    for (int i = 1; i < GROUP / LANES; i++) peak = v_max(peak, v_abs(v[i]));
    float top = v_peak(peak);
    Vec inverse = v_set(top > 0 ? 127.0f / top : 0.0f);
    int8_t *q = (int8_t *)out + GROUP * t;
    for (int i = 0; i < GROUP / LANES; i++) v_store_int8(q + i * LANES, v_mul(v[i], inverse));
    int32_t sum = sum16(q) + sum16(q + 16);
    *real(out, n, SCALE, t) = top / 127.0f, *real(out, n, TOTAL, t) = top / 127.0f * (float)sum;
    *field(out, n, OFFSET, 0, t) = -16 * sum;
}

/* 256 values: the scale of their peak, of which a group of 32 takes the smallest half, quarter, ... that covers it. */
INLINE void quantise_super(const Vec *v, uint8_t *out, int n, int t) {
    float peaks[8], top = 0;
    int32_t power[8], sum[8], largest = 0, shift = 0;
    for (int g = 0; g < 8; g++) {
        Vec peak = v_abs(v[g * GROUP / LANES]);
        for (int i = 1; i < GROUP / LANES; i++) peak = v_max(peak, v_abs(v[g * GROUP / LANES + i]));
        peaks[g] = v_peak(peak), top = peaks[g] > top ? peaks[g] : top;
    }
    if (top < 1e-30f) top = 0; /* what its inverse could not hold */
    for (int g = 0; g < 8; g++) {
        float ratio = top / peaks[g]; /* not a number: its exponent is large */
        uint32_t bits;
        memcpy(&bits, &ratio, 4);
        int32_t exponent = (int32_t)(bits >> 23) - 127;
        exponent = exponent < MAX_SHIFT ? exponent : MAX_SHIFT;
        power[g] = MAX_SHIFT - (exponent > 0 ? exponent : 0);
    }
    *real(out, n, SUPER_SCALE, t) = top / (127.0f * (1 << MAX_SHIFT));
    float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int g = 0; g < 8; g++) {
        int8_t *q = (int8_t *)out + GROUP * (g * n + t);
        Vec factor = v_set(inverse * (float)(1 << (MAX_SHIFT - power[g])));
        for (int i = 0; i < GROUP / LANES; i++) v_store_int8(q + i * LANES, v_mul(v[g * GROUP / LANES + i], factor));
        int32_t s0 = sum16(q), s1 = sum16(q + 16);
        *field(out, n, POWERS, g, t) = power[g] << 23;
        *field(out, n, OFFSETS, 2 * g, t) = offset_of(s0), *field(out, n, OFFSETS, 2 * g + 1, t) = offset_of(s1);
        sum[g] = (s0 + s1) * (1 << power[g]);
        largest |= sum[g] < 0 ? -sum[g] : sum[g];
    }
    while (largest >> shift > INT16_MAX) shift++;
    *field(out, n, SHIFT, 0, t) = shift << 23;
    for (int g = 0; g < 8; g++) {
        int32_t rounded = (sum[g] + (1 << shift >> 1)) >> shift;
        int16_t value = (int16_t)(rounded > INT16_MAX ? INT16_MAX : rounded);
        memcpy((uint8_t *)field(out, n, SUMS, g / 2, t) + 2 * (g % 2), &value, 2);
    }
}

/* Row `t` of `count`. With eps >= 0 it is RMS-normalised first; `norm` may be null. */
void fr_prepare(const float *x, const float *norm, float eps, int64_t cols, int per, int64_t t, int64_t count, uint8_t *out) {
    const int side = t < wide_rows(count, per) ? WIDE : TILE;
    int64_t first = t / side * side, block_bytes = row_bytes(per, per);
    int n = count - first < side ? (int)(count - first) : side, own = (int)(t - first);
    out += first * row_bytes(cols, per);
    Vec factor = v_set(1.0f);
    if (eps >= 0) {
        Vec total = v_set(0);
        for (int64_t i = 0; i < cols; i += LANES) total = v_fma(v_load(x + i), v_load(x + i), total);
        factor = v_set((float)(1.0 / sqrt((double)v_sum(total) / cols + eps)));
    }
    const int size = per == 1 ? LANES : per;
    for (int64_t b = 0; b < cols / size; b++) {
        Vec v[SUPER / LANES];
        for (int i = 0; i < size / LANES; i++) {
            v[i] = v_mul(v_load(x + b * size + i * LANES), factor);
            if (norm) v[i] = v_mul(v[i], v_load(norm + b * size + i * LANES));
        }
        if (per == SUPER) quantise_super(v, out + b * n * block_bytes, n, own);
        else if (per == GROUP) quantise_group(v, out + b * n * block_bytes, n, own);
        else {
            float each[LANES];
            v_store(each, v[0]);
            for (int i = 0; i < LANES; i++) *real(out + (b * LANES + i) * n * block_bytes, n, 0, own) = each[i];
        }
    }
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* The weights from `w` on, into a core's second cache. */
INLINE void fetch(const uint8_t *w, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(w + i, 0, 2);
}
/* Those PREFETCH_BYTES on, while these are multiplied. */
INLINE void fetch_ahead(const uint8_t *w, int64_t bytes, int ahead) {
    if (ahead) fetch(w + PREFETCH_BYTES, bytes);
}
#define UNROLL _Pragma("GCC unroll 8") /* which of a group's vectors it is decides how it is unpacked */
#define UNROLL16 _Pragma("GCC unroll 16")
INLINE int32_t word(const void *p) { int32_t v; memcpy(&v, p, 4); return v; }

#if LANES == 16
#include "tiles16.h"
#if WIDE > TILE
#include "amx16.h"
#endif
#else
#include "tiles8.h"
#endif

const char *fr_isa(void) {
#ifdef AMX
    if (amx_granted()) return ISA " " AMX;
#endif
    return ISA;
}

INLINE void tile(const Kind *k, const uint8_t *w, int64_t blocks, const uint8_t *x, int T, float *y, int64_t ldy, int ahead) {
    switch (k->type) {
    case F16: float_tile(w, blocks, x, T, y, ldy, ahead); break;
    case Q4_0: plain_tile(k, 4, 0, 8, w, blocks, x, T, y, ldy, ahead); break;
    case Q4_1: plain_tile(k, 4, 1, 0, w, blocks, x, T, y, ldy, ahead); break;
    case Q5_0: plain_tile(k, 5, 0, 16, w, blocks, x, T, y, ldy, ahead); break;
    case Q5_1: plain_tile(k, 5, 1, 0, w, blocks, x, T, y, ldy, ahead); break;
    case Q8_0: plain_tile(k, 8, 0, 128, w, blocks, x, T, y, ldy, ahead); break;
    case Q4_K: super_tile(k, 4, w, blocks, x, T, y, ldy, ahead); break;
    case Q5_K: super_tile(k, 5, w, blocks, x, T, y, ldy, ahead); break;
    case Q6_K: q6_tile(k, w, blocks, x, T, y, ldy, ahead); break;
    }
}
typedef void Tile(const Kind *, const uint8_t *, int64_t, const uint8_t *, float *, int64_t, int);
#define FIXED(T) static __attribute__((noinline)) void tile##T(const Kind *k, const uint8_t *w, int64_t b, const uint8_t *x, float *y, int64_t ldy, int ahead) { tile(k, w, b, x, T, y, ldy, ahead); }
FIXED(1) FIXED(2) FIXED(3) FIXED(4)
#if TILE == 8
FIXED(5) FIXED(6) FIXED(7) FIXED(8)
static Tile *const TILES[] = {0, tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8};
#else
static Tile *const TILES[] = {0, tile1, tile2, tile3, tile4};
#endif

/* Row groups from..to of a packed matrix times `count` prepared rows: y [count, (to - from) ROWS]. */
void fr_product(int type, const uint8_t *w, int64_t cols, int64_t from, int64_t to, const uint8_t *x, int64_t count, float *y) {
    const Kind *k = kind_of(type);
    int64_t blocks = cols / k->per, bytes = row_bytes(cols, k->per), ldy = (to - from) * ROWS;
    const int64_t wide = wide_rows(count, k->per);
    fetch(w + from * blocks * k->packed_bytes, PREFETCH_BYTES);
#if WIDE > TILE
    if (wide) wide_product(k, w, blocks, from, to, x, wide, y);
#endif
    for (int64_t g = from; g < to; g++)
        for (int64_t t = wide; t < count; t += TILE)
            TILES[count - t < TILE ? count - t : TILE](k, w + g * blocks * k->packed_bytes, blocks, x + t * bytes,
                                                      y + t * ldy + (g - from) * ROWS, ldy, !t);
}
