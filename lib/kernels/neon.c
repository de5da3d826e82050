/* neon.c: the kernels for any 64-bit ARM (Cortex-A53, A72). Products of bytes are 16 bits wide there: two of them fit (w may be
 * -128, x never is), and pairs are then added into 32 bits. Nothing but the getter leaves this file. */
#include "kernels/neon.h"

COLI_INLINE int32x4_t dot4(int32x4_t sum, int8x16_t w, int8x16_t x) {
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
}
COLI_INLINE v16i attention_dot(v16i sum, v16i keys, v16i x) { return dot_quarters(sum, keys, x, dot4); }
#define COLI_ATTENTION_DOT attention_dot
#include "kernels/neon_body.h"

/* Four bytes in every lane. The empty statement hides from clang that both halves are equal: it would move the high half of
 * the weights down for each product instead of using smull2. */
COLI_INLINE int8x16_t four_everywhere(const int8_t *x) {
    int8x16_t four = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)x));
    __asm__("" : "+w"(four));
    return four;
}

/* Rows 2 i and 2 i + 1 of a register are in half i of it; a sum has two lanes for each row. */
COLI_INLINE void dots_q8(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES],
                         const int nv) {
    const int8_t *wp = (const int8_t *)w;
    int32x4_t acc[2][4][2];
    EACH (v, nv)
        EACH (h, 4) acc[v][h][0] = acc[v][h][1] = vdupq_n_s32(0);
    for (uint32_t c = at; c < at + k; c += 8, wp += 128) {
        int8x16_t xs[2][2];
        EACH (v, nv) {
            xs[v][0] = four_everywhere(x[v] + c);
            xs[v][1] = four_everywhere(x[v] + c + 4);
        }
        if (nv == 1) ask_ahead((const uint8_t *)wp), ask_ahead((const uint8_t *)wp + 64);
        EACH (h, 4) {
            int8x16_t w0 = vld1q_s8(wp + h * 16), w1 = vld1q_s8(wp + 64 + h * 16);
            EACH (v, nv) {
                int16x8_t low = vmull_s8(vget_low_s8(w0), vget_low_s8(xs[v][0])), high = vmull_high_s8(w0, xs[v][0]);
                low = vmlal_s8(low, vget_low_s8(w1), vget_low_s8(xs[v][1]));
                high = vmlal_high_s8(high, w1, xs[v][1]);
                acc[v][h][0] = vpadalq_s16(acc[v][h][0], low);
                acc[v][h][1] = vpadalq_s16(acc[v][h][1], high);
            }
        }
    }
    EACH (v, nv)
        EACH (h, 4) {
            int32_t *sum = sums[v] + h * 4;
            vst1q_s32(sum, vaddq_s32(vld1q_s32(sum), vpaddq_s32(acc[v][h][0], acc[v][h][1])));
        }
}

COLI_INLINE operand_t operand(const int8_t *x) {
    return (operand_t){ { four_everywhere(x), four_everywhere(x + 4), four_everywhere(x + 8), four_everywhere(x + 12) } };
}

/* Levels are at most 18: eight products fit 16 bits. */
COLI_INLINE int32x4_t dot16(const int8x16_t level[4], const operand_t *x) {
    int16x8_t low = vmull_s8(vget_low_s8(level[0]), vget_low_s8(x->part[0])), high = vmull_high_s8(level[0], x->part[0]);
    for (int i = 1; i < 4; i++) {
        low = vmlal_s8(low, vget_low_s8(level[i]), vget_low_s8(x->part[i]));
        high = vmlal_high_s8(high, level[i], x->part[i]);
    }
    return vpaddlq_s16(vpaddq_s16(low, high));
}

COLI_INLINE void dots_q4(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES],
                         const int nv) {
    q4_tile(w, x, at, k, sums, operand, dot16, nv);
}

DOTS(q8, dots_q8, 1)
DOTS(q8, dots_q8, 2)
DOTS(q4, dots_q4, 1)
DOTS(q4, dots_q4, 2)

static void unpack(const uint8_t *w, uint32_t k, int8_t *panel) { unpack_q4(w, k, panel, emit_steps); }

static const dots_fn q8_dots[] = { q8_1, q8_2 }, q4_dots[] = { q4_1, q4_2 };
static const method_t by_q8 = { NULL, q8_dots, 2, 1, 2048 };
static const method_t by_q4 = { NULL, q4_dots, 2, 1, COLIBRI_Q4_PIECE };
static const method_t by_unpacking = { unpack, q8_dots, 2, 1, COLIBRI_Q4_PIECE };

static void matmul_q8(const coli_matmul_t *m) { integer_product(m, &by_q8); }
static void matmul_q4(const coli_matmul_t *m) { integer_product(m, vectors_of(m) <= 3 ? &by_q4 : &by_unpacking); }

const coli_kernels_t *coli_kernels_neon(void) {
    static const coli_kernels_t table = NEON_TABLE("neon", 8);
    return &table;
}
