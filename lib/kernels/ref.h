/* ref.h: what the reference's files share: ref.c has its table and what runs over single vectors, ref_integer.c the products
 * with q8 and q4 weights, ref_float.c those with float weights, and attention. */
#ifndef COLI_REF_H
#define COLI_REF_H

#include "base/math.h"
#include "kernels/tables.h"

#define LANES COLIBRI_TILE_ROWS

/* The fixed tree over 16 lanes; v is overwritten. */
COLI_INLINE float tree(float v[LANES]) {
    for (int h = LANES / 2; h > 0; h /= 2)
        for (int i = 0; i < h; i++) v[i] += v[i + h];
    return v[0];
}

COLI_INLINE size_t row_of(const coli_matmul_t *m, uint32_t token) { return m->rows ? m->rows[token] : m->first_row + token; }

void coli_ref_matmul_f32(const coli_matmul_t *m);
void coli_ref_matmul_f16(const coli_matmul_t *m);
void coli_ref_matmul_bf16(const coli_matmul_t *m);
void coli_ref_matmul_q8(const coli_matmul_t *m);
void coli_ref_matmul_q4(const coli_matmul_t *m);
void coli_ref_attention_f32(const coli_attention_t *a);
void coli_ref_attention_f16(const coli_attention_t *a);
void coli_ref_attention_q8(const coli_attention_t *a);

#endif
