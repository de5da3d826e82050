/* pack_q4.h: 16 rows of rotated weights become a q4 block (colibri_format.h). A part of pack.c. */
#ifndef COLI_PACK_Q4_H
#define COLI_PACK_Q4_H

#include "base/base.h"

/* How the row scale is found. */
typedef enum coli_q4_rule {
    COLI_Q4_SEARCH, /* the one whose squared error is least, of some tried; `most` is not used */
    COLI_Q4_FIXED   /* the largest integer, 126, stands for most[r]; what is larger saturates */
} coli_q4_rule_t;

/* x [k][16]: column c of all 16 rows side by side, |x| <= 64, k a multiple of 128; 64-byte aligned. Writes the k / 128 pieces
 * of the block, and for each row its scale (0: a row of zeros) and the sum of (x - scale * q)^2. Same bits on every machine. */
void coli_pack_q4(const float *x, uint32_t k, coli_q4_rule_t rule, const float most[COLIBRI_TILE_ROWS], uint8_t *dst,
                  float scale[COLIBRI_TILE_ROWS], double error[COLIBRI_TILE_ROWS]);

#endif
