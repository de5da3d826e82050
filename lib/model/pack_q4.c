/* pack_q4.c: 16 rows of rotated weights become a q4 block: w = scale[row] * (s * level), s = 0 ... 7 for 16 k of a row.
 *
 * For a given row scale every group of 16 k takes the s whose nearest levels have the least squared error; all of them are
 * tried. With these integers q = s * level fixed, the best row scale is sum(x q) / sum(q q). Row scales are searched: a few
 * give integers, each is then judged by the best scale for its integers, and the winner's gives integers once more.
 *
 * A row is a lane: 16 rows go through the same steps side by side, in vectors of 16 that the compiler cuts to what the
 * machine has. Nothing is added across lanes, there is no fused multiply-add, so every machine gives the same bits. */
#include "model/pack_q4.h"

#include "base/math.h"

#pragma clang diagnostic ignored "-Wpsabi" /* vectors are only passed to functions that are inlined */

#define LANES COLIBRI_TILE_ROWS
#define GROUP 16               /* k under one s */
#define MAX_S 7
#define LARGEST 126.0f         /* MAX_S * 18 */
#define LARGEST_SIGMAS 2.7326f /* the outermost level of 16 for a unit Gaussian (Max 1960) */

typedef float v16f __attribute__((vector_size(64), may_alias));
typedef double v16d __attribute__((vector_size(128)));
typedef int32_t v16i __attribute__((vector_size(64), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), may_alias));

COLI_INLINE v16f splat(float x) { return (v16f){ x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x }; }
COLI_INLINE v16f load(const float *x) { return *(const v16f *)(const void *)x; }
COLI_INLINE v16f choose(v16i mask, v16f yes, v16f no) { return (v16f)((mask & (v16i)yes) | (~mask & (v16i)no)); }
COLI_INLINE v16f if_set(v16i mask, float x) { return (v16f)(mask & (v16i)splat(x)); } /* else 0 */
COLI_INLINE v16f magnitude(v16f x) { return (v16f)((v16i)x & 0x7fffffff); }

/* The nearest of 1, 3, 5, 7, 9, 11, 14, 18 to 0 <= a < 2^22; of two equally near ones, always the same. */
COLI_INLINE v16f nearest_level(v16f a) {
    const v16f magic = splat(25165824.0f); /* 1.5 * 2^24: neighbours are 2 apart */
    v16f even = ((a - splat(1)) + magic) - magic;
    even = choose(even < splat(10), even, splat(10));
    return (even + splat(1)) + (if_set(a >= splat(12.5f), 3) + if_set(a >= splat(16), 4));
}

/* One group's choice, by lane. */
typedef struct choice {
    v16f s, inverse; /* 0 ... 7; 1 / s, or 0 */
    v16f error;      /* in units of the row scale */
} choice_t;

/* a: [16] vectors |x| / row scale. */
COLI_INLINE choice_t choose_s(const v16f a[GROUP]) {
    choice_t best = { .s = splat(0), .inverse = splat(0), .error = splat(0) };
    for (int i = 0; i < GROUP; i++) best.error += a[i] * a[i];
    for (int s = 1; s <= MAX_S; s++) {
        v16f inverse = splat(1.0f / (float)s), error = splat(0);
        for (int i = 0; i < GROUP; i++) {
            v16f v = a[i] * inverse, d = v - nearest_level(v);
            error += d * d;
        }
        error *= splat((float)(s * s));
        v16i better = error < best.error;
        best.s = choose(better, splat((float)s), best.s);
        best.inverse = choose(better, inverse, best.inverse);
        best.error = choose(better, error, best.error);
    }
    return best;
}

/* ---- Searching row scales ------------------------------------------------------------------------------------------- */

/* What is known of 16 rows under some row scales. */
typedef struct fit {
    v16f inverse;       /* 1 / row scale that the integers were chosen for */
    v16d cross, square; /* sums of |x| |q| and q q for these integers */
} fit_t;

/* |x| / row scale; far beyond the largest integer it does not matter how far, but squares must stay finite. */
COLI_INLINE void scaled_group(const float *x, v16f inverse, v16f a[GROUP]) {
    for (int i = 0; i < GROUP; i++) {
        a[i] = magnitude(load(x + i * LANES)) * inverse;
        a[i] = choose(a[i] < splat(4096), a[i], splat(4096));
    }
}

static void fit_rows(const float *x, uint32_t k, fit_t *fit) {
    fit->cross = fit->square = (v16d){ 0 };
    for (uint32_t c = 0; c < k; c += GROUP, x += GROUP * LANES) {
        v16f a[GROUP], cross = splat(0), square = splat(0);
        scaled_group(x, fit->inverse, a);
        choice_t best = choose_s(a);
        for (int i = 0; i < GROUP; i++) {
            v16f q = best.s * nearest_level(a[i] * best.inverse);
            cross += magnitude(load(x + i * LANES)) * q;
            square += q * q;
        }
        fit->cross += __builtin_convertvector(cross, v16d);
        fit->square += __builtin_convertvector(square, v16d);
    }
}

/* A row's squared error if its scale is the best one for the integers of a fit; `norm` is its squared length. */
static double error_of(const fit_t *fit, int r, double norm) {
    double square = fit->square[r];
    return square > 0 ? norm - fit->cross[r] * fit->cross[r] / square : norm;
}

/* For each row the better of two fits. */
static void keep_better(fit_t *best, const fit_t *other, const double norm[LANES]) {
    for (int r = 0; r < LANES; r++) {
        if (error_of(other, r, norm[r]) >= error_of(best, r, norm[r])) continue;
        best->inverse[r] = other->inverse[r];
        best->cross[r] = other->cross[r];
        best->square[r] = other->square[r];
    }
}

/* What the search begins with. */
typedef struct start {
    double norm[LANES]; /* squared length */
    v16f all_in;        /* 1 / row scale that makes the largest element the largest integer; 0: a row of zeros */
    v16f spread;        /* ... that spreads the largest group, if it is Gaussian, over all levels under the largest s */
} start_t;

static start_t measure(const float *x, uint32_t k) {
    start_t start = { .all_in = splat(0), .spread = splat(0) };
    v16d sum = { 0 };
    v16f element = splat(0), group = splat(0);
    for (uint32_t c = 0; c < k; c += GROUP) {
        v16f part = splat(0);
        for (int i = 0; i < GROUP; i++, x += LANES) {
            v16f a = magnitude(load(x));
            part += a * a;
            element = choose(a > element, a, element);
        }
        sum += __builtin_convertvector(part, v16d);
        group = choose(part > group, part, group);
    }
    for (int r = 0; r < LANES; r++) {
        start.norm[r] = sum[r];
        if (!(group[r] > 0)) continue;
        start.all_in[r] = LARGEST / element[r];
        start.spread[r] = LARGEST / (LARGEST_SIGMAS * coli_sqrtf(group[r] / GROUP));
    }
    return start;
}

/* Gaussian rows do best a little beyond `spread`, where the largest group may saturate, others perhaps with `all_in`. */
static fit_t search(const float *x, uint32_t k, const start_t *start) {
    static const float factors[] = { 1.1f, 1.19f, 1.28f, 1.37f };
    fit_t best = { .inverse = start->all_in }, other;
    fit_rows(x, k, &best);
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        other.inverse = start->spread * splat(factors[i]);
        fit_rows(x, k, &other);
        keep_better(&best, &other, start->norm);
    }
    other.inverse = best.inverse; /* once more, with the scale that is best for the integers */
    for (int r = 0; r < LANES; r++)
        if (best.cross[r] > 0) other.inverse[r] = (float)(best.square[r] / best.cross[r]);
    fit_rows(x, k, &other);
    keep_better(&best, &other, start->norm);
    return best;
}

/* ---- Bytes ------------------------------------------------------------------------------------------------------------ */

/* Which of the 16 levels x / (row scale * s) is, given its magnitude a / s: 0 ... 7 the negative ones. */
COLI_INLINE v16u nibble(v16f x, v16f v) {
    v16f level = nearest_level(v);
    v16i index = { 0 }; /* 0 ... 7 of magnitude 1 ... 18 */
    index -= (level > splat(1)) + (level > splat(3)) + (level > splat(5)) + (level > splat(7));
    index -= (level > splat(9)) + (level > splat(11)) + (level > splat(14));
    v16i negative = x < splat(0);
    return (v16u)((negative & (7 - index)) | (~negative & (8 + index)));
}

/* One group as s and two steps; word r of a step is row r's. Groups of zeros are zeros. */
COLI_INLINE v16u write_group(const float *x, v16f inverse, uint8_t *dst) {
    v16f a[GROUP];
    v16u step[2] = { { 0 }, { 0 } };
    scaled_group(x, inverse, a);
    choice_t best = choose_s(a);
    v16u used = (v16u)(best.s > splat(0));
    for (int i = 0; i < GROUP; i++)
        step[i / 8] |= (nibble(load(x + i * LANES), a[i] * best.inverse) & used) << (i % 4 * 8 + (i % 8 < 4 ? 0 : 4));
    memcpy(dst, step, sizeof step);
    return (v16u)__builtin_convertvector(best.s, v16i);
}

static void write_block(const float *x, uint32_t k, v16f inverse, uint8_t *dst) {
    for (uint32_t c = 0; c < k; c += COLIBRI_TILE_K, dst += COLIBRI_Q4_PIECE) {
        v16u scales = { 0 };
        for (int g = 0; g < COLIBRI_TILE_K / GROUP; g++, x += GROUP * LANES)
            scales |= write_group(x, inverse, dst + 64 + g * 128) << (4 * g);
        memcpy(dst, &scales, sizeof scales);
    }
}

void coli_pack_q4(const float *x, uint32_t k, coli_q4_rule_t rule, const float most[LANES], uint8_t *dst, float scale[LANES],
                  double error[LANES]) {
    start_t start = measure(x, k);
    fit_t fit = { .inverse = splat(0) };
    if (rule == COLI_Q4_SEARCH) {
        fit = search(x, k, &start);
    } else {
        for (int r = 0; r < LANES; r++) fit.inverse[r] = most[r] > 0 ? LARGEST / most[r] : 0;
        fit_rows(x, k, &fit);
    }
    write_block(x, k, fit.inverse, dst);
    for (int r = 0; r < LANES; r++) {
        double cross = fit.cross[r], square = fit.square[r], best = square > 0 ? cross / square : 0;
        scale[r] = rule == COLI_Q4_SEARCH ? (float)best : most[r] / LARGEST;
        double stored = scale[r];
        error[r] = COLI_MAX(start.norm[r] - stored * (2 * cross - stored * square), 0.0);
    }
}
