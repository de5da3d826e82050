/* ref.c: every kernel in portable C: the definition that the other instruction sets repeat bit for bit, and what runs where
 * none of them is there. Read it beside kernels.h. It is compiled for the baseline machine, so every fused multiply-add is
 * coli_fmaf. Matrix products and attention are in ref_float.c and ref_integer.c. */
#include "kernels/ref.h"

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* ---- Activations ---------------------------------------------------------------------------------------------------- */

static void hadamard(float *x, uint32_t k, uint32_t block) {
    for (float *part = x; part < x + k; part += block)
        for (uint32_t h = block / 2; h > 0; h /= 2)
            for (uint32_t i = 0; i < block; i += 2 * h)
                for (uint32_t j = i; j < i + h; j++) {
                    float a = part[j], b = part[j + h];
                    part[j] = a + b;
                    part[j + h] = a - b;
                }
}

/* Largest |x|, compared as integers: NaN above infinity above all else. */
static float largest(const float *x, uint32_t k) {
    uint32_t max = 0;
    float value;
    for (uint32_t i = 0; i < k; i++) max = COLI_MAX(max, bits_of(x[i]) & 0x7fffffffu);
    memcpy(&value, &max, 4);
    return value;
}

/* Nearest even of |v| <= 2^22: adding 1.5 * 2^23 leaves no bits for a fraction. */
static float round_even(float v) { return (v + 12582912.0f) - 12582912.0f; }

/* Scale of a row for integers up to `limit`, and its inverse; both 0 for a row of zeros, NaN and 0 if it is not finite. */
static float row_scale(const float *x, uint32_t k, float limit, float *inverse) {
    float max = largest(x, k);
    *inverse = 0;
    if (bits_of(max) >= 0x7f800000u) return __builtin_nanf("");
    if (max < COLI_QUANTIZE_FLOOR) return 0;
    *inverse = limit / max;
    return max / limit;
}

static int32_t quantize(float x, float inverse, float limit) {
    float v = round_even(x * inverse);
    return (int32_t)(v > limit ? limit : v < -limit ? -limit : v);
}

static void quantize8(const float *x, uint32_t k, int8_t *hi, float *scale, int32_t *sum_hi) {
    float inverse;
    *scale = row_scale(x, k, 127, &inverse);
    *sum_hi = 0;
    for (uint32_t i = 0; i < k; i++) {
        hi[i] = inverse == 0 ? 0 : (int8_t)quantize(x[i], inverse, 127);
        *sum_hi += hi[i];
    }
}

static void quantize16(const float *x, uint32_t k, int8_t *hi, int8_t *lo, float *scale, int32_t *sum_hi, int32_t *sum_lo) {
    float inverse;
    *scale = row_scale(x, k, 16256, &inverse);
    *sum_hi = *sum_lo = 0;
    for (uint32_t i = 0; i < k; i++) {
        int32_t q = inverse == 0 ? 0 : quantize(x[i], inverse, 16256);
        hi[i] = (int8_t)((q + 64) >> 7);
        lo[i] = (int8_t)(q - 128 * hi[i]);
        *sum_hi += hi[i];
        *sum_lo += lo[i];
    }
}

static void fit8(const float *x, uint32_t k, float inverse, float sums[3]) {
    float error[LANES] = { 0 }, cross[LANES] = { 0 }, square[LANES] = { 0 };
    for (uint32_t i = 0; i < k; i++) {
        float u = x[i] * inverse;
        float q = round_even(u > 127 ? 127 : u < -127 ? -127 : u), d = u - q;
        error[i % LANES] = coli_fmaf(d, d, error[i % LANES]);
        cross[i % LANES] = coli_fmaf(d, q, cross[i % LANES]);
        square[i % LANES] = coli_fmaf(q, q, square[i % LANES]);
    }
    sums[0] = tree(error);
    sums[1] = tree(cross);
    sums[2] = tree(square);
}

/* ---- Vectors -------------------------------------------------------------------------------------------------------- */

static float rms_norm(const float *x, const float *w, float *y, uint32_t k, uint32_t n, float eps) {
    float squares[LANES] = { 0 };
    for (uint32_t i = 0; i < k; i++) squares[i % LANES] = coli_fmaf(x[i], x[i], squares[i % LANES]);
    float sum = tree(squares);
    if (w == NULL || y == NULL) return sum;
    float r = 1.0f / coli_sqrtf(sum / (float)n + eps);
    for (uint32_t i = 0; i < k; i++) y[i] = w[i] * (x[i] * r);
    return sum;
}

static void swiglu(const float *gate_up, float *act, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        const float *pair = gate_up + (size_t)(i / LANES) * 2 * LANES + i % LANES;
        float g = pair[0], u = pair[LANES];
        act[i] = (g / (1.0f + coli_expf(-g))) * u;
    }
}

static void axpy(float a, const float *x, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = coli_fmaf(a, x[i], y[i]);
}

static void add(const float *x, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] += x[i];
}

static void exps(const float *x, float shift, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = coli_expf(x[i] - shift);
}

static void f32_to_f16(const float *x, uint16_t *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = coli_f32_to_f16(x[i] > 65504 ? 65504 : x[i] < -65504 ? -65504 : x[i]);
}

const coli_kernels_t *coli_kernels_ref(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_REF,
        .name = "ref",
        .matmul = { coli_ref_matmul_f32, coli_ref_matmul_f16, coli_ref_matmul_bf16, coli_ref_matmul_q8, coli_ref_matmul_q4 },
        .geometry = { { 1, 8 }, { 1, 8 }, { 1, 8 }, { 1, 64 }, { 1, 64 } },
        .hadamard = hadamard,
        .quantize8 = quantize8,
        .quantize16 = quantize16,
        .fit8 = fit8,
        .rms_norm = rms_norm,
        .swiglu = swiglu,
        .axpy = axpy,
        .add = add,
        .exps = exps,
        .attention = { coli_ref_attention_f32, coli_ref_attention_f16, coli_ref_attention_q8 },
        .f32_to_f16 = f32_to_f16,
    };
    return &table;
}
