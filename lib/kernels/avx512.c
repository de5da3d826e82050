/* avx512.c: the kernels for AVX-512 (F, BW, VL, DQ): 16 lanes are one register. There are two tables, with and without VNNI in
 * the q8 product. Compiled with those features except VNNI, which two functions alone may use (so that no compiler puts it into
 * the others), and called only where the CPU has them (select.c); nothing but the getters leaves this file. */
#include <immintrin.h>

#include "kernels/attention_body.h"
#include "kernels/integer.h"

#ifndef TARGET_VNNI
#  define TARGET_VNNI __attribute__((target("avx512vnni")))
#endif

/* ---- Products with float weights: at most 24 of the 32 registers accumulate ---- */

#define FLOAT_TILES(type)                                                                             \
    FLOAT_TILE(type, 4, 1)                                                                            \
    FLOAT_TILE(type, 1, 1)                                                                            \
    FLOAT_TILE(type, 4, 2)                                                                            \
    FLOAT_TILE(type, 1, 2)                                                                            \
    FLOAT_TILE(type, 4, 3)                                                                            \
    FLOAT_TILE(type, 1, 3)                                                                            \
    FLOAT_TILE(type, 4, 4)                                                                            \
    FLOAT_TILE(type, 1, 4)                                                                            \
    FLOAT_TILE(type, 4, 5)                                                                            \
    FLOAT_TILE(type, 1, 5)                                                                            \
    FLOAT_TILE(type, 4, 6)                                                                            \
    FLOAT_TILE(type, 1, 6)                                                                            \
    static void matmul_##type(const coli_matmul_t *m) {                                               \
        static const tile_t tiles[MAX_VECTORS] = {                                                    \
            { 4, tile_##type##_4x1, tile_##type##_1x1 }, { 4, tile_##type##_4x2, tile_##type##_1x2 }, \
            { 4, tile_##type##_4x3, tile_##type##_1x3 }, { 4, tile_##type##_4x4, tile_##type##_1x4 }, \
            { 4, tile_##type##_4x5, tile_##type##_1x5 }, { 4, tile_##type##_4x6, tile_##type##_1x6 }, \
        };                                                                                            \
        tiled_product(m, tiles, MAX_VECTORS);                                                         \
    }

FLOAT_TILES(f32)
FLOAT_TILES(f16)
FLOAT_TILES(bf16)

/* ---- Products with q8 weights ---- */

COLI_INLINE v16i step(const uint8_t *w, uint32_t c) { return *(const v16i *)(const void *)(w + (size_t)c * 16); }

/* Four activations in every lane. */
COLI_INLINE v16i four(const int8_t *x, uint32_t c) {
    int32_t i;
    memcpy(&i, x + c, 4);
    return (v16i){ i, i, i, i, i, i, i, i, i, i, i, i, i, i, i, i };
}

/* With VNNI: four products of a lane are summed in one instruction, whose first side is unsigned: w + 128 is w with its sign
 * bit flipped, and 128 * sum(x) too much is taken off at the end. Sums may wrap on the way; the end is exact modulo 2^32. */
TARGET_VNNI COLI_INLINE void q8_tile_vnni(const coli_matmul_t *m, uint32_t b, uint32_t t, const int nb, const int nt,
                                          const int bits) {
    const int nv = nt * bits / 8;
    const uint8_t *w = m->w + b * m->block_bytes;
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    v16i acc[SUPERBLOCK][MAX_VECTORS], flipped[SUPERBLOCK];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (i, nb)
        EACH (v, nv) acc[i][v] = (v16i){ 0 };
    for (uint32_t c = 0; c < m->k; c += 4) {
        EACH (i, nb) flipped[i] = step(w + (size_t)i * m->block_bytes, c) ^ (int32_t)0x80808080;
        EACH (v, nv) {
            v16i xs = four(x[v], c);
            EACH (i, nb) acc[i][v] = (v16i)_mm512_dpbusd_epi32((__m512i)acc[i][v], (__m512i)flipped[i], (__m512i)xs);
        }
    }
    finish_q8(m, b, t, acc, excess, nb, nt, bits);
}

COLI_INLINE v32s even_bytes(v16i v) { return (v32s)((v32s)((v32s)v << 8) >> 8); } /* with their signs, as 16 bits */
COLI_INLINE v32s odd_bytes(v16i v) { return (v32s)v >> 8; }
COLI_INLINE v16i madd(v32s a, v32s b) { return (v16i)_mm512_madd_epi16((__m512i)a, (__m512i)b); }

/* Without: even and odd bytes as 16-bit numbers, products added in pairs. */
COLI_INLINE void q8_tile(const coli_matmul_t *m, uint32_t b, uint32_t t, const int nb, const int nt, const int bits) {
    const int nv = nt * bits / 8;
    const uint8_t *w = m->w + b * m->block_bytes;
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    v16i acc[SUPERBLOCK][MAX_VECTORS];
    gather_q8(m, t, x, excess, nt, bits);
    EACH (i, nb)
        EACH (v, nv) acc[i][v] = (v16i){ 0 };
    for (uint32_t c = 0; c < m->k; c += 4)
        EACH (i, nb) {
            v16i all = step(w + (size_t)i * m->block_bytes, c);
            v32s even = even_bytes(all), odd = odd_bytes(all);
            EACH (v, nv) {
                v16i xs = four(x[v], c);
                acc[i][v] += madd(even, even_bytes(xs)) + madd(odd, odd_bytes(xs));
            }
        }
    memset(excess, 0, sizeof excess);
    finish_q8(m, b, t, acc, excess, nb, nt, bits);
}

#define Q8_TILE(variant, attribute, nb, nt, bits)                                                              \
    attribute static void tile_##variant##bits##_##nb##x##nt(const coli_matmul_t *m, uint32_t b, uint32_t t) { \
        variant(m, b, t, nb, nt, bits);                                                                        \
    }
#define Q8_TILES(variant, attribute)                               \
    Q8_TILE(variant, attribute, 4, 1, 8)                           \
    Q8_TILE(variant, attribute, 1, 1, 8)                           \
    Q8_TILE(variant, attribute, 4, 2, 8)                           \
    Q8_TILE(variant, attribute, 1, 2, 8)                           \
    Q8_TILE(variant, attribute, 4, 3, 8)                           \
    Q8_TILE(variant, attribute, 1, 3, 8)                           \
    Q8_TILE(variant, attribute, 4, 4, 8)                           \
    Q8_TILE(variant, attribute, 1, 4, 8)                           \
    Q8_TILE(variant, attribute, 4, 1, 16)                          \
    Q8_TILE(variant, attribute, 1, 1, 16)                          \
    Q8_TILE(variant, attribute, 4, 2, 16)                          \
    Q8_TILE(variant, attribute, 1, 2, 16)                          \
    static void matmul_##variant(const coli_matmul_t *m) {         \
        static const tile_t tiles8[] = {                           \
            { 4, tile_##variant##8_4x1, tile_##variant##8_1x1 },   \
            { 4, tile_##variant##8_4x2, tile_##variant##8_1x2 },   \
            { 4, tile_##variant##8_4x3, tile_##variant##8_1x3 },   \
            { 4, tile_##variant##8_4x4, tile_##variant##8_1x4 },   \
        };                                                         \
        static const tile_t tiles16[] = {                          \
            { 4, tile_##variant##16_4x1, tile_##variant##16_1x1 }, \
            { 4, tile_##variant##16_4x2, tile_##variant##16_1x2 }, \
        };                                                         \
        if (m->x->bits == 16)                                      \
            tiled_product(m, tiles16, 2);                          \
        else                                                       \
            tiled_product(m, tiles8, 4);                           \
    }

#define NO_ATTRIBUTE
Q8_TILES(q8_tile, NO_ATTRIBUTE)
Q8_TILES(q8_tile_vnni, TARGET_VNNI)

/* ---- Attention with an 8-bit cache ---- */

TARGET_VNNI COLI_INLINE v16i dot_vnni(v16i sum, v16i keys, v16i x) {
    return (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)keys, (__m512i)x);
}
ATTENTION_Q8(q8_vnni, TARGET_VNNI, dot_vnni, BY_FLIPPED)

static void matmul_q4(const coli_matmul_t *m) { coli_kernels_ref()->matmul[COLIBRI_FILE_Q4](m); }

const coli_kernels_t *coli_kernels_avx512(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AVX512,
        .name = "avx512",
        KERNELS_OF_BODY,
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, matmul_q8_tile, matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 6 }, { 4, 6 }, { 4, 4 }, { 4, 4 } },
    };
    return &table;
}

const coli_kernels_t *coli_kernels_avx512_vnni(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AVX512,
        .name = "avx512 vnni",
        KERNELS_OF_BODY_WITH(attention_q8_vnni),
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, matmul_q8_tile_vnni, matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 6 }, { 4, 6 }, { 4, 4 }, { 4, 4 } },
    };
    return &table;
}

/* Where there is AMX: its products of integer weights, and everything else from here. */
const coli_kernels_t *coli_kernels_amx(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AMX,
        .name = "amx",
        KERNELS_OF_BODY_WITH(attention_q8_vnni),
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, coli_amx_matmul_q8, coli_amx_matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 6 }, { 4, 6 }, { 4, 64 }, { 4, 64 } },
    };
    return &table;
}
