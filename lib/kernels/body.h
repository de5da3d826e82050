/* body.h: the kernels written once in 16-lane vectors (lanes.h), compiled by the file of each instruction set, which adds the
 * integer products (integer.h), attention (attention_body.h) and the table. Same operations in the same order as ref.c; only
 * the tiling differs. All static. */
#ifndef COLI_BODY_H
#define COLI_BODY_H

#include "kernels/lanes.h"
#include "kernels/tables.h"

#define MAX_VECTORS 6 /* activation rows that one register tile takes */
#define SUPERBLOCK 4  /* blocks of weights that stay in cache while all tokens pass */

/* ---- Products with float weights --------------------------------------------------------------------------------- */

COLI_INLINE uint32_t row_of(const coli_matmul_t *m, uint32_t token) { return m->rows ? m->rows[token] : m->first_row + token; }

/* Two columns (c even) of a block as f32. */
typedef void (*columns_fn)(const uint8_t *block, uint32_t c, v16f w[2]);

COLI_INLINE void columns_f32(const uint8_t *block, uint32_t c, v16f w[2]) {
    w[0] = *(const v16f *)(const void *)(block + (size_t)c * 64);
    w[1] = *(const v16f *)(const void *)(block + (size_t)c * 64 + 64);
}

COLI_INLINE void columns_f16(const uint8_t *block, uint32_t c, v16f w[2]) {
    v32h pairs = *(const v32h *)(const void *)(block + (size_t)c * 32);
    v16h even = __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    v16h odd = __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    w[0] = __builtin_convertvector(even, v16f);
    w[1] = __builtin_convertvector(odd, v16f);
}

COLI_INLINE void columns_bf16(const uint8_t *block, uint32_t c, v16f w[2]) {
    v16u pairs = *(const v16u *)(const void *)(block + (size_t)c * 32);
    w[0] = (v16f)(pairs << 16);
    w[1] = (v16f)(pairs & 0xffff0000u);
}

/* A register tile: nb blocks (from block b) times nt tokens (from token t). nb, nt and columns are constants when inlined. */
COLI_INLINE void float_tile(const coli_matmul_t *m, uint32_t b, uint32_t t, columns_fn columns, const int nb, const int nt) {
    const uint8_t *w = m->w + b * m->block_bytes;
    const float *x[MAX_VECTORS];
    v16f acc[SUPERBLOCK][MAX_VECTORS];
    EACH (j, nt) {
        x[j] = m->x->f32 + (size_t)row_of(m, t + (uint32_t)j) * m->x->stride;
        EACH (i, nb) acc[i][j] = splat(0);
    }
    for (uint32_t c = 0; c < m->k; c += 2) {
        EACH (i, nb) {
            v16f pair[2];
            columns(w + (size_t)i * m->block_bytes, c, pair);
            EACH (j, nt) {
                acc[i][j] = fma16(pair[0], splat(x[j][c]), acc[i][j]);
                acc[i][j] = fma16(pair[1], splat(x[j][c + 1]), acc[i][j]);
            }
        }
    }
    EACH (j, nt)
        EACH (i, nb) store(m->y + (t + (size_t)j) * m->y_stride + (b + (size_t)i) * LANES, acc[i][j]);
}

/* How to multiply n tokens at once: `blocks` blocks together (divides SUPERBLOCK), or one. */
typedef struct tile {
    uint32_t blocks;
    void (*wide)(const coli_matmul_t *m, uint32_t b, uint32_t t);
    void (*one)(const coli_matmul_t *m, uint32_t b, uint32_t t);
} tile_t;

#define FLOAT_TILE(type, nb, nt)                                                            \
    static void tile_##type##_##nb##x##nt(const coli_matmul_t *m, uint32_t b, uint32_t t) { \
        float_tile(m, b, t, columns_##type, nb, nt);                                        \
    }

/* Cut n into the fewest groups of at most `most`, sizes differing by one at most: the size of the group that starts at `at`. */
COLI_INLINE uint32_t group_size(uint32_t n, uint32_t at, uint32_t most) {
    uint32_t left = n - at, groups = (left + most - 1) / most;
    return (left + groups - 1) / groups;
}

/* All tokens pass over a few blocks before the next ones are read. tiles[n - 1] takes n tokens. */
COLI_INLINE void tiled_product(const coli_matmul_t *m, const tile_t *tiles, uint32_t most) {
    for (uint32_t first = 0; first < m->n_blocks; first += SUPERBLOCK) {
        uint32_t end = COLI_MIN(m->n_blocks, first + SUPERBLOCK);
        for (uint32_t t = 0, n; t < m->n_tokens; t += n) {
            n = group_size(m->n_tokens, t, most);
            const tile_t *tile = &tiles[n - 1];
            uint32_t b = first;
            for (; b + tile->blocks <= end; b += tile->blocks) tile->wide(m, b, t);
            for (; b < end; b++) tile->one(m, b, t);
        }
    }
}

/* ---- Activations ------------------------------------------------------------------------------------------------- */

/* Distances 8, 4, 2, 1 inside one vector: lane i gets partner + x, or partner - x where bit h of i is set: an fma with 1 or -1
 * rounds as the sum does. */
#define HADAMARD_STAGE(v, h)                                                                                            \
    fma16(v,                                                                                                            \
          (v16f){ SIGN(0, h), SIGN(1, h), SIGN(2, h), SIGN(3, h), SIGN(4, h), SIGN(5, h), SIGN(6, h), SIGN(7, h),       \
                  SIGN(8, h), SIGN(9, h), SIGN(10, h), SIGN(11, h), SIGN(12, h), SIGN(13, h), SIGN(14, h), SIGN(15, h) }, \
          SWAP_LANES(v, h))
#define SIGN(lane, h) (((lane) & (h)) ? -1.0f : 1.0f)

/* Stages h and h / 2 (h >= 32) of one part in one pass over memory. */
COLI_INLINE void hadamard_two_stages(float *x, uint32_t block, uint32_t h) {
    uint32_t q = h / 2;
    for (uint32_t i = 0; i < block; i += 2 * h)
        for (float *p = x + i; p < x + i + q; p += LANES) {
            v16f a = load(p), b = load(p + q), c = load(p + h), d = load(p + h + q);
            v16f ac = a + c, bd = b + d, a_c = a - c, b_d = b - d;
            store(p, ac + bd);
            store(p + q, ac - bd);
            store(p + h, a_c + b_d);
            store(p + h + q, a_c - b_d);
        }
}

COLI_INLINE void hadamard_stage(float *x, uint32_t block, uint32_t h) {
    for (float *p = x; p < x + block; p += 2 * h)
        for (float *q = p; q < p + h; q += LANES) {
            v16f a = load(q), b = load(q + h);
            store(q, a + b);
            store(q + h, a - b);
        }
}

/* The last four stages. */
COLI_INLINE v16f hadamard_within(v16f v) {
    v = HADAMARD_STAGE(v, 8);
    v = HADAMARD_STAGE(v, 4);
    v = HADAMARD_STAGE(v, 2);
    return HADAMARD_STAGE(v, 1);
}

/* The last six. */
COLI_INLINE void hadamard_64(float *p) {
    v16f a = load(p), b = load(p + LANES), c = load(p + 2 * LANES), d = load(p + 3 * LANES);
    v16f ac = a + c, bd = b + d, a_c = a - c, b_d = b - d;
    store(p, hadamard_within(ac + bd));
    store(p + LANES, hadamard_within(ac - bd));
    store(p + 2 * LANES, hadamard_within(a_c + b_d));
    store(p + 3 * LANES, hadamard_within(a_c - b_d));
}

static void hadamard(float *x, uint32_t k, uint32_t block) {
    for (float *part = x; block >= 64 && part < x + k; part += block) {
        uint32_t h = block / 2;
        if (__builtin_ctz(block) % 2) { /* an odd number of stages before the last six */
            hadamard_stage(part, block, h);
            h /= 2;
        }
        for (; h >= 128; h /= 4) hadamard_two_stages(part, block, h);
        for (float *p = part; p < part + block; p += 64) hadamard_64(p);
    }
    if (block == 2 * LANES) hadamard_stage(x, k, LANES);
    for (float *p = x; block <= 2 * LANES && p < x + k; p += LANES) store(p, hadamard_within(load(p)));
}

/* Scale and inverse of a row for integers up to `limit`; both 0 for a row of zeros, NaN and 0 if it is not finite. */
COLI_INLINE float row_scale(const float *x, uint32_t k, float limit, float *inverse) {
    v16u lanes = { 0 };
    for (uint32_t i = 0; i < k; i += LANES) lanes = __builtin_elementwise_max(lanes, (v16u)load(x + i) & 0x7fffffffu);
    uint32_t bits = __builtin_reduce_max(lanes);
    float max;
    memcpy(&max, &bits, 4);
    *inverse = 0;
    if (bits >= 0x7f800000u) return __builtin_nanf("");
    if (max < COLI_QUANTIZE_FLOOR) return 0;
    *inverse = limit / max;
    return max / limit;
}

COLI_INLINE v16i quantize16_lanes(const float *x, float inverse, float limit) { /* x is finite */
    v16f v = round_even16(load(x) * splat(inverse));
    return __builtin_convertvector(larger(smaller(v, splat(limit)), splat(-limit)), v16i);
}

COLI_INLINE void store_bytes(int8_t *p, v16i v) { *(v16c *)(void *)p = __builtin_convertvector(v, v16c); }

static void quantize8(const float *x, uint32_t k, int8_t *hi, float *scale, int32_t *sum_hi) {
    float inverse;
    v16i sum = { 0 };
    *scale = row_scale(x, k, 127, &inverse);
    *sum_hi = 0;
    if (inverse == 0) {
        memset(hi, 0, k);
        return;
    }
    for (uint32_t i = 0; i < k; i += LANES) {
        v16i q = quantize16_lanes(x + i, inverse, 127);
        store_bytes(hi + i, q);
        sum += q;
    }
    *sum_hi = sum_lanes(sum);
}

static void quantize16(const float *x, uint32_t k, int8_t *hi, int8_t *lo, float *scale, int32_t *sum_hi, int32_t *sum_lo) {
    float inverse;
    v16i high_sum = { 0 }, low_sum = { 0 };
    *scale = row_scale(x, k, 16256, &inverse);
    *sum_hi = *sum_lo = 0;
    if (inverse == 0) {
        memset(hi, 0, k);
        memset(lo, 0, k);
        return;
    }
    for (uint32_t i = 0; i < k; i += LANES) {
        v16i q = quantize16_lanes(x + i, inverse, 16256), high = (q + 64) >> 7, low = q - high * 128;
        store_bytes(hi + i, high);
        store_bytes(lo + i, low);
        high_sum += high;
        low_sum += low;
    }
    *sum_hi = sum_lanes(high_sum);
    *sum_lo = sum_lanes(low_sum);
}

static void fit8(const float *x, uint32_t k, float inverse, float sums[3]) {
    v16f error = splat(0), cross = splat(0), square = splat(0);
    for (uint32_t i = 0; i < k; i += LANES) {
        v16f u = load(x + i) * splat(inverse), q = round_even16(clamp(u, 127)), d = u - q;
        error = fma16(d, d, error);
        cross = fma16(d, q, cross);
        square = fma16(q, q, square);
    }
    sums[0] = tree(error);
    sums[1] = tree(cross);
    sums[2] = tree(square);
}

/* ---- Vectors ----------------------------------------------------------------------------------------------------- */

static float rms_norm(const float *x, const float *w, float *y, uint32_t k, uint32_t n, float eps) {
    v16f squares = splat(0);
    for (uint32_t i = 0; i < k; i += LANES) squares = fma16(load(x + i), load(x + i), squares);
    float sum = tree(squares);
    if (w == NULL || y == NULL) return sum;
    float r = 1.0f / coli_sqrtf(sum / (float)n + eps);
    for (uint32_t i = 0; i < k; i += LANES) store(y + i, load(w + i) * (load(x + i) * splat(r)));
    return sum;
}

static void swiglu(const float *gate_up, float *act, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES, gate_up += 2 * LANES) {
        v16f g = load(gate_up), u = load(gate_up + LANES);
        store(act + i, (g / (splat(1) + exp16(-g))) * u);
    }
}

static void axpy(float a, const float *x, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES) store(y + i, fma16(splat(a), load(x + i), load(y + i)));
}

static void add(const float *x, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES) store(y + i, load(y + i) + load(x + i));
}

static void exps(const float *x, float shift, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES) store(y + i, exp16(load(x + i) - splat(shift)));
}

static void f32_to_f16(const float *x, uint16_t *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i += LANES) {
        v16h half = __builtin_convertvector(clamp(load(x + i), 65504), v16h);
        memcpy(y + i, &half, sizeof half);
    }
}

/* The entries of the table that this header and attention_body.h define, with the attention for the q8 cache as given. */
#define KERNELS_OF_BODY KERNELS_OF_BODY_WITH(attention_q8)
#define KERNELS_OF_BODY_WITH(attention_for_q8)                                                                              \
    .hadamard = hadamard, .quantize8 = quantize8, .quantize16 = quantize16, .fit8 = fit8, .rms_norm = rms_norm,            \
    .swiglu = swiglu, .axpy = axpy, .add = add, .exps = exps, .attention = { attention_f32, attention_f16, attention_for_q8 }, \
    .f32_to_f16 = f32_to_f16

#endif
