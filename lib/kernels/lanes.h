/* lanes.h: the 16 lanes of a tile as one vector value, by clang's vector extensions: one register with AVX-512, two with AVX2.
 * Operators are lane by lane and round as the scalar ones do. For the files of one instruction set (with fma and f16
 * conversion) alone; everything here is inlined. */
#ifndef COLI_LANES_H
#define COLI_LANES_H

#ifdef __AVX2__
#  include <immintrin.h>
#endif

#include "base/math.h"

/* Vectors wider than the machine's are split; they are never passed to a function that is really called. */
#pragma clang diagnostic ignored "-Wpsabi"

#define LANES COLIBRI_TILE_ROWS
/* for i = 0 ... n - 1, written out: n is a constant and i indexes registers. */
#define EACH(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)

typedef float v16f __attribute__((vector_size(64), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), may_alias));
typedef int8_t v16c __attribute__((vector_size(16), may_alias));
typedef int16_t v32s __attribute__((vector_size(64), may_alias));
typedef _Float16 v16h __attribute__((vector_size(32), may_alias));
typedef _Float16 v32h __attribute__((vector_size(64), may_alias));

COLI_INLINE v16f load(const float *p) { return *(const v16f *)(const void *)p; }
COLI_INLINE void store(float *p, v16f v) { *(v16f *)(void *)p = v; }
COLI_INLINE v16f splat(float x) { return (v16f){ x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x }; }
#if defined(__FMA__) || defined(__aarch64__)
COLI_INLINE v16f fma16(v16f a, v16f b, v16f c) { return __builtin_elementwise_fma(a, b, c); }
#else /* tests that emulate an instruction set: not every fmaf of a compiler's library rounds once */
COLI_INLINE v16f fma16(v16f a, v16f b, v16f c) {
    for (int i = 0; i < LANES; i++) c[i] = coli_fmaf(a[i], b[i], c[i]);
    return c;
}
#endif

/* yes where the mask (all ones or zeros a lane) is set, else no. */
COLI_INLINE v16f choose(v16i mask, v16f yes, v16f no) { return (v16f)((mask & (v16i)yes) | (~mask & (v16i)no)); }

COLI_INLINE v16f larger(v16f a, v16f b) { return choose(a > b, a, b); } /* b if a is NaN */
COLI_INLINE v16f smaller(v16f a, v16f b) { return choose(a < b, a, b); }

COLI_INLINE v16f clamp(v16f x, float limit) { /* NaN stays */
    x = choose(x > splat(limit), splat(limit), x);
    return choose(x < splat(-limit), splat(-limit), x);
}

COLI_INLINE v16f widen_f16(const uint16_t *p) { /* 32-byte aligned */
    return __builtin_convertvector(*(const v16h *)(const void *)p, v16f);
}

#define SWAP_LANES(v, h)                                                                                                \
    __builtin_shufflevector(v, v, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, 11 ^ h, \
                            12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h)

/* The fixed tree over 16 lanes: +8, +4, +2, +1. */
COLI_INLINE float tree(v16f v) {
    v += SWAP_LANES(v, 8);
    v += SWAP_LANES(v, 4);
    v += SWAP_LANES(v, 2);
    v += SWAP_LANES(v, 1);
    return v[0];
}

COLI_INLINE int32_t sum_lanes(v16i v) {
    v += SWAP_LANES(v, 8);
    v += SWAP_LANES(v, 4);
    v += SWAP_LANES(v, 2);
    v += SWAP_LANES(v, 1);
    return v[0];
}

/* Of lanes that are not NaN. */
COLI_INLINE float largest_lane(v16f v) {
    for (int h = LANES / 2; h > 0; h /= 2)
        for (int i = 0; i < h; i++) v[i] = v[i + h] > v[i] ? v[i + h] : v[i];
    return v[0];
}

COLI_INLINE v16f round_even16(v16f v) { return (v + splat(12582912.0f)) - splat(12582912.0f); } /* |v| <= 2^22 */

/* p * 2^n, exact: nf = n as a float. Anything where nf is out of range. */
COLI_INLINE v16f scale16(v16f p, v16f nf, v16i n) {
#ifdef __AVX512F__
    (void)n;
    return (v16f)_mm512_scalef_ps((__m512)p, (__m512)nf);
#else
    (void)nf;
    v16i half = n >> 1;
    v16u high = ((v16u)half + 127) << 23, low = ((v16u)n - (v16u)half + 127) << 23;
    return p * (v16f)high * (v16f)low;
#endif
}

/* coli_expf (base/math.h) up to its selections, so for x in [COLI_EXPF_MIN, COLI_EXPF_MAX]; NaN gives some NaN. */
COLI_INLINE v16f exp16_between(v16f x) {
    v16f t = fma16(x, splat(COLI_EXPF_LOG2E), splat(COLI_EXPF_MAGIC)), nf = t - splat(COLI_EXPF_MAGIC);
    v16i n = (v16i)((v16u)t - (v16u)splat(COLI_EXPF_MAGIC));
    v16f r = fma16(nf, splat(-COLI_EXPF_LN2_HI), x);
    r = fma16(nf, splat(-COLI_EXPF_LN2_LO), r);
    v16f p = splat(COLI_EXPF_C6);
    p = fma16(p, r, splat(COLI_EXPF_C5));
    p = fma16(p, r, splat(COLI_EXPF_C4));
    p = fma16(p, r, splat(COLI_EXPF_C3));
    p = fma16(p, r, splat(COLI_EXPF_C2));
    p = fma16(p, r, splat(1.0f));
    p = fma16(p, r, splat(1.0f));
    return scale16(p, nf, n);
}

/* coli_expf of x <= 0; NaN gives some NaN. */
COLI_INLINE v16f exp16_negative(v16f x) { return choose(x < splat(COLI_EXPF_MIN), splat(0.0f), exp16_between(x)); }

COLI_INLINE v16f exp16(v16f x) {
    v16f y = exp16_negative(x);
    y = choose(x > splat(COLI_EXPF_MAX), splat(__builtin_inff()), y);
    return choose(x != x, splat(__builtin_nanf("")), y);
}

#endif
