/* math.c: scalar arithmetic that gives the same bits on every machine: double and integer operations in one written order
 * (compiled with -ffp-contract=off), no libm. Serves tables, routers, the sampler, the reference kernels; see math.h. */
#include "base/math.h"

COLI_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

COLI_INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

COLI_INLINE uint64_t bits_of_double(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    return u;
}

COLI_INLINE double double_of(uint64_t u) {
    double x;
    memcpy(&x, &u, 8);
    return x;
}

/* ---- Single precision ------------------------------------------------------------------------------------------------ */

/* The product of two floats is exact in double. Their sum with c is not, and rounding it to double and then to float could
 * round twice. So the sum is rounded to odd: where it was inexact, of the two doubles around it take the one whose last bit
 * is 1. With 53 bits >= 24 + 2 the second rounding, also to a subnormal float, then sees on which side of a tie it stands. */
float coli_fmaf_soft(float a, float b, float c) {
    double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    if (!coli_rounds_twice(sum)) return (float)sum;
    double part = sum - product; /* TwoSum: sum + error == product + addend exactly */
    double error = (product - (sum - part)) + (addend - part);
    uint64_t u = bits_of_double(sum);
    bool finite = (u & 0x7FF0000000000000u) != 0x7FF0000000000000u;
    if (finite && error != 0 && (u & 1) == 0) u += (error > 0) == (sum > 0) ? 1 : (uint64_t)-1;
    return (float)double_of(u);
}

float coli_expf(float x) {
    if (x != x) return float_of(0x7FC00000u);
    if (x > COLI_EXPF_MAX) return float_of(0x7F800000u);
    if (x < COLI_EXPF_MIN) return 0.0f;
    float t = coli_fmaf(x, COLI_EXPF_LOG2E, COLI_EXPF_MAGIC);
    float nf = t - COLI_EXPF_MAGIC;
    int32_t n = (int32_t)(bits_of(t) - bits_of(COLI_EXPF_MAGIC));
    float r = coli_fmaf(nf, -COLI_EXPF_LN2_HI, x);
    r = coli_fmaf(nf, -COLI_EXPF_LN2_LO, r);
    float p = COLI_EXPF_C6;
    p = coli_fmaf(p, r, COLI_EXPF_C5);
    p = coli_fmaf(p, r, COLI_EXPF_C4);
    p = coli_fmaf(p, r, COLI_EXPF_C3);
    p = coli_fmaf(p, r, COLI_EXPF_C2);
    p = coli_fmaf(p, r, 1.0f);
    p = coli_fmaf(p, r, 1.0f);
    int32_t half = n >> 1; /* 2^128 is no float: two factors */
    return p * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(n - half + 127) << 23);
}

/* Bit by bit on the significand: exact, and no compiler turns it into a library call. */
float coli_sqrtf(float x) {
    uint32_t u = bits_of(x);
    if (u == 0x7F800000u || (u & 0x7FFFFFFFu) == 0) return x; /* infinity and both zeros */
    if (u > 0x7F800000u) return float_of(0x7FC00000u);        /* NaN and negative numbers */
    int32_t exponent = (int32_t)(u >> 23) - 150;
    uint64_t significand = u & 0x7FFFFFu;
    if (u >> 23) significand |= 0x800000u;
    else exponent++;
    int shift = __builtin_clzll(significand) - 13; /* to 51 significant bits, so that the root has 26: one for rounding */
    if ((exponent - shift) & 1) shift--;           /* 51 or 50 bits, whichever makes the exponent even */
    uint64_t rest = significand << shift, root = 0;
    for (uint64_t bit = (uint64_t)1 << 25; bit; bit >>= 1) {
        uint64_t trial = (root << 1 | bit) * bit;
        if (rest >= trial) {
            rest -= trial;
            root |= bit;
        }
    }
    /* root has 26 (or 25 and a bit) bits; a rest makes it odd, so that the one rounding below cannot see a false tie. */
    double value = (double)(root << 1 | (rest != 0));
    return (float)(value * double_of((uint64_t)((exponent - shift) / 2 - 1 + 1023) << 52));
}

/* ---- 16-bit types ------------------------------------------------------------------------------------------------------ */

uint16_t coli_f32_to_f16(float x) {
    uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u;
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | (u >> 13 & 0x3FFu)); /* NaN: quiet, the payload's high bits */
    if (u >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);                     /* 65520 and more round to infinity */
    if (u >= 0x38800000u) { /* 2^-14: normal. The carry of rounding runs into the exponent as it should */
        return (uint16_t)(sign | ((u + 0xFFFu + (u >> 13 & 1u)) >> 13) - (112u << 10));
    }
    if (u < 0x33000000u) return (uint16_t)sign; /* below 2^-25, half the smallest subnormal */
    uint32_t shift = 126 - (u >> 23), significand = (u & 0x7FFFFFu) | 0x800000u;
    uint32_t result = significand >> shift, rest = significand & ((1u << shift) - 1), tie = 1u << (shift - 1);
    if (rest > tie || (rest == tie && (result & 1))) result++;
    return (uint16_t)(sign | result);
}

float coli_f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = x >> 10 & 31u, fraction = x & 0x3FFu;
    if (exponent == 31) return float_of(sign | 0x7F800000u | fraction << 13 | (fraction ? 0x400000u : 0));
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f; /* zero or subnormal, exact */
    return float_of(sign | bits_of(magnitude));
}

uint16_t coli_f32_to_bf16(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

/* ---- Double precision ---------------------------------------------------------------------------------------------------- */

#define LN2_HI 0x1.62e42feep-1 /* 32 bits: an exponent times it is exact */
#define LN2_LO 0x1.a39ef35793c76p-33

/* Nearest integer for |x| < 2^51, ties to even: the bits below 1 fall off the end of x + 1.5 * 2^52. */
COLI_INLINE double round_even(double x) { return (x + 0x1.8p+52) - 0x1.8p+52; }

double coli_exp(double x) {
    if (x != x) return x;
    if (x > 709.8) return double_of(0x7FF0000000000000u);
    if (x < -745.2) return 0.0;
    double n = round_even(x * 0x1.71547652b82fep+0);
    double r = (x - n * LN2_HI) - n * LN2_LO; /* |r| <= ln 2 / 2 */
    static const double inverse_factorial[] = { /* 1 / 2! ... 1 / 13! */
        1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800,
        1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    double p = inverse_factorial[11];
    for (int i = 10; i >= 0; i--) p = p * r + inverse_factorial[i];
    p = 1.0 + (r + r * r * p);
    int32_t k = (int32_t)n, half = k >> 1; /* -1075 ... 1024: two factors, each a normal number */
    return p * double_of((uint64_t)(half + 1023) << 52) * double_of((uint64_t)(k - half + 1023) << 52);
}

double coli_log(double x) {
    if (x != x || x < 0) return double_of(0x7FF8000000000000u);
    if (x == 0) return double_of(0xFFF0000000000000u);
    if (bits_of_double(x) == 0x7FF0000000000000u) return x;
    int32_t exponent = -1023;
    if (x < 0x1p-1022) {
        x *= 0x1p+54;
        exponent -= 54;
    }
    uint64_t u = bits_of_double(x);
    exponent += (int32_t)(u >> 52);
    double m = double_of((u & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u); /* [1, 2) */
    if (m > 0x1.6a09e667f3bcdp+0) { /* sqrt 2: keep m within [sqrt 1/2, sqrt 2] */
        m *= 0.5;
        exponent++;
    }
    /* log m = 2 artanh f = 2 (f + f^3 / 3 + f^5 / 5 + ...), f = (m - 1) / (m + 1), |f| <= 0.172 */
    double f = (m - 1.0) / (m + 1.0), square = f * f, tail = 1.0 / 23;
    for (int odd = 21; odd >= 3; odd -= 2) tail = tail * square + 1.0 / odd;
    double e = (double)exponent;
    return e * LN2_HI + (2.0 * f + (2.0 * f * square * tail + e * LN2_LO));
}

double coli_pow(double x, double y) { return coli_exp(y * coli_log(x)); }

/* Taylor around 0 for |r| <= pi / 4 and a little: the first term left out is below 1e-18. */
static double sine_near_zero(double r) {
    static const double c[] = {-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800,
                               -1.0 / 1307674368000};
    double square = r * r, p = c[6];
    for (int i = 5; i >= 0; i--) p = p * square + c[i];
    return r + r * square * p;
}

static double cosine_near_zero(double r) {
    static const double c[] = {1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200,
                               1.0 / 20922789888000};
    double square = r * r, p = c[6];
    for (int i = 5; i >= 0; i--) p = p * square + c[i];
    return (1.0 - 0.5 * square) + square * square * p;
}

void coli_sincos(double x, double *sine, double *cosine) {
    if (!(x > -0x1p+31 && x < 0x1p+31)) { /* also NaN: converting it to an integer would differ between machines */
        *sine = *cosine = double_of(0x7FF8000000000000u);
        return;
    }
    /* x - n pi / 2 with pi / 2 in four pieces. The first three have 22 bits, so that n (< 2^31) times each is exact. */
    double n = round_even(x * 0x1.45f306dc9c883p-1);
    double r = x - n * 0x1.921fb0p+0;
    r -= n * 0x1.5110bp-22;
    r -= n * 0x1.1846980p-44;
    r -= n * 0x1.3198a2e037073p-69;
    double s = sine_near_zero(r), c = cosine_near_zero(r);
    switch ((int64_t)n & 3) {
        case 0: *sine = s, *cosine = c; break;
        case 1: *sine = c, *cosine = -s; break;
        case 2: *sine = -s, *cosine = -c; break;
        default: *sine = -c, *cosine = s; break;
    }
}
