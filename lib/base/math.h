/* math.h: scalar arithmetic with the same bits everywhere: no libm, no contraction, one written order (DESIGN section 6).
 * The 16-lane versions live in lib/kernels; these serve tables, routers, samplers and conversions. */
#ifndef COLI_MATH_H
#define COLI_MATH_H

#include "base/base.h"

/* a * b + c rounded once. In software (exact double product, sum rounded to odd) so that every machine agrees. */
float coli_fmaf(float a, float b, float c);

double coli_exp(double x);             /* relative error < 1e-15; 0 and inf at the ends; NaN stays NaN */
double coli_log(double x);             /* x > 0 */
double coli_pow(double x, double y);   /* x > 0, exp(y log x) */
void coli_sincos(double x, double *sine, double *cosine); /* |x| < 2^31, absolute error < 1e-12 */
float coli_expf(float x);              /* the definition that the vector kernels' exp repeats bit for bit */
float coli_sqrtf(float x);             /* IEEE, correctly rounded */

uint16_t coli_f32_to_f16(float x);     /* nearest even; overflow to inf; NaN quiet */
float coli_f16_to_f32(uint16_t x);
uint16_t coli_f32_to_bf16(float x);    /* nearest even; NaN becomes quiet with its sign (7f800001 -> 7fc0) */
COLI_INLINE float coli_bf16_to_f32(uint16_t x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }

#endif
