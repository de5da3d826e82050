/* avx512.c: the kernels for AVX-512 (F, BW, VL, DQ): 16 lanes are one register. There are three tables, which differ in their
 * integer products: without VNNI those of AVX2, which are no slower there; with it; with it and VBMI. Compiled with those
 * features except the last two, which marked functions alone may use (so that no compiler puts them into the others), and called
 * only where the CPU has them (select.c); nothing but the getters leaves this file. */
#include <immintrin.h>

#define COLI_ATTENTION_Q8_ELSEWHERE 1
#include "kernels/attention_body.h"
#include "kernels/avx512_products.h"

/* ---- Products with float weights: at most 24 of the 32 registers accumulate, 20 where weights are widened in others ---- */

#define FLOAT_TILES(type)  \
    FLOAT_TILE(type, 4, 1) \
    FLOAT_TILE(type, 1, 1) \
    FLOAT_TILE(type, 4, 2) \
    FLOAT_TILE(type, 1, 2) \
    FLOAT_TILE(type, 4, 3) \
    FLOAT_TILE(type, 1, 3) \
    FLOAT_TILE(type, 4, 4) \
    FLOAT_TILE(type, 1, 4) \
    FLOAT_TILE(type, 4, 5) \
    FLOAT_TILE(type, 1, 5)
#define FLOAT_PRODUCT(type, most, ...)                                                                                 \
    static void matmul_##type(const coli_matmul_t *m) {                                                                \
        static const tile_t tiles[most] = {                                                                            \
            { 4, tile_##type##_4x1, tile_##type##_1x1 }, { 4, tile_##type##_4x2, tile_##type##_1x2 },                  \
            { 4, tile_##type##_4x3, tile_##type##_1x3 }, { 4, tile_##type##_4x4, tile_##type##_1x4 },                  \
            { 4, tile_##type##_4x5, tile_##type##_1x5 }, __VA_ARGS__                                                   \
        };                                                                                                             \
        tiled_product(m, tiles, most);                                                                                 \
    }

FLOAT_TILES(f32)
FLOAT_TILE(f32, 4, 6)
FLOAT_TILE(f32, 1, 6)
FLOAT_TILES(f16)
FLOAT_TILES(bf16)
FLOAT_PRODUCT(f32, 6, { 4, tile_f32_4x6, tile_f32_1x6 })
FLOAT_PRODUCT(f16, 5, )
FLOAT_PRODUCT(bf16, 5, )

/* ---- Attention with an 8-bit cache ---- */

ATTENTION_Q8(q8_vnni, TARGET_VNNI, dot_vnni, BY_FLIPPED)

/* ---- The tables ---- */

#define TABLE(getter, text, attention, q8, q4)                                        \
    const coli_kernels_t *getter(void) {                                              \
        static const coli_kernels_t table = {                                         \
            .isa = COLIBRI_ISA_AVX512,                                                \
            .name = text,                                                             \
            KERNELS_OF_BODY_WITH(attention),                                          \
            .matmul = { matmul_f32, matmul_f16, matmul_bf16, q8, q4 },                \
            .geometry = { { 4, 6 }, { 4, 5 }, { 4, 5 }, { 8, 6 }, { 4, 6 } },         \
        };                                                                            \
        return &table;                                                                \
    }

TABLE(coli_kernels_avx512, "avx512", coli_avx2_attention_q8, coli_avx2_matmul_q8, coli_avx2_matmul_q4)
TABLE(coli_kernels_avx512_vnni, "avx512 vnni", attention_q8_vnni, matmul_q8_vnni, matmul_q4_vnni)
TABLE(coli_kernels_avx512_vbmi, "avx512 vnni vbmi", attention_q8_vnni, matmul_q8_vnni, matmul_q4_vbmi)

/* Where there is AMX: its products of integer weights, and everything else from here. */
const coli_kernels_t *coli_kernels_amx(void) {
    static const coli_kernels_t table = {
        .isa = COLIBRI_ISA_AMX,
        .name = "amx",
        KERNELS_OF_BODY_WITH(attention_q8_vnni),
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, coli_amx_matmul_q8, coli_amx_matmul_q4 },
        .geometry = { { 4, 6 }, { 4, 5 }, { 4, 5 }, { 8, 64 }, { 4, 64 } },
    };
    return &table;
}
