/* avx2.c: the kernels for AVX2 with FMA and F16C: 16 lanes are two registers. Compiled with those features and called only
 * where the CPU has them (select.c); nothing but the getter leaves this file. */
#include <immintrin.h>

#include "kernels/attention_body.h"
#include "kernels/integer.h"

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

/* ---- Products with q8 weights ---- */

/* Four products of a lane are summed as |w| (unsigned) times x with w's sign: two of them are at most 2 * 128 * 127 and fit the
 * 16 bits of maddubs, and the pairs are added exactly. x is never -128, so its negative is exact; w may be. */
COLI_INLINE __m256i dot4(__m256i acc, __m256i magnitude, __m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* nb blocks times the rows of nt tokens, each one vector (bits 8) or two (16). */
COLI_INLINE void q8_tile(const coli_matmul_t *m, uint32_t b, uint32_t t, const int nb, const int nt, const int bits) {
    const int nv = nt * bits / 8;
    const uint8_t *w = m->w + b * m->block_bytes;
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    __m256i acc[SUPERBLOCK][MAX_VECTORS][2];
    v16i sums[SUPERBLOCK][MAX_VECTORS];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (i, nb)
        EACH (v, nv) acc[i][v][0] = acc[i][v][1] = _mm256_setzero_si256();
    for (uint32_t c = 0; c < m->k; c += 4)
        EACH (i, nb)
            EACH (half, 2) {
                __m256i wv = _mm256_load_si256(
                    (const __m256i *)(const void *)(w + i * m->block_bytes + (size_t)c * 16 + half * 32));
                __m256i magnitude = _mm256_abs_epi8(wv);
                EACH (v, nv) {
                    int32_t four;
                    memcpy(&four, x[v] + c, 4);
                    acc[i][v][half] = dot4(acc[i][v][half], magnitude, wv, _mm256_set1_epi32(four));
                }
            }
    EACH (v, nv) {
        excess[v] = 0;
        EACH (i, nb) memcpy(&sums[i][v], acc[i][v], sizeof sums[i][v]);
    }
    finish_q8(m, b, t, sums, excess, nb, nt, bits);
}

#define Q8_TILE(nb, nt, bits) \
    static void tile_q##bits##_##nb##x##nt(const coli_matmul_t *m, uint32_t b, uint32_t t) { q8_tile(m, b, t, nb, nt, bits); }
Q8_TILE(4, 1, 8)
Q8_TILE(1, 1, 8)
Q8_TILE(2, 2, 8)
Q8_TILE(1, 2, 8)
Q8_TILE(1, 3, 8)
Q8_TILE(1, 4, 8)
Q8_TILE(2, 1, 16)
Q8_TILE(1, 1, 16)
Q8_TILE(1, 2, 16)

static void matmul_q8(const coli_matmul_t *m) {
    static const tile_t tiles8[] = {
        { 4, tile_q8_4x1, tile_q8_1x1 },
        { 2, tile_q8_2x2, tile_q8_1x2 },
        { 1, tile_q8_1x3, tile_q8_1x3 },
        { 1, tile_q8_1x4, tile_q8_1x4 },
    };
    static const tile_t tiles16[] = { { 2, tile_q16_2x1, tile_q16_1x1 }, { 1, tile_q16_1x2, tile_q16_1x2 } };
    if (m->x->bits == 16)
        tiled_product(m, tiles16, 2);
    else
        tiled_product(m, tiles8, 4);
}

static void matmul_q4(const coli_matmul_t *m) { coli_kernels_ref()->matmul[COLIBRI_FILE_Q4](m); }

const coli_kernels_t *coli_kernels_avx2(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AVX2,
        .name = "avx2",
        KERNELS_OF_BODY,
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, matmul_q8, matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 4 }, { 4, 6 }, { 4, 4 }, { 4, 4 } },
    };
    return &table;
}
