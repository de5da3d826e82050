/* math.h: scalar arithmetic with the same bits everywhere: no libm, no contraction, one written order (DESIGN section 6).
 * The 16-lane versions live in lib/kernels; these serve tables, routers, samplers and conversions. */
#ifndef COLI_MATH_H
#define COLI_MATH_H

#include "base/base.h"

/* a * b + c rounded once: in software (exact double product, sum rounded to odd) where the target's baseline has no such
 * instruction, so that every machine agrees. */
float coli_fmaf_soft(float a, float b, float c);

/* 1 where rounding this sum, of an exact product and a float, from double to float might not be rounding once: in the middle
 * between two normal floats (a middle is a double too: what is not there was on the same side of it before), and where the
 * float is subnormal. */
COLI_INLINE uint32_t coli_rounds_twice(double sum) {
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    uint32_t middle = ((uint32_t)bits & 0x1FFFFFFFu) == 0x10000000u;
    return middle | ((uint32_t)(__builtin_fabs(sum) < 0x1p-126) & (uint32_t)(sum != 0));
}

#if defined(__aarch64__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__riscv_flen)
#  define COLI_HAVE_FMA 1
COLI_INLINE float coli_fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
COLI_INLINE float coli_fmaf(float a, float b, float c) { return coli_fmaf_soft(a, b, c); }
#endif

double coli_exp(double x);             /* relative error < 1e-15; 0 and inf at the ends; NaN stays NaN */
double coli_log(double x);             /* x > 0 */
double coli_pow(double x, double y);   /* x > 0, exp(y log x) */
void coli_sincos(double x, double *sine, double *cosine); /* absolute error < 1e-12; NaN unless |x| < 2^31 */
float coli_sqrtf(float x);             /* IEEE, correctly rounded */

/* exp in single precision, at most 1 ulp from the true value: the definition that the vector kernels repeat bit for bit. fma, *, -
 * are single-precision IEEE operations rounded to nearest even; steps in this order, nothing reassociated:
 *
 *     t  = fma(x, COLI_EXPF_LOG2E, COLI_EXPF_MAGIC)        the integer n nearest to x / ln 2 (ties to even) in t's low bits
 *     nf = t - COLI_EXPF_MAGIC                             n as a float
 *     n  = bits(t) - bits(COLI_EXPF_MAGIC)                 n as a 32-bit integer, -126 ... 128
 *     r  = fma(nf, -COLI_EXPF_LN2_HI, x)                   |r| <= ln 2 / 2 and a little
 *     r  = fma(nf, -COLI_EXPF_LN2_LO, r)
 *     p  = COLI_EXPF_C6
 *     p  = fma(p, r, C5), then C4, C3, C2, 1.0f, 1.0f      exp(r)
 *     y  = p * pow2(n >> 1) * pow2(n - (n >> 1))           >> arithmetic; pow2(i) = the float with bits (i + 127) << 23;
 *                                                          both products are exact: p * pow2(n) is never subnormal
 *     x > COLI_EXPF_MAX: y = +infinity. x < COLI_EXPF_MIN: y = +0 (also where a subnormal would be right). x NaN: y is the
 *     NaN 7fc00000. Lanes outside the range may compute garbage first, the selection comes last. */
#define COLI_EXPF_MAX 0x1.62e42ep+6f    /* 88.72283..., the largest x with a finite result */
#define COLI_EXPF_MIN (-0x1.5d589ep+6f) /* -87.33654..., the smallest x with a normal result */
#define COLI_EXPF_LOG2E 0x1.715476p+0f
#define COLI_EXPF_MAGIC 0x1.8p+23f
#define COLI_EXPF_LN2_HI 0x1.62e430p-1f
#define COLI_EXPF_LN2_LO (-0x1.05c610p-29f)
#define COLI_EXPF_C2 0x1.fffffcp-2f
#define COLI_EXPF_C3 0x1.555492p-3f
#define COLI_EXPF_C4 0x1.5558f2p-5f
#define COLI_EXPF_C5 0x1.123a20p-7f
#define COLI_EXPF_C6 0x1.6a23cep-10f
float coli_expf(float x);

uint16_t coli_f32_to_f16(float x);     /* nearest even; overflow to inf; NaN quiet */
float coli_f16_to_f32(uint16_t x);
uint16_t coli_f32_to_bf16(float x);    /* nearest even; NaN becomes quiet with its sign (7f800001 -> 7fc0) */
COLI_INLINE float coli_bf16_to_f32(uint16_t x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }

#endif
