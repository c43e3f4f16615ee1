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

/* ---- activations ------------------------------------------------------------------------------------------------ */

/* Prepared activations: a tile of up to TILE rows side by side, so that a kernel finds all of them at fixed distances from
 * one address. A block of n rows has q [n][32] and then n of each: */
#if LANES == 16
#define TILE 8 /* as many rows as there are registers for */
#else
#define TILE 4
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
    OFFSETS = 288, /* [8][2][n] -32 times the sum of 16, for Q6_K (with 8 lanes: a pair of int16 that adds up to it) */
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

INLINE int32_t sum16(const int8_t *q) {
    __m128i sum = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)q));
    sum = _mm_madd_epi16(sum, _mm_set1_epi16(1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}

INLINE int32_t offset_of(int32_t sum) { return LANES == 16 ? -32 * sum : (int32_t)((-16 * sum & 0xffff) * 0x10001u); }

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
    __m256i exponent = _mm256_castps_si256(_mm256_div_ps(_mm256_set1_ps(top), _mm256_loadu_ps(peaks))); /* not a number: large */
    exponent = _mm256_sub_epi32(_mm256_srli_epi32(exponent, 23), _mm256_set1_epi32(127));
    exponent = _mm256_sub_epi32(_mm256_set1_epi32(MAX_SHIFT), _mm256_min_epi32(exponent, _mm256_set1_epi32(MAX_SHIFT)));
    _mm256_storeu_si256((__m256i *)power, exponent);
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
    int64_t first = t / TILE * TILE, block_bytes = row_bytes(per, per);
    int n = count - first < TILE ? (int)(count - first) : TILE, own = (int)(t - first);
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
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)w + i, _MM_HINT_T1);
}
/* Those PREFETCH_BYTES on, while these are multiplied. */
INLINE void fetch_ahead(const uint8_t *w, int64_t bytes, int ahead) {
    if (ahead) fetch(w + PREFETCH_BYTES, bytes);
}
#define UNROLL _Pragma("GCC unroll 8") /* which of a group's vectors it is decides how it is unpacked */
INLINE int32_t word(const void *p) { int32_t v; memcpy(&v, p, 4); return v; }

#if LANES == 16
#define ISA "avx512_vnni"
INLINE __m512 half16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* Vector s of a group's 8: 4 consecutive quants of each of 16 rows. */
INLINE __m512i quants(const uint8_t *w, int bits, int s) {
    if (bits == 8) return _mm512_loadu_si512(w + 64 * s);
    __m512i n = _mm512_loadu_si512(w + 64 * (s & 3));
    n = _mm512_and_si512(s < 4 ? n : _mm512_srli_epi16(n, 4), _mm512_set1_epi8(15));
    if (bits == 4) return n;
    __m512i high = _mm512_loadu_si512(w + 256 + (bits == 6 ? 64 * (s >> 2) : 0));
    int shift = bits == 5 ? 4 - s : 4 - 2 * (s & 3);
    high = shift >= 0 ? _mm512_slli_epi16(high, shift) : _mm512_srli_epi16(high, -shift);
    return _mm512_or_si512(n, _mm512_and_si512(high, _mm512_set1_epi8(bits == 5 ? 16 : 48)));
}
/* acc[t] += vectors from..to of a group times row t's values. All rows for one vector, then the next: no product waits
 * for the one before it, and a vector is unpacked when it is needed. Compilers would put it in another order. */
INLINE void dot_rows(__m512i *acc, const uint8_t *w, int bits, int from, int to, const int8_t (*q)[GROUP], int T) {
    UNROLL for (int s = from; s < to; s++) {
        __m512i v = quants(w, bits, s);
        __asm__("" : "+v"(v));
        for (int t = 0; t < T; t++) {
            acc[t] = _mm512_dpbusd_epi32(acc[t], v, _mm512_set1_epi32(word(q[t] + 4 * s)));
            __asm__("" : "+v"(acc[t]));
        }
    }
}
/* A float times the power of two that `power` adds to its exponent; zero becomes about 1e-34. */
INLINE __m512 times_power(__m512 a, int32_t power) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(power)));
}

/* Columns in pairs, each with a sum of its own. */
INLINE void float_tile(const uint8_t *w, int64_t cols, const uint8_t *x, int T, float *y, int64_t ldy, int ahead) {
    __m512 even[TILE], odd[TILE];
    for (int t = 0; t < T; t++) even[t] = odd[t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < cols; c += 2, w += 4 * ROWS, x += 8 * T) {
        fetch_ahead(w, 4 * ROWS, ahead);
        __m512 w0 = half16(w), w1 = half16(w + 2 * ROWS);
        for (int t = 0; t < T; t++) {
            even[t] = _mm512_fmadd_ps(w0, _mm512_set1_ps(*real(x, T, 0, t)), even[t]);
            odd[t] = _mm512_fmadd_ps(w1, _mm512_set1_ps(*real(x, T, 4, t)), odd[t]);
        }
    }
    for (int t = 0; t < T; t++) _mm512_storeu_ps(y + t * ldy, _mm512_add_ps(even[t], odd[t]));
}
INLINE void plain_tile(const Kind *k, int bits, int mins, int offset, const uint8_t *w, int64_t blocks, const uint8_t *x, int T,
                       float *y, int64_t ldy, int ahead) {
    __m512 acc[TILE];
    for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
    for (; blocks; blocks--, w += k->packed_bytes, x += BLOCK_BYTES * T) {
        __m512i i[TILE];
        fetch_ahead(w, k->packed_bytes, ahead);
        for (int t = 0; t < T; t++) {
            i[t] = _mm512_setzero_si512();
            if (offset) i[t] = _mm512_set1_epi32(*field(x, T, OFFSET, 0, t));
            if (offset == 8) i[t] = _mm512_srai_epi32(i[t], 1);
            if (offset == 128) i[t] = _mm512_slli_epi32(i[t], 3);
        }
        dot_rows(i, w + (mins ? 4 : 2) * ROWS, bits, 0, 8, (const int8_t (*)[GROUP])x, T);
        __m512 d = half16(w), m = mins ? half16(w + 2 * ROWS) : _mm512_setzero_ps();
        for (int t = 0; t < T; t++) {
            if (mins) acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(*real(x, T, TOTAL, t)), acc[t]);
            acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(i[t]), d), _mm512_set1_ps(*real(x, T, SCALE, t)), acc[t]);
        }
    }
    for (int t = 0; t < T; t++) _mm512_storeu_ps(y + t * ldy, acc[t]);
}
INLINE void super_tile(const Kind *k, int bits, const uint8_t *w, int64_t blocks, const uint8_t *x, int T, float *y, int64_t ldy, int ahead) {
    __m512 acc[TILE];
    const int group = 256 + (bits == 5 ? 64 : 0);
    for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
    for (; blocks; blocks--, w += k->packed_bytes, x += SUPER_BYTES * T) {
        fetch_ahead(w, k->packed_bytes, ahead);
        __m512 part[TILE];
        __m512i min[TILE];
        for (int t = 0; t < T; t++) part[t] = _mm512_setzero_ps(), min[t] = _mm512_setzero_si512();
        for (int j = 0; j < 8; j++) {
            __m512i i[TILE];
            for (int t = 0; t < T; t++) i[t] = _mm512_setzero_si512();
            dot_rows(i, w + 20 * ROWS + group * j, bits, 0, 8, (const int8_t (*)[GROUP])x + j * T, T);
            __m512 sc = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + 4 * ROWS + ROWS * j))));
            for (int t = 0; t < T; t++)
                part[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[t]), times_power(sc, *field(x, T, POWERS, j, t)), part[t]);
        }
        for (int p = 0; p < 4; p++) {
            __m512i m = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(w + 12 * ROWS + 2 * ROWS * p)));
            for (int t = 0; t < T; t++) min[t] = _mm512_dpwssd_epi32(min[t], m, _mm512_set1_epi32(word(field(x, T, SUMS, p, t))));
        }
        __m512 d = half16(w), dm = half16(w + 2 * ROWS);
        for (int t = 0; t < T; t++) {
            __m512 f = _mm512_mul_ps(part[t], d);
            f = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min[t]), times_power(dm, *field(x, T, SHIFT, 0, t)), f);
            acc[t] = _mm512_fmadd_ps(f, _mm512_set1_ps(*real(x, T, SUPER_SCALE, t)), acc[t]);
        }
    }
    for (int t = 0; t < T; t++) _mm512_storeu_ps(y + t * ldy, acc[t]);
}
INLINE void q6_tile(const Kind *k, const uint8_t *w, int64_t blocks, const uint8_t *x, int T, float *y, int64_t ldy, int ahead) {
    __m512 acc[TILE];
    for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
    for (; blocks; blocks--, w += k->packed_bytes, x += SUPER_BYTES * T) {
        fetch_ahead(w, k->packed_bytes, ahead);
        __m512 part[TILE], d = half16(w);
        for (int t = 0; t < T; t++) part[t] = _mm512_setzero_ps();
        for (int j = 0; j < 8; j++)
            UNROLL for (int h = 0; h < 2; h++) {
                __m512i i[TILE];
                for (int t = 0; t < T; t++) i[t] = _mm512_set1_epi32(*field(x, T, OFFSETS, 2 * j + h, t));
                dot_rows(i, w + 18 * ROWS + 384 * j, 6, 4 * h, 4 * h + 4, (const int8_t (*)[GROUP])x + j * T, T);
                const uint8_t *s = w + 2 * ROWS + 2 * ROWS * j + ROWS * h;
                __m512 sc = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)s)));
                for (int t = 0; t < T; t++)
                    part[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[t]), times_power(sc, *field(x, T, POWERS, j, t)), part[t]);
            }
        for (int t = 0; t < T; t++)
            acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(part[t], d), _mm512_set1_ps(*real(x, T, SUPER_SCALE, t)), acc[t]);
    }
    for (int t = 0; t < T; t++) _mm512_storeu_ps(y + t * ldy, acc[t]);
}
#else
#define ISA "avx2"
INLINE __m256 half8(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

/* As above for rows 8h to 8h + 7. */
INLINE __m256i quants(const uint8_t *w, int bits, int h, int s) {
    w += 32 * h;
    if (bits == 8) return _mm256_loadu_si256((const __m256i *)(w + 64 * s));
    __m256i n = _mm256_loadu_si256((const __m256i *)(w + 64 * (s & 3)));
    n = _mm256_and_si256(s < 4 ? n : _mm256_srli_epi16(n, 4), _mm256_set1_epi8(15));
    if (bits == 4) return n;
    __m256i high = _mm256_loadu_si256((const __m256i *)(w + 256 + (bits == 6 ? 64 * (s >> 2) : 0)));
    int shift = bits == 5 ? 4 - s : 4 - 2 * (s & 3);
    high = shift >= 0 ? _mm256_slli_epi16(high, shift) : _mm256_srli_epi16(high, -shift);
    return _mm256_or_si256(n, _mm256_and_si256(high, _mm256_set1_epi8(bits == 5 ? 16 : 48)));
}
INLINE __m256 times_power(__m256 a, int32_t power) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(power)));
}
/* acc[t] = sums of pairs in 16 bits: 8 vectors of quants up to 15 cannot overflow them (8 * 2 * 15 * 127 < 2**15), nor 4 of
 * quants up to 31, nor 2 of quants up to 63. */
INLINE void dot_rows(__m256i *acc, const uint8_t *w, int bits, int h, int from, int to, const int8_t (*q)[GROUP], int T) {
    UNROLL for (int s = from; s < to; s++) {
        __m256i v = quants(w, bits, h, s);
        __asm__("" : "+x"(v));
        for (int t = 0; t < T; t++) {
            __m256i p = _mm256_maddubs_epi16(v, _mm256_set1_epi32(word(q[t] + 4 * s)));
            acc[t] = s == from ? p : _mm256_add_epi16(acc[t], p);
            __asm__("" : "+x"(acc[t]));
        }
    }
}
INLINE void dot_signed(__m256i *acc, const uint8_t *w, int h, const int8_t (*q)[GROUP], int T) { /* quants with 128 added */
    const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
    UNROLL for (int s = 0; s < 8; s++) {
        __m256i v = _mm256_xor_si256(quants(w, 8, h, s), flip), size = _mm256_abs_epi8(v);
        for (int t = 0; t < T; t++) {
            __m256i p = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(word(q[t] + 4 * s)), v));
            acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
        }
    }
}

INLINE void float_tile(const uint8_t *w0, int64_t cols, const uint8_t *x0, int T, float *y, int64_t ldy, int ahead) {
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0 + 16 * h, *x = x0;
        __m256 even[TILE], odd[TILE];
        for (int t = 0; t < T; t++) even[t] = odd[t] = _mm256_setzero_ps();
        for (int64_t c = 0; c < cols; c += 2, w += 4 * ROWS, x += 8 * T) {
            if (!h) fetch_ahead(w, 4 * ROWS, ahead);
            __m256 v0 = half8(w), v1 = half8(w + 2 * ROWS);
            for (int t = 0; t < T; t++) {
                even[t] = _mm256_fmadd_ps(v0, _mm256_set1_ps(*real(x, T, 0, t)), even[t]);
                odd[t] = _mm256_fmadd_ps(v1, _mm256_set1_ps(*real(x, T, 4, t)), odd[t]);
            }
        }
        for (int t = 0; t < T; t++) _mm256_storeu_ps(y + t * ldy + 8 * h, _mm256_add_ps(even[t], odd[t]));
    }
}
INLINE void plain_tile(const Kind *k, int bits, int mins, int offset, const uint8_t *w0, int64_t blocks, const uint8_t *x0, int T,
                       float *y, int64_t ldy, int ahead) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0, *x = x0;
        __m256 acc[TILE];
        for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
        for (int64_t b = 0; b < blocks; b++, w += k->packed_bytes, x += BLOCK_BYTES * T) {
            const uint8_t *body = w + (mins ? 4 : 2) * ROWS;
            __m256i i[TILE], low[TILE];
            if (!h) fetch_ahead(w, k->packed_bytes, ahead);
            if (bits == 8) {
                for (int t = 0; t < T; t++) i[t] = _mm256_setzero_si256();
                dot_signed(i, body, h, (const int8_t (*)[GROUP])x, T);
            } else if (bits == 4) {
                dot_rows(i, body, bits, h, 0, 8, (const int8_t (*)[GROUP])x, T);
                for (int t = 0; t < T; t++) i[t] = _mm256_madd_epi16(i[t], ones);
            } else {
                dot_rows(low, body, bits, h, 0, 4, (const int8_t (*)[GROUP])x, T);
                for (int t = 0; t < T; t++) low[t] = _mm256_madd_epi16(low[t], ones);
                dot_rows(i, body, bits, h, 4, 8, (const int8_t (*)[GROUP])x, T);
                for (int t = 0; t < T; t++) i[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(i[t], ones));
            }
            __m256 d = half8(w + 16 * h), m = mins ? half8(w + 2 * ROWS + 16 * h) : _mm256_setzero_ps();
            for (int t = 0; t < T; t++) {
                __m256i o = _mm256_set1_epi32(*field(x, T, OFFSET, 0, t));
                if (offset == 8 || offset == 16) i[t] = _mm256_add_epi32(i[t], offset == 8 ? _mm256_srai_epi32(o, 1) : o);
                if (mins) acc[t] = _mm256_fmadd_ps(m, _mm256_set1_ps(*real(x, T, TOTAL, t)), acc[t]);
                acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(i[t]), d), _mm256_set1_ps(*real(x, T, SCALE, t)), acc[t]);
            }
        }
        for (int t = 0; t < T; t++) _mm256_storeu_ps(y + t * ldy + 8 * h, acc[t]);
    }
}
INLINE __m256i twice(__m128i bytes8) { /* 8 bytes as pairs of equal int16 */
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes8, bytes8));
}
INLINE __m256i twice_signed(__m128i bytes8) { return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes8, bytes8)); }

INLINE void super_tile(const Kind *k, int bits, const uint8_t *w0, int64_t blocks, const uint8_t *x0, int T, float *y, int64_t ldy, int ahead) {
    const int group = 256 + (bits == 5 ? 64 : 0);
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0, *x = x0;
        __m256 acc[TILE];
        for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
        for (int64_t b = 0; b < blocks; b++, w += k->packed_bytes, x += SUPER_BYTES * T) {
            __m256 part[TILE];
            __m256i min[TILE];
            if (!h) fetch_ahead(w, k->packed_bytes, ahead);
            for (int t = 0; t < T; t++) part[t] = _mm256_setzero_ps(), min[t] = _mm256_setzero_si256();
            for (int j = 0; j < 8; j++) {
                const uint8_t *body = w + 20 * ROWS + group * j;
                __m256i i[TILE], high[TILE], sc = twice(_mm_loadl_epi64((const __m128i *)(w + 4 * ROWS + ROWS * j + 8 * h)));
                dot_rows(i, body, bits, h, 0, bits == 4 ? 8 : 4, (const int8_t (*)[GROUP])x + j * T, T);
                for (int t = 0; t < T; t++) i[t] = _mm256_madd_epi16(i[t], sc);
                if (bits == 5) {
                    dot_rows(high, body, bits, h, 4, 8, (const int8_t (*)[GROUP])x + j * T, T);
                    for (int t = 0; t < T; t++) i[t] = _mm256_add_epi32(i[t], _mm256_madd_epi16(high[t], sc));
                }
                for (int t = 0; t < T; t++)
                    part[t] = _mm256_add_ps(part[t], times_power(_mm256_cvtepi32_ps(i[t]), *field(x, T, POWERS, j, t)));
            }
            for (int p = 0; p < 4; p++) {
                __m256i m = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w + 12 * ROWS + 2 * ROWS * p + 16 * h)));
                for (int t = 0; t < T; t++)
                    min[t] = _mm256_add_epi32(min[t], _mm256_madd_epi16(m, _mm256_set1_epi32(word(field(x, T, SUMS, p, t)))));
            }
            __m256 d = half8(w + 16 * h), dm = half8(w + 2 * ROWS + 16 * h);
            for (int t = 0; t < T; t++) {
                __m256 f = _mm256_mul_ps(part[t], d);
                f = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(min[t]), times_power(dm, *field(x, T, SHIFT, 0, t)), f);
                acc[t] = _mm256_fmadd_ps(f, _mm256_set1_ps(*real(x, T, SUPER_SCALE, t)), acc[t]);
            }
        }
        for (int t = 0; t < T; t++) _mm256_storeu_ps(y + t * ldy + 8 * h, acc[t]);
    }
}
INLINE void q6_tile(const Kind *k, const uint8_t *w0, int64_t blocks, const uint8_t *x0, int T, float *y, int64_t ldy, int ahead) {
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0, *x = x0;
        __m256 acc[TILE];
        for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
        for (int64_t b = 0; b < blocks; b++, w += k->packed_bytes, x += SUPER_BYTES * T) {
            __m256 part[TILE];
            if (!h) fetch_ahead(w, k->packed_bytes, ahead);
            for (int t = 0; t < T; t++) part[t] = _mm256_setzero_ps();
            for (int j = 0; j < 8; j++) {
                const uint8_t *s = w + 2 * ROWS + 2 * ROWS * j + 8 * h;
                __m256i i[TILE], pair[TILE];
                UNROLL for (int g = 0; g < 4; g++) {
                    __m256i sc = twice_signed(_mm_loadl_epi64((const __m128i *)(s + (g < 2 ? 0 : ROWS))));
                    dot_rows(pair, w + 18 * ROWS + 384 * j, 6, h, 2 * g, 2 * g + 2, (const int8_t (*)[GROUP])x + j * T, T);
                    for (int t = 0; t < T; t++) {
                        pair[t] = _mm256_madd_epi16(pair[t], sc);
                        if (g % 2 == 0)
                            pair[t] = _mm256_add_epi32(pair[t], _mm256_madd_epi16(sc, _mm256_set1_epi32(*field(x, T, OFFSETS, 2 * j + g / 2, t))));
                        i[t] = g ? _mm256_add_epi32(i[t], pair[t]) : pair[t];
                    }
                }
                for (int t = 0; t < T; t++)
                    part[t] = _mm256_add_ps(part[t], times_power(_mm256_cvtepi32_ps(i[t]), *field(x, T, POWERS, j, t)));
            }
            __m256 d = half8(w + 16 * h);
            for (int t = 0; t < T; t++)
                acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(part[t], d), _mm256_set1_ps(*real(x, T, SUPER_SCALE, t)), acc[t]);
        }
        for (int t = 0; t < T; t++) _mm256_storeu_ps(y + t * ldy + 8 * h, acc[t]);
    }
}
#endif

const char *fr_isa(void) { return ISA; }

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
    fetch(w + from * blocks * k->packed_bytes, PREFETCH_BYTES);
    for (int64_t g = from; g < to; g++)
        for (int64_t t = 0; t < count; t += TILE)
            TILES[count - t < TILE ? count - t : TILE](k, w + g * blocks * k->packed_bytes, blocks, x + t * bytes,
                                                      y + t * ldy + (g - from) * ROWS, ldy, !t);
}
