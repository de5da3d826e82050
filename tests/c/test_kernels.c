/* test_kernels.c: the reference kernels do what kernels.h says (against double precision and plain definitions), and every
 * other table this machine can use gives the same bits (tests/kernels/compare.h). */
#include <math.h>

#include "../kernels/compare.h"
#include "../kernels/plain.h"
#include "base/cpu.h"
#include "kernels/tables.h"

static const coli_kernels_t *ref;

/* ---- The reference against the definitions ---- */

static void test_float_products(void) {
    static const float tolerance = 2e-6f;
    for (uint32_t type = 0; type < 3; type++) {
        coli_act_t x;
        guarded_t parts[6], w = make_weights(type, 128, 2, PLAIN), y = guarded_new(3 * 32 * 4);
        uint32_t rows[3] = { 7, 0, 39 };
        double worst = 0;
        make_activations(&x, parts, 128, 0, PLAIN);
        coli_matmul_t m = { .w = w.data,
                            .block_bytes = w.bytes / 2,
                            .n_blocks = 2,
                            .k = 128,
                            .x = &x,
                            .rows = rows,
                            .n_tokens = 3,
                            .y = floats(&y),
                            .y_stride = 32 };
        ref->matmul[type](&m);
        for (uint32_t t = 0; t < 3; t++)
            for (uint32_t row = 0; row < 32; row++) {
                const uint8_t *block = w.data + (row / 16) * m.block_bytes;
                uint32_t r = row % 16;
                double dot = 0;
                for (uint32_t c = 0; c < 128; c++) {
                    uint16_t half; /* element (r, c) where colibri_format.h says it is */
                    float value;
                    memcpy(&half, block + ((c / 2) * 32 + r * 2 + c % 2) * 2, 2);
                    if (type == COLIBRI_FILE_F32) memcpy(&value, block + (c * 16 + r) * 4, 4);
                    if (type == COLIBRI_FILE_F16) value = coli_f16_to_f32(half);
                    if (type == COLIBRI_FILE_BF16) value = coli_bf16_to_f32(half);
                    dot += (double)value * x.f32[(size_t)rows[t] * 128 + c];
                }
                worst = fmax(worst, fabs(dot - m.y[t * 32 + row]));
            }
        CHECK(worst < tolerance * 16);
        for (int i = 0; i < 6; i++) guarded_free(&parts[i]);
        guarded_free(&w);
        guarded_free(&y);
    }
}

static void test_integer_products(void) {
    coli_kernels_t plain = plain_kernels(ref);
    compare_products(&plain, ref);
}

static void test_hadamard(void) {
    static float x[4096], y[4096];
    for (int i = 0; i < 4096; i++) x[i] = y[i] = (float)(int)(rng() % 2001) - 1000;
    ref->hadamard(y, 4096, 64);
    int wrong = 0;
    for (int i = 64; i < 128; i++) { /* the second part, by the Sylvester matrix: sign = parity of i & j */
        float sum = 0;
        for (int j = 0; j < 64; j++) sum += __builtin_popcount((unsigned)(i & j & 63)) % 2 ? -x[64 + j] : x[64 + j];
        wrong += y[i] != sum;
    }
    CHECK_EQ(wrong, 0);
    ref->hadamard(y, 4096, 64); /* its own inverse, times 64; integers: exact */
    for (int i = 0; i < 4096; i++) wrong += y[i] != 64 * x[i];
    CHECK_EQ(wrong, 0);
}

static void test_quantize(void) {
    _Alignas(64) float x[128] = { 127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f, 3.49f };
    static const int8_t expected[9] = { 127, -127, 0, 2, 2, 0, -2, 126, 3 };
    _Alignas(64) int8_t hi[128], lo[128];
    float scale;
    int32_t sum_hi, sum_lo;
    ref->quantize8(x, 128, hi, &scale, &sum_hi);
    CHECK(scale == 1 && !memcmp(hi, expected, 9) && hi[100] == 0 && sum_hi == 131 - 0);
    ref->quantize16(x, 128, hi, lo, &scale, &sum_hi, &sum_lo);
    CHECK(scale == 1 / 128.0f);
    for (int i = 0; i < 9; i++) CHECK_EQ(128 * hi[i] + lo[i], lrintf(128 * x[i]));
    CHECK_EQ(128 * sum_hi + sum_lo,
             lrintf(128 * 1.0f * (127 - 127 + 0.5f + 1.5f + 2.5f - 0.5f - 1.5f + 126.5f)) + lrintf(128 * 3.49f));
    memset(x, 0, sizeof x);
    ref->quantize8(x, 128, hi, &scale, &sum_hi);
    CHECK(scale == 0 && hi[0] == 0 && sum_hi == 0);
    x[77] = -INFINITY;
    x[3] = 2;
    ref->quantize8(x, 128, hi, &scale, &sum_hi);
    CHECK(scale != scale && hi[3] == 0 && sum_hi == 0);
    ref->quantize16(x, 128, hi, lo, &scale, &sum_hi, &sum_lo);
    CHECK(scale != scale && hi[3] == 0 && lo[3] == 0 && sum_lo == 0);
}

static void test_norm_and_swiglu(void) {
    _Alignas(64) float x[128] = { 3, 4 }, w[128] = { 2, 1 }, y[128];
    CHECK(ref->rms_norm(x, w, y, 128, 2, 0) == 25);
    CHECK(fabsf(y[0] - 6 / sqrtf(12.5f)) < 1e-6f && fabsf(y[1] - 4 / sqrtf(12.5f)) < 1e-6f && y[2] == 0);
    x[5] = NAN;
    float sum = ref->rms_norm(x, NULL, NULL, 128, 2, 0);
    CHECK(sum != sum);
    _Alignas(64) float gate_up[32] = { 1, -2, 90, -90, -1e30f }, act[16];
    for (int i = 0; i < 16; i++) gate_up[16 + i] = 3;
    ref->swiglu(gate_up, act, 16);
    CHECK(fabsf(act[0] - 3 / (1 + expf(-1.0f))) < 1e-6f && fabsf(act[1] + 6 / (1 + expf(2.0f))) < 1e-6f);
    CHECK(act[2] == 270 && fabsf(act[3]) < 1e-30f && act[4] == 0 && act[5] == 0);
}

/* 40 keys, 5 ... 33 seen, one query; scores as given by q[0] and the first element of each key. */
static void attend_scores(const coli_kernels_t *table, float offset, float spread, float *out, double *expected) {
    static _Alignas(64) float k[3 * 16 * 16], v[48 * 16], q[16], scores[48];
    double sum = 0;
    *expected = 0;
    memset(q, 0, sizeof q);
    q[0] = 1;
    for (uint32_t key = 0; key < 48; key++) {
        float score = offset + spread * rng_float();
        for (uint32_t d = 0; d < 16; d++)
            k[(key / 16 * 16 + d) * 16 + key % 16] = d ? 0.25f : key < 5 || key > 33 ? NAN : score;
        for (uint32_t d = 0; d < 16; d++) v[key * 16 + d] = key < 5 || key > 33 ? NAN : (float)key;
    }
    for (uint32_t key = 5; key <= 33; key++) {
        double p = exp((double)k[key / 16 * 256 + key % 16] - offset);
        sum += p;
        *expected += p * key;
    }
    *expected /= sum;
    coli_attention_t a = { .k_cache = k,
                           .v_cache = v,
                           .head_dim = 16,
                           .n_tokens = 1,
                           .n_heads = 1,
                           .position = 33,
                           .window = 29,
                           .scale = 1,
                           .q = q,
                           .out = out,
                           .q_stride = 16,
                           .out_stride = 16,
                           .scores = scores,
                           .score_stride = 48 };
    table->attention[0](&a);
}

static void test_attention(const coli_kernels_t *table) {
    _Alignas(64) float out[16];
    double expected;
    attend_scores(table, 0, 4, out, &expected);
    CHECK(fabs(out[0] - expected) < 1e-4 && out[15] == out[0]);
    attend_scores(table, -2.35e5f, 4, out, &expected); /* every score far below zero */
    CHECK(fabs(out[0] - expected) < 1e-4);
    attend_scores(table, NAN, 4, out, &expected);
    CHECK(out[0] != out[0]);
    attend_scores(table, INFINITY, 4, out, &expected);
    CHECK(out[0] != out[0]);
}

static void test_f32_to_f16(void) {
    static const float x[16] = { 1,        65504,    65519,      65520, 1e30f,    -INFINITY,
                                 0x1p-24f, 0x1p-25f, 0x1.8p-25f, -0.0f, 0x1p-15f, 1.00048828125f };
    static const uint16_t expected[12] = { 0x3c00, 0x7bff, 0x7bff, 0x7bff, 0x7bff, 0xfbff, 1, 0, 1, 0x8000, 0x0200, 0x3c00 };
    _Alignas(64) float in[16];
    _Alignas(64) uint16_t out[16];
    memcpy(in, x, sizeof in);
    in[12] = NAN;
    ref->f32_to_f16(in, out, 16);
    CHECK(!memcmp(out, expected, sizeof expected));
    CHECK((out[12] & 0x7fff) > 0x7c00);
}

/* A score that is NaN in the middle of others must not vanish in a maximum. */
static void test_lone_nan(const coli_kernels_t *table) {
    static _Alignas(64) float k[64 * 16], v[64 * 16], q[16], out[16], scores[64];
    for (uint32_t bad = 0; bad < 64; bad++) {
        for (int i = 0; i < 64 * 16; i++) k[i] = v[i] = 1;
        for (int i = 0; i < 16; i++) q[i] = rng_float();
        k[(bad / 16 * 16 + 3) * 16 + bad % 16] = NAN;
        coli_attention_t a = { .k_cache = k,
                               .v_cache = v,
                               .head_dim = 16,
                               .n_tokens = 1,
                               .n_heads = 1,
                               .position = 63,
                               .scale = 1,
                               .q = q,
                               .out = out,
                               .q_stride = 16,
                               .out_stride = 16,
                               .scores = scores,
                               .score_stride = 64 };
        table->attention[0](&a);
        CHECK(out[0] != out[0] && out[15] != out[15]);
    }
}

/* ---- Every other table that this machine can use ---- */

enum { MAX_TABLES = 8 };

/* The best of each instruction set first in its place, then the lesser ones that also run here. */
static int usable_tables(const coli_kernels_t *tables[MAX_TABLES]) {
    static const colibri_isa_t isas[] = { COLIBRI_ISA_AVX2, COLIBRI_ISA_AVX512, COLIBRI_ISA_AMX, COLIBRI_ISA_NEON };
    int n = 0;
    for (int i = 0; i < 4; i++) {
        const coli_kernels_t *table = coli_kernels_select(isas[i]);
        if (table == NULL) continue;
        CHECK_EQ(table->isa, isas[i]);
        tables[n++] = table;
    }
#ifdef COLI_HAVE_NEON_KERNELS
    CHECK(n == 1 && coli_kernels_select(COLIBRI_ISA_AUTO) == tables[0]);
    if (coli_cpu_features() & COLI_CPU_NEON_I8MM) tables[n++] = coli_kernels_neon_dotprod();
    if (coli_cpu_features() & COLI_CPU_NEON_DOTPROD) tables[n++] = coli_kernels_neon();
#endif
    return n;
}

/* With an argument: the best table here must have that name, and only it is compared. */
int main(int argc, char **argv) {
    const coli_kernels_t *tables[MAX_TABLES];
    ref = coli_kernels_select(COLIBRI_ISA_REF);
    CHECK(ref != NULL && ref->isa == COLIBRI_ISA_REF);
    CHECK(coli_kernels_select(COLIBRI_ISA_AUTO) != NULL);
    CHECK(coli_kernels_select((colibri_isa_t)99) == NULL);
    test_float_products();
    test_integer_products();
    test_hadamard();
    test_quantize();
    test_norm_and_swiglu();
    test_f32_to_f16();
    test_attention(ref);
    test_lone_nan(ref);
    int n = usable_tables(tables);
    if (argc > 1) {
        tables[0] = coli_kernels_select(COLIBRI_ISA_AUTO);
        n = 1;
        CHECK(strcmp(tables[0]->name, argv[1]) == 0);
    }
    for (int i = 0; i < n; i++) {
        fprintf(stderr, "compared with the reference: %s\n", tables[i]->name);
        test_attention(tables[i]);
        test_lone_nan(tables[i]);
        compare_tables(ref, tables[i]);
        if (tables[i]->isa == COLIBRI_ISA_AMX) compare_many_tokens(ref, tables[i]);
    }
    return check_report();
}
