/* plain.h: products with q8 and q4 weights as colibri_format.h and kernels.h define them, in plain loops: what
 * ref_integer.c is compared with. */
#ifndef PLAIN_H
#define PLAIN_H

#include "base/math.h"
#include "kernels/kernels.h"

/* Weight (row, c) of a block. */
static int32_t plain_q8(const uint8_t *block, uint32_t row, uint32_t c) { return (int8_t)block[c / 4 * 64 + row * 4 + c % 4]; }

static int32_t plain_q4(const uint8_t *block, uint32_t row, uint32_t c) {
    static const int8_t levels[16] = COLI_Q4_LEVELS;
    const uint8_t *piece = block + (size_t)(c / 128) * COLIBRI_Q4_PIECE;
    uint32_t group = c % 128 / 16, i = c % 16;
    int32_t scale = piece[row * 4 + group / 2] >> group % 2 * 4 & 7;
    uint8_t byte = piece[64 + (group * 2 + i / 8) * 64 + row * 4 + i % 4];
    return scale * levels[i % 8 < 4 ? byte & 15 : byte >> 4];
}

typedef int32_t (*plain_weight_fn)(const uint8_t *block, uint32_t row, uint32_t c);

static void plain_product(const coli_matmul_t *m, plain_weight_fn weight) {
    const coli_act_t *x = m->x;
    for (uint32_t t = 0; t < m->n_tokens; t++)
        for (uint32_t row = 0; row < m->n_blocks * 16; row++) {
            uint32_t of = m->rows ? m->rows[t] : m->first_row + t;
            int32_t hi = 0, lo = 0;
            for (uint32_t c = 0; c < m->k; c++) {
                int32_t w = weight(m->w + row / 16 * m->block_bytes, row % 16, c);
                hi += w * x->hi[(size_t)of * x->stride + c];
                if (x->bits == 16) lo += w * x->lo[(size_t)of * x->stride + c];
            }
            float sum = x->bits == 16 ? coli_fmaf(128.0f, (float)hi, (float)lo) : (float)hi;
            m->y[t * m->y_stride + row] = sum * (m->w_scale[row] * x->scale[of]);
        }
}

static void plain_matmul_q8(const coli_matmul_t *m) { plain_product(m, plain_q8); }
static void plain_matmul_q4(const coli_matmul_t *m) { plain_product(m, plain_q4); }

/* The reference, but plain in these. */
static coli_kernels_t plain_kernels(const coli_kernels_t *ref) {
    coli_kernels_t plain = *ref;
    plain.name = "plain";
    plain.matmul[COLIBRI_FILE_Q8] = plain_matmul_q8;
    plain.matmul[COLIBRI_FILE_Q4] = plain_matmul_q4;
    return plain;
}

#endif
