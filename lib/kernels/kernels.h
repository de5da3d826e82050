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
 *   q8 and q4    sum = sum_c w[row][c] * q[c] exactly in int32, y = (float)sum * (row_scale * token_scale)
 *   products     16-bit activations: y = fma(128, (float)sum_hi, (float)sum_lo) * (row_scale * token_scale)
 *                q4 weights are w = level[nibble] * scale (colibri_format.h), whatever their bytes: scales are taken modulo 8
 */
#ifndef COLI_KERNELS_H
#define COLI_KERNELS_H

#include "base/base.h"

/* The 16 levels of q4 (colibri_format.h). */
#define COLI_Q4_LEVELS { -18, -14, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 14, 18 }

#define COLI_MAX_Q8_K 131072 /* up to here every integer sum of a q8 or q4 product fits 32 bits */
#define COLI_NUM_DTYPES 5     /* COLIBRI_FILE_F32 ... _Q4 */
#define COLI_MAX_HEAD_DIM 1024
#define COLI_KERNEL_SCRATCH 262144 /* bytes of coli_matmul_t.scratch */

/* Activation rows as one matrix product wants them: f32 for f32/f16/bf16 weights, rotated and quantised for q8 and q4. */
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
    const float *w_scale;  /* q8, q4: [n_blocks][16], else NULL */
    uint64_t block_bytes;  /* k / 128 * (8192 | 4096 | 4096 | 2048 | 1088): contiguous blocks */
    uint32_t n_blocks;
    uint32_t k;            /* padded */
    const coli_act_t *x;
    const uint32_t *rows;  /* [n_tokens] activation row of each token, or NULL: first_row + t */
    uint32_t first_row;
    uint32_t n_tokens;
    float *y;              /* [n_tokens][y_stride] */
    uint64_t y_stride;     /* floats, multiple of 16 */
    void *scratch;         /* COLI_KERNEL_SCRATCH bytes of the calling thread's own, 64-byte aligned; contents mean nothing */
} coli_matmul_t;

/* Queries of consecutive positions and of the heads that share one KV head, against that head's keys. The query of token t
 * (position p = position + t) sees keys first ... p, first = window && p >= window ? p - window + 1 : 0; all of them are stored.
 *
 *     cache    k_cache                                  v_cache           element
 *     f32 f16  [keys / 16][head_dim][16 keys]           [keys][head_dim]  float, IEEE half
 *     q8       [keys / 16][head_dim / 4][16 keys][4]    [keys][head_dim]  int8, scale k_scale[key], v_scale[key]
 *
 * Keys of q8 are rotated: each head times the Hadamard matrix with block B = coli_rotation_block(head_dim), then quantize8;
 * values are quantised as they are. A block of keys is a q8 tile block whose rows are keys. */
typedef struct coli_attention {
    const void *k_cache, *v_cache;
    const float *k_scale, *v_scale; /* q8: [keys], else NULL */
    uint32_t head_dim;     /* padded to 16, at most COLI_MAX_HEAD_DIM */
    uint32_t n_tokens, n_heads;
    uint32_t position;     /* of token 0 */
    uint32_t window;       /* 0: none */
    float scale;           /* of q . k */
    const float *q;        /* query of (token t, head h) at q + t * q_stride + h * head_dim */
    float *out;            /* likewise with out_stride; not q */
    uint64_t q_stride, out_stride; /* floats, multiples of 16 */
    float *scores;         /* scratch [n_tokens * n_heads][score_stride], aligned */
    uint64_t score_stride; /* floats, multiple of 16, >= pad16(position + n_tokens) - (first key of token 0) / 16 * 16 */
} coli_attention_t;

/* The first key that the query at position p sees. */
COLI_INLINE uint32_t coli_first_key(uint32_t window, uint32_t p) { return window && p >= window ? p - window + 1 : 0; }

/* How a product is cut best: whole multiples of `blocks` blocks and, with many tokens, at least `tokens` at once. */
typedef struct coli_geometry {
    uint16_t blocks, tokens;
} coli_geometry_t;

typedef struct coli_kernels {
    colibri_isa_t isa;
    const char *name;

    /* by COLIBRI_FILE_F32, _F16, _BF16, _Q8, _Q4 */
    void (*matmul[COLI_NUM_DTYPES])(const coli_matmul_t *m);
    coli_geometry_t geometry[COLI_NUM_DTYPES];

    /* In place on k floats (a multiple of 16): every part of `block` (a power of two, 16 ... 4096, dividing k) times the Hadamard matrix.
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

    void (*exps)(const float *x, float shift, float *y, uint32_t n); /* y = coli_expf(x - shift); n multiple of 16 */

    /* [0] f32 cache, [1] f16 cache, [2] q8 cache. Per query: s[key] = score; m = max; p = exp(s - m); sum = tree(lanes of p,
     * lane = key % 16, keys ascending); out[d] = (fma down keys of weight * v) / sum. exp is coli_expf.
     *     f32, f16  score = (fma down d of k[d][key] * q[d]) * scale; weight = p
     *     q8        qr = quantize16(hadamard(q)); score = fma(128, (float)(k . hi), (float)(k . lo)) *
     *               (k_scale[key] * qr's scale) * (scale / B); weight = p * v_scale[key], v = (float)integer
     * Unseen keys take no part: no fma with 0. */
    void (*attention[3])(const coli_attention_t *a);

    /* n multiple of 16; nearest even, clamped to +-65504; NaN stays. */
    void (*f32_to_f16)(const float *x, uint16_t *y, uint32_t n);
} coli_kernels_t;

/* The table for an instruction set (AUTO: the best one here); NULL if not built in or not usable on this machine. */
const coli_kernels_t *coli_kernels_select(colibri_isa_t isa);
const char *coli_isa_name(colibri_isa_t isa); /* "auto", "ref", ...; NULL if there is no such */

/* Largest power of two dividing k (padded k, or a head padded to 16), at most COLIBRI_MAX_ROTATION. */
COLI_INLINE uint32_t coli_rotation_block(uint32_t k) {
    uint32_t b = k & (0u - k);
    return b > COLIBRI_MAX_ROTATION ? COLIBRI_MAX_ROTATION : b;
}

#endif
