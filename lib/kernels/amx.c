/* amx.c: the q8 and q4 products with AMX int8 tiles, for enough tokens at once; the rest of the AMX table, and products with
 * few tokens, are AVX-512's (avx512.c). Compiled with AVX-512 VBMI and AMX, called only where CPU and system allow it
 * (select.c).
 *
 * tdpbssd adds to a C tile (16 vectors x 16 rows, int32) an A tile (16 vectors x 64 k) times a B tile (64 k x 16 rows). 16
 * consecutive steps of a q8 block are a B tile as they stand. A "vector" is an activation row: one per token, or hi and lo.
 * They are packed into A tiles first. Two groups of at most 16 vectors are a strip; a strip meets a pair of blocks in four C
 * tiles. Sums are exact, so nothing here can differ from ref.c but by a mistake.
 *
 * What moves for one pair of blocks, 64 vectors and 64 k, against 8 tdpbssd of 16 cycles = 128 cycles:
 *     tile loads   2 strips x (2 A + 2 B) x 16 lines at two lines a cycle = 64 cycles of the load ports
 *     from L2      A 4 KB (64 x 2048 bytes of activations do not fit L1), q8 weights 2 KB: 48 bytes a cycle; q4: 41
 *     from memory  2 KB or 1 KB: 16 (8.5) bytes a cycle, several times what one core gets: with weights not in a cache
 *                  memory is the limit up to about 230 (125) tokens
 *     vectors      q4: 32 steps unpacked, each 4.5 micro-operations on two ports (vpermi2b is three) = 72 cycles, all beside
 *                  the first strip's 64; y: 2 tokens x 2 blocks, about 20 cycles
 * and per panel of 512 k: 8 C tiles in and out of L1 (64 + 128 cycles of their ports, beside 1024 of tdpbssd). So with weights
 * in L2 the products are the longest of these (in q4 nearly), and all else must run beside them: y of the last pair is written
 * and the next weights are unpacked and prefetched between the tile instructions of this one. Packing alone stands before them:
 * 2048 lines for 64 vectors of 2048 k, against 2048 cycles of products a block, so blocks should come many at once. */
#include <immintrin.h>

#include "kernels/lanes.h"
#include "kernels/tables.h"

#define STEP_K 64          /* k of a tile product */
#define TILE 1024          /* bytes of a full tile */
#define FEW_VECTORS 8      /* with fewer, AVX-512 is as fast */
#define PACKED (128 * TILE) /* bytes of packed vectors: 64 x 2048 k or 128 x 1024 k */
#define MANY_WEIGHTS (1u << 20) /* bytes of weights that stay in L2 while all tokens pass */
#define PANEL 8            /* steps; a pair's weights of a panel (16 KB) stay in L1 while the strips pass */
#define AHEAD 2            /* steps between unpacking q4 and its use */
#define RING (PANEL + AHEAD)
#define STRIP_SUMS 24      /* strips' sums, of one pair each, that wait for the next k or for their end */

_Static_assert(PACKED + STRIP_SUMS * 4 * TILE + RING * 2 * TILE <= COLI_KERNEL_SCRATCH, "a product's parts fit its scratch");
_Static_assert(COLIBRI_TILE_K % STEP_K == 0 && COLIBRI_Q4_PIECE == 64 + 16 * 64, "shapes of the format");

typedef uint8_t v64b __attribute__((vector_size(64), may_alias));

/* y to be written from finished sums: of tokens `token` ... (of the tile), whose group and row in it are at hand. */
typedef struct finish {
    const int32_t *sums;
    uint32_t block, n_blocks; /* 1 or 2 */
    uint32_t token, group, row;
} finish_t;

/* Steps of q4 on their way into the ring. */
typedef struct unpack {
    uint32_t block, step, slot;
} unpack_t;

/* One product: its scratch, and where its loops are. */
typedef struct product {
    const coli_matmul_t *m;
    uint8_t *packed; /* [strips][2 groups][steps][16 vectors][64 k] */
    int32_t *sums;   /* [pairs][strips][2 groups][2 blocks][16 vectors][16 rows] */
    uint8_t *ring;   /* [RING][2 blocks][64 k][16 rows] unpacked q4 */
    uint32_t planes; /* 2: vectors are hi and lo of each token, in the two groups of a strip */
    uint32_t token, n_tokens, rows, strips; /* the tile of tokens, in strips of 2 groups of `rows` vectors */
    uint32_t block, end;                    /* blocks while the tokens pass */
    uint32_t first_step, steps;             /* of the chunk of k */
    uint32_t slot;                          /* of the panel's first step in the ring */
    finish_t finish;
    unpack_t unpack;
} product_t;

COLI_INLINE uint32_t wrap(uint32_t slot) { return slot >= RING ? slot - RING : slot; }

/* ---- Tile registers: 0 ... 3 C (group, block), 4 and 5 A (group), 6 and 7 B (block) ---- */

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config_t;

static void configure_tiles(uint32_t vectors) {
    _Alignas(64) tile_config_t config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = i < 6 ? (uint8_t)vectors : 16;
    }
    _tile_loadconfig(&config);
}

/* ---- Activations into tile order ---- */

/* Vector r of group `group` of the tile, at the chunk's first k; NULL: there is none (the last group may not be full). */
COLI_INLINE const int8_t *vector_at(const product_t *p, uint32_t group, uint32_t r) {
    const coli_matmul_t *m = p->m;
    uint32_t token = group / p->planes * p->rows + r;
    if (token >= p->n_tokens) return NULL;
    token += p->token;
    size_t row = m->rows ? m->rows[token] : m->first_row + token;
    return (group % p->planes ? m->x->lo : m->x->hi) + row * m->x->stride + (size_t)p->first_step * STEP_K;
}

static void pack_group(const product_t *p, uint32_t group) {
    const int8_t *x[16];
    uint8_t *tiles = p->packed + (size_t)group * p->steps * TILE;
    for (uint32_t r = 0; r < p->rows; r++) x[r] = vector_at(p, group, r);
    for (uint32_t first = 0, end; first < p->steps; first = end) { /* 512 bytes of a row, so that it is read as a stream */
        end = COLI_MIN(first + 8, p->steps);
        for (uint32_t r = 0; r < p->rows; r++)
            for (uint32_t s = first; s < end; s++) {
                v64b bytes = { 0 };
                if (x[r]) bytes = *(const v64b *)(const void *)(x[r] + (size_t)s * STEP_K);
                *(v64b *)(void *)(tiles + (size_t)s * TILE + r * 64) = bytes;
            }
    }
}

/* ---- q4 into q8 steps ---- */

#define LEVELS_TIMES(s) \
    -18 * s, -14 * s, -11 * s, -9 * s, -7 * s, -5 * s, -3 * s, -1 * s, s, 3 * s, 5 * s, 7 * s, 9 * s, 11 * s, 14 * s, 18 * s
static const _Alignas(64) int8_t level_times_scale[2][64] = {
    { LEVELS_TIMES(0), LEVELS_TIMES(1), LEVELS_TIMES(2), LEVELS_TIMES(3) },
    { LEVELS_TIMES(4), LEVELS_TIMES(5), LEVELS_TIMES(6), LEVELS_TIMES(7) },
};

/* Byte `byte` of every four, four times. */
#define FOUR(i, byte) i + byte, i + byte, i + byte, i + byte
#define SPREAD(v, byte)                                                                                              \
    __builtin_shufflevector(v, v, FOUR(0, byte), FOUR(4, byte), FOUR(8, byte), FOUR(12, byte), FOUR(16, byte),       \
                            FOUR(20, byte), FOUR(24, byte), FOUR(28, byte), FOUR(32, byte), FOUR(36, byte),          \
                            FOUR(40, byte), FOUR(44, byte), FOUR(48, byte), FOUR(52, byte), FOUR(56, byte), FOUR(60, byte))

/* Table entry nibble + 16 * scale: nibbles are the low ones of `nibbles`, scales the high ones of `scales` (modulo 8). */
COLI_INLINE v64b weights_of(v64b nibbles, v64b scales) {
    const v64b *table = (const v64b *)(const void *)level_times_scale;
    v64b index = (nibbles & 15) | (scales & 0xf0);
    return (v64b)_mm512_permutex2var_epi8((__m512i)table[0], (__m512i)index, (__m512i)table[1]);
}

/* 16 k under one scale: two q4 steps are four of q8. */
COLI_INLINE void unpack_16(const v64b *q4, v64b scales, v64b *q8) {
    q8[0] = weights_of(q4[0], scales);
    q8[1] = weights_of((v64b)((v16u)q4[0] >> 4), scales);
    q8[2] = weights_of(q4[1], scales);
    q8[3] = weights_of((v64b)((v16u)q4[1] >> 4), scales);
}

/* 64 k of a block: half a piece. */
COLI_INLINE void unpack_step(const uint8_t *block, uint32_t step, uint8_t *tile) {
    const v64b *piece = (const v64b *)(const void *)(block + (size_t)(step / 2) * COLIBRI_Q4_PIECE);
    const v64b *q4 = piece + 1 + step % 2 * 8;
    v64b *q8 = (v64b *)(void *)tile, scales = (v64b)(*(const v16u *)(const void *)piece >> step % 2 * 16);
    v64b first = SPREAD(scales, 0), second = SPREAD(scales, 1); /* nibbles 0 and 1; 2 and 3 */
    unpack_16(q4, (v64b)((v16u)first << 4), q8);
    unpack_16(q4 + 2, first, q8 + 4);
    unpack_16(q4 + 4, (v64b)((v16u)second << 4), q8 + 8);
    unpack_16(q4 + 6, second, q8 + 12);
}

/* The next step of both blocks of a pair; an odd last block is its own partner. */
COLI_INLINE void unpack_next(product_t *p) {
    unpack_t *u = &p->unpack;
    if (u->block >= p->end) return;
    for (uint32_t i = 0; i < 2; i++)
        unpack_step(p->m->w + COLI_MIN(u->block + i, p->end - 1) * p->m->block_bytes, p->first_step + u->step,
                    p->ring + (size_t)(u->slot * 2 + i) * TILE);
    u->slot = wrap(u->slot + 1);
    if (++u->step == p->steps) u->step = 0, u->block += 2;
}

/* ---- From sums to y ---- */

COLI_INLINE v16f sums_at(const int32_t *p) { return __builtin_convertvector(*(const v16i *)(const void *)p, v16f); }

COLI_INLINE void finish_tokens(product_t *p, uint32_t count) {
    finish_t *f = &p->finish;
    const coli_matmul_t *m = p->m;
    for (; count && f->token < p->n_tokens; count--, f->token++, f->row++) {
        if (f->row == p->rows) f->row = 0, f->group++;
        uint32_t token = p->token + f->token;
        float token_scale = m->x->scale[m->rows ? m->rows[token] : m->first_row + token];
        for (uint32_t b = 0; b < f->n_blocks; b++) {
            const int32_t *sums = f->sums + ((size_t)f->group * p->planes * 2 + b) * 256 + (size_t)f->row * LANES;
            size_t at = (size_t)(f->block + b) * LANES;
            v16f sum = sums_at(sums);
            if (p->planes == 2) sum = fma16(splat(128), sum, sums_at(sums + 512));
            store(m->y + token * m->y_stride + at, sum * (load(m->w_scale + at) * splat(token_scale)));
        }
    }
}

/* ---- Tile products ---- */

/* The weights of a block a panel ahead, or those of the block that comes a pair later. */
COLI_INLINE void prefetch_ahead(const product_t *p, uint32_t block, uint32_t step, const bool q4) {
    const uint32_t bytes = q4 ? COLIBRI_Q4_PIECE / 2 : TILE;
    step += PANEL;
    if (step >= p->steps) step -= p->steps, block += 2;
    if (step >= p->steps || block >= p->end) return;
    const char *w = (const char *)p->m->w + block * p->m->block_bytes + (size_t)(p->first_step + step) * bytes;
    for (uint32_t i = 0; i < bytes; i += 64) _mm_prefetch(w + i, _MM_HINT_T1);
}

COLI_INLINE void multiply_tiles(const uint8_t *a, size_t group_bytes, const uint8_t *b0, const uint8_t *b1) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b0, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, b1, 64);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, a + group_bytes, 64);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
}

COLI_INLINE void load_sums(const int32_t *sums, bool begin) {
    if (begin) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    }
}

COLI_INLINE void store_sums(int32_t *sums) {
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* One strip and one pair of blocks over a panel, and beside it what waits. */
COLI_INLINE void multiply_strip(product_t *p, uint32_t strip, uint32_t block, uint32_t first, uint32_t n, int32_t *sums,
                                const bool q4) {
    const coli_matmul_t *m = p->m;
    size_t group_bytes = (size_t)p->steps * TILE;
    const uint8_t *a = p->packed + strip * 2 * group_bytes + (size_t)first * TILE;
    uint32_t partner = COLI_MIN(block + 1, p->end - 1), slot = p->slot;
    const uint8_t *w0 = m->w + block * m->block_bytes, *w1 = m->w + partner * m->block_bytes;
    load_sums(sums, p->first_step + first == 0);
    for (uint32_t s = first; s < first + n; s++, a += TILE, slot = wrap(slot + 1)) {
        size_t at = (size_t)(p->first_step + s) * TILE;
        const uint8_t *b0 = q4 ? p->ring + (size_t)slot * 2 * TILE : w0 + at, *b1 = q4 ? b0 + TILE : w1 + at;
        multiply_tiles(a, group_bytes, b0, b1);
        if (strip == 0) prefetch_ahead(p, block, s, q4);
        if (strip == p->strips - 1) prefetch_ahead(p, partner, s, q4);
        if (q4 && strip == 0) unpack_next(p);
        finish_tokens(p, 2);
    }
    store_sums(sums);
}

/* All strips and one pair over the chunk: panel by panel, so that weights come from L1 for all strips but the first. */
COLI_INLINE void multiply_pair(product_t *p, uint32_t block, int32_t *sums, const bool q4) {
    uint32_t panel = p->strips == 1 ? p->steps : PANEL;
    for (uint32_t first = 0; first < p->steps; first += panel) {
        uint32_t n = COLI_MIN(panel, p->steps - first);
        for (uint32_t strip = 0; strip < p->strips; strip++)
            multiply_strip(p, strip, block, first, n, sums + (size_t)strip * 1024, q4);
        p->slot = (p->slot + n) % RING;
    }
}

/* A chunk of k: pairs follow each other, and each one's y is written while the next is multiplied. */
COLI_INLINE void multiply_chunk(product_t *p, const bool q4) {
    bool only = p->steps * STEP_K == p->m->k, last = (p->first_step + p->steps) * STEP_K == p->m->k;
    for (uint32_t group = 0; group < 2 * p->strips; group++) pack_group(p, group);
    p->slot = 0;
    p->unpack = (unpack_t){ p->block, 0, 0 };
    for (int i = 0; q4 && i < AHEAD; i++) unpack_next(p);
    for (uint32_t block = p->block, pair = 0; block < p->end; block += 2, pair++) {
        int32_t *sums = p->sums + (size_t)(only ? pair % 2 : pair) * p->strips * 1024;
        multiply_pair(p, block, sums, q4);
        if (!last) continue;
        finish_tokens(p, p->n_tokens); /* what is left of the pair before */
        p->finish = (finish_t){ sums, block, COLI_MIN(2, p->end - block), 0, 0, 0 };
    }
    if (last) finish_tokens(p, p->n_tokens);
}

/* A tile of tokens and the blocks p->block ... p->end over all of k. */
COLI_INLINE void multiply_tokens(product_t *p, uint32_t chunk, const bool q4) {
    uint32_t all = p->m->k / STEP_K, groups;
    p->strips = (p->n_tokens * p->planes + 31) / 32;
    groups = 2 * p->strips / p->planes; /* of tokens */
    p->rows = (p->n_tokens + groups - 1) / groups;
    p->finish = (finish_t){ .token = p->n_tokens }; /* nothing waits */
    configure_tiles(p->rows);
    for (p->first_step = 0; p->first_step < all; p->first_step += p->steps) {
        p->steps = COLI_MIN(chunk, all - p->first_step);
        multiply_chunk(p, q4);
    }
}

/* Blocks that stay in L2 while the tokens pass, at least a pair; if k comes in chunks, as many as there is room for sums. */
static uint32_t blocks_at_once(const coli_matmul_t *m, uint32_t vectors, uint32_t chunk) {
    uint32_t most = (uint32_t)(MANY_WEIGHTS / m->block_bytes);
    if (chunk * STEP_K < m->k) most = STRIP_SUMS / (vectors / 32) * 2;
    most = COLI_MAX(most / 2 * 2, 2);
    uint32_t parts = COLI_MAX((m->n_blocks + most - 1) / most, 1); /* of equal size */
    return ((m->n_blocks + parts - 1) / parts + 1) / 2 * 2;
}

COLI_INLINE void multiply(const coli_matmul_t *m, const bool q4) {
    uint8_t *scratch = m->scratch;
    product_t p = { .m = m,
                    .packed = scratch,
                    .sums = (int32_t *)(void *)(scratch + PACKED),
                    .ring = scratch + PACKED + STRIP_SUMS * 4 * TILE,
                    .planes = m->x->bits == 16 ? 2 : 1 };
    /* 128 vectors at once where all of k fits, or where weights come from memory again for every tile of tokens. */
    bool wide = m->n_tokens * p.planes > 64 && (m->k <= PACKED / 128 || m->n_blocks * m->block_bytes > MANY_WEIGHTS);
    uint32_t vectors = wide ? 128 : 64, chunk = PACKED / vectors / STEP_K, most = vectors / p.planes;
    uint32_t blocks = blocks_at_once(m, vectors, chunk);
    for (p.block = 0; p.block < m->n_blocks; p.block = p.end) {
        p.end = COLI_MIN(p.block + blocks, m->n_blocks);
        for (p.token = 0; p.token < m->n_tokens; p.token += p.n_tokens) {
            uint32_t left = m->n_tokens - p.token, tiles = (left + most - 1) / most;
            p.n_tokens = (left + tiles - 1) / tiles; /* tiles of equal size */
            multiply_tokens(&p, chunk, q4);
        }
    }
    _tile_release();
}

static bool few(const coli_matmul_t *m) { return m->n_tokens * (m->x->bits / 8) < FEW_VECTORS; }

void coli_amx_matmul_q8(const coli_matmul_t *m) {
    if (few(m)) coli_kernels_avx512_vbmi()->matmul[COLIBRI_FILE_Q8](m);
    else multiply(m, false);
}

void coli_amx_matmul_q4(const coli_matmul_t *m) {
    if (few(m)) coli_kernels_avx512_vbmi()->matmul[COLIBRI_FILE_Q4](m);
    else multiply(m, true);
}
