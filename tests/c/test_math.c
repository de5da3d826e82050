/* test_math.c: the library's own arithmetic against the C library's, on hard and on random bit patterns. */
#include <math.h>
#include <stdlib.h>

#include "base/math.h"
#include "check.h"

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static uint64_t random64(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545F4914F6CDD1Du;
}

static double random_unit(void) { return (double)(random64() >> 11) * 0x1p-53; }

static uint32_t bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static bool same(float a, float b) { return bits(a) == bits(b) || (a != a && b != b); }

/* Few significant bits and close exponents: cancellations, ties and subnormal results are frequent. */
static float hard_float(int centre) {
    uint64_t r = random64();
    uint32_t fraction = (uint32_t)(r & 0x7FFFFF);
    switch (r >> 60 & 3) {
        case 0: fraction &= 0x700000; break;
        case 1: fraction = (fraction & 3) | ((r >> 30 & 1) ? 0x7FFFFC : 0); break;
        case 2: fraction = 1u << (r >> 32 & 31) & 0x7FFFFF; break;
        default: break;
    }
    int exponent = centre + (int)(r >> 40 & 31) - 16;
    exponent = exponent < 0 ? 0 : exponent > 255 ? 255 : exponent;
    return from_bits((uint32_t)(r >> 63) << 31 | (uint32_t)exponent << 23 | fraction);
}

/* A finite float as significand * 2^exponent. */
static int64_t split(float x, int *exponent) {
    uint32_t u = bits(x), biased = u >> 23 & 255, fraction = u & 0x7FFFFF;
    *exponent = (biased ? (int)biased : 1) - 150;
    int64_t significand = biased ? fraction | 0x800000 : fraction;
    return u >> 31 ? -significand : significand;
}

#ifdef __SIZEOF_INT128__
typedef __int128 wide;
typedef unsigned __int128 wide_unsigned;
#else /* 32-bit targets */
typedef _BitInt(128) wide;
typedef unsigned _BitInt(128) wide_unsigned;
#endif

/* significand * 2^exponent as a multiple of 2^unit; what falls below becomes a last bit that is 1. */
static wide align(int64_t significand, int exponent, int unit) {
    wide_unsigned magnitude = (uint64_t)(significand < 0 ? -significand : significand);
    int down = unit - exponent;
    if (down <= 0) magnitude <<= -down;
    else if (down > 100) magnitude = magnitude != 0;
    else magnitude = magnitude >> down | ((magnitude & (((wide_unsigned)1 << down) - 1)) != 0);
    return significand < 0 ? -(wide)magnitude : (wide)magnitude;
}

/* fma in integers, an oracle that shares nothing with coli_fmaf. (Some C libraries' fmaf rounds ties wrongly.) */
static float exact_fmaf(float a, float b, float c) {
    int ea, eb, ec;
    int64_t ma = split(a, &ea), mb = split(b, &eb), mc = split(c, &ec);
    bool finite = fabsf(a) < INFINITY && fabsf(b) < INFINITY && fabsf(c) < INFINITY;
    if (!finite || ma == 0 || mb == 0) return (float)((double)a * b + c);
    int unit = (ea + eb > ec || mc == 0 ? ea + eb : ec) - 70;
    wide sum = align(ma * mb, ea + eb, unit) + align(mc, ec, unit);
    if (sum == 0) return 0.0f;
    wide_unsigned magnitude = sum < 0 ? -(wide_unsigned)sum : (wide_unsigned)sum;
    uint64_t high = (uint64_t)(magnitude >> 64);
    int top = high ? 127 - __builtin_clzll(high) : 63 - __builtin_clzll((uint64_t)magnitude);
    int last = unit + top - 23 < -149 ? -149 : unit + top - 23, shift = last - unit; /* exponents of the float's last bit */
    uint64_t kept = shift > 126 ? 0 : (uint64_t)(shift <= 0 ? magnitude << -shift : magnitude >> shift);
    if (shift > 0 && shift <= 126) {
        wide_unsigned rest = magnitude - ((wide_unsigned)kept << shift), tie = (wide_unsigned)1 << (shift - 1);
        if (rest > tie || (rest == tie && (kept & 1))) kept++;
    }
    float result = (float)ldexp((double)kept, last);
    return sum < 0 ? -result : result;
}

static void test_fmaf(void) {
    long wrong = 0;
    for (int i = 0; i < 10000000; i++) {
        float a, b, c;
        uint64_t r = random64();
        if (i & 1) { /* any bits at all */
            a = from_bits((uint32_t)r), b = from_bits((uint32_t)(r >> 32)), c = from_bits((uint32_t)random64());
        } else { /* exponents that meet: product and addend overlap or lie a rounding apart; often near the subnormals */
            int ea = (int)(r & 255), product = r >> 8 & 1 ? (int)(r >> 9 & 255) : 8;
            int eb = product + 127 - ea;
            a = hard_float(ea), b = hard_float(eb), c = hard_float(product + (r >> 20 & 1 ? 0 : r >> 21 & 1 ? 24 : -24));
        }
        float exact = exact_fmaf(a, b, c);
        if ((!same(coli_fmaf(a, b, c), exact) || !same(coli_fmaf_soft(a, b, c), exact)) && wrong++ < 5)
            fprintf(stderr, "fmaf(%a, %a, %a) = %a, not %a\n", a, b, c, exact, coli_fmaf(a, b, c));
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(bits(coli_fmaf(-0x1.4p+109f, -0x1.fffff8p-127f, -0x1.fffffep-122f)), bits(0x1.3ffffap-17f));
    /* Ties that a double rounding would get wrong: 1 + 2^-24 plus or minus a hair beyond the double's last bit. */
    CHECK_EQ(bits(coli_fmaf(0x1p-40f, 0x1p-40f, 0x1p-24f)), bits(0x1p-24f));
    CHECK_EQ(bits(coli_fmaf(0x1.000002p+0f, 0x1.000002p+0f, 0x1p-60f)), bits(0x1.000004p+0f));
    CHECK_EQ(bits(coli_fmaf(1.0f, 0.0f, -0.0f)), bits(0.0f));
    CHECK_EQ(bits(coli_fmaf(-1.0f, 0.0f, -0.0f)), bits(-0.0f));
}

static void test_expf(void) {
    double worst = 0;
    for (int i = 0; i < 500000; i++) {
        float x = (float)(COLI_EXPF_MIN + random_unit() * (COLI_EXPF_MAX - (double)COLI_EXPF_MIN));
        if (i & 1) x *= (float)random_unit() * 0.02f;
        double exact = exp((double)x), unit = ldexp(1.0, ilogb(exact) - 23);
        double error = fabs((double)coli_expf(x) - exact) / unit;
        if (error > worst) worst = error;
    }
    CHECK(worst <= 1.0);
    CHECK(worst > 0.4); /* the measure itself works */
    CHECK_EQ(bits(coli_expf(0.0f)), bits(1.0f));
    CHECK_EQ(bits(coli_expf(-0.0f)), bits(1.0f));
    CHECK(coli_expf(COLI_EXPF_MAX) < INFINITY);
    CHECK(coli_expf(nextafterf(COLI_EXPF_MAX, 1000)) == INFINITY);
    CHECK(coli_expf(COLI_EXPF_MIN) >= 0x1p-126f);
    CHECK_EQ(bits(coli_expf(nextafterf(COLI_EXPF_MIN, -1000))), 0);
    CHECK_EQ(bits(coli_expf(-INFINITY)), 0);
    CHECK(coli_expf(INFINITY) == INFINITY);
    CHECK_EQ(bits(coli_expf(-NAN)), 0x7FC00000);
    /* Monotone through every change of n, where the polynomial's two ends meet. */
    for (int n = -125; n < 128; n++) {
        float x = (float)((n + 0.5) * 0.6931471805599453);
        for (int i = 0; i < 8; i++) x = nextafterf(x, -1000);
        for (int i = 0; i < 16; i++, x = nextafterf(x, 1000)) CHECK(coli_expf(x) <= coli_expf(nextafterf(x, 1000)) * 0x1.000001p0f);
    }
}

static void test_sqrtf(void) {
    long wrong = 0;
    for (int i = 0; i < 1000000; i++) {
        float x = i & 1 ? from_bits((uint32_t)random64()) : hard_float((int)(random64() & 255));
        if (!same(coli_sqrtf(x), sqrtf(x)) && wrong++ < 5) fprintf(stderr, "sqrtf(%a) = %a, not %a\n", x, sqrtf(x), coli_sqrtf(x));
    }
    CHECK_EQ(wrong, 0);
    for (uint32_t u = 0; u < 64; u++) CHECK(same(coli_sqrtf(from_bits(u)), sqrtf(from_bits(u))));
    CHECK_EQ(bits(coli_sqrtf(-0.0f)), bits(-0.0f));
}

static void test_halves(void) {
    static const uint32_t to_bf16[][2] = {{0x3F808000, 0x3F80}, {0x3F818000, 0x3F82}, {0x7F7FFFFF, 0x7F80}, {0x7F800001, 0x7FC0},
                                          {0x007FFFFF, 0x0080}, {0xFF800001, 0xFFC0}, {0xFF800000, 0xFF80}, {0x80000000, 0x8000}};
    for (size_t i = 0; i < sizeof to_bf16 / sizeof *to_bf16; i++) CHECK_EQ(coli_f32_to_bf16(from_bits(to_bf16[i][0])), to_bf16[i][1]);
    CHECK_EQ(coli_f32_to_f16(0x1p-15f), 0x0200);
    CHECK_EQ(coli_f32_to_f16(0x1p-24f), 0x0001);
    CHECK_EQ(coli_f32_to_f16(0x1p-25f), 0x0000);
    CHECK_EQ(coli_f32_to_f16(0x1.000002p-25f), 0x0001);
    CHECK_EQ(coli_f32_to_f16(65519.996f), 0x7BFF);
    CHECK_EQ(coli_f32_to_f16(65520.0f), 0x7C00);
    CHECK_EQ(coli_f32_to_f16(-INFINITY), 0xFC00);
    CHECK_EQ(coli_f32_to_f16(from_bits(0x7F800001)), 0x7E00);
    for (uint32_t h = 0; h < 65536; h++) { /* every half and bfloat16 comes back; NaNs come back quiet */
        bool f16_nan = (h & 0x7FFF) > 0x7C00, bf16_nan = (h & 0x7FFF) > 0x7F80;
        CHECK_EQ(coli_f32_to_f16(coli_f16_to_f32((uint16_t)h)), h | (f16_nan ? 0x200 : 0));
        CHECK_EQ(coli_f32_to_bf16(coli_bf16_to_f32((uint16_t)h)), h | (bf16_nan ? 0x40 : 0));
        if (h >= 0x7C00) continue;
        /* Neighbours: the midpoint goes to the even one, a hair beside it to the nearer one. (0x7C00 stands for 65536.) */
        double low = coli_f16_to_f32((uint16_t)h), high = h == 0x7BFF ? 65536.0 : coli_f16_to_f32((uint16_t)(h + 1));
        float middle = (float)(0.5 * (low + high));
        CHECK_EQ(coli_f32_to_f16(middle), h + (h & 1));
        CHECK_EQ(coli_f32_to_f16(nextafterf(middle, 0)), h);
        CHECK_EQ(coli_f32_to_f16(-nextafterf(middle, INFINITY)), (h + 1) | 0x8000);
    }
}

static double relative(double value, double exact) { return value == exact ? 0 : fabs(value - exact) / fabs(exact); }

static void test_doubles(void) {
    double worst_exp = 0, worst_log = 0, worst_pow = 0, worst_angle = 0;
    for (int i = 0; i < 300000; i++) {
        double x = (random_unit() - 0.5) * (i & 1 ? 1400 : 4), y = ldexp(0.5 + random_unit(), i & 1 ? (int)(random64() % 2000) - 1000 : 0);
        double angle = (random_unit() - 0.5) * (i & 1 ? 0x1p+32 : 100), s, c;
        worst_exp = fmax(worst_exp, relative(coli_exp(x), exp(x)));
        worst_log = fmax(worst_log, fabs(log(y)) < 1e-3 ? fabs(coli_log(y) - log(y)) * 1e3 : relative(coli_log(y), log(y)));
        worst_pow = fmax(worst_pow, relative(coli_pow(10000.0, x / 700), pow(10000.0, x / 700)));
        coli_sincos(angle, &s, &c);
        worst_angle = fmax(worst_angle, fmax(fabs(s - sin(angle)), fabs(c - cos(angle))));
    }
    CHECK(worst_exp < 1e-15);
    CHECK(worst_log < 1e-15);
    CHECK(worst_pow < 4e-15);
    CHECK(worst_angle < 1e-12);
    CHECK(coli_exp(0) == 1 && coli_exp(-INFINITY) == 0 && coli_exp(INFINITY) == INFINITY && isnan(coli_exp(NAN)));
    CHECK(coli_exp(-740) > 0 && relative(coli_exp(-740), exp(-740)) < 0.01 && coli_exp(710) == INFINITY);
    CHECK(coli_log(1) == 0 && coli_log(0) == -INFINITY && isnan(coli_log(-1)) && coli_log(INFINITY) == INFINITY);
    CHECK(relative(coli_log(0x1p-1074), log(0x1p-1074)) < 1e-15);
    double s, c;
    coli_sincos(0, &s, &c);
    CHECK(s == 0 && c == 1);
    const double beyond[] = {0x1p+31, -0x1p+31, 1e300, INFINITY, -INFINITY, NAN}; /* no integer holds a quadrant's number */
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        coli_sincos(beyond[i], &s, &c);
        CHECK(isnan(s) && isnan(c));
    }
}

int main(void) {
    test_fmaf();
    test_expf();
    test_sqrtf();
    test_halves();
    test_doubles();
    return check_report();
}
