/* integer.h: what the integer products of all instruction sets share: from activation rows to a tile's inputs, from its integer
 * sums to y. Everything is inlined into the file of the instruction set. */
#ifndef COLI_INTEGER_H
#define COLI_INTEGER_H

#include "kernels/body.h"

/* The activation rows of a tile in the order of its sums, and 128 times the sum of each. */
COLI_INLINE void gather_q8(const coli_matmul_t *m, uint32_t t, const int8_t *x[MAX_VECTORS], int32_t excess[MAX_VECTORS],
                           const int nt, const int bits) {
    EACH (j, nt) {
        size_t row = row_of(m, t + (uint32_t)j), at = row * m->x->stride;
        int v = bits == 16 ? 2 * j : j;
        x[v] = m->x->hi + at;
        excess[v] = (int32_t)(128u * (uint32_t)m->x->sum_hi[row]);
        if (bits == 16) {
            x[v + 1] = m->x->lo + at;
            excess[v + 1] = (int32_t)(128u * (uint32_t)m->x->sum_lo[row]);
        }
    }
}

/* From the integer sums of a tile [nb][nt * bits / 8][16] (hi, or hi and lo of each token) to y. What a kernel added to every
 * lane of a sum by flipping the weights' signs is in excess[vector]. */
COLI_INLINE void finish_sums(const coli_matmul_t *m, uint32_t b, uint32_t t, v16i (*sums)[MAX_VECTORS], const int32_t *excess,
                             uint32_t nb, uint32_t nt) {
    uint32_t per = m->x->bits / 8;
    for (uint32_t j = 0; j < nt; j++) {
        v16f token_scale = splat(m->x->scale[row_of(m, t + j)]);
        const float *w_scale = m->w_scale + (size_t)b * LANES;
        float *y = m->y + (t + (size_t)j) * m->y_stride + (size_t)b * LANES;
        for (uint32_t i = 0; i < nb; i++) {
            const v16i *of = &sums[i][j * per];
            v16f sum = __builtin_convertvector((v16i)((v16u)of[0] - (uint32_t)excess[j * per]), v16f);
            if (per == 2) {
                v16i lo = (v16i)((v16u)of[1] - (uint32_t)excess[j * 2 + 1]);
                sum = fma16(splat(128), sum, __builtin_convertvector(lo, v16f));
            }
            store(y + (size_t)i * LANES, sum * (load(w_scale + (size_t)i * LANES) * token_scale));
        }
    }
}

#endif
