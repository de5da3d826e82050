/* kernels.h: the table of hot functions, one set per instruction set, all giving the same bits.
 *
 * Contract of every kernel: row lengths are padded (k to 128, rows to 16, head_dim to 16) and padding holds zeros on input
 * and gets zeros (or products of zeros) on output, so no kernel has a tail; pointers to float and int8 rows are 64-byte
 * aligned; no kernel reads or writes outside the given rows, allocates, or depends on anything but its arguments. Batch size
 * and number of blocks select tiling, never arithmetic. All "fma" round once; the written order is:
 *
 *   lanes        16 partial results, element i belongs to lane i % 16, elements in ascending order
 *   tree(v)      v[i] += v[i + 8] (i < 8), then + 4, + 2, + 1: result in v[0]
 *   f32/f16/bf16 matrix products: acc = 0; for c = 0 ... k - 1: acc[row] = fma(w[row][c], x[c], acc[row])
 *   q8 products  sum = sum_c w[row][c] * q[c] exactly in int32, y = (float)sum * (row_scale * token_scale)
 *                16-bit activations: y = fma(128, (float)sum_hi, (float)sum_lo) * (row_scale * token_scale)
 */
#ifndef COLI_KERNELS_H
#define COLI_KERNELS_H

#include "base/base.h"

#define COLI_MAX_Q8_K 131072 /* up to here every integer sum of a q8 product fits 32 bits */

/* Activation rows as one matrix product wants them: f32 for f32/f16/bf16 weights, rotated and quantised for q8. */
typedef struct coli_act {
    uint32_t stride;   /* elements (floats, or int8) from row to row: padded k, multiple of 128 */
    uint32_t bits;     /* 0: f32 rows below; 8: hi; 16: hi and lo */
    float *f32;        /* [rows][stride] */
    int8_t *hi;        /* [rows][stride] in [-127, 127] */
    int8_t *lo;        /* [rows][stride] in [-64, 63]; x = scale * (128 hi + lo) */
    float *scale;      /* [rows] token scale */
    int32_t *sum_hi;   /* [rows] sum of hi over k (for kernels that flip the weights' sign bit) */
    int32_t *sum_lo;   /* [rows] */
} coli_act_t;

/* y[t][block * 16 + r] = W[block][r] . x[row(t)]   for n_tokens tokens and n_blocks consecutive blocks of 16 rows. */
typedef struct coli_matmul {
    const uint8_t *w;      /* first block; blocks are block_bytes apart */
    const float *w_scale;  /* q8: [n_blocks][16], else NULL */
    uint64_t block_bytes;  /* 16 * k * element size (contiguous blocks) */
    uint32_t n_blocks;
    uint32_t k;            /* padded */
    const coli_act_t *x;
    const uint32_t *rows;  /* [n_tokens] activation row of each token, or NULL: first_row + t */
    uint32_t first_row;
    uint32_t n_tokens;
    float *y;              /* [n_tokens][y_stride] */
    uint64_t y_stride;     /* floats, multiple of 16 */
} coli_matmul_t;

/* One query head group against the keys of one KV head. Keys [first, last] are seen. K is stored in blocks of 16 keys:
 * k_cache [block][head_dim][16], v_cache [key][head_dim]; head_dim padded to 16; element type f32 or f16. */
typedef struct coli_attention {
    const void *k_cache, *v_cache;
    uint32_t head_dim;     /* padded */
    uint32_t n_queries;    /* query heads that share this KV head, same position */
    uint32_t first, last;  /* key positions, first <= last */
    float scale;           /* of q . k */
    const float *q;        /* [n_queries][q_stride] */
    float *out;            /* [n_queries][q_stride], may be q itself */
    uint64_t q_stride;     /* floats, multiple of 16 */
    float *scores;         /* scratch [n_queries][score_stride], aligned */
    uint64_t score_stride; /* floats, multiple of 16, >= pad16(last + 1) - first / 16 * 16 */
} coli_attention_t;

typedef struct coli_kernels {
    colibri_isa_t isa;
    const char *name;

    /* by COLIBRI_FILE_F32, _F16, _BF16, _Q8 */
    void (*matmul[4])(const coli_matmul_t *m);

    /* In place on k floats: every part of `block` (a power of two, 16 ... 4096, dividing k) times the Hadamard matrix.
     * Written order: for h = block / 2, block / 4, ..., 1: (a, b) at distance h become (a + b, a - b). */
    void (*hadamard)(float *x, uint32_t k, uint32_t block);
    /* scale = max|x| / 127, q = nearest-even(x * (127 / max|x|)) clamped to +-127. max below 2^-100 (or 0): all zero. A NaN or
     * infinity in x: scale = NaN, q = 0 (so that every product is NaN). Max is over the bits of |x| as integers. */
    void (*quantize8)(const float *x, uint32_t k, int8_t *hi, float *scale, int32_t *sum_hi);
    /* The same with 16256 for 127: q in [-16256, 16256], hi = (q + 64) >> 7, lo = q - 128 hi. */
    void (*quantize16)(const float *x, uint32_t k, int8_t *hi, int8_t *lo, float *scale, int32_t *sum_hi, int32_t *sum_lo);

    /* How well 8 bits hold x at a given step (for the search of weight scales): with u = x * inverse, q = nearest-even(u
     * clamped to +-127), d = u - q, the tree of lanes of [0] fma(d, d, acc), [1] fma(d, q, acc), [2] fma(q, q, acc). u is
     * finite. */
    void (*fit8)(const float *x, uint32_t k, float inverse, float sums[3]);

    /* y = w * (x * r), r = 1 / sqrt(tree(lanes of fma(x, x, acc)) / n + eps); w and y may be NULL: only the sum is made.
     * k padded, n true width; y may be x; k is a multiple of 16 here (heads). Returns the sum of squares (NaN or inf if x
     * holds one). */
    float (*rms_norm)(const float *x, const float *w, float *y, uint32_t k, uint32_t n, float eps);
    /* act[j] = (g / (1 + exp(-g))) * u. gate_up: [n / 16][gate 16, up 16]; n multiple of 16. */
    void (*swiglu)(const float *gate_up, float *act, uint32_t n);
    void (*axpy)(float a, const float *x, float *y, uint32_t n);              /* y = fma(a, x, y); n multiple of 16 */
    void (*add)(const float *x, float *y, uint32_t n);                        /* y = y + x; n multiple of 16 */

    /* [0] f32 cache, [1] f16 cache. Per query: s[key] = (fma down d of k[d][key] * q[d]) * scale; m = max; p = exp(s - m);
     * sum = tree(lanes of p, lane = key % 16, blocks ascending, unseen keys give 0); out[d] = (fma down keys of p * v) / sum.
     * exp is coli_expf. */
    void (*attention[2])(const coli_attention_t *a);

    /* n multiple of 16; nearest even, clamped to +-65504; NaN stays. */
    void (*f32_to_f16)(const float *x, uint16_t *y, uint32_t n);
} coli_kernels_t;

/* The table for an instruction set (AUTO: the best one here); NULL if not built in or not usable on this machine. */
const coli_kernels_t *coli_kernels_select(colibri_isa_t isa);
const char *coli_isa_name(colibri_isa_t isa); /* "auto", "ref", ...; NULL if there is no such */

/* Largest power of two dividing the padded k, at most COLIBRI_MAX_ROTATION. */
COLI_INLINE uint32_t coli_rotation_block(uint32_t k) {
    uint32_t b = k & (0u - k);
    return b > COLIBRI_MAX_ROTATION ? COLIBRI_MAX_ROTATION : b;
}

#endif
