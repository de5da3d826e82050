/* ref_integer.c: the reference's products with q8 and q4 weights. Sums of integers are exact in any order, so these may be made
 * for speed where ref.c is made to be read: they are what processors without kernels of their own run (32-bit ARM, RISC-V,
 * WebAssembly, x86-64 before AVX2). tests/c/test_kernels.c compares them with plain loops.
 *
 * Weights of a block are widened to 16 bits panel by panel (q4: level times scale), once for many tokens; a panel stays in the
 * first-level cache while their activation rows pass. A row of weights and a token then meet in pairs of 16-bit products, for
 * which SSE2, NEON and WebAssembly have 128-bit instructions: eight of them for 64 products. */
#include "kernels/ref.h"

#if defined(__SSE2__)
#  include <emmintrin.h>
#elif defined(__ARM_NEON)
#  include <arm_neon.h>
#elif defined(__wasm_simd128__)
#  include <wasm_simd128.h>
#endif

#define PANEL 512 /* k; as 16-bit integers 16 KiB */
#define CHUNK 64  /* tokens whose sums are held at once */

typedef struct scratch {
    int16_t panel[PANEL * LANES];  /* [k / 4][16 rows][4 k] */
    int32_t sums[CHUNK][2][LANES]; /* hi, lo */
} scratch_t;

_Static_assert(sizeof(scratch_t) <= COLI_KERNEL_SCRATCH, "a product's parts fit its scratch");
_Static_assert(PANEL % COLIBRI_TILE_K == 0, "panels are whole pieces");

/* ---- Weights into a panel ---- */

static void widen_q8(const uint8_t *w, uint32_t k, int16_t *panel) {
    const int8_t *bytes = (const int8_t *)w;
    for (uint32_t i = 0; i < k * LANES; i++) panel[i] = bytes[i];
}

/* COLI_Q4_LEVELS as arithmetic, which vectors have: odd numbers, with larger steps at the ends. */
COLI_INLINE int16_t level_of(uint8_t nibble) {
    int16_t level = (int16_t)(2 * nibble - 15);
    level = (int16_t)(level + (nibble > 13) + 2 * (nibble > 14));
    return (int16_t)(level - (nibble < 2) - 2 * (nibble < 1));
}

static void widen_q4(const uint8_t *w, uint32_t k, int16_t *panel) {
    for (uint32_t c = 0; c < k; c += COLIBRI_TILE_K, w += COLIBRI_Q4_PIECE) {
        const uint8_t *step = w + 64;
        for (uint32_t group = 0; group < 8; group++) { /* 16 k under one scale: two steps */
            int16_t scale[64];
            for (uint32_t i = 0; i < 64; i++) scale[i] = w[i / 4 * 4 + group / 2] >> group % 2 * 4 & 7;
            for (uint32_t half = 0; half < 2; half++, step += 64, panel += 128)
                for (uint32_t i = 0; i < 64; i++) {
                    panel[i] = (int16_t)(level_of(step[i] & 15) * scale[i]);
                    panel[64 + i] = (int16_t)(level_of(step[i] >> 4) * scale[i]);
                }
        }
    }
}

/* ---- A panel times one activation row: every product fits 16 bits (|w| <= 128, |x| <= 127) ---- */

#if defined(__SSE2__)

typedef __m128i pair_sums_t;
COLI_INLINE __m128i four_twice(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    __m128i bytes = _mm_set1_epi32(four);
    return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
}
#  define NONE _mm_setzero_si128()
#  define ADD_PAIRS(sum, w, x) _mm_add_epi32(sum, _mm_madd_epi16(_mm_load_si128((const __m128i *)(const void *)(w)), x))
#  define STORE(to, sum) _mm_storeu_si128((__m128i *)(void *)(to), sum)

#elif defined(__ARM_NEON)

COLI_INLINE int16x8_t four_twice(const int8_t *x) {
    return vmovl_s8(vreinterpret_s8_s32(vld1_dup_s32((const int32_t *)(const void *)x)));
}
typedef int32x4_t pair_sums_t;
#  define NONE vdupq_n_s32(0)
#  define ADD_PAIRS(sum, w, x) vpadalq_s16(sum, vmulq_s16(vld1q_s16(w), x))
#  define STORE(to, sum) vst1q_s32(to, sum)

#elif defined(__wasm_simd128__)

typedef v128_t pair_sums_t;
COLI_INLINE v128_t four_twice(const int8_t *x) { return wasm_i16x8_extend_low_i8x16(wasm_v128_load32_splat(x)); }
#  define NONE wasm_i32x4_const_splat(0)
#  define ADD_PAIRS(sum, w, x) wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(wasm_v128_load(w), x))
#  define STORE(to, sum) wasm_v128_store(to, sum)

#endif

#ifdef ADD_PAIRS

/* A register of sums holds two pairs of k for each of two rows. */
static void add_dots(const int16_t *panel, const int8_t *x, uint32_t k, int32_t sums[LANES]) {
    pair_sums_t acc[8] = { NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE };
    int32_t pairs[2 * LANES];
    for (uint32_t c = 0; c < k; c += 4, panel += 64) {
        const __typeof__(four_twice(x)) four = four_twice(x + c);
#  pragma clang loop unroll(full)
        for (int i = 0; i < 8; i++) acc[i] = ADD_PAIRS(acc[i], panel + i * 8, four);
    }
#  pragma clang loop unroll(full)
    for (int i = 0; i < 8; i++) STORE(pairs + i * 4, acc[i]);
    for (int r = 0; r < LANES; r++) sums[r] += pairs[2 * r] + pairs[2 * r + 1];
}

#else

static void add_dots(const int16_t *panel, const int8_t *x, uint32_t k, int32_t sums[LANES]) {
    for (uint32_t c = 0; c < k; c += 4, panel += 64, x += 4)
        for (int r = 0; r < LANES; r++)
            sums[r] += panel[r * 4] * x[0] + panel[r * 4 + 1] * x[1] + panel[r * 4 + 2] * x[2] + panel[r * 4 + 3] * x[3];
}

#endif

/* ---- Products ---- */

typedef void (*widen_fn)(const uint8_t *w, uint32_t k, int16_t *panel);

/* One block times tokens first ... first + n - 1. */
static void sum_up(const coli_matmul_t *m, const uint8_t *block, uint32_t first, uint32_t n, widen_fn widen, scratch_t *s) {
    memset(s->sums, 0, n * sizeof s->sums[0]);
    for (uint32_t c = 0; c < m->k; c += PANEL) {
        uint32_t k = COLI_MIN(PANEL, m->k - c);
        widen(block + (size_t)(c / COLIBRI_TILE_K) * (m->block_bytes / (m->k / COLIBRI_TILE_K)), k, s->panel);
        for (uint32_t t = 0; t < n; t++) {
            size_t at = row_of(m, first + t) * m->x->stride + c;
            add_dots(s->panel, m->x->hi + at, k, s->sums[t][0]);
            if (m->x->bits == 16) add_dots(s->panel, m->x->lo + at, k, s->sums[t][1]);
        }
    }
}

static void product(const coli_matmul_t *m, widen_fn widen) {
    scratch_t *s = m->scratch;
    for (uint32_t b = 0; b < m->n_blocks; b++)
        for (uint32_t first = 0; first < m->n_tokens; first += CHUNK) {
            uint32_t n = COLI_MIN(CHUNK, m->n_tokens - first);
            const float *w_scale = m->w_scale + (size_t)b * LANES;
            sum_up(m, m->w + b * m->block_bytes, first, n, widen, s);
            for (uint32_t t = 0; t < n; t++) {
                float scale = m->x->scale[row_of(m, first + t)], *y = m->y + (first + t) * m->y_stride + (size_t)b * LANES;
                for (int r = 0; r < LANES; r++) {
                    float hi = (float)s->sums[t][0][r], lo = (float)s->sums[t][1][r];
                    y[r] = (m->x->bits == 16 ? coli_fmaf(128.0f, hi, lo) : hi) * (w_scale[r] * scale);
                }
            }
        }
}

void coli_ref_matmul_q8(const coli_matmul_t *m) { product(m, widen_q8); }
void coli_ref_matmul_q4(const coli_matmul_t *m) { product(m, widen_q4); }
