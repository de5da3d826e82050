/* avx2.c: the kernels for AVX2 with FMA and F16C: 16 lanes are two registers. There are two tables, with and without AVX-VNNI
 * in the q8 product. Compiled with those features except AVX-VNNI, which the functions that say so alone may use, and called
 * only where the CPU has them (select.c); nothing but the getters leaves this file. */
#include <immintrin.h>

#include "kernels/attention_body.h"
#include "kernels/avx2_panels.h"

#ifndef TARGET_AVX_VNNI
#  define TARGET_AVX_VNNI __attribute__((target("avxvnni")))
#endif

/* ---- Products with float weights: at most 12 of the 16 registers accumulate ---- */

#define FLOAT_TILES(type)  \
    FLOAT_TILE(type, 4, 1) \
    FLOAT_TILE(type, 1, 1) \
    FLOAT_TILE(type, 2, 2) \
    FLOAT_TILE(type, 1, 2) \
    FLOAT_TILE(type, 2, 3) \
    FLOAT_TILE(type, 1, 3) \
    FLOAT_TILE(type, 1, 4)
#define SMALL_TILES(type)                                                                                  \
    { 4, tile_##type##_4x1, tile_##type##_1x1 }, { 2, tile_##type##_2x2, tile_##type##_1x2 },              \
    { 2, tile_##type##_2x3, tile_##type##_1x3 }, { 1, tile_##type##_1x4, tile_##type##_1x4 }
#define LARGE_TILES(type) { 1, tile_##type##_1x5, tile_##type##_1x5 }, { 1, tile_##type##_1x6, tile_##type##_1x6 }

FLOAT_TILES(f32)
FLOAT_TILE(f32, 1, 5)
FLOAT_TILE(f32, 1, 6)
FLOAT_TILES(bf16)
FLOAT_TILE(bf16, 1, 5)
FLOAT_TILE(bf16, 1, 6)
FLOAT_TILES(f16) /* converting takes registers of its own */

static void matmul_f32(const coli_matmul_t *m) {
    static const tile_t tiles[] = { SMALL_TILES(f32), LARGE_TILES(f32) };
    tiled_product(m, tiles, 6);
}

static void matmul_bf16(const coli_matmul_t *m) {
    static const tile_t tiles[] = { SMALL_TILES(bf16), LARGE_TILES(bf16) };
    tiled_product(m, tiles, 6);
}

static void matmul_f16(const coli_matmul_t *m) {
    static const tile_t tiles[] = { SMALL_TILES(f16) };
    tiled_product(m, tiles, 4);
}

/* ---- Integer products of few tokens: from the bytes of the file in registers ---- */

#define AHEAD 256 /* bytes of weights that are asked for ahead of their use */

/* Four products of a lane are summed as |w| (unsigned) times x with w's sign: two of them are at most 2 * 128 * 127 and fit the
 * 16 bits of maddubs, and the pairs are added exactly. x is never -128, so its negative is exact; w may be. */
COLI_INLINE __m256i dot4(__m256i acc, __m256i magnitude, __m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* One block times the rows of nt tokens, each one vector (bits 8) or two (16). */
COLI_INLINE void q8_tile(const coli_matmul_t *m, uint32_t b, uint32_t t, const int nt, const int bits) {
    const int nv = nt * bits / 8;
    const uint8_t *w = m->w + b * m->block_bytes;
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    __m256i acc[MAX_VECTORS][2];
    v16i sums[1][MAX_VECTORS];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (v, nv) acc[v][0] = acc[v][1] = _mm256_setzero_si256();
    for (uint32_t c = 0; c < m->k; c += 4, w += 64) {
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
        EACH (half, 2) {
            __m256i wv = load_vector(w + half * 32), magnitude = _mm256_abs_epi8(wv);
            EACH (v, nv) acc[v][half] = dot4(acc[v][half], magnitude, wv, repeat4(x[v] + c));
        }
    }
    EACH (v, nv) {
        excess[v] = 0;
        memcpy(&sums[0][v], acc[v], sizeof sums[0][v]);
    }
    finish_sums(m, b, t, sums, excess, 1, (uint32_t)nt);
}

#define Q8_TILE(nt, bits) \
    static void q##bits##_##nt(const coli_matmul_t *m, uint32_t b, uint32_t t) { q8_tile(m, b, t, nt, bits); }
Q8_TILE(1, 8)
Q8_TILE(2, 8)
Q8_TILE(3, 8)
Q8_TILE(4, 8)
Q8_TILE(1, 16)
Q8_TILE(2, 16)

/* 16 k of 8 rows times nv vectors. */
COLI_INLINE void q4_group(const uint8_t *steps, __m256i scale, const int8_t *const x[], uint32_t c,
                          const int32_t *const starts[], __m256i acc[][2], const int half, const int nv) {
    __m256i w[4];
    q4_step(steps + half * 32, w);
    q4_step(steps + 64 + half * 32, w + 2);
    EACH (v, nv) {
        __m256i sum = repeat4(starts[v] + c / 16);
        EACH (i, 4) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i], repeat4(x[v] + c + i * 4)));
        acc[v][half] = _mm256_add_epi32(acc[v][half], _mm256_madd_epi16(sum, scale));
    }
}

COLI_INLINE void q4_tile(const coli_matmul_t *m, uint32_t b, uint32_t t, const int nt, const int bits) {
    const int nv = nt * bits / 8;
    const uint8_t *w = m->w + b * m->block_bytes;
    const int8_t *x[MAX_VECTORS];
    const int32_t *starts[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    __m256i acc[MAX_VECTORS][2];
    v16i sums[1][MAX_VECTORS];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (v, nv) {
        starts[v] = (const int32_t *)m->scratch + (size_t)v * (m->k / 16);
        acc[v][0] = acc[v][1] = _mm256_setzero_si256();
    }
    for (uint32_t c = 0; c < m->k; c += 128, w += COLIBRI_Q4_PIECE) {
        __m256i scales[2] = { load_vector(w), load_vector(w + 32) };
        EACH (g, 8) {
            const uint8_t *steps = w + 64 + g * 128;
            _mm_prefetch((const char *)steps + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)steps + AHEAD + 64, _MM_HINT_T0);
            EACH (half, 2) q4_group(steps, q4_scale(scales[half], g), x, c + (uint32_t)g * 16, starts, acc, half, nv);
        }
    }
    EACH (v, nv) {
        excess[v] = 0;
        memcpy(&sums[0][v], acc[v], sizeof sums[0][v]);
    }
    finish_sums(m, b, t, sums, excess, 1, (uint32_t)nt);
}

/* ---- The choice ---- */

/* Up to so many tokens are multiplied from the file's bytes: unpacking would take longer. */
#define FEW_Q8 11
#define FEW_Q8_16BIT 2
#define FEW_Q4 2
#define FEW_Q4_16BIT 3

static void q8_few(const coli_matmul_t *m, uint32_t b, uint32_t t, uint32_t nt) {
    for (uint32_t i = t, n; i < t + nt; i += n) {
        n = group_size(t + nt, i, m->x->bits == 16 ? 2 : 4);
        if (m->x->bits == 16) (n == 2 ? q16_2 : q16_1)(m, b, i);
        else (n == 4 ? q8_4 : n == 3 ? q8_3 : n == 2 ? q8_2 : q8_1)(m, b, i);
    }
}

/* From the activations of a tile to what its sums start with, in scratch. */
COLI_INLINE void q4_prepare(const coli_matmul_t *m, uint32_t t, const int nt, const int bits) {
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (v, nt * bits / 8) q4_starts(x[v], m->k, (int32_t *)m->scratch + (size_t)v * (m->k / 16));
}

#define Q4_TILE(nt, bits)                                                                               \
    static void q4_##bits##_##nt(const coli_matmul_t *m, uint32_t b, uint32_t nb, uint32_t t) {         \
        q4_prepare(m, t, nt, bits);                                                                     \
        for (uint32_t i = b; i < b + nb; i++) q4_tile(m, i, t, nt, bits);                               \
    }
Q4_TILE(1, 8)
Q4_TILE(2, 8)
Q4_TILE(1, 16)

static void q4_blocks(const coli_matmul_t *m, uint32_t b, uint32_t nb, uint32_t t, uint32_t nt) {
    for (uint32_t i = t, n; i < t + nt; i += n) {
        n = m->x->bits == 16 || i + 1 == t + nt ? 1 : 2;
        (m->x->bits == 16 ? q4_16_1 : n == 2 ? q4_8_2 : q4_8_1)(m, b, nb, i);
    }
}

static void q4_few(const coli_matmul_t *m, uint32_t b, uint32_t t, uint32_t nt) { q4_blocks(m, b, 1, t, nt); }

static void matmul_q8(const coli_matmul_t *m) {
    if (m->x->bits == 8 ? m->n_tokens > FEW_Q8 : m->n_tokens > FEW_Q8_16BIT && m->k <= LONGEST)
        wide_product(m, wide_panel_q8, q8_few);
    else
        for (uint32_t b = 0; b < m->n_blocks; b++) q8_few(m, b, 0, m->n_tokens);
}

static void matmul_q4(const coli_matmul_t *m) {
    if (m->x->bits == 8 && m->n_tokens > FEW_Q4) q4_product(m);
    else if (m->x->bits == 16 && m->n_tokens > FEW_Q4_16BIT && m->k <= LONGEST) wide_product(m, wide_panel_q4, q4_few);
    else q4_blocks(m, 0, m->n_blocks, 0, m->n_tokens);
}

/* ---- q8 with AVX-VNNI ---- */

/* Four products of a row are summed in one instruction, whose first side is unsigned: w + 128 is w with its sign bit flipped,
 * and 128 * sum(x) too much is taken off at the end. Sums may wrap on the way; the end is exact modulo 2^32. */
TARGET_AVX_VNNI COLI_INLINE void q8_tile_vnni(const coli_matmul_t *m, uint32_t b, uint32_t t, const int nt, const int bits) {
    const int nv = nt * bits / 8;
    const uint8_t *w = m->w + b * m->block_bytes;
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    __m256i acc[MAX_VECTORS][2];
    v16i sums[1][MAX_VECTORS];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (v, nv) acc[v][0] = acc[v][1] = _mm256_setzero_si256();
    for (uint32_t c = 0; c < m->k; c += 4, w += 64) {
        __m256i flipped[2];
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
        EACH (half, 2) flipped[half] = _mm256_xor_si256(load_vector(w + half * 32), _mm256_set1_epi8((char)0x80));
        EACH (v, nv) {
            __m256i xs = repeat4(x[v] + c);
            EACH (half, 2) acc[v][half] = _mm256_dpbusd_avx_epi32(acc[v][half], flipped[half], xs);
        }
    }
    EACH (v, nv) memcpy(&sums[0][v], acc[v], sizeof sums[0][v]);
    finish_sums(m, b, t, sums, excess, 1, (uint32_t)nt);
}

#define VNNI_TILE(nt, bits)                                                                               \
    TARGET_AVX_VNNI static void vnni##bits##_##nt(const coli_matmul_t *m, uint32_t b, uint32_t t) {       \
        q8_tile_vnni(m, b, t, nt, bits);                                                                  \
    }
VNNI_TILE(1, 8)
VNNI_TILE(2, 8)
VNNI_TILE(3, 8)
VNNI_TILE(4, 8)
VNNI_TILE(5, 8)
VNNI_TILE(6, 8)
VNNI_TILE(1, 16)
VNNI_TILE(2, 16)
VNNI_TILE(3, 16)

static void matmul_q8_vnni(const coli_matmul_t *m) {
    static void (*const tiles8[])(const coli_matmul_t *, uint32_t, uint32_t) = { vnni8_1, vnni8_2, vnni8_3,
                                                                                 vnni8_4, vnni8_5, vnni8_6 };
    static void (*const tiles16[])(const coli_matmul_t *, uint32_t, uint32_t) = { vnni16_1, vnni16_2, vnni16_3 };
    for (uint32_t b = 0; b < m->n_blocks; b++)
        for (uint32_t t = 0, n; t < m->n_tokens; t += n) {
            n = group_size(m->n_tokens, t, m->x->bits == 16 ? 3 : 6);
            (m->x->bits == 16 ? tiles16 : tiles8)[n - 1](m, b, t);
        }
}

void coli_avx2_matmul_q8(const coli_matmul_t *m) { matmul_q8(m); }
void coli_avx2_matmul_q4(const coli_matmul_t *m) { matmul_q4(m); }
void coli_avx2_attention_q8(const coli_attention_t *a) { attention_q8(a); }

const coli_kernels_t *coli_kernels_avx2(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AVX2,
        .name = "avx2",
        KERNELS_OF_BODY,
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, matmul_q8, matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 4 }, { 4, 6 }, { 1, 12 }, { 1, 3 } },
    };
    return &table;
}

const coli_kernels_t *coli_kernels_avx2_vnni(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AVX2,
        .name = "avx2 vnni",
        KERNELS_OF_BODY,
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, matmul_q8_vnni, matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 4 }, { 4, 6 }, { 1, 6 }, { 1, 3 } },
    };
    return &table;
}
