/* Products of 16 weight rows, with AVX512 and VNNI. A piece of blocks.c: its formats and its prepared activations. */
#pragma once
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
