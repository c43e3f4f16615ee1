/* Products of 16 weight rows, 8 at a time, with AVX2 or NEON. A piece of blocks.c: its formats and its prepared
 * activations. What depends on the instruction set comes first; integers are exact, and floats are computed in one
 * order, so both give the same bits. */
#pragma once

#ifdef __aarch64__
#ifdef __ARM_FEATURE_DOTPROD
#define ISA "neon_dotprod"
#else
#define ISA "neon"
#endif
#define SPAN(bits) ((bits) == 6 ? 4 : 8) /* vectors of a group that are summed before they are scaled: those of one scale */
typedef struct { int32x4_t lo, hi; } Ints; /* one of each row */
typedef struct { int16x8_t lo, hi; } Pairs; /* two of each row */

INLINE Vec half8(const uint8_t *p) {
    float16x8_t a = vreinterpretq_f16_u8(vld1q_u8(p));
    return (Vec){vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a)};
}
INLINE Ints i_set(int32_t a) { return (Ints){vdupq_n_s32(a), vdupq_n_s32(a)}; }
INLINE Ints i_add(Ints a, Ints b) { return (Ints){vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
INLINE Ints i_halved(Ints a) { return (Ints){vshrq_n_s32(a.lo, 1), vshrq_n_s32(a.hi, 1)}; }
INLINE Vec i_float(Ints a) { return (Vec){vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }
INLINE Vec v_fnma(Vec a, Vec b, Vec c) { return (Vec){vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi)}; }
INLINE Vec times_power(Vec a, int32_t power) {
    Ints p = i_add((Ints){vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi)}, i_set(power));
    return (Vec){vreinterpretq_f32_s32(p.lo), vreinterpretq_f32_s32(p.hi)};
}
/* Scales of 8 rows, and what `dot_rows` gave times them, or as it is. */
INLINE Ints widened(int16x8_t a) { return (Ints){vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a)}; }
INLINE Ints scales(const uint8_t *p) { return widened(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)))); }
INLINE Ints scales_signed(const uint8_t *p) { return widened(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))); }
INLINE Ints scaled(Ints a, Ints scale) { return (Ints){vmulq_s32(a.lo, scale.lo), vmulq_s32(a.hi, scale.hi)}; }
INLINE Ints unscaled(Ints a) { return a; }
INLINE Pairs pairs(const uint8_t *p) { /* 16 bytes */
    uint8x16_t a = vld1q_u8(p);
    return (Pairs){vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a))), vreinterpretq_s16_u16(vmovl_high_u8(a))};
}
INLINE int32x4_t dot_pair(int16x8_t a, int16x8_t b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}
INLINE Ints dot_pairs(Pairs a, int32_t two) { /* a times the two int16 of a word */
    int16x8_t b = vreinterpretq_s16_s32(vdupq_n_s32(two));
    return (Ints){dot_pair(a.lo, b), dot_pair(a.hi, b)};
}

/* Vector s of a group's 8 for 4 rows: 4 consecutive quants of each. */
INLINE int8x16_t quants(const uint8_t *w, int bits, int s) {
    if (bits == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 * s), vdupq_n_u8(128)));
    uint8x16_t n = vld1q_u8(w + 64 * (s & 3));
    n = s < 4 ? vandq_u8(n, vdupq_n_u8(15)) : vshrq_n_u8(n, 4);
    if (bits > 4) {
        uint8x16_t high = vld1q_u8(w + 256 + (bits == 6 ? 64 * (s >> 2) : 0));
        int shift = bits == 5 ? 4 - s : 4 - 2 * (s & 3);
        n = vorrq_u8(n, vandq_u8(vshlq_u8(high, vdupq_n_s8(shift)), vdupq_n_u8(bits == 5 ? 16 : 48)));
    }
    return vreinterpretq_s8_u8(n);
}
#ifdef __ARM_FEATURE_DOTPROD
#define DOT(i) vdotq_laneq_s32(acc, a, vreinterpretq_s8_s32(b), i)
#else
INLINE int32x4_t dot_bytes(int32x4_t acc, int8x16_t a, int8x16_t b) { /* two products of at most 128 * 127 fit into 16 bits */
    return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
}
#define DOT(i) dot_bytes(acc, a, vreinterpretq_s8_s32(vdupq_laneq_s32(b, i)))
#endif
/* acc plus each row's 4 quants times those of word i of b: a number that is part of the instruction. */
INLINE int32x4_t dot(int32x4_t acc, int8x16_t a, int32x4_t b, int i) {
    switch (i) {
    case 0: return DOT(0);
    case 1: return DOT(1);
    case 2: return DOT(2);
    default: return DOT(3);
    }
}
/* acc[t] = vectors from..to of a group, rows 8h to 8h + 7, times activation row t's values, of which 16 are
 * read at a time: words of their own take loads, copies and registers, 1.7 times the instructions. */
INLINE void dot_rows(Ints *acc, const uint8_t *w, int bits, int h, int from, int to, const int8_t (*q)[GROUP], int T) {
    for (int t = 0; t < T; t++) acc[t] = i_set(0);
    UNROLL for (int s = from; s < to; s += 4) {
        int32x4_t x[TILE];
        for (int t = 0; t < T; t++) x[t] = vreinterpretq_s32_s8(vld1q_s8(q[t] + 4 * s));
        UNROLL for (int i = 0; i < 4; i++) {
            int8x16_t lo = quants(w + 32 * h, bits, s + i), hi = quants(w + 32 * h + 16, bits, s + i);
            for (int t = 0; t < T; t++) acc[t] = (Ints){dot(acc[t].lo, lo, x[t], i), dot(acc[t].hi, hi, x[t], i)};
        }
    }
}
INLINE void dot_signed(Ints *acc, const uint8_t *w, int h, const int8_t (*q)[GROUP], int T) { dot_rows(acc, w, 8, h, 0, 8, q, T); }

#else
#define ISA "avx2"
/* Vectors of a group that are summed in 16 bits: 8 of quants up to 15 cannot overflow them (8 * 2 * 15 * 127 < 2**15),
 * nor 4 of quants up to 31, nor 2 of quants up to 63. */
#define SPAN(bits) ((bits) == 4 ? 8 : (bits) == 5 ? 4 : 2)
typedef __m256i Ints, Pairs;

INLINE Vec half8(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE Ints i_set(int32_t a) { return _mm256_set1_epi32(a); }
INLINE Ints i_add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints i_halved(Ints a) { return _mm256_srai_epi32(a, 1); }
INLINE Vec i_float(Ints a) { return _mm256_cvtepi32_ps(a); }
INLINE Vec v_fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE Vec times_power(Vec a, int32_t power) { return _mm256_castsi256_ps(i_add(_mm256_castps_si256(a), i_set(power))); }

/* Scales of 8 rows as pairs of equal int16, and the pairs that `dot_rows` gave times them, or just added up. */
INLINE __m128i doubled(const uint8_t *p) {
    __m128i a = _mm_loadl_epi64((const __m128i *)p);
    return _mm_unpacklo_epi8(a, a);
}
INLINE Ints scales(const uint8_t *p) { return _mm256_cvtepu8_epi16(doubled(p)); }
INLINE Ints scales_signed(const uint8_t *p) { return _mm256_cvtepi8_epi16(doubled(p)); }
INLINE Ints scaled(Ints a, Ints scale) { return _mm256_madd_epi16(a, scale); }
INLINE Ints unscaled(Ints a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
INLINE Pairs pairs(const uint8_t *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE Ints dot_pairs(Pairs a, int32_t two) { return _mm256_madd_epi16(a, i_set(two)); }

/* Vector s of a group's 8 for rows 8h to 8h + 7: 4 consecutive quants of each. */
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
/* acc[t] = vectors from..to of a group times activation row t's values, as sums of pairs in 16 bits. */
INLINE void dot_rows(Ints *acc, const uint8_t *w, int bits, int h, int from, int to, const int8_t (*q)[GROUP], int T) {
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
INLINE void dot_signed(Ints *acc, const uint8_t *w, int h, const int8_t (*q)[GROUP], int T) { /* quants with 128 added */
    const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
    for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_si256();
    UNROLL for (int s = 0; s < 8; s++) {
        __m256i v = _mm256_xor_si256(quants(w, 8, h, s), flip), size = _mm256_abs_epi8(v);
        for (int t = 0; t < T; t++) {
            __m256i p = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(word(q[t] + 4 * s)), v));
            acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
        }
    }
}
#endif

/* Columns in pairs, each with a sum of its own. */
INLINE void float_tile(const uint8_t *w0, int64_t cols, const uint8_t *x0, int T, float *y, int64_t ldy, int ahead) {
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0 + 16 * h, *x = x0;
        Vec even[TILE], odd[TILE];
        for (int t = 0; t < T; t++) even[t] = odd[t] = v_set(0);
        for (int64_t c = 0; c < cols; c += 2, w += 4 * ROWS, x += 8 * T) {
            if (!h) fetch_ahead(w, 4 * ROWS, ahead);
            Vec v0 = half8(w), v1 = half8(w + 2 * ROWS);
            for (int t = 0; t < T; t++) {
                even[t] = v_fma(v0, v_set(*real(x, T, 0, t)), even[t]);
                odd[t] = v_fma(v1, v_set(*real(x, T, 4, t)), odd[t]);
            }
        }
        for (int t = 0; t < T; t++) v_store(y + t * ldy + 8 * h, v_add(even[t], odd[t]));
    }
}
INLINE void plain_tile(const Kind *k, int bits, int mins, int offset, const uint8_t *w0, int64_t blocks, const uint8_t *x0, int T,
                       float *y, int64_t ldy, int ahead) {
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0, *x = x0;
        Vec acc[TILE];
        for (int t = 0; t < T; t++) acc[t] = v_set(0);
        for (int64_t b = 0; b < blocks; b++, w += k->packed_bytes, x += BLOCK_BYTES * T) {
            const uint8_t *body = w + (mins ? 4 : 2) * ROWS;
            Ints i[TILE];
            if (!h) fetch_ahead(w, k->packed_bytes, ahead);
            if (bits == 8) dot_signed(i, body, h, (const int8_t (*)[GROUP])x, T);
            else
                UNROLL for (int s = 0; s < 8; s += SPAN(bits)) {
                    Ints sum[TILE];
                    dot_rows(sum, body, bits, h, s, s + SPAN(bits), (const int8_t (*)[GROUP])x, T);
                    for (int t = 0; t < T; t++) i[t] = s ? i_add(i[t], unscaled(sum[t])) : unscaled(sum[t]);
                }
            Vec d = half8(w + 16 * h), m = mins ? half8(w + 2 * ROWS + 16 * h) : v_set(0);
            for (int t = 0; t < T; t++) {
                Ints o = i_set(*field(x, T, OFFSET, 0, t));
                if (offset == 8 || offset == 16) i[t] = i_add(i[t], offset == 8 ? i_halved(o) : o);
                if (mins) acc[t] = v_fma(m, v_set(*real(x, T, TOTAL, t)), acc[t]);
                acc[t] = v_fma(v_mul(i_float(i[t]), d), v_set(*real(x, T, SCALE, t)), acc[t]);
            }
        }
        for (int t = 0; t < T; t++) v_store(y + t * ldy + 8 * h, acc[t]);
    }
}
INLINE void super_tile(const Kind *k, int bits, const uint8_t *w0, int64_t blocks, const uint8_t *x0, int T, float *y, int64_t ldy, int ahead) {
    const int group = 256 + (bits == 5 ? 64 : 0);
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0, *x = x0;
        Vec acc[TILE];
        for (int t = 0; t < T; t++) acc[t] = v_set(0);
        for (int64_t b = 0; b < blocks; b++, w += k->packed_bytes, x += SUPER_BYTES * T) {
            Vec part[TILE];
            Ints min[TILE];
            if (!h) fetch_ahead(w, k->packed_bytes, ahead);
            for (int t = 0; t < T; t++) part[t] = v_set(0), min[t] = i_set(0);
            for (int j = 0; j < 8; j++) {
                const uint8_t *body = w + 20 * ROWS + group * j;
                Ints i[TILE], sc = scales(w + 4 * ROWS + ROWS * j + 8 * h);
                UNROLL for (int s = 0; s < 8; s += SPAN(bits)) {
                    Ints sum[TILE];
                    dot_rows(sum, body, bits, h, s, s + SPAN(bits), (const int8_t (*)[GROUP])x + j * T, T);
                    for (int t = 0; t < T; t++) i[t] = s ? i_add(i[t], scaled(sum[t], sc)) : scaled(sum[t], sc);
                }
                for (int t = 0; t < T; t++)
                    part[t] = v_add(part[t], times_power(i_float(i[t]), *field(x, T, POWERS, j, t)));
            }
            for (int p = 0; p < 4; p++) {
                Pairs m = pairs(w + 12 * ROWS + 2 * ROWS * p + 16 * h);
                for (int t = 0; t < T; t++) min[t] = i_add(min[t], dot_pairs(m, word(field(x, T, SUMS, p, t))));
            }
            Vec d = half8(w + 16 * h), dm = half8(w + 2 * ROWS + 16 * h);
            for (int t = 0; t < T; t++) {
                Vec f = v_mul(part[t], d);
                f = v_fnma(i_float(min[t]), times_power(dm, *field(x, T, SHIFT, 0, t)), f);
                acc[t] = v_fma(f, v_set(*real(x, T, SUPER_SCALE, t)), acc[t]);
            }
        }
        for (int t = 0; t < T; t++) v_store(y + t * ldy + 8 * h, acc[t]);
    }
}
INLINE void q6_tile(const Kind *k, const uint8_t *w0, int64_t blocks, const uint8_t *x0, int T, float *y, int64_t ldy, int ahead) {
    for (int h = 0; h < 2; h++) {
        const uint8_t *w = w0, *x = x0;
        Vec acc[TILE];
        for (int t = 0; t < T; t++) acc[t] = v_set(0);
        for (int64_t b = 0; b < blocks; b++, w += k->packed_bytes, x += SUPER_BYTES * T) {
            Vec part[TILE];
            if (!h) fetch_ahead(w, k->packed_bytes, ahead);
            for (int t = 0; t < T; t++) part[t] = v_set(0);
            for (int j = 0; j < 8; j++) {
                Ints i[TILE];
                UNROLL for (int s = 0; s < 8; s += SPAN(6)) {
                    Ints sum[TILE], sc = scales_signed(w + 2 * ROWS + 2 * ROWS * j + 8 * h + (s < 4 ? 0 : ROWS));
                    dot_rows(sum, w + 18 * ROWS + 384 * j, 6, h, s, s + SPAN(6), (const int8_t (*)[GROUP])x + j * T, T);
                    for (int t = 0; t < T; t++) {
                        sum[t] = scaled(sum[t], sc);
                        if (s % 4 == 0) sum[t] = i_add(sum[t], scaled(i_set(*field(x, T, OFFSETS, 2 * j + s / 4, t)), sc));
                        i[t] = s ? i_add(i[t], sum[t]) : sum[t];
                    }
                }
                for (int t = 0; t < T; t++)
                    part[t] = v_add(part[t], times_power(i_float(i[t]), *field(x, T, POWERS, j, t)));
            }
            Vec d = half8(w + 16 * h);
            for (int t = 0; t < T; t++)
                acc[t] = v_fma(v_mul(part[t], d), v_set(*real(x, T, SUPER_SCALE, t)), acc[t]);
        }
        for (int t = 0; t < T; t++) v_store(y + t * ldy + 8 * h, acc[t]);
    }
}
