/* ref.c: every kernel in portable C: the definition that the other instruction sets repeat bit for bit, and what runs where
 * none of them is there. Read it beside kernels.h. It is compiled for the baseline machine, so every fused multiply-add is
 * coli_fmaf; everything is written as loops over the 16 lanes of a tile. Products with integer weights are in ref_integer.c. */
#include "base/math.h"
#include "kernels/tables.h"

#define LANES COLIBRI_TILE_ROWS

/* The fixed tree over 16 lanes; v is overwritten. */
static float tree(float v[LANES]) {
    for (int h = LANES / 2; h > 0; h /= 2)
        for (int i = 0; i < h; i++) v[i] += v[i + h];
    return v[0];
}

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* ---- Matrix products ------------------------------------------------------------------------------------------------ */

static uint32_t row_of(const coli_matmul_t *m, uint32_t token) { return m->rows ? m->rows[token] : m->first_row + token; }

/* Column c of a block of 16 rows as f32. */
typedef void (*column_fn)(const uint8_t *block, uint32_t c, float w[LANES]);

static void column_f32(const uint8_t *block, uint32_t c, float w[LANES]) { memcpy(w, block + (size_t)c * 64, 64); }

static void column_f16(const uint8_t *block, uint32_t c, float w[LANES]) {
    const uint16_t *step = (const uint16_t *)(const void *)(block + (size_t)(c / 2) * 64);
    for (int r = 0; r < LANES; r++) w[r] = coli_f16_to_f32(step[r * 2 + c % 2]);
}

static void column_bf16(const uint8_t *block, uint32_t c, float w[LANES]) {
    const uint16_t *step = (const uint16_t *)(const void *)(block + (size_t)(c / 2) * 64);
    for (int r = 0; r < LANES; r++) w[r] = coli_bf16_to_f32(step[r * 2 + c % 2]);
}

/* One block times up to 8 tokens, so that a column is widened once for all of them. */
static void float_block(const coli_matmul_t *m, const uint8_t *block, float *y, uint32_t token, uint32_t n, column_fn column) {
    const float *x[8];
    float acc[8][LANES] = { { 0 } }, w[LANES];
    for (uint32_t t = 0; t < n; t++) x[t] = m->x->f32 + (size_t)row_of(m, token + t) * m->x->stride;
    for (uint32_t c = 0; c < m->k; c++) {
        column(block, c, w);
        for (uint32_t t = 0; t < n; t++)
            for (int r = 0; r < LANES; r++) acc[t][r] = coli_fmaf(w[r], x[t][c], acc[t][r]);
    }
    for (uint32_t t = 0; t < n; t++) memcpy(y + (size_t)(token + t) * m->y_stride, acc[t], sizeof acc[t]);
}

static void float_product(const coli_matmul_t *m, column_fn column) {
    for (uint32_t b = 0; b < m->n_blocks; b++)
        for (uint32_t t = 0; t < m->n_tokens; t += 8)
            float_block(m, m->w + b * m->block_bytes, m->y + (size_t)b * LANES, t, COLI_MIN(8, m->n_tokens - t), column);
}

static void matmul_f32(const coli_matmul_t *m) { float_product(m, column_f32); }
static void matmul_f16(const coli_matmul_t *m) { float_product(m, column_f16); }
static void matmul_bf16(const coli_matmul_t *m) { float_product(m, column_bf16); }

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

/* ---- Attention ------------------------------------------------------------------------------------------------------ */

typedef float (*element_fn)(const void *cache, size_t i);

static float element_f32(const void *cache, size_t i) { return ((const float *)cache)[i]; }
static float element_f16(const void *cache, size_t i) { return coli_f16_to_f32(((const uint16_t *)cache)[i]); }
static float element_q8(const void *cache, size_t i) { return (float)((const int8_t *)cache)[i]; }

/* One query: the keys first ... last that it sees; s[key - base] is a key's score, later its weight. */
typedef struct query {
    const float *q; /* [head_dim] */
    float *s, *out;
    uint32_t base, first, last;
} query_t;

static void score_float(const coli_attention_t *a, const query_t *query, element_fn element) {
    for (uint32_t key = query->first; key <= query->last; key++) {
        size_t column = (size_t)(key / LANES) * a->head_dim * LANES + key % LANES;
        float dot = 0;
        for (uint32_t d = 0; d < a->head_dim; d++) dot = coli_fmaf(element(a->k_cache, column + d * LANES), query->q[d], dot);
        query->s[key - query->base] = dot * a->scale;
    }
}

/* sum[r] = exact integer dot product of key r of a block with one query. */
static void integer_dots_q8(const uint8_t *bytes, const int8_t *q, uint32_t k, int32_t sum[LANES]) {
    const int8_t *block = (const int8_t *)bytes;
    memset(sum, 0, LANES * sizeof *sum);
    for (uint32_t c = 0; c < k; c += 4, block += 64)
        for (int r = 0; r < LANES; r++)
            for (int i = 0; i < 4; i++) sum[r] += block[r * 4 + i] * q[c + i];
}

static void score_q8(const coli_attention_t *a, const query_t *query) {
    float rotated[COLI_MAX_HEAD_DIM], q_scale;
    int8_t high[COLI_MAX_HEAD_DIM], low[COLI_MAX_HEAD_DIM];
    int32_t hi[LANES], lo[LANES], unused;
    uint32_t block = coli_rotation_block(a->head_dim);
    memcpy(rotated, query->q, a->head_dim * sizeof(float));
    hadamard(rotated, a->head_dim, block);
    quantize16(rotated, a->head_dim, high, low, &q_scale, &unused, &unused);
    for (uint32_t key = query->first; key <= query->last; key++) {
        const uint8_t *keys = (const uint8_t *)a->k_cache + (size_t)(key / LANES) * a->head_dim * LANES;
        if (key % LANES == 0 || key == query->first) {
            integer_dots_q8(keys, high, a->head_dim, hi);
            integer_dots_q8(keys, low, a->head_dim, lo);
        }
        float sum = coli_fmaf(128.0f, (float)hi[key % LANES], (float)lo[key % LANES]);
        query->s[key - query->base] = sum * (a->k_scale[key] * q_scale) * (a->scale / (float)block);
    }
}

static void attend(const coli_attention_t *a, const query_t *query, element_fn element) {
    float *s = query->s, max = -__builtin_inff(), sums[LANES] = { 0 };
    uint32_t base = query->base;
    for (uint32_t key = query->first; key <= query->last; key++)
        if (s[key - base] > max) max = s[key - base]; /* a NaN is left out here and makes the sum NaN below */
    for (uint32_t key = query->first; key <= query->last; key++) {
        float p = coli_expf(s[key - base] - max);
        sums[key % LANES] += p;
        s[key - base] = a->v_scale ? p * a->v_scale[key] : p;
    }
    float sum = tree(sums);
    for (uint32_t d = 0; d < a->head_dim; d++) {
        float acc = 0;
        for (uint32_t key = query->first; key <= query->last; key++)
            acc = coli_fmaf(s[key - base], element(a->v_cache, (size_t)key * a->head_dim + d), acc);
        query->out[d] = acc / sum;
    }
}

static void attention(const coli_attention_t *a, element_fn element) {
    uint32_t base = coli_first_key(a->window, a->position) / LANES * LANES;
    for (uint32_t t = 0; t < a->n_tokens; t++)
        for (uint32_t h = 0; h < a->n_heads; h++) {
            uint32_t last = a->position + t;
            query_t query = { a->q + t * a->q_stride + (size_t)h * a->head_dim,
                              a->scores + (t * a->n_heads + h) * a->score_stride,
                              a->out + t * a->out_stride + (size_t)h * a->head_dim,
                              base, coli_first_key(a->window, last), last };
            if (a->k_scale) score_q8(a, &query);
            else score_float(a, &query, element);
            attend(a, &query, element);
        }
}

static void attention_f32(const coli_attention_t *a) { attention(a, element_f32); }
static void attention_f16(const coli_attention_t *a) { attention(a, element_f16); }
static void attention_q8(const coli_attention_t *a) { attention(a, element_q8); }

const coli_kernels_t *coli_kernels_ref(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_REF,
        .name = "ref",
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, coli_ref_matmul_q8, coli_ref_matmul_q4 },
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
        .attention = { attention_f32, attention_f16, attention_q8 },
        .f32_to_f16 = f32_to_f16,
    };
    return &table;
}
