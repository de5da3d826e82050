/* avx512_products.h: the products with q8 and q4 weights for AVX-512, part of avx512.c. Four blocks of weights stay in the
 * cache while all tokens pass, six vectors of activations (hi or lo of a row) at a time:
 *
 *     wide    8 blocks x 1 or 2 vectors of q8: one token, at the memory's speed
 *     tile    4 blocks x 6 vectors, 24 registers of sums, weights as bytes: of q8 from the file, of q4 from a panel
 *     stream  1 block x 6 vectors of q4, unpacked in registers in the order of memory, and into the panel if more tokens follow
 *
 *     scratch  panel  [4][PANEL_STRIDE]         PANEL_K k of each block as q8 steps (q4)
 *              sums   int32 [groups][4][6][16]  of the tokens, six vectors a group, over the k before
 *
 * VNNI sums four products of a lane in one instruction, whose first side is unsigned. So there every weight comes as w + 128,
 * and 128 * sum(x) too much is taken off at the end (sums may wrap on the way; the end is exact modulo 2^32). */
#ifndef COLI_AVX512_PRODUCTS_H
#define COLI_AVX512_PRODUCTS_H

#include <immintrin.h>

#include "kernels/integer.h"

#ifndef TARGET_VNNI
#  define TARGET_VNNI __attribute__((target("avx512vnni")))
#  define TARGET_VBMI __attribute__((target("avx512vnni,avx512vbmi")))
#endif

#define PANEL_K 2048                     /* a panel of 128 KiB stays in the second level of caches */
#define PANEL_STRIDE (PANEL_K * 16 + 64) /* not a power of two: the four blocks do not meet in the same cache sets */
#define Q8_PIECE 2048                    /* bytes of 16 rows x 128 k */

/* ---- Weights: 16 k of a block as four q8 steps ---- */

typedef uint16_t v32u __attribute__((vector_size(64), may_alias));
typedef uint8_t v64b __attribute__((vector_size(64), may_alias));

/* Group g, k 16g ... 16g + 15, of the 8 of a q4 piece. */
typedef void (*unpack_fn)(const uint8_t *piece, uint32_t g, v16i w[4]);

#define BYTES(x) ((int32_t)((uint32_t)(x) * 0x01010101u)) /* a byte four times */

COLI_INLINE v16i step(const uint8_t *w) { return *(const v16i *)(const void *)w; }
COLI_INLINE void put(uint8_t *p, v16i v) { *(v16i *)(void *)p = v; }
COLI_INLINE v16i every(int32_t i) { return (v16i){ i, i, i, i, i, i, i, i, i, i, i, i, i, i, i, i }; }
COLI_INLINE v16i times16(v16i a, v16i b) { return (v16i)((v32u)a * (v32u)b); } /* as 16-bit numbers */
COLI_INLINE v16i high_nibbles(v16i v) { return (v16i)((v32u)v >> 4); }         /* in the low ones; the others are anything */
COLI_INLINE v16i shuffle(v16i v, v16i control) { return (v16i)_mm512_shuffle_epi8((__m512i)v, (__m512i)control); }

/* Byte i of every lane, in all four bytes of the lane. */
COLI_INLINE v16i spread(v16i v, uint32_t i) {
    const int32_t a = BYTES(0), b = BYTES(4), c = BYTES(8), d = BYTES(12); /* within a quarter of the register */
    return shuffle(v, (v16i){ a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d } + BYTES(i));
}

/* With VBMI: the byte scale * 16 + nibble picks level * scale + 128 from a table of 128 bytes in two registers. Bit 7 of an
 * index does not count, so the format's spare bit needs no mask. */
TARGET_VBMI COLI_INLINE void q4_vbmi(const uint8_t *piece, uint32_t g, v16i w[4]) {
    static const int8_t levels[16] = COLI_Q4_LEVELS;
    v64b table[2];
    EACH (i, 64) {
        table[0][i] = (uint8_t)(128 + levels[i % 16] * (i / 16));
        table[1][i] = (uint8_t)(128 + levels[i % 16] * (4 + i / 16));
    }
    v16i scales = step(piece), nibble = every(BYTES(15));
    v16i scale = spread(g % 2 ? scales : (v16i)((v16u)scales << 4), g / 2); /* in bits 4 to 6 of all bytes */
    EACH (j, 2) {
        v16i bytes = step(piece + 64 + (size_t)(g * 2 + (uint32_t)j) * 64);
        v16i low = (bytes & nibble) | (scale & ~nibble), high = (high_nibbles(bytes) & nibble) | (scale & ~nibble);
        w[2 * j] = (v16i)_mm512_permutex2var_epi8((__m512i)table[0], (__m512i)low, (__m512i)table[1]);
        w[2 * j + 1] = (v16i)_mm512_permutex2var_epi8((__m512i)table[0], (__m512i)high, (__m512i)table[1]);
    }
}

/* Without: a shuffle gives level + 18 of each nibble, a 16-bit product two of them times their scale (36 * 7 at most: no
 * carry), and 18 * scale - plus is taken off: level * scale + plus. */
COLI_INLINE void q4_vnni(const uint8_t *piece, uint32_t g, v16i w[4]) {
    static const int8_t levels[16] = COLI_Q4_LEVELS;
    v64b above;
    EACH (i, 64) above[i] = (uint8_t)(levels[i % 16] + 18);
    v16i scales = (g % 2 ? high_nibbles(step(piece)) : step(piece)) & BYTES(7), nibble = every(BYTES(15));
    v16i excess = spread((v16i)((v64b)times16(scales, every(0x00120012)) - (uint8_t)128), g / 2);
    v16i scale = spread(scales, g / 2) & 0x00ff00ff;
    EACH (j, 2) {
        v16i bytes = step(piece + 64 + (size_t)(g * 2 + (uint32_t)j) * 64);
        v16i low = shuffle((v16i)above, bytes & nibble), high = shuffle((v16i)above, high_nibbles(bytes) & nibble);
        w[2 * j] = (v16i)((v64b)times16(low, scale) - (v64b)excess);
        w[2 * j + 1] = (v16i)((v64b)times16(high, scale) - (v64b)excess);
    }
}

/* ---- Sums of products: acc + those of the bytes of w and x, by fours ---- */

typedef v16i (*dot_fn)(v16i acc, v16i w, v16i x);

COLI_INLINE v16i four(const int8_t *x) { /* four bytes in every lane */
    int32_t i;
    memcpy(&i, x, 4);
    return every(i);
}

TARGET_VNNI COLI_INLINE v16i dot_vnni(v16i acc, v16i w, v16i x) {
    return (v16i)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}

/* ---- Stream: n k of one q4 block times nv vectors ---- */

#define STREAM_AHEAD 4096 /* bytes: with many products a byte the processor itself does not fetch far enough ahead */

/* Adds to sums, or begins them. The unpacked steps are kept in a panel if that is not NULL. Of few vectors several partial sums
 * are made, so that none waits for the one before. */
COLI_INLINE void stream(const uint8_t *w, const int8_t *const *x, uint32_t n, v16i *sums, bool first, uint8_t *panel,
                        unpack_fn unpack, dot_fn dot, const int nv) {
    const int ways = nv == 1 ? 4 : nv < MAX_VECTORS ? 2 : 1;
    v16i acc[4][MAX_VECTORS], steps[4];
    EACH (i, ways)
        EACH (v, nv) acc[i][v] = i || first ? (v16i){ 0 } : sums[v];
    for (uint32_t c = 0; c < n; c += 128, w += COLIBRI_Q4_PIECE)
        EACH (g, 8) {
            if (nv > 2)
                EACH (i, 2) __builtin_prefetch(w + STREAM_AHEAD + g * 128 + i * 64);
            unpack(w, (uint32_t)g, steps);
            EACH (j, 4)
                EACH (v, nv) acc[j % ways][v] = dot(acc[j % ways][v], steps[j], four(x[v] + c + g * 16 + j * 4));
            if (panel) {
                EACH (j, 4) put(panel + j * 64, steps[j]);
                panel += 256;
            }
        }
    EACH (v, nv) {
        EACH (i, ways - 1) acc[0][v] = (v16i)((v16u)acc[0][v] + (v16u)acc[i + 1][v]);
        sums[v] = acc[0][v];
    }
}

#define STREAM_ARGUMENTS const uint8_t *w, const int8_t *const *x, uint32_t n, v16i *sums, bool first, uint8_t *panel

typedef void (*stream_fn)(STREAM_ARGUMENTS);

#define STREAM(name, attribute, unpack, dot, nv)                                           \
    attribute static void name##_##nv(STREAM_ARGUMENTS) {                                  \
        stream(w, x, n, sums, first, panel, unpack, dot, nv);                              \
    }
#define STREAMS(name, attribute, unpack, dot) \
    STREAM(name, attribute, unpack, dot, 1)   \
    STREAM(name, attribute, unpack, dot, 2)   \
    STREAM(name, attribute, unpack, dot, 4)   \
    STREAM(name, attribute, unpack, dot, 6)   \
    static const stream_fn name[MAX_VECTORS] = { name##_1, name##_2, name##_4, name##_4, name##_6, name##_6 };

STREAMS(stream_q4_vbmi, TARGET_VBMI, q4_vbmi, dot_vnni)
STREAMS(stream_q4_vnni, TARGET_VNNI, q4_vnni, dot_vnni)

/* ---- Tiles: n k of nb blocks, `stride` bytes apart, times nv vectors ---- */

/* Weights to come, fetched while a tile is multiplied: `rate` (at most 128) bytes a step. */
typedef struct ahead {
    const uint8_t *p;
    size_t rate;
} ahead_t;

COLI_INLINE const uint8_t *fetch(const uint8_t *p) {
    __builtin_prefetch(p, 0, 2);
    __builtin_prefetch(p + 64, 0, 2);
    return p;
}

TARGET_VNNI COLI_INLINE void tile_vnni(const uint8_t *w, size_t stride, const int8_t *const *x, uint32_t n,
                                       v16i (*sums)[MAX_VECTORS], bool first, ahead_t ahead, const int32_t flip, const int nb,
                                       const int nv) {
    v16i acc[SUPERBLOCK][MAX_VECTORS], steps[SUPERBLOCK];
    const int8_t *rows[MAX_VECTORS];
    EACH (v, nv) rows[v] = x[v];
    EACH (i, nb)
        EACH (v, nv) acc[i][v] = first ? (v16i){ 0 } : sums[i][v];
    for (uint32_t c = 0; c < n; c += 4, w += 64) {
        if (ahead.rate) ahead.p = fetch(ahead.p) + ahead.rate; /* for nothing it would cost a tenth of one token's speed */
        EACH (i, nb) steps[i] = step(w + (size_t)i * stride) ^ flip;
        EACH (v, nv) {
            v16i xs = four(rows[v] + c);
            EACH (i, nb) acc[i][v] = dot_vnni(acc[i][v], steps[i], xs);
        }
    }
    EACH (i, nb)
        EACH (v, nv) sums[i][v] = acc[i][v];
}

#define TILE_ARGUMENTS                                                                                           \
    const uint8_t *w, size_t stride, const int8_t *const *x, uint32_t n, v16i (*sums)[MAX_VECTORS], bool first, ahead_t ahead

typedef void (*tile_fn)(TILE_ARGUMENTS);

#define TILE(name, attribute, nb, nv, body, ...)                     \
    attribute static void name##_##nb##x##nv(TILE_ARGUMENTS) {       \
        body(w, stride, x, n, sums, first, ahead, __VA_ARGS__, nv);  \
    }
#define TILES_OF(name, attribute, nb, ...)    \
    TILE(name, attribute, nb, 1, __VA_ARGS__) \
    TILE(name, attribute, nb, 2, __VA_ARGS__) \
    TILE(name, attribute, nb, 3, __VA_ARGS__) \
    TILE(name, attribute, nb, 4, __VA_ARGS__) \
    TILE(name, attribute, nb, 5, __VA_ARGS__) \
    TILE(name, attribute, nb, 6, __VA_ARGS__)
#define TILE_NAMES(name, nb) \
    { name##_##nb##x1, name##_##nb##x2, name##_##nb##x3, name##_##nb##x4, name##_##nb##x5, name##_##nb##x6 }
#define TILE_TABLE(name)                                                                                              \
    static const tile_fn name[2][MAX_VECTORS] = { TILE_NAMES(name, 1), TILE_NAMES(name, 4) };
#define VNNI_TILES(name, flip)                           \
    TILES_OF(name, TARGET_VNNI, 1, tile_vnni, flip, 1)   \
    TILES_OF(name, TARGET_VNNI, 4, tile_vnni, flip, 4)   \
    TILE_TABLE(name)

VNNI_TILES(tile_signed, BYTES(128)) /* q8 in the file: w + 128 is w with its sign bit flipped */
VNNI_TILES(tile_unsigned, 0)        /* q4 in a panel */

/* ---- One token's q8: eight blocks are read side by side ---- */

#define WIDE 8          /* streams of 4 KiB pages hide each other's page walks */
#define PAGE_AHEAD 4096 /* bytes: now and then a line of the next page is asked for, so that its walk is over in time */

TARGET_VNNI COLI_INLINE void wide_vnni(const uint8_t *w, size_t stride, const int8_t *const *x, uint32_t n,
                                       v16i (*sums)[MAX_VECTORS], const int nv) {
    v16i acc[WIDE][2];
    EACH (i, WIDE)
        EACH (v, nv) acc[i][v] = (v16i){ 0 };
    for (uint32_t c = 0; c < n; c += 64, w += 1024) {
        EACH (i, WIDE) __builtin_prefetch(w + (size_t)i * stride + PAGE_AHEAD);
        for (uint32_t j = 0; j < 16; j++) {
            v16i xs[2];
            EACH (v, nv) xs[v] = four(x[v] + c + j * 4);
            EACH (i, WIDE) {
                v16i weights = step(w + (size_t)i * stride + j * 64) ^ BYTES(128);
                EACH (v, nv) acc[i][v] = dot_vnni(acc[i][v], weights, xs[v]);
            }
        }
    }
    EACH (i, WIDE)
        EACH (v, nv) sums[i][v] = acc[i][v];
}

TARGET_VNNI static void wide_1(const uint8_t *w, size_t stride, const int8_t *const *x, uint32_t n, v16i (*sums)[MAX_VECTORS]) {
    wide_vnni(w, stride, x, n, sums, 1);
}

TARGET_VNNI static void wide_2(const uint8_t *w, size_t stride, const int8_t *const *x, uint32_t n, v16i (*sums)[MAX_VECTORS]) {
    wide_vnni(w, stride, x, n, sums, 2);
}

/* ---- The product ---- */

/* How a type is multiplied with one set of instructions. */
typedef struct scheme {
    const stream_fn *stream;             /* by vectors - 1: unpacks q4; NULL for q8 */
    const tile_fn (*tile)[MAX_VECTORS];  /* of one block and of four, by vectors - 1 */
    uint32_t piece;                      /* bytes of 16 rows x 128 k */
} scheme_t;

/* Up to four blocks and some k of a product, with all tokens. */
typedef struct part {
    const scheme_t *scheme;
    const coli_matmul_t *m;
    uint32_t b, nb, c, n; /* blocks b ... b + nb - 1 (one or four), k c ... c + n - 1 */
    ahead_t ahead;        /* what comes next; rate: all of its bytes */
    uint8_t *panel;
    v16i (*sums)[SUPERBLOCK][MAX_VECTORS]; /* [groups] */
} part_t;

/* Group g of the tokens: nv vectors x. The first one unpacks q4. */
static void multiply_group(const part_t *p, const int8_t **x, uint32_t nv, uint32_t g, uint32_t groups) {
    const scheme_t *scheme = p->scheme;
    size_t block_bytes = p->m->block_bytes;
    const uint8_t *w = p->m->w + p->b * block_bytes + (size_t)(p->c / 128) * scheme->piece;
    v16i(*sums)[MAX_VECTORS] = p->sums[g];
    uint32_t unpacks = scheme->stream != NULL;
    if (unpacks && g == 0) {
        for (uint32_t v = nv; v < MAX_VECTORS; v++) x[v] = x[0]; /* a stream may take one more than there are */
        for (uint32_t i = 0; i < p->nb; i++)
            scheme->stream[nv - 1](w + i * block_bytes, x, p->n, sums[i], p->c == 0,
                                   groups > 1 ? p->panel + (size_t)i * PANEL_STRIDE : NULL);
        return;
    }
    ahead_t ahead = { p->panel, 0 };
    if (p->ahead.rate) {
        size_t share = p->ahead.rate / (groups - unpacks);
        ahead = (ahead_t){ p->ahead.p + (g - unpacks) * share, share / (p->n / 4) + 1 };
    }
    if (unpacks) w = p->panel, block_bytes = PANEL_STRIDE;
    scheme->tile[p->nb == SUPERBLOCK][nv - 1](w, block_bytes, x, p->n, sums, p->c == 0, ahead);
}

/* The vectors of n tokens from t on, at the part's k, and what flipped signs will have added to their sums. */
COLI_INLINE void gather_vectors(const part_t *p, uint32_t t, uint32_t n, const int8_t **x, int32_t *excess) {
    const coli_act_t *a = p->m->x;
    for (uint32_t j = 0, v = 0; j < n; j++) {
        size_t row = row_of(p->m, t + j), at = row * a->stride + p->c;
        excess[v] = (int32_t)(128u * (uint32_t)a->sum_hi[row]);
        x[v++] = a->hi + at;
        if (a->bits == 16) {
            excess[v] = (int32_t)(128u * (uint32_t)a->sum_lo[row]);
            x[v++] = a->lo + at;
        }
    }
}

static void multiply_part(const part_t *p, uint32_t t, uint32_t end) {
    uint32_t per = p->m->x->bits / 8, most = MAX_VECTORS / per, groups = (end - t + most - 1) / most;
    for (uint32_t g = 0, n; t < end; t += n, g++) {
        const int8_t *x[MAX_VECTORS];
        int32_t excess[MAX_VECTORS];
        n = group_size(end, t, most);
        gather_vectors(p, t, n, x, excess);
        multiply_group(p, x, n * per, g, groups);
        if (p->c + p->n == p->m->k) finish_sums(p->m, p->b, t, p->sums[g], excess, p->nb, n);
    }
}

/* Blocks of the part that begins at block b. */
static uint32_t blocks_at(const coli_matmul_t *m, uint32_t b) {
    return m->n_blocks - b >= SUPERBLOCK ? SUPERBLOCK : m->n_blocks > b;
}

/* The weights that the next part reads. */
static ahead_t part_after(const part_t *p, uint32_t most_k) {
    const coli_matmul_t *m = p->m;
    uint32_t c = p->c + p->n, b = p->b, nb = p->nb;
    if (c == m->k) c = 0, b += nb, nb = blocks_at(m, b);
    size_t bytes = (size_t)(COLI_MIN(most_k, m->k - c) / 128) * p->scheme->piece;
    return (ahead_t){ m->w + b * m->block_bytes + (size_t)(c / 128) * p->scheme->piece, nb * bytes };
}

/* One or two vectors, eight blocks at a time, while there are as many. */
static void wide_parts(part_t *p) {
    const coli_matmul_t *m = p->m;
    const int8_t *x[MAX_VECTORS];
    int32_t excess[MAX_VECTORS];
    v16i sums[WIDE][MAX_VECTORS];
    uint32_t vectors = m->n_tokens * m->x->bits / 8;
    gather_vectors(p, 0, m->n_tokens, x, excess);
    for (; m->n_blocks - p->b >= WIDE; p->b += WIDE) {
        (vectors == 1 ? wide_1 : wide_2)(m->w + p->b * m->block_bytes, m->block_bytes, x, m->k, sums);
        finish_sums(m, p->b, 0, sums, excess, WIDE, m->n_tokens);
    }
}

static void integer_product(const coli_matmul_t *m, const scheme_t *scheme) {
    part_t p = { .scheme = scheme, .m = m, .panel = m->scratch };
    uint8_t *sums = p.panel + (scheme->stream ? SUPERBLOCK * PANEL_STRIDE : 0);
    p.sums = (v16i(*)[SUPERBLOCK][MAX_VECTORS])(void *)sums;
    uint32_t most = MAX_VECTORS / (m->x->bits / 8); /* tokens of a group */
    uint32_t room = (uint32_t)((size_t)(p.panel + COLI_KERNEL_SCRATCH - sums) / sizeof *p.sums) * most;
    bool once = m->n_tokens <= most; /* neither a panel nor sums need room */
    uint32_t most_k = once ? m->k : PANEL_K;
    if (!scheme->stream && m->n_tokens * m->x->bits <= 16) wide_parts(&p);
    for (; p.b < m->n_blocks; p.b += p.nb) {
        p.nb = blocks_at(m, p.b);
        for (uint32_t t = 0, n; t < m->n_tokens; t += n) {
            n = group_size(m->n_tokens, t, room);
            for (p.c = 0; p.c < m->k; p.c += p.n) {
                p.n = COLI_MIN(most_k, m->k - p.c);
                if (!once) p.ahead = part_after(&p, most_k);
                multiply_part(&p, t, t + n);
            }
        }
    }
}

#define PRODUCT(name, ...)                              \
    static void name(const coli_matmul_t *m) {          \
        static const scheme_t scheme = { __VA_ARGS__ }; \
        integer_product(m, &scheme);                    \
    }
PRODUCT(matmul_q8_vnni, NULL, tile_signed, Q8_PIECE)
PRODUCT(matmul_q4_vbmi, stream_q4_vbmi, tile_unsigned, COLIBRI_Q4_PIECE)
PRODUCT(matmul_q4_vnni, stream_q4_vnni, tile_unsigned, COLIBRI_Q4_PIECE)

#endif
