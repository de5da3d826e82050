/* neon_body.h: what the three files of 64-bit ARM share: the products with float weights, and for those with integer weights
 * the way through blocks, tokens and k, and the unpacking of q4. What differs are the instructions that multiply bytes: the
 * file that includes this defines tiles (dots_fn) by them. A register holds 4 rows x 4 k of a q8 step. All static.
 *
 * Integer sums of a block are kept in the thread's scratch, so tiles add k panel by k panel: with many vectors of activations a
 * panel of weights is unpacked once and stays in the first-level cache while all of them pass. */
#ifndef COLI_NEON_BODY_H
#define COLI_NEON_BODY_H

#include "kernels/attention_body.h"
#include "kernels/neon.h"

/* ---- Products with float weights: at most 24 of the 32 registers accumulate ---- */

#define FLOAT_TILES(type)  \
    FLOAT_TILE(type, 2, 1) \
    FLOAT_TILE(type, 1, 1) \
    FLOAT_TILE(type, 1, 2) \
    FLOAT_TILE(type, 1, 3) \
    FLOAT_TILE(type, 1, 4)
#define LARGE_TILES(type)  \
    FLOAT_TILE(type, 2, 2) \
    FLOAT_TILE(type, 1, 5)

FLOAT_TILES(f32)
LARGE_TILES(f32)
FLOAT_TILES(bf16)
LARGE_TILES(bf16)
FLOAT_TILES(f16) /* converting takes registers of its own */

#define THREE_AND_FOUR(type) { 1, tile_##type##_1x3, tile_##type##_1x3 }, { 1, tile_##type##_1x4, tile_##type##_1x4 }
#define UP_TO_FIVE(type)                                                                                  \
    { 2, tile_##type##_2x1, tile_##type##_1x1 }, { 2, tile_##type##_2x2, tile_##type##_1x2 },             \
    THREE_AND_FOUR(type), { 1, tile_##type##_1x5, tile_##type##_1x5 }

static void matmul_f32(const coli_matmul_t *m) {
    static const tile_t tiles[] = { UP_TO_FIVE(f32) };
    tiled_product(m, tiles, 5);
}

static void matmul_bf16(const coli_matmul_t *m) {
    static const tile_t tiles[] = { UP_TO_FIVE(bf16) };
    tiled_product(m, tiles, 5);
}

static void matmul_f16(const coli_matmul_t *m) {
    static const tile_t tiles[] = { { 2, tile_f16_2x1, tile_f16_1x1 }, { 1, tile_f16_1x2, tile_f16_1x2 }, THREE_AND_FOUR(f16) };
    tiled_product(m, tiles, 4);
}

/* ---- Products with integer weights ---- */

#define PANEL 1024        /* k of a panel: 16 KiB of q8 steps */
#define CHUNK 128         /* vectors of activations whose sums are held at once */
#define STREAM_AHEAD 1024 /* bytes from where one vector's product reads to what it asks the memory for */

/* One vector of activations is `hi` of a token, or `lo`. */
typedef struct neon_scratch {
    int8_t panel[PANEL * LANES];
    int32_t sums[CHUNK][LANES];
    const int8_t *x[CHUNK + 1]; /* an odd one out is paired with itself */
} neon_scratch_t;
_Static_assert(sizeof(neon_scratch_t) <= COLI_KERNEL_SCRATCH, "scratch");

/* sums[v][row] += w[row] . x[v][at ... at + k - 1] for the vectors of a tile. w: k of one block, as the tile wants them. */
typedef void (*dots_fn)(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES]);

/* How a product is made. */
typedef struct method {
    void (*unpack)(const uint8_t *w, uint32_t k, int8_t *panel); /* k of a block into what dots read; NULL: they read w */
    const dots_fn *dots;                                         /* dots[i] takes (i + 1) * unit vectors */
    uint32_t most, unit;                                         /* dots has `most` entries */
    uint32_t bytes;                                              /* of 16 rows x 128 k as stored */
} method_t;

/* The sums of one block with n vectors. */
COLI_INLINE void block_sums(const method_t *how, const uint8_t *block, uint32_t k, uint32_t n, neon_scratch_t *s) {
    uint32_t tiles = (n + how->unit - 1) / how->unit, panel = how->unpack || tiles > how->most ? PANEL : k;
    memset(s->sums, 0, (size_t)tiles * how->unit * sizeof s->sums[0]);
    for (uint32_t at = 0; at < k; at += panel) {
        uint32_t width = COLI_MIN(panel, k - at);
        const uint8_t *w = block + (size_t)(at / 128) * how->bytes;
        if (how->unpack) {
            how->unpack(w, width, s->panel);
            w = (const uint8_t *)s->panel;
        }
        for (uint32_t i = 0, size; i < tiles; i += size) {
            size = group_size(tiles, i, how->most);
            how->dots[size - 1](w, s->x + i * how->unit, at, width, s->sums + i * how->unit);
        }
    }
}

COLI_INLINE void gather(const coli_matmul_t *m, uint32_t t, uint32_t n, neon_scratch_t *s) {
    uint32_t v = 0;
    for (uint32_t j = 0; j < n; j++) {
        size_t at = (size_t)row_of(m, t + j) * m->x->stride;
        s->x[v++] = m->x->hi + at;
        if (m->x->bits == 16) s->x[v++] = m->x->lo + at;
    }
    s->x[v] = s->x[v - 1];
}

/* y of n tokens of block b from the sums. */
COLI_INLINE void finish(const coli_matmul_t *m, uint32_t b, uint32_t t, uint32_t n, const neon_scratch_t *s) {
    v16f w_scale = load(m->w_scale + (size_t)b * LANES);
    const v16i *sums = (const v16i *)(const void *)s->sums;
    for (uint32_t j = 0; j < n; j++) {
        v16f sum;
        if (m->x->bits == 16)
            sum = fma16(splat(128), __builtin_convertvector(sums[2 * j], v16f), __builtin_convertvector(sums[2 * j + 1], v16f));
        else
            sum = __builtin_convertvector(sums[j], v16f);
        float token_scale = m->x->scale[row_of(m, t + j)];
        store(m->y + (t + (size_t)j) * m->y_stride + (size_t)b * LANES, sum * (w_scale * splat(token_scale)));
    }
}

static void integer_product(const coli_matmul_t *m, const method_t *how) {
    neon_scratch_t *s = m->scratch;
    uint32_t parts = m->x->bits / 8;
    for (uint32_t t = 0, n; t < m->n_tokens; t += n) {
        n = group_size(m->n_tokens, t, CHUNK / parts);
        gather(m, t, n, s);
        for (uint32_t b = 0; b < m->n_blocks; b++) {
            block_sums(how, m->w + b * m->block_bytes, m->k, n * parts, s);
            finish(m, b, t, n, s);
        }
    }
}

COLI_INLINE uint32_t vectors_of(const coli_matmul_t *m) { return m->n_tokens * (m->x->bits / 8); }

COLI_INLINE void ask_ahead(const uint8_t *w) { __builtin_prefetch(w + STREAM_AHEAD, 0, 0); }

/* ---- q4 ---- */

/* Four rows x 16 k of a q4 piece: the levels of four steps' worth of q8, not yet times their scale. */
COLI_INLINE void levels_of(const uint8_t *two_steps, int8x16_t level[4]) {
    static const int8_t levels[16] = COLI_Q4_LEVELS;
    int8x16_t table = vld1q_s8(levels);
    EACH (i, 2) {
        uint8x16_t bytes = vld1q_u8(two_steps + i * 64);
        level[2 * i] = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
        level[2 * i + 1] = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
    }
}

/* Writes rows 4 h ... 4 h + 3 of two q8 steps, 128 bytes, in the order that the tiles read. */
typedef void (*emit_fn)(int8_t *two_steps, int h, int8x16_t first, int8x16_t second);

/* All scales of four rows, one in each byte: of groups 0, 2, 4, 6 and of 1, 3, 5, 7. Level times scale is at most 18 * 7. */
COLI_INLINE void unpack_q4(const uint8_t *w, uint32_t k, int8_t *panel, emit_fn emit) {
    static const uint8_t first_byte[16] = { 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12 };
    for (uint32_t c = 0; c < k; c += 128, w += COLIBRI_Q4_PIECE, panel += 128 * LANES)
        EACH (h, 4) {
            uint8x16_t scales = vld1q_u8(w + h * 16), of_row = vld1q_u8(first_byte);
            uint8x16_t even = vandq_u8(scales, vdupq_n_u8(7)), odd = vandq_u8(vshrq_n_u8(scales, 4), vdupq_n_u8(7));
            for (int g = 0; g < 8; g += 2, of_row = vaddq_u8(of_row, vdupq_n_u8(1)))
                EACH (i, 2) {
                    int8x16_t scale = vreinterpretq_s8_u8(vqtbl1q_u8(i ? odd : even, of_row)), level[4];
                    int8_t *out = panel + (size_t)(g + i) * 256;
                    levels_of(w + 64 + (size_t)(g + i) * 128 + h * 16, level);
                    emit(out, h, vmulq_s8(level[0], scale), vmulq_s8(level[1], scale));
                    emit(out + 128, h, vmulq_s8(level[2], scale), vmulq_s8(level[3], scale));
                }
        }
}

COLI_INLINE void emit_steps(int8_t *two_steps, int h, int8x16_t first, int8x16_t second) {
    vst1q_s8(two_steps + h * 16, first);
    vst1q_s8(two_steps + 64 + h * 16, second);
}

/* 16 k of activations as an instruction set wants them (it uses as many of these as it likes), and four rows' dot products
 * with them. */
typedef struct operand {
    int8x16_t part[4];
} operand_t;
typedef operand_t (*operand_fn)(const int8_t *x);
typedef int32x4_t (*dot16_fn)(const int8x16_t level[4], const operand_t *x);

/* The tile of few vectors: nothing is unpacked in memory, and a scale multiplies the sum of 16 k. */
COLI_INLINE void q4_tile(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES],
                         operand_fn operand, dot16_fn dot16, const int nv) {
    int32x4_t acc[MAX_VECTORS][4];
    EACH (v, nv)
        EACH (h, 4) acc[v][h] = vld1q_s32(sums[v] + h * 4);
    for (uint32_t c = at; c < at + k; w += COLIBRI_Q4_PIECE) {
        uint32x4_t scale[4];
        EACH (h, 4) scale[h] = vld1q_u32((const uint32_t *)(const void *)(w + h * 16));
        for (const uint8_t *steps = w + 64; steps < w + COLIBRI_Q4_PIECE; steps += 128, c += 16) {
            operand_t xs[MAX_VECTORS];
            EACH (v, nv) xs[v] = operand(x[v] + c);
            if (nv == 1) ask_ahead(steps), ask_ahead(steps + 64);
            EACH (h, 4) {
                int8x16_t level[4];
                int32x4_t s = vreinterpretq_s32_u32(vandq_u32(scale[h], vdupq_n_u32(7)));
                scale[h] = vshrq_n_u32(scale[h], 4);
                levels_of(steps + h * 16, level);
                EACH (v, nv) acc[v][h] = vmlaq_s32(acc[v][h], dot16(level, &xs[v]), s);
            }
        }
    }
    EACH (v, nv)
        EACH (h, 4) vst1q_s32(sums[v] + h * 4, acc[v][h]);
}

/* A tile of n vectors (or pairs) by an inlined function. */
#define DOTS(name, body, n)                                                                                             \
    static void name##_##n(const uint8_t *w, const int8_t *const *x, uint32_t at, uint32_t k, int32_t (*sums)[LANES]) { \
        body(w, x, at, k, sums, n);                                                                                     \
    }

#define NEON_TABLE(text, tokens)                                                    \
    {                                                                                              \
        .isa = COLIBRI_ISA_NEON, .name = text, KERNELS_OF_BODY,                                    \
        .matmul = { matmul_f32, matmul_f16, matmul_bf16, matmul_q8, matmul_q4 },                   \
        .geometry = { { 2, 5 }, { 2, 4 }, { 2, 5 }, { 1, tokens }, { 1, tokens } },                \
    }

#endif
