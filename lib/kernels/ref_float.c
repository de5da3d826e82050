/* ref_float.c: the reference's products with float weights, and its attention. Written as loops over 16 lanes, for compilers
 * that turn them into vectors of whatever width the target has. */
#include "kernels/ref.h"

/* acc = fma(w, x, acc) in all lanes. Where the target has no such instruction, all are sums in double,
 * rounded to float; if that may be wrong in one of them, they are done again by software. */
COLI_INLINE void fma_lanes(const float w[LANES], float x, float acc[LANES]) {
#ifdef COLI_HAVE_FMA
    for (int r = 0; r < LANES; r++) acc[r] = coli_fmaf(w[r], x, acc[r]);
#else
    double sum[LANES];
    uint32_t unsure = 0;
    for (int r = 0; r < LANES; r++) sum[r] = (double)w[r] * (double)x + (double)acc[r];
    for (int r = 0; r < LANES; r++) unsure |= coli_rounds_twice(sum[r]);
    for (int r = 0; r < LANES; r++) acc[r] = unsure ? coli_fmaf(w[r], x, acc[r]) : (float)sum[r];
#endif
}

/* ---- 16 elements as float ---- */

typedef void (*widen_fn)(const void *from, size_t first, float to[LANES]);

static void widen_f32(const void *from, size_t first, float to[LANES]) { memcpy(to, (const float *)from + first, LANES * 4); }

/* coli_f16_to_f32 without branches: a subnormal half gets 2^-14 added in its bits, which the subtraction takes away exactly. */
COLI_INLINE float f16_lane(uint16_t x) {
    uint32_t magnitude = x & 0x7FFFu, sign = (uint32_t)(x & 0x8000u) << 16, bits = (magnitude << 13) + (112u << 23);
    float normal;
    uint32_t special = magnitude >= 0x7C00u ? 112u << 23 : 0, quiet = magnitude > 0x7C00u ? 0x400000u : 0;
    uint32_t small = (magnitude << 13) + (113u << 23), small_bits;
    memcpy(&normal, &small, 4);
    normal -= 0x1p-14f;
    memcpy(&small_bits, &normal, 4);
    bits = sign | (magnitude < 0x400u ? small_bits : (bits + special) | quiet);
    memcpy(&normal, &bits, 4);
    return normal;
}

static void widen_f16(const void *from, size_t first, float to[LANES]) {
    const uint16_t *half = (const uint16_t *)from + first;
    for (int r = 0; r < LANES; r++) to[r] = f16_lane(half[r]);
}

static void widen_q8(const void *from, size_t first, float to[LANES]) {
    const int8_t *byte = (const int8_t *)from + first;
    for (int r = 0; r < LANES; r++) to[r] = (float)byte[r];
}

/* ---- Matrix products ---- */

/* Column c of a block of 16 rows as f32. */
typedef void (*column_fn)(const uint8_t *block, uint32_t c, float w[LANES]);

static void column_f32(const uint8_t *block, uint32_t c, float w[LANES]) { memcpy(w, block + (size_t)c * 64, 64); }

static void column_f16(const uint8_t *block, uint32_t c, float w[LANES]) {
    const uint16_t *step = (const uint16_t *)(const void *)(block + (size_t)(c / 2) * 64);
    for (int r = 0; r < LANES; r++) w[r] = f16_lane(step[r * 2 + c % 2]);
}

static void column_bf16(const uint8_t *block, uint32_t c, float w[LANES]) {
    const uint16_t *step = (const uint16_t *)(const void *)(block + (size_t)(c / 2) * 64);
    for (int r = 0; r < LANES; r++) w[r] = coli_bf16_to_f32(step[r * 2 + c % 2]);
}

/* One block times up to 8 tokens, so that a column is widened once for all of them. */
static void float_block(const coli_matmul_t *m, const uint8_t *block, float *y, uint32_t token, uint32_t n, column_fn column) {
    const float *x[8];
    float acc[8][LANES] = { { 0 } }, w[LANES];
    for (uint32_t t = 0; t < n; t++) x[t] = m->x->f32 + row_of(m, token + t) * m->x->stride;
    for (uint32_t c = 0; c < m->k; c++) {
        column(block, c, w);
        for (uint32_t t = 0; t < n; t++) fma_lanes(w, x[t][c], acc[t]);
    }
    for (uint32_t t = 0; t < n; t++) memcpy(y + (size_t)(token + t) * m->y_stride, acc[t], sizeof acc[t]);
}

static void product(const coli_matmul_t *m, column_fn column) {
    for (uint32_t b = 0; b < m->n_blocks; b++)
        for (uint32_t t = 0; t < m->n_tokens; t += 8)
            float_block(m, m->w + b * m->block_bytes, m->y + (size_t)b * LANES, t, COLI_MIN(8, m->n_tokens - t), column);
}

void coli_ref_matmul_f32(const coli_matmul_t *m) { product(m, column_f32); }
void coli_ref_matmul_f16(const coli_matmul_t *m) { product(m, column_f16); }
void coli_ref_matmul_bf16(const coli_matmul_t *m) { product(m, column_bf16); }

/* ---- Attention ---- */

/* One query: the keys first ... last that it sees; s[key - base] is a key's score, later its weight. */
typedef struct query {
    const float *q; /* [head_dim] */
    float *s, *out;
    uint32_t base, first, last;
} query_t;

/* Of all keys of the blocks: the scores of those that are not seen mean nothing. */
static void score_float(const coli_attention_t *a, const query_t *query, widen_fn widen) {
    for (uint32_t key = query->first / LANES * LANES; key <= query->last; key += LANES) {
        float dots[LANES] = { 0 }, keys[LANES];
        for (uint32_t d = 0; d < a->head_dim; d++) {
            widen(a->k_cache, ((size_t)(key / LANES) * a->head_dim + d) * LANES, keys);
            fma_lanes(keys, query->q[d], dots);
        }
        for (uint32_t r = 0; r < LANES; r++) query->s[key - query->base + r] = dots[r] * a->scale;
    }
}

/* sum[r] = exact integer dot product of key r of a block with one query. */
static void key_dots(const uint8_t *bytes, const int8_t *q, uint32_t k, int32_t sum[LANES]) {
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
    coli_kernels_ref()->hadamard(rotated, a->head_dim, block);
    coli_kernels_ref()->quantize16(rotated, a->head_dim, high, low, &q_scale, &unused, &unused);
    for (uint32_t key = query->first; key <= query->last; key++) {
        const uint8_t *keys = (const uint8_t *)a->k_cache + (size_t)(key / LANES) * a->head_dim * LANES;
        if (key % LANES == 0 || key == query->first) {
            key_dots(keys, high, a->head_dim, hi);
            key_dots(keys, low, a->head_dim, lo);
        }
        float sum = coli_fmaf(128.0f, (float)hi[key % LANES], (float)lo[key % LANES]);
        query->s[key - query->base] = sum * (a->k_scale[key] * q_scale) * (a->scale / (float)block);
    }
}

static void attend(const coli_attention_t *a, const query_t *query, widen_fn widen) {
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
    for (uint32_t d = 0; d < a->head_dim; d += LANES) {
        float acc[LANES] = { 0 }, values[LANES];
        for (uint32_t key = query->first; key <= query->last; key++) {
            widen(a->v_cache, (size_t)key * a->head_dim + d, values);
            fma_lanes(values, s[key - base], acc);
        }
        for (int r = 0; r < LANES; r++) query->out[d + (uint32_t)r] = acc[r] / sum;
    }
}

static void attention(const coli_attention_t *a, widen_fn widen) {
    uint32_t base = coli_first_key(a->window, a->position) / LANES * LANES;
    for (uint32_t t = 0; t < a->n_tokens; t++)
        for (uint32_t h = 0; h < a->n_heads; h++) {
            uint32_t last = a->position + t;
            query_t query = { a->q + t * a->q_stride + (size_t)h * a->head_dim,
                              a->scores + (t * a->n_heads + h) * a->score_stride,
                              a->out + t * a->out_stride + (size_t)h * a->head_dim,
                              base, coli_first_key(a->window, last), last };
            if (a->k_scale) score_q8(a, &query);
            else score_float(a, &query, widen);
            attend(a, &query, widen);
        }
}

void coli_ref_attention_f32(const coli_attention_t *a) { attention(a, widen_f32); }
void coli_ref_attention_f16(const coli_attention_t *a) { attention(a, widen_f16); }
void coli_ref_attention_q8(const coli_attention_t *a) { attention(a, widen_q8); }
