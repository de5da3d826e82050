/* attention_body.h: attention in 16-lane vectors, included by the file of each instruction set.
 *
 * The queries of a call (tokens x heads) are cut into tiles. A tile computes all its scores, then softmax query by query, then
 * its outputs; every load of 16 keys or values serves all queries of the tile from registers. Its scores lie in the caller's
 * scratch as [key block][query][16 keys], so that one pointer reaches all queries. Queries of a tile see different keys: scores
 * of unseen keys are computed and left out later; outputs are summed for the keys that all queries see together, and query by
 * query before and after them, with the partial sums kept in `out`. */
#ifndef COLI_ATTENTION_BODY_H
#define COLI_ATTENTION_BODY_H

#include "kernels/body.h"

#ifdef __AVX512F__
#  define MAX_QUERIES 12 /* 12 queries x 2 vectors of keys or values: 24 of 32 registers accumulate */
#else
#  define MAX_QUERIES 6
#endif

#define QUERY_FLOATS (COLI_MAX_HEAD_DIM + LANES) /* rows of one tile's copies do not meet in the same cache sets */

/* 16 elements of a cache, from element i. */
typedef v16f (*cache_fn)(const void *cache, size_t i);
COLI_INLINE v16f cache_f32(const void *cache, size_t i) { return load((const float *)cache + i); }
COLI_INLINE v16f cache_f16(const void *cache, size_t i) { return widen_f16((const uint16_t *)cache + i); }
COLI_INLINE v16f cache_q8(const void *cache, size_t i) {
    return __builtin_convertvector(*(const v16c *)(const void *)((const int8_t *)cache + i), v16f);
}

typedef struct query_tile {
    const coli_attention_t *a;
    uint32_t n;                   /* queries */
    uint32_t block, end;          /* key blocks that any of them sees: block ... end - 1 */
    uint32_t common, common_end;  /* keys that all of them see: common ... common_end - 1 */
    float *scores;                /* [end - block][n][16], later the weights */
    const float *q[MAX_QUERIES];
    float *out[MAX_QUERIES];
    uint32_t first[MAX_QUERIES], last[MAX_QUERIES]; /* keys that each sees */
} query_tile_t;

static __attribute__((noinline)) void open_tile(query_tile_t *tile, const coli_attention_t *a, uint32_t query, uint32_t n) {
    tile->a = a;
    tile->n = n;
    tile->scores = a->scores + query * a->score_stride;
    for (uint32_t j = 0; j < n; j++) {
        uint32_t token = (query + j) / a->n_heads, head = (query + j) % a->n_heads;
        tile->q[j] = a->q + token * a->q_stride + (size_t)head * a->head_dim;
        tile->out[j] = a->out + token * a->out_stride + (size_t)head * a->head_dim;
        tile->last[j] = a->position + token;
        tile->first[j] = coli_first_key(a->window, tile->last[j]);
    }
    tile->block = tile->first[0] / LANES; /* first and last grow with the token */
    tile->end = tile->last[n - 1] / LANES + 1;
    tile->common = tile->first[n - 1];
    tile->common_end = COLI_MAX(tile->last[0] + 1, tile->common); /* with a narrow window there may be none */
}

COLI_INLINE float *scores_at(const query_tile_t *tile, uint32_t block, uint32_t j) {
    return tile->scores + ((size_t)(block - tile->block) * tile->n + j) * LANES;
}

/* ---- Scores ---- */

/* Scores of the tile's nq queries with nb key blocks. q: [nq][QUERY_FLOATS]. */
COLI_INLINE void score_float(const query_tile_t *tile, const float *q, uint32_t block, cache_fn cache, const int nb,
                             const int nq) {
    const coli_attention_t *a = tile->a;
    uint32_t dim = a->head_dim;
    size_t keys = (size_t)dim * LANES;
    v16f acc[4][MAX_QUERIES], scale = splat(a->scale);
    float *scores = scores_at(tile, block, 0);
    EACH (b, nb)
        EACH (j, nq) acc[b][j] = splat(0);
    for (uint32_t d = 0; d < dim; d++, q++) {
        v16f k[4];
        EACH (b, nb) k[b] = cache(a->k_cache, (block + (size_t)b) * keys + (size_t)d * LANES);
        EACH (j, nq) {
            v16f x = splat(q[(size_t)j * QUERY_FLOATS]);
            EACH (b, nb) acc[b][j] = fma16(k[b], x, acc[b][j]);
        }
    }
    EACH (b, nb)
        EACH (j, nq) store(scores + (size_t)(b * nq + j) * LANES, acc[b][j] * scale);
}

COLI_INLINE void score_tile(const query_tile_t *tile, cache_fn cache, const int nb, const int nq) {
    _Alignas(COLI_ALIGN) float q[MAX_QUERIES * QUERY_FLOATS];
    uint32_t block = tile->block;
    for (int j = 0; j < nq; j++) memcpy(q + (size_t)j * QUERY_FLOATS, tile->q[j], tile->a->head_dim * sizeof(float));
    for (; block + (uint32_t)nb <= tile->end; block += (uint32_t)nb) score_float(tile, q, block, cache, nb, nq);
    for (; block < tile->end; block++) score_float(tile, q, block, cache, 1, nq);
}

/* ---- Softmax ---- */

/* Lanes of a key block that query j sees. */
COLI_INLINE v16i seen(const query_tile_t *tile, uint32_t j, uint32_t block) {
    v16u key = (v16u){ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 } + block * LANES;
    return (v16i)(key >= tile->first[j]) & (v16i)(key <= tile->last[j]);
}

/* The greatest seen score of query j; a NaN is left out. */
COLI_INLINE float greatest(const query_tile_t *tile, uint32_t j) {
    uint32_t block = tile->first[j] / LANES, last = tile->last[j] / LANES;
    const float *s = scores_at(tile, block, j);
    size_t step = (size_t)tile->n * LANES;
    v16f least = splat(-__builtin_inff()), max = larger(choose(seen(tile, j, block), load(s), least), least);
    if (block == last) return largest_lane(max);
    for (s += step; ++block < last; s += step) max = larger(load(s), max);
    return largest_lane(larger(choose(seen(tile, j, last), load(s), least), max));
}

/* The weights of one block: p = exp(s - max), times the scale of each value where they have one. Returns p, 0 if unseen. */
COLI_INLINE v16f soften_block(const query_tile_t *tile, uint32_t j, uint32_t block, float *s, float max, const int edge) {
    v16f p = exp16_negative(load(s) - splat(max));
    if (edge) p = choose(seen(tile, j, block), p, splat(0));
    store(s, tile->a->v_scale ? p * load(tile->a->v_scale + (size_t)block * LANES) : p);
    return p;
}

/* Scores of query j become weights; the sum of its exponentials. */
static __attribute__((noinline)) float soften(const query_tile_t *tile, uint32_t j) {
    uint32_t block = tile->first[j] / LANES, last = tile->last[j] / LANES;
    float *s = scores_at(tile, block, j), max = greatest(tile, j);
    size_t step = (size_t)tile->n * LANES;
    v16f sums = splat(0) + soften_block(tile, j, block, s, max, 1);
    if (block == last) return tree(sums);
    for (s += step; ++block < last; s += step) sums += soften_block(tile, j, block, s, max, 0);
    return tree(sums + soften_block(tile, j, last, s, max, 1));
}

/* ---- Values ---- */

/* nd * 16 elements (from d) of the outputs of nq queries (from j): the weighted values of the keys from ... to - 1 go on top of
 * what is there. */
COLI_INLINE void value_piece(const query_tile_t *tile, uint32_t j0, uint32_t from, uint32_t to, uint32_t d, cache_fn cache,
                             const int nd, const int nq) {
    uint32_t dim = tile->a->head_dim, key = from;
    size_t at = (size_t)from * dim + d;
    v16f acc[4][MAX_QUERIES];
    EACH (e, nd)
        EACH (j, nq) acc[e][j] = load(tile->out[j0 + (uint32_t)j] + d + (size_t)e * LANES);
    while (key < to) {
        const float *p = scores_at(tile, key / LANES, j0) + key % LANES;
        uint32_t stop = COLI_MIN(to, (key / LANES + 1) * LANES);
        for (; key < stop; key++, p++, at += dim) {
            v16f v[4];
            EACH (e, nd) v[e] = cache(tile->a->v_cache, at + (size_t)e * LANES);
            EACH (j, nq) {
                v16f weight = splat(p[(size_t)j * LANES]);
                EACH (e, nd) acc[e][j] = fma16(weight, v[e], acc[e][j]);
            }
        }
    }
    EACH (e, nd)
        EACH (j, nq) store(tile->out[j0 + (uint32_t)j] + d + (size_t)e * LANES, acc[e][j]);
}

COLI_INLINE void values(const query_tile_t *tile, uint32_t j, uint32_t from, uint32_t to, cache_fn cache, const int nd,
                        const int nq) {
    uint32_t d = 0, dim = tile->a->head_dim, step = (uint32_t)nd * LANES;
    if (from >= to) return;
    for (; d + step <= dim; d += step) value_piece(tile, j, from, to, d, cache, nd, nq);
    for (; d < dim; d += LANES) value_piece(tile, j, from, to, d, cache, 1, nq);
}

/* The keys of each query before those that all see, or (after) behind them. */
COLI_INLINE void values_apart(const query_tile_t *tile, bool after, cache_fn cache) {
    for (uint32_t j = 0; j < tile->n; j++) {
        uint32_t from = after ? COLI_MAX(tile->common_end, tile->first[j]) : tile->first[j];
        uint32_t to = after ? tile->last[j] + 1 : COLI_MIN(tile->common, tile->last[j] + 1);
        values(tile, j, from, to, cache, 4, 1);
    }
}

/* Softmax and outputs of a tile whose scores are there. */
COLI_INLINE void finish_tile(const query_tile_t *tile, cache_fn cache, void (*apart)(const query_tile_t *, bool),
                             const int nd, const int nq) {
    uint32_t dim = tile->a->head_dim;
    float sums[MAX_QUERIES];
    for (uint32_t j = 0; j < (uint32_t)nq; j++) {
        sums[j] = soften(tile, j);
        memset(tile->out[j], 0, dim * sizeof(float));
    }
    if (tile->first[0] < tile->common) apart(tile, false);
    values(tile, 0, tile->common, tile->common_end, cache, nd, nq);
    if (tile->last[nq - 1] >= tile->common_end) apart(tile, true);
    for (uint32_t j = 0; j < (uint32_t)nq; j++)
        for (uint32_t d = 0; d < dim; d += LANES) store(tile->out[j] + d, load(tile->out[j] + d) / splat(sums[j]));
}

/* ---- Calls ---- */

typedef void (*attend_fn)(const query_tile_t *tile);

/* attend[n] takes n queries, for the n named here. */
COLI_INLINE void attention_tiles(const coli_attention_t *a, const attend_fn *attend) {
    static const uint8_t sizes[] = { 0, 1, 2, 2, 4, 4, 6, 6, 4, 6, 6, 6 }; /* of the next tile, by queries left */
    uint32_t queries = a->n_tokens * a->n_heads;
    for (uint32_t i = 0, n; i < queries; i += n) {
        query_tile_t tile;
        n = queries - i < MAX_QUERIES ? sizes[queries - i] : MAX_QUERIES;
        open_tile(&tile, a, i, n);
        attend[n](&tile);
    }
}

#define APART(type)                                                                            \
    static __attribute__((noinline)) void apart_##type(const query_tile_t *tile, bool after) { \
        values_apart(tile, after, cache_##type);                                               \
    }
APART(f32)
APART(f16)
APART(q8)

/* nq queries; nb key blocks or nd pieces of the values at once. One query needs several to hide the latency of fma. */
#define ATTEND(type, nq, nb, nd)                                         \
    static void attend_##type##_##nq(const query_tile_t *tile) {         \
        score_tile(tile, cache_##type, nb, nq);                          \
        finish_tile(tile, cache_##type, apart_##type, nd, nq);           \
    }
#ifdef __AVX512F__
#  define ATTEND_ALL(type)     \
      ATTEND(type, 1, 4, 4)    \
      ATTEND(type, 2, 4, 4)    \
      ATTEND(type, 4, 4, 4)    \
      ATTEND(type, 6, 4, 4)    \
      ATTEND(type, 12, 2, 2)
#  define ATTEND_TABLE(type)                                                                                          \
      { [1] = attend_##type##_1, [2] = attend_##type##_2, [4] = attend_##type##_4, \
        [6] = attend_##type##_6, [12] = attend_##type##_12 }
#else
#  define ATTEND_ALL(type)     \
      ATTEND(type, 1, 4, 4)    \
      ATTEND(type, 2, 2, 2)    \
      ATTEND(type, 4, 1, 1)    \
      ATTEND(type, 6, 1, 1)
#  define ATTEND_TABLE(type)                                                                                          \
      { [1] = attend_##type##_1, [2] = attend_##type##_2, [4] = attend_##type##_4, \
        [6] = attend_##type##_6 }
#endif

#define ATTENTION(type)                                         \
    ATTEND_ALL(type)                                            \
    static void attention_##type(const coli_attention_t *a) {   \
        static const attend_fn attend[] = ATTEND_TABLE(type);   \
        attention_tiles(a, attend);                             \
    }

ATTENTION(f32)
ATTENTION(f16)

/* ---- 8-bit cache: integer scores ---- */

/* How keys are multiplied: by the bytes hi and lo of the query (with signs, or with the keys' sign bits flipped for machines
 * that take one side unsigned), or by the 16 bits 128 hi + lo at once. Sums of hi and of lo stay below 2^24 and those of both
 * below 2^31 (head_dim is at most 1024), so both ways round once, the same. */
enum { BY_BYTES, BY_FLIPPED, BY_WORDS };

/* A lane's sum plus the products of its 4 signed bytes with those of x, which are never -128. */
typedef v16i (*dot_fn)(v16i sum, v16i keys, v16i x);
COLI_INLINE v16i no_dot(v16i sum, v16i keys, v16i x) {
    (void)keys, (void)x;
    return sum;
}

/* The same with 16-bit numbers: bytes 0 and 2 with those of x_even, 1 and 3 with those of x_odd. */
COLI_INLINE v16i dot_words(v16i sum, v16i keys, v16i x_even, v16i x_odd) {
#if defined(__AVX2__)
    v32s pairs[2] = { ((v32s)keys << 8) >> 8, (v32s)keys >> 8 }, x[2] = { (v32s)x_even, (v32s)x_odd };
    __m256i k[2][2], q[2][2], sums[2];
    memcpy(k, pairs, sizeof k);
    memcpy(q, x, sizeof q);
    memcpy(sums, &sum, sizeof sums);
    EACH (part, 2)
        EACH (half, 2) sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(k[part][half], q[part][half]));
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    EACH (i, 2) sum += ((keys << (24 - 16 * i)) >> 24) * ((x_even << (16 - 16 * i)) >> 16);
    EACH (i, 2) sum += ((keys << (16 - 16 * i)) >> 24) * ((x_odd << (16 - 16 * i)) >> 16);
    return sum;
#endif
}

typedef struct q8_queries {
    /* For every 4 elements: hi and lo, or 16 bits of elements 0 and 2, and of 1 and 3. Rows do not meet in the same cache
     * sets. */
    _Alignas(COLI_ALIGN) int32_t x[MAX_QUERIES][2][(COLI_MAX_HEAD_DIM + COLI_ALIGN) / 4];
    float scale[MAX_QUERIES];
    int32_t sum[MAX_QUERIES][2];
} q8_queries_t;

static __attribute__((noinline)) void quantise_queries(const query_tile_t *tile, q8_queries_t *queries) {
    _Alignas(COLI_ALIGN) float rotated[COLI_MAX_HEAD_DIM];
    uint32_t dim = tile->a->head_dim;
    for (uint32_t j = 0; j < tile->n; j++) {
        memcpy(rotated, tile->q[j], dim * sizeof(float));
        hadamard(rotated, dim, coli_rotation_block(dim));
        quantize16(rotated, dim, (int8_t *)queries->x[j][0], (int8_t *)queries->x[j][1], &queries->scale[j],
                   &queries->sum[j][0], &queries->sum[j][1]);
    }
}

/* From bytes to 16 bits, in place. */
static __attribute__((noinline)) void join_bytes(q8_queries_t *queries, uint32_t n, uint32_t dim) {
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t i = 0; i < dim / 4; i += LANES) { /* dim / 4 may end within the vector: what is behind means nothing */
            v32s hi = *(v32s *)(void *)&queries->x[j][0][i], lo = *(v32s *)(void *)&queries->x[j][1][i];
            *(v32s *)(void *)&queries->x[j][0][i] = ((hi << 8) >> 8) * 128 + ((lo << 8) >> 8);
            *(v32s *)(void *)&queries->x[j][1][i] = (hi >> 8) * 128 + (lo >> 8);
        }
}

/* Scores of nj queries (from j0) with nb key blocks. */
COLI_INLINE void score_q8(const query_tile_t *tile, const q8_queries_t *queries, uint32_t block, uint32_t j0, dot_fn dot,
                          const int way, const int nb, const int nj) {
    const coli_attention_t *a = tile->a;
    uint32_t dim = a->head_dim;
    const int8_t *keys = (const int8_t *)a->k_cache + (size_t)block * dim * LANES;
    const int32_t *x = queries->x[j0][0];
    const size_t row = sizeof queries->x[0][0] / sizeof *x;
    v16i acc[4][MAX_QUERIES][2];
    EACH (b, nb)
        EACH (j, nj)
            EACH (part, 2)
                acc[b][j][part] = (v16i){ 0 } - (way == BY_FLIPPED ? 128 * queries->sum[j0 + (uint32_t)j][part] : 0);
    for (uint32_t d = 0; d < dim; d += 4, x++, keys += 4 * LANES) {
        v16i k[4];
        EACH (b, nb) {
            k[b] = *(const v16i *)(const void *)(keys + (size_t)b * dim * LANES);
            if (way == BY_FLIPPED) k[b] ^= (int32_t)0x80808080;
        }
        EACH (j, nj) {
            v16i x0 = (v16i){ 0 } + x[(size_t)j * 2 * row], x1 = (v16i){ 0 } + x[(size_t)j * 2 * row + row];
            EACH (b, nb) {
                acc[b][j][0] = way == BY_WORDS ? dot_words(acc[b][j][0], k[b], x0, x1) : dot(acc[b][j][0], k[b], x0);
                if (way != BY_WORDS) acc[b][j][1] = dot(acc[b][j][1], k[b], x1);
            }
        }
    }
    EACH (b, nb)
        EACH (j, nj) {
            v16f sum = __builtin_convertvector(acc[b][j][0], v16f);
            if (way != BY_WORDS) sum = fma16(splat(128), sum, __builtin_convertvector(acc[b][j][1], v16f));
            v16f scale = load(a->k_scale + (block + (size_t)b) * LANES) * splat(queries->scale[j0 + (uint32_t)j]);
            store(scores_at(tile, block + (uint32_t)b, j0 + (uint32_t)j),
                  sum * scale * splat(a->scale / (float)coli_rotation_block(dim)));
        }
}

/* All scores of a tile of nq queries, nj (dividing nq) at a time. */
COLI_INLINE void score_tile_q8(const query_tile_t *tile, dot_fn dot, const int way, const int nq, const int nj, const int nb) {
    q8_queries_t queries;
    uint32_t block = tile->block;
    quantise_queries(tile, &queries);
    if (way == BY_WORDS) join_bytes(&queries, (uint32_t)nq, tile->a->head_dim);
    for (; block + (uint32_t)nb <= tile->end; block += (uint32_t)nb)
        for (uint32_t j = 0; j < (uint32_t)nq; j += (uint32_t)nj) score_q8(tile, &queries, block, j, dot, way, nb, nj);
    for (; block < tile->end; block++)
        for (uint32_t j = 0; j < (uint32_t)nq; j += (uint32_t)nj) score_q8(tile, &queries, block, j, dot, way, 1, nj);
}

#define ATTEND_Q8(variant, attribute, dot, way, nq, nj, nb, nd)                \
    attribute static void attend_##variant##_##nq(const query_tile_t *tile) {   \
        score_tile_q8(tile, dot, way, nq, nj, nb);                             \
        finish_tile(tile, cache_q8, apart_q8, nd, nq);                          \
    }
#ifdef __AVX512F__
#  define ATTEND_Q8_ALL(variant, attribute, dot, way)         \
      ATTEND_Q8(variant, attribute, dot, way, 1, 1, 4, 4)     \
      ATTEND_Q8(variant, attribute, dot, way, 2, 2, 4, 4)     \
      ATTEND_Q8(variant, attribute, dot, way, 4, 4, 2, 4)     \
      ATTEND_Q8(variant, attribute, dot, way, 6, 6, 2, 4)     \
      ATTEND_Q8(variant, attribute, dot, way, 12, 12, 1, 2)
#elif defined(__aarch64__) /* a sum is four registers of 32, and by bytes there are two for each query */
#  define ATTEND_Q8_ALL(variant, attribute, dot, way)         \
      ATTEND_Q8(variant, attribute, dot, way, 1, 1, 2, 4)     \
      ATTEND_Q8(variant, attribute, dot, way, 2, 2, 1, 2)     \
      ATTEND_Q8(variant, attribute, dot, way, 4, 2, 1, 1)     \
      ATTEND_Q8(variant, attribute, dot, way, 6, 3, 1, 1)
#else
#  define ATTEND_Q8_ALL(variant, attribute, dot, way)         \
      ATTEND_Q8(variant, attribute, dot, way, 1, 1, 2, 4)     \
      ATTEND_Q8(variant, attribute, dot, way, 2, 2, 1, 2)     \
      ATTEND_Q8(variant, attribute, dot, way, 4, 4, 1, 1)     \
      ATTEND_Q8(variant, attribute, dot, way, 6, 6, 1, 1)
#endif

/* attention_VARIANT with the dot product of an instruction set. */
#define ATTENTION_Q8(variant, attribute, dot, way)               \
    ATTEND_Q8_ALL(variant, attribute, dot, way)                  \
    static void attention_##variant(const coli_attention_t *a) {  \
        static const attend_fn attend[] = ATTEND_TABLE(variant);  \
        attention_tiles(a, attend);                               \
    }

#if defined(COLI_ATTENTION_Q8_ELSEWHERE) /* the including file makes its own, or takes another's */
#elif defined(COLI_ATTENTION_DOT) /* defined by the including file before, if bytes are faster there */
ATTENTION_Q8(q8, , COLI_ATTENTION_DOT, BY_BYTES)
#else
ATTENTION_Q8(q8, , no_dot, BY_WORDS)
#endif

#endif
