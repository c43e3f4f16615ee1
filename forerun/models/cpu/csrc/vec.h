/* Vectors of floats, 16 or 8 lanes: what the kernels need of an instruction set, under one name. */
#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LANES 16
typedef __m512 Vec;
INLINE Vec v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, Vec a) { _mm512_storeu_ps(p, a); }
INLINE Vec v_set(float a) { return _mm512_set1_ps(a); }
INLINE Vec v_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
INLINE Vec v_sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
INLINE Vec v_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
INLINE Vec v_div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
INLINE Vec v_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec v_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec v_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec v_abs(Vec a) { return _mm512_abs_ps(a); }
INLINE Vec v_round(Vec a) { return _mm512_roundscale_ps(a, 0); }
INLINE Vec v_power2(Vec n) { /* 2**n for whole n from -126 to 127 */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE float v_sum(Vec a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
INLINE float v_peak(Vec a) { return _mm512_reduce_max_ps(a); }
INLINE void v_store_int8(int8_t *p, Vec a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
/* The sums of 16 vectors, each summed in the same order. */
INLINE Vec v_sums(const Vec *a) {
    Vec w[4];
    for (int i = 0; i < 4; i++) {
        const Vec *s = a + 4 * i;
        __m512d t = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1])));
        __m512d u = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3])));
        w[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(t, u)), _mm512_castpd_ps(_mm512_unpackhi_pd(t, u)));
    }
    Vec x = _mm512_add_ps(_mm512_shuffle_f32x4(w[0], w[1], 0x44), _mm512_shuffle_f32x4(w[0], w[1], 0xEE));
    Vec y = _mm512_add_ps(_mm512_shuffle_f32x4(w[2], w[3], 0x44), _mm512_shuffle_f32x4(w[2], w[3], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
}
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
typedef __m256 Vec;
INLINE Vec v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, Vec a) { _mm256_storeu_ps(p, a); }
INLINE Vec v_set(float a) { return _mm256_set1_ps(a); }
INLINE Vec v_add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec v_sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec v_mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec v_div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec v_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec v_min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec v_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec v_abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE Vec v_round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec v_power2(Vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE float v_sum(Vec a) {
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
INLINE float v_peak(Vec a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
INLINE void v_store_int8(int8_t *p, Vec a) {
    __m256i i = _mm256_cvtps_epi32(a);
    __m128i s = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(s, s));
}
/* The sums of 8 vectors, each summed in the same order. */
INLINE Vec v_sums(const Vec *a) {
    Vec w[2];
    for (int i = 0; i < 2; i++) {
        const Vec *s = a + 4 * i;
        __m256d t = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(s[0], s[1]), _mm256_unpackhi_ps(s[0], s[1])));
        __m256d u = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(s[2], s[3]), _mm256_unpackhi_ps(s[2], s[3])));
        w[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(t, u)), _mm256_castpd_ps(_mm256_unpackhi_pd(t, u)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(w[0], w[1], 0x20), _mm256_permute2f128_ps(w[0], w[1], 0x31));
}
#elif defined(__aarch64__)
#define LANES 8
typedef struct { float32x4_t lo, hi; } Vec;
#define EACH(name, of) INLINE Vec name(Vec a) { return (Vec){of(a.lo), of(a.hi)}; }
#define PAIR(name, of) INLINE Vec name(Vec a, Vec b) { return (Vec){of(a.lo, b.lo), of(a.hi, b.hi)}; }
PAIR(v_add, vaddq_f32) PAIR(v_sub, vsubq_f32) PAIR(v_mul, vmulq_f32) PAIR(v_div, vdivq_f32)
PAIR(v_max, vmaxnmq_f32) PAIR(v_min, vminnmq_f32) EACH(v_abs, vabsq_f32) EACH(v_round, vrndnq_f32)
INLINE Vec v_load(const float *p) { return (Vec){vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void v_store(float *p, Vec a) { vst1q_f32(p, a.lo), vst1q_f32(p + 4, a.hi); }
INLINE Vec v_set(float a) { return (Vec){vdupq_n_f32(a), vdupq_n_f32(a)}; }
INLINE Vec v_fma(Vec a, Vec b, Vec c) { return (Vec){vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
INLINE float32x4_t power2(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
EACH(v_power2, power2)
INLINE float v_sum(Vec a) {
    float32x4_t b = vaddq_f32(a.lo, a.hi);
    return vpadds_f32(vadd_f32(vget_low_f32(b), vget_high_f32(b)));
}
INLINE float v_peak(Vec a) { return vmaxnmvq_f32(vmaxnmq_f32(a.lo, a.hi)); }
INLINE void v_store_int8(int8_t *p, Vec a) {
    vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a.lo)), vqmovn_s32(vcvtnq_s32_f32(a.hi)))));
}
/* The sums of 8 vectors, each summed in the same order. */
INLINE Vec v_sums(const Vec *a) {
    float32x4_t w[8];
    for (int i = 0; i < 8; i++) w[i] = vaddq_f32(a[i].lo, a[i].hi);
    return (Vec){vpaddq_f32(vpaddq_f32(w[0], w[1]), vpaddq_f32(w[2], w[3])), vpaddq_f32(vpaddq_f32(w[4], w[5]), vpaddq_f32(w[6], w[7]))};
}
#else
#error "the kernels need AVX2 and FMA, or NEON of 64-bit ARM"
#endif

/* The sum of 16 integers, and a vector that stays in a register: compilers would load it again for every use, as an
 * operand in memory. */
#ifdef __aarch64__
INLINE int32_t sum16(const int8_t *q) { return vaddlvq_s8(vld1q_s8(q)); }
INLINE Vec v_held(Vec a) {
    __asm__("" : "+w"(a.lo), "+w"(a.hi));
    return a;
}
#else
INLINE int32_t sum16(const int8_t *q) {
    __m128i sum = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)q));
    sum = _mm_madd_epi16(sum, _mm_set1_epi16(1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}
INLINE Vec v_held(Vec a) {
    __asm__("" : "+v"(a));
    return a;
}
#endif

/* e**x to 2 units in the last place, 0 far below zero; e**0 is 1 exactly. */
INLINE Vec v_exp(Vec x) {
    x = v_max(v_min(x, v_set(88.0f)), v_set(-87.0f));
    Vec n = v_round(v_mul(x, v_set(1.44269504f)));
    Vec r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    Vec p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_add(v_fma(v_mul(r, r), p, r), v_set(1.0f));
    return v_mul(p, v_power2(n));
}
