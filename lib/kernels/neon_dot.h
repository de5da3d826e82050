/* neon_dot.h: tiles by sdot, for the files of ARMv8.2 and later: each lane of a register of weights (4 rows x 4 k) times one
 * lane of a register of activations (16 k), which therefore needs no broadcast. */
#ifndef COLI_NEON_DOT_H
#define COLI_NEON_DOT_H

#include "kernels/neon.h"

COLI_INLINE v16i attention_dot(v16i sum, v16i keys, v16i x) { return dot_quarters(sum, keys, x, vdotq_s32); }
#define COLI_ATTENTION_DOT attention_dot
#include "kernels/neon_body.h"

COLI_INLINE void dots_q8(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES],
                         const int nv) {
    const int8_t *wp = (const int8_t *)w;
    int32x4_t acc[MAX_VECTORS][4];
    EACH (v, nv)
        EACH (h, 4) acc[v][h] = vld1q_s32(sums[v] + h * 4);
    for (uint32_t c = at; c < at + k; c += 16, wp += 256) {
        int8x16_t xs[MAX_VECTORS];
        EACH (v, nv) xs[v] = vld1q_s8(x[v] + c);
        if (nv == 1)
            EACH (i, 4) ask_ahead((const uint8_t *)wp + i * 64);
#define STEP(i)                                                                              \
    EACH (h, 4) {                                                                            \
        int8x16_t four = vld1q_s8(wp + (i) * 64 + h * 16);                                   \
        EACH (v, nv) acc[v][h] = vdotq_laneq_s32(acc[v][h], four, xs[v], i);                 \
    }
        STEP(0)
        STEP(1)
        STEP(2)
        STEP(3)
#undef STEP
    }
    EACH (v, nv)
        EACH (h, 4) vst1q_s32(sums[v] + h * 4, acc[v][h]);
}

COLI_INLINE operand_t operand(const int8_t *x) { return (operand_t){ { vld1q_s8(x) } }; }

COLI_INLINE int32x4_t dot16(const int8x16_t level[4], const operand_t *x) {
    int32x4_t sum = vdotq_laneq_s32(vdupq_n_s32(0), level[0], x->part[0], 0);
    sum = vdotq_laneq_s32(sum, level[1], x->part[0], 1);
    sum = vdotq_laneq_s32(sum, level[2], x->part[0], 2);
    return vdotq_laneq_s32(sum, level[3], x->part[0], 3);
}

COLI_INLINE void dots_q4(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES],
                         const int nv) {
    q4_tile(w, x, at, k, sums, operand, dot16, nv);
}

DOTS(q8, dots_q8, 1)
DOTS(q8, dots_q8, 2)
DOTS(q8, dots_q8, 3)
DOTS(q8, dots_q8, 4)
DOTS(q8, dots_q8, 5)
DOTS(q4, dots_q4, 1)
DOTS(q4, dots_q4, 2)
DOTS(q4, dots_q4, 3)

static const dots_fn q8_dots[] = { q8_1, q8_2, q8_3, q8_4, q8_5 }, q4_dots[] = { q4_1, q4_2, q4_3 };
static const method_t by_q8 = { NULL, q8_dots, 5, 1, 2048 };
static const method_t by_q4 = { NULL, q4_dots, 3, 1, COLIBRI_Q4_PIECE };

#endif
