/* compare.h: every entry of two kernel tables on the same random inputs: the outputs must agree bit for bit (any NaN equals any
 * NaN). Rows end at a page that may not be touched, where the system offers that, and lie between canaries: a kernel that reads
 * or writes past them is found. Used by tests/c/test_kernels.c and tests/kernels/emulated.c. */
#ifndef COMPARE_H
#define COMPARE_H

#include <stdlib.h>
#include <string.h>

#include "../c/check.h"
#include "base/math.h"
#include "kernels/kernels.h"

#if defined(__unix__) || defined(__APPLE__)
#  include <sys/mman.h>
#  include <unistd.h>
#  define GUARD_PAGES 1
#endif

/* ---- Random numbers and guarded memory ---- */

static uint64_t rng_state = 88172645463325252u;
static uint32_t rng(void) { /* xorshift64* */
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return (uint32_t)((rng_state * 2685821657736338717u) >> 32);
}
static float rng_float(void) { return (float)(int32_t)rng() * 0x1p-31f; }

enum { PLAIN, WIDE, SPECIAL, NUM_KINDS };

static float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* PLAIN: [-1, 1). WIDE: every exponent, subnormals too. SPECIAL: some zeros, infinities and NaNs among plain ones. */
static float rng_kind(int kind) {
    static const uint32_t special[] = { 0x7fc00000u, 0x7f800000u, 0xff800000u, 0x80000000u,
                                        0,           0x7f7fffffu, 0x00000001u, 0xffc00001u };
    uint32_t u = rng();
    if (kind == WIDE) return from_bits((u & 0x7f800000u) == 0x7f800000u ? u & 0xbfffffffu : u);
    if (kind == SPECIAL && u % 16 == 0) return from_bits(special[(u >> 8) % 8]);
    return rng_float();
}

#define CANARY 0xa5
#define GUARD 256 /* bytes before the rows, and after them where no page stops a kernel */

typedef struct guarded {
    uint8_t *data, *base;
    size_t bytes, mapped;
} guarded_t;

static guarded_t guarded_new(size_t bytes) { /* bytes: multiple of 64; all canary */
    guarded_t g = { .bytes = bytes };
#ifdef GUARD_PAGES
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (bytes + GUARD + page - 1) / page * page;
    g.mapped = body + page;
    g.base = mmap(NULL, g.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (g.base == MAP_FAILED || mprotect(g.base + body, page, PROT_NONE)) abort();
    g.data = g.base + body - bytes;
    memset(g.base, CANARY, body);
#else
    g.mapped = bytes + 2 * GUARD + 64;
    g.base = malloc(g.mapped);
    if (!g.base) abort();
    g.data = (uint8_t *)(((uintptr_t)g.base + GUARD + 63) & ~(uintptr_t)63);
    memset(g.base, CANARY, g.mapped);
#endif
    return g;
}

static void guarded_free(guarded_t *g) {
    size_t damaged = 0;
    for (uint8_t *p = g->data - GUARD; p < g->data; p++) damaged += *p != CANARY;
#ifdef GUARD_PAGES
    CHECK_EQ(damaged, 0);
    munmap(g->base, g->mapped);
#else
    for (uint8_t *p = g->data + g->bytes; p < g->data + g->bytes + GUARD; p++) damaged += *p != CANARY;
    CHECK_EQ(damaged, 0);
    free(g->base);
#endif
}

static float *floats(const guarded_t *g) { return (float *)(void *)g->data; }

static guarded_t guarded_floats(size_t n, int kind) {
    guarded_t g = guarded_new(n * 4);
    for (size_t i = 0; i < n; i++) floats(&g)[i] = rng_kind(kind);
    return g;
}

static guarded_t guarded_copy(const guarded_t *from) {
    guarded_t g = guarded_new(from->bytes);
    memcpy(g.data, from->data, from->bytes);
    return g;
}

/* Compared as floats; canaries in gaps between rows are not NaN and are compared with the rest. */
static size_t differing_floats(const float *a, const float *b, size_t n) {
    size_t differing = 0;
    for (size_t i = 0; i < n; i++) differing += memcmp(&a[i], &b[i], 4) != 0 && !(a[i] != a[i] && b[i] != b[i]);
    return differing;
}

static int report(size_t differing, const char *isa, const char *what, unsigned a, unsigned b, unsigned c, unsigned d) {
    check_count++;
    if (differing == 0) return 1;
    check_failures++;
    fprintf(stderr, "%s %s(%u, %u, %u, %u): %zu numbers differ from the reference\n", isa, what, a, b, c, d, differing);
    return 0;
}

/* ---- Matrix products ---- */

enum { NUM_ROWS = 40, MOST_TOKENS = 1100 }; /* activation rows to choose from, and how often in one product */

static void make_activations(coli_act_t *x, guarded_t parts[6], uint32_t k, uint32_t bits, int kind) {
    parts[0] = guarded_floats(bits ? 16 : (size_t)NUM_ROWS * k, kind);
    parts[1] = guarded_new(bits ? (size_t)NUM_ROWS * k : 64);
    parts[2] = guarded_new(bits ? (size_t)NUM_ROWS * k : 64);
    parts[3] = guarded_floats(48, PLAIN);
    parts[4] = guarded_new(48 * 4);
    parts[5] = guarded_new(48 * 4);
    *x = (coli_act_t){ k,
                       bits,
                       floats(&parts[0]),
                       (int8_t *)parts[1].data,
                       (int8_t *)parts[2].data,
                       floats(&parts[3]),
                       (int32_t *)(void *)parts[4].data,
                       (int32_t *)(void *)parts[5].data };
    for (uint32_t row = 0; bits && row < NUM_ROWS; row++) {
        x->sum_hi[row] = x->sum_lo[row] = 0;
        for (uint32_t c = 0; c < k; c++) {
            int8_t hi = (int8_t)((int)(rng() % 255) - 127), lo = (int8_t)((int)(rng() % 128) - 64);
            if (kind == WIDE) hi = 127, lo = -64;
            x->hi[(size_t)row * k + c] = hi;
            x->lo[(size_t)row * k + c] = lo;
            x->sum_hi[row] += hi;
            x->sum_lo[row] += lo;
        }
        if (kind == SPECIAL && row == 3) x->scale[row] = from_bits(0x7fc00000u);
    }
}

/* Bytes of n_blocks blocks. q8 in WIDE: extremes, and -128, which no converter writes but a file may hold. */
static guarded_t make_weights(uint32_t type, uint32_t k, uint32_t n_blocks, int kind) {
    static const uint32_t piece[] = { 8192, 4096, 4096, 2048, COLIBRI_Q4_PIECE }; /* bytes of 16 rows x 128 k */
    static const uint32_t element[] = { 4, 2, 2, 1, 1 };
    guarded_t g = guarded_new((size_t)n_blocks * (k / 128) * piece[type]);
    for (size_t i = 0; i < g.bytes / element[type]; i++) {
        if (type == COLIBRI_FILE_F32) floats(&g)[i] = rng_kind(kind);
        if (type == COLIBRI_FILE_F16)
            ((uint16_t *)(void *)g.data)[i] = kind == WIDE ? (uint16_t)rng() : coli_f32_to_f16(rng_kind(kind));
        if (type == COLIBRI_FILE_BF16) ((uint16_t *)(void *)g.data)[i] = coli_f32_to_bf16(rng_kind(kind));
        uint32_t row = (uint32_t)(i / 4 % 16); /* of q8, and of q4, whose scales are 64 bytes too */
        int positive = kind == WIDE && row < 8 ? row < 4 : rng() % 2; /* whole rows of one sign: the largest sums */
        if (type == COLIBRI_FILE_Q8) g.data[i] = kind == WIDE ? (uint8_t)(positive ? 127 : 128) : (uint8_t)rng();
        if (type == COLIBRI_FILE_Q4) /* scales too: any byte is allowed. WIDE: level 18 with scale 7, or -18 with 7 */
            g.data[i] = kind != WIDE ? (uint8_t)rng() : i % COLIBRI_Q4_PIECE < 64 || positive ? 0xff : 0x00;
    }
    return g;
}

static void compare_matmul(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t type, uint32_t bits, uint32_t k,
                           uint32_t n_blocks, uint32_t n_tokens, int kind) {
    coli_act_t x;
    guarded_t parts[6], w = make_weights(type, k, n_blocks, kind), scale = guarded_floats((size_t)n_blocks * 16, PLAIN);
    uint32_t rows[MOST_TOKENS], stride = n_blocks * 16 + 16 * (rng() % 2);
    guarded_t ya = guarded_new((size_t)n_tokens * stride * 4), yb = guarded_new((size_t)n_tokens * stride * 4);
    guarded_t scratch = guarded_new(COLI_KERNEL_SCRATCH);
    make_activations(&x, parts, k, bits, kind);
    for (int i = 0; i < MOST_TOKENS; i++) rows[i] = rng() % NUM_ROWS;
    coli_matmul_t m = { .w = w.data,
                        .w_scale = coli_is_quantised(type) ? floats(&scale) : NULL,
                        .scratch = scratch.data,
                        .block_bytes = w.bytes / n_blocks,
                        .n_blocks = n_blocks,
                        .k = k,
                        .x = &x,
                        .rows = n_tokens > NUM_ROWS || rng() % 2 ? rows : NULL,
                        .first_row = n_tokens > NUM_ROWS ? 0 : rng() % (NUM_ROWS - n_tokens + 1),
                        .n_tokens = n_tokens,
                        .y_stride = stride };
    m.y = floats(&ya);
    ref->matmul[type](&m);
    m.y = floats(&yb);
    other->matmul[type](&m);
    report(differing_floats(floats(&ya), floats(&yb), (size_t)n_tokens * stride), other->name, "matmul", type, k, n_blocks,
           n_tokens);
    for (int i = 0; i < 6; i++) guarded_free(&parts[i]);
    guarded_free(&w);
    guarded_free(&scratch);
    guarded_free(&scale);
    guarded_free(&ya);
    guarded_free(&yb);
}

static void compare_products(const coli_kernels_t *ref, const coli_kernels_t *other) {
    static const uint32_t tokens[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33 };
    for (uint32_t type = 0; type < COLI_NUM_DTYPES; type++)
        for (uint32_t bits = coli_is_quantised(type) ? 8 : 0; bits <= (coli_is_quantised(type) ? 16u : 0u); bits += 8) {
            for (uint32_t i = 0; i < 11; i++)
                for (uint32_t n_blocks = 1; n_blocks <= 9; n_blocks++)
                    compare_matmul(ref, other, type, bits, 128, n_blocks, tokens[i], (int)(rng() % NUM_KINDS));
            compare_matmul(ref, other, type, bits, 384, 3, 5, SPECIAL);
            compare_matmul(ref, other, type, bits, 1408, 2, 7, PLAIN);
            compare_matmul(ref, other, type, bits, 4096, 1, 2, PLAIN);
            compare_matmul(ref, other, type, bits, 2176, 18, 40, PLAIN);
            compare_matmul(ref, other, type, bits, 256, 35, 131, PLAIN);
            compare_matmul(ref, other, type, bits, 1024, 2, 17, WIDE); /* 128 hi + lo as one: sums at the end of 32 bits */
            compare_matmul(ref, other, type, bits, 1152, 2, 17, WIDE); /* and beyond */
            for (uint32_t n_tokens = 1; coli_is_quantised(type) && n_tokens < 30; n_tokens += 28) /* the largest sums */
                compare_matmul(ref, other, type, bits, COLI_MAX_Q8_K, 1, n_tokens, WIDE);
            if (coli_is_quantised(type)) /* tokens in parts */
                compare_matmul(ref, other, type, bits, 2176, 1, MOST_TOKENS, PLAIN);
        }
}

/* For kernels that cut tokens, blocks and k into parts: more of each. */
__attribute__((unused)) static void compare_many_tokens(const coli_kernels_t *ref, const coli_kernels_t *other) {
    static const uint32_t widths[] = { 128, 256, 384, 128, 640 };
    for (uint32_t type = COLIBRI_FILE_Q8; type <= COLIBRI_FILE_Q4; type++)
        for (uint32_t bits = 8; bits <= 16; bits += 8) {
            uint32_t many = 520 / bits; /* more than 64 activation rows, hi and lo counted apart */
            for (uint32_t n = 1; n <= 130; n++)
                compare_matmul(ref, other, type, bits, widths[n % 5], 1 + rng() % (n % 5 == 4 ? 2 : 5), n,
                               (int)(rng() % NUM_KINDS));
            for (uint32_t n_blocks = 1; n_blocks <= 40; n_blocks += 1 + n_blocks / 5)
                compare_matmul(ref, other, type, bits, 128, n_blocks, 8 + rng() % 30, PLAIN);
            compare_matmul(ref, other, type, bits, 2048, 3, many, PLAIN);
            compare_matmul(ref, other, type, bits, 2176, 5, 33, PLAIN);
            compare_matmul(ref, other, type, bits, 4224, 27, 9, SPECIAL);
            compare_matmul(ref, other, type, bits, COLI_MAX_Q8_K, 1, 8, WIDE);
            if (bits == 8) /* more than 1 MB */
                compare_matmul(ref, other, type, bits, 8192, type == COLIBRI_FILE_Q8 ? 9 : 17, many, WIDE);
        }
}

/* ---- Activations and vectors ---- */

static void compare_hadamard(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t k, uint32_t block, int kind) {
    guarded_t a = guarded_floats(k, kind), b = guarded_copy(&a);
    ref->hadamard(floats(&a), k, block);
    other->hadamard(floats(&b), k, block);
    report(differing_floats(floats(&a), floats(&b), k), other->name, "hadamard", k, block, (unsigned)kind, 0);
    guarded_free(&a);
    guarded_free(&b);
}

static guarded_t quantizer_input(uint32_t k, int kind, float magnitude) {
    guarded_t x = guarded_floats(k, kind);
    for (uint32_t i = 0; i < k; i++) floats(&x)[i] *= magnitude;
    for (uint32_t i = 0; kind == PLAIN && i < k; i += 3)
        floats(&x)[i] = (float)((int)(rng() % 255) - 127) * 0.5f * magnitude; /* ties */
    return x;
}

static void compare_quantize(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t k, int kind, float magnitude) {
    guarded_t x = quantizer_input(k, kind, magnitude), hi[2], lo[2];
    float scale[2];
    int32_t sum_hi[2], sum_lo[2];
    for (int i = 0; i < 2; i++) {
        hi[i] = guarded_new(k);
        lo[i] = guarded_new(k);
        (i ? other : ref)->quantize8(floats(&x), k, (int8_t *)hi[i].data, &scale[i], &sum_hi[i]);
    }
    size_t differing = (memcmp(hi[0].data, hi[1].data, k) != 0) + (sum_hi[0] != sum_hi[1]) +
                       differing_floats(&scale[0], &scale[1], 1);
    report(differing, other->name, "quantize8", k, (unsigned)kind, 0, 0);
    for (int i = 0; i < 2; i++)
        (i ? other : ref)
            ->quantize16(floats(&x), k, (int8_t *)hi[i].data, (int8_t *)lo[i].data, &scale[i], &sum_hi[i], &sum_lo[i]);
    differing = (memcmp(hi[0].data, hi[1].data, k) != 0) + (memcmp(lo[0].data, lo[1].data, k) != 0) + (sum_hi[0] != sum_hi[1]) +
                (sum_lo[0] != sum_lo[1]) + differing_floats(&scale[0], &scale[1], 1);
    report(differing, other->name, "quantize16", k, (unsigned)kind, 0, 0);
    for (int i = 0; i < 2; i++) {
        guarded_free(&hi[i]);
        guarded_free(&lo[i]);
    }
    guarded_free(&x);
}

static void compare_fit8(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t k, float inverse) {
    guarded_t x = guarded_floats(k, PLAIN);
    float a[3], b[3];
    ref->fit8(floats(&x), k, inverse, a);
    other->fit8(floats(&x), k, inverse, b);
    report(differing_floats(a, b, 3), other->name, "fit8", k, 0, 0, 0);
    guarded_free(&x);
}

static void compare_rms_norm(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t k, uint32_t n, int kind) {
    guarded_t x = guarded_floats(k, kind), w = guarded_floats(k, PLAIN), a = guarded_new(k * 4), b = guarded_copy(&x);
    float sums[4];
    sums[0] = ref->rms_norm(floats(&x), floats(&w), floats(&a), k, n, 1e-5f);
    sums[1] = other->rms_norm(floats(&b), floats(&w), floats(&b), k, n, 1e-5f); /* in place */
    sums[2] = ref->rms_norm(floats(&x), NULL, NULL, k, n, 0);
    sums[3] = other->rms_norm(floats(&x), NULL, NULL, k, n, 0);
    size_t differing = differing_floats(floats(&a), floats(&b), k) + differing_floats(&sums[0], &sums[1], 1) +
                       differing_floats(&sums[2], &sums[3], 1) + differing_floats(&sums[0], &sums[2], 1);
    report(differing, other->name, "rms_norm", k, n, (unsigned)kind, 0);
    guarded_free(&x);
    guarded_free(&w);
    guarded_free(&a);
    guarded_free(&b);
}

static void compare_vectors(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t n, int kind) {
    guarded_t x = guarded_floats(2 * (size_t)n, kind), a = guarded_floats(n, kind), b = guarded_copy(&a);
    float factor = rng_kind(kind);
    ref->axpy(factor, floats(&x), floats(&a), n);
    other->axpy(factor, floats(&x), floats(&b), n);
    report(differing_floats(floats(&a), floats(&b), n), other->name, "axpy", n, (unsigned)kind, 0, 0);
    memcpy(b.data, a.data, a.bytes);
    ref->add(floats(&x), floats(&a), n);
    other->add(floats(&x), floats(&b), n);
    report(differing_floats(floats(&a), floats(&b), n), other->name, "add", n, (unsigned)kind, 0, 0);
    for (uint32_t i = 0; kind == PLAIN && i < 2 * n; i++) floats(&x)[i] *= 110; /* through both ends of exp */
    ref->exps(floats(&x), factor, floats(&a), n);
    other->exps(floats(&x), factor, floats(&b), n);
    report(differing_floats(floats(&a), floats(&b), n), other->name, "exps", n, (unsigned)kind, 0, 0);
    ref->swiglu(floats(&x), floats(&a), n);
    other->swiglu(floats(&x), floats(&b), n);
    report(differing_floats(floats(&a), floats(&b), n), other->name, "swiglu", n, (unsigned)kind, 0, 0);
    guarded_free(&x);
    guarded_free(&a);
    guarded_free(&b);
}

static void compare_f32_to_f16(const coli_kernels_t *ref, const coli_kernels_t *other, uint32_t n, int kind) {
    guarded_t x = guarded_floats(n, kind), a = guarded_new((size_t)n * 2), b = guarded_new((size_t)n * 2);
    for (uint32_t i = 0; kind == PLAIN && i < n; i++) floats(&x)[i] *= from_bits((100 + rng() % 45) << 23); /* 2^-27 ... 2^17 */
    ref->f32_to_f16(floats(&x), (uint16_t *)(void *)a.data, n);
    other->f32_to_f16(floats(&x), (uint16_t *)(void *)b.data, n);
    size_t differing = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint16_t p = ((uint16_t *)(void *)a.data)[i], q = ((uint16_t *)(void *)b.data)[i];
        differing += p != q && !((p & 0x7fff) > 0x7c00 && (q & 0x7fff) > 0x7c00);
    }
    report(differing, other->name, "f32_to_f16", n, (unsigned)kind, 0, 0);
    guarded_free(&x);
    guarded_free(&a);
    guarded_free(&b);
}

/* ---- Attention ---- */

/* A cache of `blocks` key blocks; elements that the range does not reach are NaN (q8: anything). which 0: keys, 1: values. */
static guarded_t make_cache(int type, int which, uint32_t dim, uint32_t blocks, uint32_t first, uint32_t last, int kind) {
    static const uint32_t element[] = { 4, 2, 1 };
    size_t n = (size_t)blocks * 16 * dim;
    guarded_t g = guarded_new(n * element[type]);
    for (size_t i = 0; i < n; i++) {
        size_t key = which ? i / dim : i / dim / 16 * 16 + i % 16;
        float value = key < first || key > last         ? from_bits(0x7fc00000u)
                      : kind == SPECIAL && rng() % 4096 ? rng_float()
                                                        : rng_kind(kind);
        if (type == 2)
            g.data[i] = kind != WIDE                  ? (uint8_t)((int)(rng() % 255) - 127)
                        : which == 0 && i / 4 % 8 < 2 ? (uint8_t)(i / 4 % 8 ? 127 : 129) /* whole keys of one sign */
                                                      : (uint8_t)(rng() % 2 ? 127 : 129);
        else if (type == 1)
            ((uint16_t *)(void *)g.data)[i] = coli_f32_to_f16(value);
        else
            floats(&g)[i] = value;
    }
    return g;
}

typedef struct attention_case {
    int type; /* of the cache */
    uint32_t dim, n_tokens, n_heads, position, window;
} attention_case_t;

/* The last token's keys are the last of the cache, so that a kernel which reads one key too many is found. */
static void compare_attention(const coli_kernels_t *ref, const coli_kernels_t *other, attention_case_t c, int kind) {
    uint32_t last = c.position + c.n_tokens - 1, first = coli_first_key(c.window, c.position), blocks = last / 16 + 1;
    uint32_t stride = (blocks - first / 16) * 16, q_stride = (c.n_heads + rng() % 2) * c.dim, queries = c.n_tokens * c.n_heads;
    guarded_t k = make_cache(c.type, 0, c.dim, blocks, first, last, kind);
    guarded_t v = make_cache(c.type, 1, c.dim, blocks, first, last, kind);
    guarded_t ks = guarded_floats(blocks * 16, PLAIN), vs = guarded_floats(blocks * 16, PLAIN);
    guarded_t q = guarded_floats((size_t)c.n_tokens * q_stride, PLAIN), a = guarded_new(q.bytes), b = guarded_new(q.bytes);
    guarded_t scores = guarded_new((size_t)queries * stride * 4);
    for (uint32_t d = 1; kind == WIDE && d < c.dim; d++) floats(&q)[d] = 0; /* rotated: the same everywhere, the largest sums */
    for (uint32_t key = 0; key < blocks * 16; key++)
        if (key < first || key > last) floats(&ks)[key] = floats(&vs)[key] = from_bits(0x7fc00000u);
    coli_attention_t call = { .k_cache = k.data,
                              .v_cache = v.data,
                              .k_scale = c.type == 2 ? floats(&ks) : NULL,
                              .v_scale = c.type == 2 ? floats(&vs) : NULL,
                              .head_dim = c.dim,
                              .n_tokens = c.n_tokens,
                              .n_heads = c.n_heads,
                              .position = c.position,
                              .window = c.window,
                              .scale = kind == PLAIN ? 3 : 0.3f,
                              .q = floats(&q),
                              .out = floats(&a),
                              .q_stride = q_stride,
                              .out_stride = q_stride,
                              .scores = floats(&scores),
                              .score_stride = stride };
    ref->attention[c.type](&call);
    memset(scores.data, CANARY, scores.bytes);
    call.out = floats(&b);
    other->attention[c.type](&call);
    report(differing_floats(floats(&a), floats(&b), a.bytes / 4), other->name, "attention", (uint32_t)c.type * 10000 + c.dim,
           c.n_tokens * 100 + c.n_heads, c.position, c.window);
    guarded_t *all[] = { &k, &v, &ks, &vs, &q, &a, &b, &scores };
    for (int i = 0; i < 8; i++) guarded_free(all[i]);
}

static void compare_attentions(const coli_kernels_t *ref, const coli_kernels_t *other) {
    static const uint32_t dims[] = { 16, 32, 48, 64, 80, 128 }, positions[] = { 0, 1, 5, 14, 15, 16, 37, 100, 131 };
    static const uint32_t tokens[] = { 1, 2, 3, 7, 16, 17, 33 }, windows[] = { 0, 0, 1, 5, 16, 40 };
    for (int type = 0; type < 3; type++)
        for (uint32_t p = 0; p < 9; p++)
            for (uint32_t t = 0; t < 7; t++) {
                uint32_t heads = 1 + rng() % 9, dim = dims[rng() % 6], window = windows[rng() % 6];
                attention_case_t c = { type, dim, tokens[t], heads, positions[p], window };
                compare_attention(ref, other, c, t == 2 ? WIDE : t == 3 ? SPECIAL : PLAIN);
                c.n_heads = 1;
                compare_attention(ref, other, c, PLAIN);
            }
    for (int type = 0; type < 3; type++)
        for (int kind = PLAIN; kind <= WIDE; kind++) { /* wide: the largest sums */
            compare_attention(ref, other, (attention_case_t){ type, COLI_MAX_HEAD_DIM, 5, 3, 30, 0 }, kind);
            compare_attention(ref, other, (attention_case_t){ type, 208, 13, 1, 70, 33 }, kind);
        }
}

static void compare_tables(const coli_kernels_t *ref, const coli_kernels_t *other) {
    compare_products(ref, other);
    compare_attentions(ref, other);
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        for (uint32_t block = 16; block <= 4096; block *= 2)
            compare_hadamard(ref, other, block < 128 ? 256 : 3 * block, block, kind);
        for (uint32_t n = 16; n <= 4096; n *= 2) compare_vectors(ref, other, n, kind);
        for (uint32_t n = 16; n <= 4096; n *= 4) compare_f32_to_f16(ref, other, n, kind);
        for (uint32_t k = 128; k <= 4096; k *= 2) compare_rms_norm(ref, other, k, k - rng() % 100, kind);
        for (uint32_t k = 128; k <= 2048; k += 384) compare_quantize(ref, other, k, kind, 1);
    }
    for (int e = -149; e <= 120; e += 7)
        compare_quantize(ref, other, 256, PLAIN, from_bits(e < -126 ? 1u << (e + 149) : (uint32_t)(e + 127) << 23));
    compare_quantize(ref, other, 256, PLAIN, 0);
    for (uint32_t k = 128; k <= 4096; k *= 2) compare_fit8(ref, other, k, 127 * (float)(k % 5) / 3);
}

#endif
