/* neon_i8mm.c: the kernels for ARM with int8 matrix multiplication besides the dot product (Neoverse V1, N2; Cortex-A510,
 * X2): smmla multiplies 2 rows x 8 k by 2 vectors x 8 k. With few vectors it has nothing to win over sdot, which needs no other
 * order of the weights. Compiled with both features and called only where the CPU has them (select.c); nothing but the getter
 * leaves this file. */
#include "kernels/neon_dot.h"

#define MANY 8 /* vectors, from which on reordering the weights pays */

/* A pair of rows (4 k each) of two steps becomes 8 k of one row, 8 k of the next. */
COLI_INLINE void emit_pairs(int8_t *two_steps, int h, int8x16_t first, int8x16_t second) {
    int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
    vst1q_s8(two_steps + h * 32, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
    vst1q_s8(two_steps + h * 32 + 16, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
}

static void unpack(const uint8_t *w, uint32_t k, int8_t *panel) { unpack_q4(w, k, panel, emit_pairs); }

static void reorder(const uint8_t *w, uint32_t k, int8_t *panel) {
    const int8_t *from = (const int8_t *)w;
    for (uint32_t c = 0; c < k; c += 8, from += 128, panel += 128)
        EACH (h, 4) emit_pairs(panel, h, vld1q_s8(from + h * 16), vld1q_s8(from + 64 + h * 16));
}

/* Sums of rows 2 r and 2 r + 1 with the vectors a and b of a pair: a lane each of row 2 r . a, . b, row 2 r + 1 . a, . b. */
COLI_INLINE void dots_pairs(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES],
                            const int np) {
    const int8_t *wp = (const int8_t *)w;
    int32x4_t acc[3][8];
    EACH (p, np)
        EACH (h, 4) {
            int32x4_t a = vld1q_s32(sums[2 * p] + h * 4), b = vld1q_s32(sums[2 * p + 1] + h * 4);
            acc[p][2 * h] = vzip1q_s32(a, b);
            acc[p][2 * h + 1] = vzip2q_s32(a, b);
        }
    for (uint32_t c = at; c < at + k; c += 8, wp += 128) {
        int8x16_t xs[3];
        EACH (p, np) xs[p] = vcombine_s8(vld1_s8(x[2 * p] + c), vld1_s8(x[2 * p + 1] + c));
        EACH (r, 8) {
            int8x16_t rows = vld1q_s8(wp + r * 16);
            EACH (p, np) acc[p][r] = vmmlaq_s32(acc[p][r], rows, xs[p]);
        }
    }
    EACH (p, np)
        EACH (h, 4) {
            vst1q_s32(sums[2 * p] + h * 4, vuzp1q_s32(acc[p][2 * h], acc[p][2 * h + 1]));
            vst1q_s32(sums[2 * p + 1] + h * 4, vuzp2q_s32(acc[p][2 * h], acc[p][2 * h + 1]));
        }
}

DOTS(pairs, dots_pairs, 1)
DOTS(pairs, dots_pairs, 2)
DOTS(pairs, dots_pairs, 3)

static const dots_fn pair_dots[] = { pairs_1, pairs_2, pairs_3 };
static const method_t by_reordering = { reorder, pair_dots, 3, 2, 2048 };
static const method_t by_unpacking = { unpack, pair_dots, 3, 2, COLIBRI_Q4_PIECE };

static void matmul_q8(const coli_matmul_t *m) { integer_product(m, vectors_of(m) < MANY ? &by_q8 : &by_reordering); }
static void matmul_q4(const coli_matmul_t *m) { integer_product(m, vectors_of(m) <= 3 ? &by_q4 : &by_unpacking); }

const coli_kernels_t *coli_kernels_neon_i8mm(void) {
    static const coli_kernels_t table = NEON_TABLE("neon i8mm", 12);
    return &table;
}
