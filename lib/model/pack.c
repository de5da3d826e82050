/* pack.c: row-major weights become tiles (colibri_format.h): what a converter spends its time on. One block of 16 rows at a
 * time: widen a row to f32, convert or rotate and quantise it into a row of 32-bit words, and at the end lay the 16 rows of
 * words out as tile steps, which is the same transposition for every type: a step is one word of each row. q4 lays out the
 * rotated floats and quantises 16 rows together (pack_q4.c). Float sums run in the written order of the kernels (or in double
 * over fixed lanes), so the bytes are the same on every machine. */
#include <stdlib.h>

#include "base/fpenv.h"
#include "base/math.h"
#include "base/status.h"
#include "base/structs.h"
#include "kernels/kernels.h"
#include "model/format.h"
#include "model/pack_q4.h"

#define LANES COLIBRI_TILE_ROWS
#define NUM_CLIPS 16           /* candidates of the search: the largest |w| times 1, 0.98, ..., 0.70 */
#define ROW_GAP 16             /* words between rows of the block: rows a power of two apart would share few cache sets */
#define SMALLEST_MAX 0x1p-100f /* rows below are stored as zeros, as the kernels do with activations */

typedef struct packer {
    colibri_pack_t pack; /* as given, defaults filled in */
    const coli_kernels_t *kernels;
    uint64_t block_bytes;
    uint32_t k;         /* padded */
    uint32_t rotation;  /* block of the Hadamard transform */
    uint32_t row_words; /* 32-bit words of a row before it is laid out: q4: floats, else as stored */
    float *row;         /* [k] one row as f32 */
    uint32_t *words;    /* [16][row_words + ROW_GAP] a block, row by row */
    float *columns;     /* [k][16] q4 alone: the same, laid out */
    double squared_error, squared_norm;
} packer_t;

static uint32_t element_size(int32_t dtype) { /* bytes before a row is laid out; 0: not a type that can be stored */
    switch (dtype) {
    case COLIBRI_DTYPE_F32:
    case COLIBRI_DTYPE_Q4: return 4;
    case COLIBRI_DTYPE_F16:
    case COLIBRI_DTYPE_BF16: return 2;
    case COLIBRI_DTYPE_Q8: return 1;
    default: return 0;
    }
}

static bool has_scales(int32_t dtype) { return dtype == COLIBRI_DTYPE_Q8 || dtype == COLIBRI_DTYPE_Q4; }

uint64_t colibri_packed_size(int32_t dtype, uint32_t rows, uint32_t k) {
    uint64_t size = element_size(dtype), unused;
    if (size == 0 || rows == 0 || k == 0 || rows > INT32_MAX || k > INT32_MAX) return 0;
    if (has_scales(dtype) && k > COLI_MAX_Q8_K) return 0;
    if (!coli_mul64((uint64_t)coli_pad_rows(rows) * size, coli_pad_k(k), &unused)) return 0;
    return coli_matrix_bytes((uint32_t)dtype - 1, rows, k);
}

/* ---- Rows in: f32, finite, their squares ---------------------------------------------------------------------------- */

/* The source may lie at any address (safetensors do not align), hence memcpy. */
static void widen_row(const uint8_t *src, int32_t dtype, uint32_t k, float *row) {
    uint16_t half;
    if (dtype == COLIBRI_DTYPE_F32) memcpy(row, src, (size_t)k * 4);
    for (uint32_t i = 0; dtype == COLIBRI_DTYPE_BF16 && i < k; i++) {
        memcpy(&half, src + (size_t)i * 2, 2);
        row[i] = coli_bf16_to_f32(half);
    }
    for (uint32_t i = 0; dtype == COLIBRI_DTYPE_F16 && i < k; i++) {
        memcpy(&half, src + (size_t)i * 2, 2);
        row[i] = coli_f16_to_f32(half);
    }
}

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* Largest |x|; not finite if one x is not. */
static float largest(const float *x, uint32_t k) {
    int32_t max = 0; /* signed, for the compare that every machine has */
    float value;
    for (uint32_t i = 0; i < k; i++) {
        int32_t bits = (int32_t)(bits_of(x[i]) & 0x7fffffffu);
        max = bits > max ? bits : max;
    }
    memcpy(&value, &max, 4);
    return value;
}

static bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

/* Sum of (x - y)^2 (y NULL: x^2) over k padded, in double, over 8 lanes so that it can run in vectors. */
static double squares(const float *x, const float *y, uint32_t k) {
    double lanes[8] = { 0 };
    for (uint32_t i = 0; i < k; i += 8)
        for (int l = 0; l < 8; l++) {
            double d = (double)x[i + l] - (y ? (double)y[i + l] : 0.0);
            lanes[l] += d * d;
        }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

static colibri_status_t read_row(packer_t *p, uint32_t r) {
    const colibri_pack_t *pack = &p->pack;
    const uint8_t *src = (const uint8_t *)pack->src + (uint64_t)r * pack->src_stride * element_size(pack->src_dtype);
    widen_row(src, pack->src_dtype, pack->k, p->row);
    memset(p->row + pack->k, 0, (size_t)(p->k - pack->k) * 4);
    if (!is_finite(largest(p->row, p->k))) {
        uint32_t c = 0;
        while (is_finite(p->row[c])) c++;
        return coli_fail(COLIBRI_ERR_NOT_FINITE, "weight [%u][%u] is %s; the checkpoint is damaged, get it again", (unsigned)r,
                         (unsigned)c, p->row[c] != p->row[c] ? "NaN" : "infinite");
    }
    p->squared_norm += squares(p->row, NULL, p->k);
    return COLIBRI_OK;
}

/* ---- Rows out: float types ------------------------------------------------------------------------------------------- */

/* p->row as f16 or bf16; what was lost is added to the error. */
static colibri_status_t narrow_row(packer_t *p, uint32_t r, uint16_t *out) {
    bool f16 = p->pack.dst_dtype == COLIBRI_DTYPE_F16;
    double lost = 0;
    for (uint32_t c = 0; c < p->k; c++) {
        out[c] = f16 ? coli_f32_to_f16(p->row[c]) : coli_f32_to_bf16(p->row[c]);
        float stored = f16 ? coli_f16_to_f32(out[c]) : coli_bf16_to_f32(out[c]);
        if (!is_finite(stored))
            return coli_fail(COLIBRI_ERR_NOT_FINITE, "weight [%u][%u] is %g, too large for %s; store this model as %s",
                             (unsigned)r, (unsigned)c, (double)p->row[c], f16 ? "f16" : "bf16", f16 ? "bf16 or f32" : "f32");
        double d = (double)p->row[c] - (double)stored;
        lost += d * d;
    }
    p->squared_error += lost;
    return COLIBRI_OK;
}

/* ---- Rows out: q8 ------------------------------------------------------------------------------------------------------ */

typedef struct step {
    float scale;   /* as stored */
    float inverse; /* q = nearest even(x * inverse), clamped to +-127 */
    double error;  /* sum of (x - scale * q)^2 over the rotated row */
} step_t;

/* Integers up to +-127 for |x| up to `clip`. */
static step_t step_for_clip(const packer_t *p, float clip, bool refine) {
    float sums[3];
    step_t step = { .scale = clip / 127.0f, .inverse = 127.0f / clip };
    p->kernels->fit8(p->row, p->k, step.inverse, sums);
    double error = sums[0], cross = sums[1], square = sums[2], unit = (double)clip / 127.0;
    if (refine && square > 0) { /* for these integers the best scale is 1 + cross / square times as large */
        step.scale = (float)((1.0 + cross / square) * unit);
        error -= cross * cross / square;
    }
    step.error = COLI_MAX(error, 0.0) * unit * unit;
    return step;
}

static step_t search_step(const packer_t *p, float max) {
    step_t best = step_for_clip(p, max, true);
    for (int i = 1; i < NUM_CLIPS; i++) {
        step_t step = step_for_clip(p, max * (1.0f - 0.02f * (float)i), true);
        if (step.error < best.error) best = step;
    }
    return best;
}

/* The nearest-rank 99.9th percentile of |x|: the largest value that more than k / 1000 elements reach. By bisection on the
 * bits, whose order as integers is that of the values. */
static float percentile(const float *x, uint32_t k) {
    uint32_t above = k / 1000, low = 0, high = 0x7f800000u; /* the answer is in [low, high) */
    float value;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2, count = 0;
        for (uint32_t i = 0; i < k; i++) count += (int32_t)(bits_of(x[i]) & 0x7fffffffu) >= (int32_t)middle;
        if (count > above)
            low = middle;
        else
            high = middle;
    }
    memcpy(&value, &low, 4);
    return value;
}

/* The |x| that gets the largest integer, by the percentile and max rules. */
static float largest_kept(const packer_t *p, float max) {
    if (p->pack.scale_rule != COLIBRI_SCALE_PERCENTILE) return max;
    float clip = percentile(p->row, p->k);
    return clip >= SMALLEST_MAX ? clip : max; /* else hardly any element is not zero: keep those */
}

static step_t choose_step(const packer_t *p, float max) {
    if (p->pack.scale_rule == COLIBRI_SCALE_LEAST_SQUARES) return search_step(p, max);
    return step_for_clip(p, largest_kept(p, max), false);
}

/* p->row rotated; its largest element. */
static float rotate_row(packer_t *p) {
    float part = 1.0f / (float)p->rotation;
    for (uint32_t c = 0; c < p->k; c++) p->row[c] *= part; /* a power of two: exact, and no sum below can overflow */
    p->kernels->hadamard(p->row, p->k, p->rotation);
    return largest(p->row, p->k);
}

/* p->row, rotated and quantised; its scale. */
static void quantize_row(packer_t *p, int8_t *out, float *scale) {
    step_t step = { 0 };
    float max = rotate_row(p);
    if (max >= SMALLEST_MAX)
        step = choose_step(p, max);
    else
        step.error = squares(p->row, NULL, p->k);
    for (uint32_t c = 0; c < p->k; c++) {
        float u = p->row[c] * step.inverse;
        u = u > 127.0f ? 127.0f : u;
        u = u < -127.0f ? -127.0f : u;
        out[c] = (int8_t)(int32_t)((u + 12582912.0f) - 12582912.0f); /* 1.5 * 2^23: to nearest even */
    }
    *scale = step.scale;
    p->squared_error += step.error * (double)p->rotation; /* turned back, lengths grow by sqrt(block) */
}

/* ---- Rows out: q4 ------------------------------------------------------------------------------------------------------ */

/* What to know of a row that waits for the other rows of its block. */
typedef struct waiting {
    float unit[LANES]; /* a power of two that was taken out: |x| < 64; 0: a row of zeros */
    float most[LANES]; /* what becomes the largest integer, unless that is searched for */
} waiting_t;

/* p->row, rotated and made small. */
static void rotate_for_q4(packer_t *p, uint32_t i, float *out, waiting_t *waiting) {
    float max = rotate_row(p), inverse = 0;
    waiting->unit[i] = waiting->most[i] = 0;
    if (max >= SMALLEST_MAX) {
        uint32_t exponent = bits_of(max) >> 23, unit = (exponent - 5) << 23, one = (259 - exponent) << 23;
        memcpy(&waiting->unit[i], &unit, 4);
        memcpy(&inverse, &one, 4);
        if (p->pack.scale_rule != COLIBRI_SCALE_LEAST_SQUARES) waiting->most[i] = largest_kept(p, max) * inverse;
    } else {
        p->squared_error += squares(p->row, NULL, p->k) * (double)p->rotation;
    }
    for (uint32_t c = 0; c < p->k; c++) out[c] = p->row[c] * inverse;
}

static void quantize_block_q4(packer_t *p, const waiting_t *waiting, uint8_t *dst, float scales[LANES]) {
    coli_q4_rule_t rule = p->pack.scale_rule == COLIBRI_SCALE_LEAST_SQUARES ? COLI_Q4_SEARCH : COLI_Q4_FIXED;
    double error[LANES];
    coli_pack_q4(p->columns, p->k, rule, waiting->most, dst, scales, error);
    for (int r = 0; r < LANES; r++) {
        double unit = (double)waiting->unit[r];
        scales[r] *= waiting->unit[r];
        p->squared_error += error[r] * unit * unit * (double)p->rotation;
    }
}

/* ---- Blocks ------------------------------------------------------------------------------------------------------------ */

/* A step is one 32-bit word (1, 2 or 4 elements) of each of the 16 rows. */
static void lay_out(const packer_t *p, uint32_t *dst) {
    size_t stride = p->row_words + ROW_GAP;
    for (size_t w = 0; w < p->row_words; w++)
        for (size_t r = 0; r < LANES; r++) dst[w * LANES + r] = p->words[r * stride + w];
}

static colibri_status_t pack_block(packer_t *p, uint32_t b) {
    uint8_t *dst = (uint8_t *)p->pack.dst + b * p->pack.dst_block_stride;
    waiting_t waiting = { 0 };
    float *scales = p->pack.dst_scale ? p->pack.dst_scale + b * p->pack.dst_scale_stride : NULL;
    for (uint32_t i = 0; i < LANES; i++) {
        uint32_t r = b * LANES + i;
        uint32_t *words = p->words + (size_t)i * (p->row_words + ROW_GAP);
        colibri_status_t status = COLIBRI_OK;
        if (r >= p->pack.rows) { /* padding */
            memset(words, 0, (size_t)p->row_words * 4);
            if (scales) scales[i] = 0;
            continue;
        }
        if ((status = read_row(p, r)) != COLIBRI_OK) return status;
        if (p->pack.dst_dtype == COLIBRI_DTYPE_Q8)
            quantize_row(p, (int8_t *)words, &scales[i]);
        else if (p->pack.dst_dtype == COLIBRI_DTYPE_Q4)
            rotate_for_q4(p, i, (float *)words, &waiting);
        else if (p->pack.dst_dtype == COLIBRI_DTYPE_F32)
            memcpy(words, p->row, (size_t)p->k * 4);
        else
            status = narrow_row(p, r, (uint16_t *)words);
        if (status != COLIBRI_OK) return status;
    }
    bool q4 = p->pack.dst_dtype == COLIBRI_DTYPE_Q4;
    lay_out(p, q4 ? (uint32_t *)p->columns : (uint32_t *)(void *)dst);
    if (q4) quantize_block_q4(p, &waiting, dst, scales);
    return COLIBRI_OK;
}

/* ---- Arguments --------------------------------------------------------------------------------------------------------- */

static colibri_status_t check_kinds(const colibri_pack_t *pack) {
    if (has_scales(pack->src_dtype) || element_size(pack->src_dtype) == 0)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack.src_dtype is %d; f32 (1), f16 (2) and bf16 (3) can be packed",
                         (int)pack->src_dtype);
    if (element_size(pack->dst_dtype) == 0)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "pack.dst_dtype is %d; f32 (1), f16 (2), bf16 (3), q8 (4) and q4 (5) can be written",
                         (int)pack->dst_dtype);
    if (pack->scale_rule < COLIBRI_SCALE_LEAST_SQUARES || pack->scale_rule > COLIBRI_SCALE_MAX)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack.scale_rule is %d; 0, 1 and 2 are known", (int)pack->scale_rule);
    if (pack->src == NULL || pack->dst == NULL)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack.%s is NULL", pack->src == NULL ? "src" : "dst");
    if (colibri_packed_size(pack->dst_dtype, pack->rows, pack->k) == 0)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "pack: a matrix of %u rows and k = %u is out of range (q8 and q4: k up to %d)", (unsigned)pack->rows,
                         (unsigned)pack->k, COLI_MAX_Q8_K);
    return COLIBRI_OK;
}

/* Strides: defaults filled in, then checked. */
static colibri_status_t check_strides(packer_t *p) {
    colibri_pack_t *pack = &p->pack;
    uint64_t blocks = coli_pad_rows(pack->rows) / LANES, unused;
    if (pack->src_stride == 0) pack->src_stride = pack->k;
    if (pack->dst_block_stride == 0) pack->dst_block_stride = p->block_bytes;
    if (pack->dst_scale_stride == 0) pack->dst_scale_stride = LANES;
    if (pack->src_stride < pack->k)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack.src_stride is %llu, less than k = %u: rows would overlap",
                         (unsigned long long)pack->src_stride, (unsigned)pack->k);
    if (pack->dst_block_stride < p->block_bytes)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack.dst_block_stride is %llu bytes, but a block has %llu",
                         (unsigned long long)pack->dst_block_stride, (unsigned long long)p->block_bytes);
    if (pack->dst_scale_stride < LANES)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack.dst_scale_stride is %llu floats, but a block has 16 scales",
                         (unsigned long long)pack->dst_scale_stride);
    if (!coli_mul64(pack->src_stride, (uint64_t)pack->rows * 4, &unused) ||
        !coli_mul64(pack->dst_block_stride, blocks, &unused) || !coli_mul64(pack->dst_scale_stride, blocks * 4, &unused))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "pack: %u rows with these strides do not fit into memory",
                         (unsigned)pack->rows);
    if ((uintptr_t)pack->dst % COLI_ALIGN != 0 || pack->dst_block_stride % COLI_ALIGN != 0)
        return coli_fail(COLIBRI_ERR_ALIGNMENT, "pack.%s is not a multiple of 64",
                         (uintptr_t)pack->dst % COLI_ALIGN ? "dst" : "dst_block_stride");
    if (!has_scales(pack->dst_dtype)) {
        pack->dst_scale = NULL;
    } else if (pack->dst_scale == NULL) {
        if (pack->dst_block_stride != p->block_bytes)
            return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                             "pack.dst_scale is NULL, but the blocks are not contiguous; say where scales go");
        pack->dst_scale = (float *)(void *)((uint8_t *)pack->dst + blocks * p->block_bytes);
    }
    if ((uintptr_t)pack->dst_scale % sizeof(float) != 0)
        return coli_fail(COLIBRI_ERR_ALIGNMENT, "pack.dst_scale is not a multiple of 4");
    return COLIBRI_OK;
}

/* One row of floats and one or (q4) two blocks of words, aligned; to be freed. NULL: none left. */
static void *allocate(packer_t *p) {
    uint64_t row = (uint64_t)p->k * 4, block = (uint64_t)LANES * (p->row_words + ROW_GAP) * 4;
    uint64_t bytes = row + block + COLI_ALIGN + (p->pack.dst_dtype == COLIBRI_DTYPE_Q4 ? row * LANES : 0);
    uint8_t *memory = bytes > SIZE_MAX / 2 ? NULL : malloc((size_t)bytes);
    if (memory == NULL) {
        coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for packing: %llu bytes for one block of rows with k = %u",
                  (unsigned long long)bytes, (unsigned)p->pack.k);
        return NULL;
    }
    p->row = (float *)(void *)(memory + (COLI_ALIGN - (uintptr_t)memory % COLI_ALIGN) % COLI_ALIGN);
    p->words = (uint32_t *)(void *)(p->row + p->k);
    p->columns = (float *)(void *)((uint8_t *)p->words + block);
    return memory;
}

static __attribute__((noinline)) colibri_status_t pack_matrix(colibri_pack_t *pack) {
    packer_t p = { .kernels = coli_kernels_select(COLIBRI_ISA_AUTO) };
    colibri_status_t status = coli_struct_in(pack, sizeof p.pack, sizeof p.pack, "colibri_pack_t", &p.pack);
    if (status != COLIBRI_OK || (status = check_kinds(&p.pack)) != COLIBRI_OK) return status;
    p.k = coli_pad_k(p.pack.k);
    p.rotation = coli_rotation_block(p.k);
    p.row_words = (uint32_t)((uint64_t)p.k * element_size(p.pack.dst_dtype) / 4);
    p.block_bytes = (uint64_t)p.row_words * 4 * LANES;
    if (p.pack.dst_dtype == COLIBRI_DTYPE_Q4) p.block_bytes = p.k / COLIBRI_TILE_K * (uint64_t)COLIBRI_Q4_PIECE;
    if ((status = check_strides(&p)) != COLIBRI_OK) return status;
    void *memory = allocate(&p);
    if (memory == NULL) return COLIBRI_ERR_OUT_OF_MEMORY;
    for (uint32_t b = 0; b < coli_pad_rows(p.pack.rows) / LANES && status == COLIBRI_OK; b++) status = pack_block(&p, b);
    free(memory);
    if (status != COLIBRI_OK) return status;
    pack->squared_error = p.squared_error;
    pack->squared_norm = p.squared_norm;
    return COLIBRI_OK;
}

colibri_status_t colibri_pack_matrix(colibri_pack_t *pack) {
    uint64_t host = coli_fp_enter();
    colibri_status_t status = pack_matrix(pack);
    coli_fp_leave(host);
    return status;
}
