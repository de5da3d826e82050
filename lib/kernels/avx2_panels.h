/* avx2_panels.h: integer products of many tokens for AVX2. A panel (PANEL k of a block) is unpacked into the scratch once, and
 * all tokens of a chunk pass over it, their activations interleaved there in the order of reading; between panels the integer
 * sums wait in y. Two kinds of panels: 16-bit numbers (q8, and q4 with 16-bit activations) and bytes (the levels of q4). Part
 * of avx2.c. */
#ifndef COLI_AVX2_PANELS_H
#define COLI_AVX2_PANELS_H

#include <immintrin.h>

#include "kernels/integer.h"

/* ---- Integer products: vectors of 8 rows x 4 k (bytes), 8 rows x 2 k (16 bits) and 8 rows (32 bits) ---- */

COLI_INLINE __m256i load_vector(const void *p) { return _mm256_load_si256((const __m256i *)p); }
COLI_INLINE void store_vector(void *p, __m256i v) { _mm256_store_si256((__m256i *)p, v); }

COLI_INLINE __m256i widen16(const int8_t *p) {
    return _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(const void *)p));
}

COLI_INLINE __m256i repeat4(const void *p) { /* 4 bytes in every row */
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

/* y = sum * (w_scale * token_scale), from the sums of 16 rows. */
COLI_INLINE void finish_rows(const coli_matmul_t *m, size_t block, size_t t, v16f sum) {
    float token_scale = m->x->scale[row_of(m, (uint32_t)t)];
    store(m->y + t * m->y_stride + block * LANES, sum * (load(m->w_scale + block * LANES) * splat(token_scale)));
}

/* ---- q4: from nibbles to bytes ---- */

/* Levels are looked up with 18 added (unsigned, for maddubs); the sum of 8 products of one 16-bit half lane starts at -18 times
 * the sum of their activations. Sums may wrap on the way: the true one, without the 18, is at most 8 * 18 * 127. */
COLI_INLINE __m256i q4_levels(__m256i nibbles) {
    const __m128i table = _mm_setr_epi8(0, 4, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 32, 36);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}

/* Step j of a piece: 8 rows x 8 k: [0] k 0 ... 3, [1] k 4 ... 7. */
COLI_INLINE void q4_step(const uint8_t *step, __m256i w[2]) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i bytes = load_vector(step);
    w[0] = q4_levels(_mm256_and_si256(bytes, low));
    w[1] = q4_levels(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
}

/* The scale of group g (k 16g ... 16g + 15 of a piece) in both halves of every row. */
COLI_INLINE __m256i q4_scale(__m256i scales, const int g) {
    const char z = (char)0x80, a = (char)(g / 2), b = (char)(a + 4), c = (char)(a + 8), d = (char)(a + 12);
    const __m128i pick = _mm_setr_epi8(a, z, a, z, b, z, b, z, c, z, c, z, d, z, d, z);
    __m256i both = _mm256_shuffle_epi8(scales, _mm256_broadcastsi128_si256(pick));
    return _mm256_and_si256(g % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi16(7));
}

/* -18 times the sums of 16 activations, by their place in a pair: what 8 products of each half of a row start with. */
COLI_INLINE __m128i q4_start(const int8_t *x) {
    __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(18), _mm_load_si128((const __m128i *)(const void *)x));
    pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0x4e));
    pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0xb1));
    return _mm_sub_epi16(_mm_setzero_si128(), pairs);
}

COLI_INLINE void q4_starts(const int8_t *x, uint32_t k, int32_t *starts) {
    for (uint32_t c = 0; c < k; c += 16) *starts++ = _mm_cvtsi128_si32(q4_start(x + c));
}

/* ---- Panels, chunks, tiles ---- */

#define PANEL 512       /* k of a panel */
#define CHUNK_TOKENS 64 /* that pass over the panels of CHUNK_BLOCKS blocks */
#define CHUNK_BLOCKS 32
#define TILE_TOKENS 6   /* times one block: 12 of the 16 registers accumulate */

COLI_INLINE int32_t *sums_of(const coli_matmul_t *m, uint32_t b, uint32_t t) {
    return (int32_t *)(void *)(m->y + t * m->y_stride + (size_t)b * LANES);
}

/* A part of a product: some blocks, some tokens, k from c to c + width. */
typedef struct panel {
    const coli_matmul_t *m;
    uint32_t block, n_blocks, token, n_tokens, c, width;
    const uint8_t *next; /* a tile asks for this, 4 k further on for the byte `stride` further on, and so on */
    uint32_t stride;
} panel_t;

typedef void (*panel_fn)(panel_t *p);

typedef void (*unpack_fn)(const panel_t *p, uint32_t b);
typedef void (*panel_tile_fn)(const panel_t *p, uint32_t b, uint32_t t);

/* tiles[n - 1] takes n tokens; `piece` bytes are 128 k of a block. What is unpacked next is asked for while this is multiplied:
 * no processor foresees the jump to another block. */
COLI_INLINE void each_tile(panel_t *p, uint32_t piece, unpack_fn unpack, panel_tile_fn const *tiles) {
    uint32_t bytes = p->width / 128 * piece, left = p->n_blocks;
    const uint8_t *first = p->m->w + p->block * p->m->block_bytes + p->c / 128 * piece, *w = first;
    for (uint32_t b = p->block; left > 0; b++, left--) {
        unpack(p, b);
        w += p->m->block_bytes;
        if (left == 1) w = p->c + p->width < p->m->k ? first + bytes : first;
        for (uint32_t t = 0, n; t < p->n_tokens; t += n) {
            n = group_size(p->n_tokens, t, TILE_TOKENS);
            p->next = w + (uint64_t)bytes * t / p->n_tokens;
            p->stride = bytes * n / (p->n_tokens * (p->width / 4));
            tiles[n - 1](p, b, t);
        }
    }
}

/* The sums of a chunk over all of k, and y from them. */
COLI_INLINE void chunk_product(panel_t *p, panel_fn work) {
    const coli_matmul_t *m = p->m;
    for (p->c = 0; p->c < m->k; p->c += PANEL) {
        p->width = COLI_MIN(PANEL, m->k - p->c);
        work(p);
    }
    for (uint32_t t = p->token; t < p->token + p->n_tokens; t++)
        for (uint32_t b = p->block; b < p->block + p->n_blocks; b++)
            finish_rows(m, b, t, __builtin_convertvector(*(const v16i *)(const void *)sums_of(m, b, t), v16f));
}

/* Once for every chunk of a product. */
#define EACH_CHUNK(p, m)                                                                                                      \
    for (panel_t p = { .m = m }; (p.n_blocks = COLI_MIN(CHUNK_BLOCKS, m->n_blocks - p.block)) > 0; p.block += p.n_blocks)     \
        for (p.token = 0; (p.n_tokens = COLI_MIN(CHUNK_TOKENS, m->n_tokens - p.token)) > 0; p.token += p.n_tokens)

/* ---- as 16-bit numbers: q8, and q4 with 16-bit activations ---- */

/* 16-bit activations are one number here, 128 hi + lo, and one sum. y is defined by the two sums, each rounded to f32: the same
 * only while both are below 2^24 and the sum fits 32 bits, which it does if the |w| of a row add up to at most 2^31 / 16320. A
 * block with a larger row is done again from its bytes; from LONGEST on hardly a row is smaller. */
#define LARGEST_ROW 131586u
#define LONGEST 4608

typedef struct wide_scratch {
    int16_t w[PANEL / 2][LANES * 2];
    int32_t x[CHUNK_TOKENS * (PANEL / 2)]; /* of each tile: [PANEL / 2][its tokens] pairs of 16 bits */
    uint32_t magnitude[CHUNK_BLOCKS][LANES]; /* sums of |w| */
} wide_scratch_t;
_Static_assert(sizeof(wide_scratch_t) <= COLI_KERNEL_SCRATCH, "scratch");

COLI_INLINE wide_scratch_t *wide_scratch(const panel_t *p) { return p->m->scratch; }

/* Dwords of one row of a tile of n tokens: every n-th of `to`, so that a tile reads its activations in one stream. */
COLI_INLINE void interleave(const void *row, uint32_t dwords, int32_t *to, uint32_t n) {
    const int32_t *from = row;
    for (uint32_t i = 0; i < dwords; i++) to[i * n] = from[i];
}

static void widen_activations(const panel_t *p) {
    const coli_act_t *x = p->m->x;
    _Alignas(32) int16_t row[PANEL];
    for (uint32_t t = 0, n; t < p->n_tokens; t += n) {
        n = group_size(p->n_tokens, t, TILE_TOKENS);
        for (uint32_t j = 0; j < n; j++) {
            size_t at = (size_t)row_of(p->m, p->token + t + j) * x->stride + p->c;
            for (uint32_t c = 0; c < p->width; c += 16) {
                __m256i v = widen16(x->hi + at + c);
                if (x->bits == 16) v = _mm256_add_epi16(_mm256_slli_epi16(v, 7), widen16(x->lo + at + c));
                store_vector(row + c, v);
            }
            interleave(row, p->width / 2, wide_scratch(p)->x + t * (PANEL / 2) + j, n);
        }
    }
}

/* 8 rows x 4 k of bytes as two vectors of 8 rows x 2 k. */
COLI_INLINE void widen(__m256i bytes, __m256i w[2]) {
    const char z = (char)0x80;
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(z, 0, z, 1, z, 4, z, 5, z, 8, z, 9, z, 12, z, 13));
    const __m256i second = _mm256_broadcastsi128_si256(_mm_setr_epi8(z, 2, z, 3, z, 6, z, 7, z, 10, z, 11, z, 14, z, 15));
    w[0] = _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, first), 8);
    w[1] = _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, second), 8);
}

COLI_INLINE __m256i add_magnitude(__m256i sum, __m256i w) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_abs_epi16(w), _mm256_set1_epi16(1)));
}

COLI_INLINE void widen_q8(const panel_t *p, uint32_t b, const int bits) {
    wide_scratch_t *s = wide_scratch(p);
    const uint8_t *w = p->m->w + b * p->m->block_bytes + (size_t)p->c * LANES;
    uint32_t *magnitude = s->magnitude[b - p->block];
    EACH (half, 2) {
        __m256i sum = load_vector(magnitude + half * 8);
        for (uint32_t c = 0; c < p->width; c += 4) {
            __m256i v[2];
            widen(load_vector(w + (size_t)c * LANES + half * 32), v);
            EACH (i, 2) {
                store_vector(s->w[c / 2 + (uint32_t)i] + half * 16, v[i]);
                if (bits == 16) sum = add_magnitude(sum, v[i]);
            }
        }
        store_vector(magnitude + half * 8, sum);
    }
}

static void widen_q8_8(const panel_t *p, uint32_t b) { widen_q8(p, b, 8); }
static void widen_q8_16(const panel_t *p, uint32_t b) { widen_q8(p, b, 16); }

static void widen_q4(const panel_t *p, uint32_t b) {
    wide_scratch_t *s = wide_scratch(p);
    const uint8_t *w = p->m->w + b * p->m->block_bytes + p->c / 128 * COLIBRI_Q4_PIECE;
    uint32_t *magnitude = s->magnitude[b - p->block];
    for (uint32_t c = 0; c < p->width; c += 128, w += COLIBRI_Q4_PIECE)
        EACH (half, 2) {
            __m256i scales = load_vector(w + half * 32), sum = load_vector(magnitude + half * 8);
            EACH (g, 8) {
                __m256i scale = q4_scale(scales, g), levels[4];
                EACH (j, 2) q4_step(w + 64 + (g * 2 + j) * 64 + half * 32, levels + 2 * j);
                EACH (i, 4) {
                    __m256i v[2];
                    widen(_mm256_sub_epi8(levels[i], _mm256_set1_epi8(18)), v);
                    EACH (l, 2) {
                        v[l] = _mm256_mullo_epi16(v[l], scale);
                        store_vector(s->w[c / 2 + (uint32_t)(g * 8 + i * 2 + l)] + half * 16, v[l]);
                        sum = add_magnitude(sum, v[l]);
                    }
                }
            }
            store_vector(magnitude + half * 8, sum);
        }
}

/* The unpacked panel of block b times tokens t ... t + nt - 1 of the chunk. */
COLI_INLINE void wide_tile(const panel_t *p, uint32_t b, uint32_t t, const int nt) {
    const wide_scratch_t *s = wide_scratch(p);
    const int32_t *x = s->x + t * (PANEL / 2);
    const int16_t *w = s->w[0];
    __m256i acc[TILE_TOKENS][2];
    EACH (j, nt)
        EACH (half, 2)
            acc[j][half] = p->c ? load_vector(sums_of(p->m, b, p->token + t + (uint32_t)j) + half * 8) : _mm256_setzero_si256();
    const uint8_t *next = p->next;
    for (uint32_t c = 0; c < p->width; c += 4, next += p->stride) {
        _mm_prefetch((const char *)next, _MM_HINT_T0);
        EACH (i, 2) {
            __m256i w0 = load_vector(w), w1 = load_vector(w + 16);
            EACH (j, nt) {
                __m256i xs = repeat4(x + j);
                acc[j][0] = _mm256_add_epi32(acc[j][0], _mm256_madd_epi16(w0, xs));
                acc[j][1] = _mm256_add_epi32(acc[j][1], _mm256_madd_epi16(w1, xs));
            }
            w += LANES * 2;
            x += nt;
        }
    }
    EACH (j, nt)
        EACH (half, 2) store_vector(sums_of(p->m, b, p->token + t + (uint32_t)j) + half * 8, acc[j][half]);
}

/* A function of a tile for every number of tokens, and a table of them. */
#define TILE(kind, nt) \
    static void kind##_##nt(const panel_t *p, uint32_t b, uint32_t t) { kind(p, b, t, nt); }
#define TILES(kind) \
    TILE(kind, 1)   \
    TILE(kind, 2)   \
    TILE(kind, 3)   \
    TILE(kind, 4)   \
    TILE(kind, 5)   \
    TILE(kind, 6)   \
    static const panel_tile_fn kind##s[] = { kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6 };

TILES(wide_tile)

static void wide_panel_q8(panel_t *p) {
    widen_activations(p);
    each_tile(p, 2048, p->m->x->bits == 16 ? widen_q8_16 : widen_q8_8, wide_tiles);
}

static void wide_panel_q4(panel_t *p) {
    widen_activations(p);
    each_tile(p, COLIBRI_Q4_PIECE, widen_q4, wide_tiles);
}

/* The blocks of the chunk with a row too large for one sum. */
static uint32_t too_large(const panel_t *p, uint32_t blocks[CHUNK_BLOCKS]) {
    const wide_scratch_t *s = wide_scratch(p);
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_blocks; i++) {
        bool large = false;
        for (int r = 0; r < LANES; r++) large |= s->magnitude[i][r] > LARGEST_ROW;
        if (large) blocks[n++] = p->block + i;
    }
    return n;
}

/* The products of one block and n tokens from the file's bytes; may use the scratch. */
typedef void (*few_fn)(const coli_matmul_t *m, uint32_t block, uint32_t token, uint32_t n);

COLI_INLINE void wide_product(const coli_matmul_t *m, panel_fn panel, few_fn few) {
    EACH_CHUNK (p, m) {
        uint32_t again[CHUNK_BLOCKS];
        memset(wide_scratch(&p)->magnitude, 0, sizeof wide_scratch(&p)->magnitude);
        chunk_product(&p, panel);
        for (uint32_t n = m->x->bits == 16 ? too_large(&p, again) : 0; n > 0; n--) few(m, again[n - 1], p.token, p.n_tokens);
    }
}

/* ---- q4 with 8-bit activations: levels as bytes, sums over 16 k in 16 bits ---- */

#define GROUPS (PANEL / 16)

typedef struct q4_scratch {
    uint8_t w[PANEL / 4][LANES * 4]; /* level + 18 */
    int32_t scale[GROUPS][LANES];    /* in both halves */
    int32_t x[CHUNK_TOKENS * GROUPS * 5]; /* of each tile: [GROUPS][what the sums start with, 4 times 4 k][its tokens] */
} q4_scratch_t;
_Static_assert(sizeof(q4_scratch_t) <= COLI_KERNEL_SCRATCH, "scratch");

static void q4_activations(const panel_t *p) {
    q4_scratch_t *s = p->m->scratch;
    for (uint32_t t = 0, n; t < p->n_tokens; t += n) {
        n = group_size(p->n_tokens, t, TILE_TOKENS);
        for (uint32_t j = 0; j < n; j++) {
            const int8_t *x = p->m->x->hi + (size_t)row_of(p->m, p->token + t + j) * p->m->x->stride + p->c;
            int32_t *to = s->x + t * GROUPS * 5 + j;
            for (uint32_t c = 0; c < p->width; c += 16, to += 5 * n) {
                *to = _mm_cvtsi128_si32(q4_start(x + c));
                interleave(x + c, 4, to + n, n);
            }
        }
    }
}

static void q4_unpack(const panel_t *p, uint32_t b) {
    q4_scratch_t *s = p->m->scratch;
    const uint8_t *w = p->m->w + b * p->m->block_bytes + p->c / 128 * COLIBRI_Q4_PIECE;
    for (uint32_t c = 0; c < p->width; c += 128, w += COLIBRI_Q4_PIECE)
        EACH (half, 2) {
            __m256i scales = load_vector(w + half * 32), levels[2];
            EACH (g, 8) store_vector(s->scale[c / 16 + (uint32_t)g] + half * 8, q4_scale(scales, g));
            EACH (j, 16) {
                q4_step(w + 64 + j * 64 + half * 32, levels);
                EACH (i, 2) store_vector(s->w[c / 4 + (uint32_t)(j * 2 + i)] + half * 32, levels[i]);
            }
        }
}

COLI_INLINE void q4_panel_tile(const panel_t *p, uint32_t b, uint32_t t, const int nt) {
    const q4_scratch_t *s = p->m->scratch;
    __m256i acc[TILE_TOKENS][2];
    EACH (j, nt)
        EACH (half, 2)
            acc[j][half] = p->c ? load_vector(sums_of(p->m, b, p->token + t + (uint32_t)j) + half * 8) : _mm256_setzero_si256();
    const int32_t *x = s->x + t * GROUPS * 5;
    const uint8_t *w = s->w[0], *next = p->next;
    for (uint32_t g = 0; g < p->width / 16; g++, w += 256, x += 5 * nt) {
        __m256i sum[TILE_TOKENS][2];
        __asm__ volatile("" : "+m"(acc)); /* the 16-bit sums want the registers */
        EACH (j, nt) sum[j][0] = sum[j][1] = repeat4(x + j);
        EACH (i, 4) {
            __m256i w0 = load_vector(w + i * 64), w1 = load_vector(w + i * 64 + 32);
            _mm_prefetch((const char *)next, _MM_HINT_T0);
            next += p->stride;
            EACH (j, nt) {
                __m256i xs = repeat4(x + (i + 1) * nt + j);
                sum[j][0] = _mm256_add_epi16(sum[j][0], _mm256_maddubs_epi16(w0, xs));
                sum[j][1] = _mm256_add_epi16(sum[j][1], _mm256_maddubs_epi16(w1, xs));
            }
        }
        EACH (half, 2) {
            __m256i scale = load_vector(s->scale[g] + half * 8);
            EACH (j, nt) acc[j][half] = _mm256_add_epi32(acc[j][half], _mm256_madd_epi16(sum[j][half], scale));
        }
    }
    EACH (j, nt)
        EACH (half, 2) store_vector(sums_of(p->m, b, p->token + t + (uint32_t)j) + half * 8, acc[j][half]);
}

TILES(q4_panel_tile)

static void q4_panel(panel_t *p) {
    q4_activations(p);
    each_tile(p, COLIBRI_Q4_PIECE, q4_unpack, q4_panel_tiles);
}

static void q4_product(const coli_matmul_t *m) {
    EACH_CHUNK (p, m) chunk_product(&p, q4_panel);
}

#endif
