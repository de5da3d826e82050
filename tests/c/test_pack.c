/* test_pack.c: colibri_pack_matrix: where every element goes, what is lost, what is refused. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/math.h"
#include "check.h"
#include "kernels/kernels.h"

static uint64_t rng_state = 1;
static uint32_t rng(void) { return (uint32_t)((rng_state = rng_state * 6364136223846793005u + 1442695040888963407u) >> 32); }
static float normal(void) { /* sum of 12 uniforms: good enough, and the same everywhere */
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += (float)(rng() >> 8) * 0x1p-24f;
    return sum;
}

static void *aligned(size_t bytes) { /* never freed: small tests */
    uint8_t *p = calloc(1, bytes + 64);
    if (p == NULL) abort();
    memset(p, 0x5a, bytes + 64);
    return p + (64 - (uintptr_t)p % 64) % 64;
}

enum { ROWS = 21, K = 300, PADDED_ROWS = 32, PADDED_K = 384, STRIDE = 310 };

static float weights[ROWS * STRIDE];
static uint16_t weights16[ROWS * STRIDE];

static void fill(int32_t dtype, float magnitude) {
    for (int i = 0; i < ROWS * STRIDE; i++) {
        weights[i] = normal() * magnitude;
        weights16[i] = dtype == COLIBRI_DTYPE_F16 ? coli_f32_to_f16(weights[i]) : coli_f32_to_bf16(weights[i]);
        if (dtype == COLIBRI_DTYPE_F16) weights[i] = coli_f16_to_f32(weights16[i]);
        if (dtype == COLIBRI_DTYPE_BF16) weights[i] = coli_bf16_to_f32(weights16[i]);
    }
}

static colibri_pack_t request(int32_t src_dtype, int32_t dst_dtype, void *dst) {
    colibri_pack_t pack = COLIBRI_PACK_INIT;
    pack.src_dtype = src_dtype;
    pack.dst_dtype = dst_dtype;
    pack.src = src_dtype == COLIBRI_DTYPE_F32 ? (const void *)weights : (const void *)weights16;
    pack.src_stride = STRIDE;
    pack.rows = ROWS;
    pack.k = K;
    pack.dst = dst;
    return pack;
}

static void test_float_layout(int32_t src_dtype, int32_t dst_dtype) {
    size_t element = dst_dtype == COLIBRI_DTYPE_F32 ? 4 : 2, bytes = PADDED_ROWS * PADDED_K * element;
    uint8_t *dst = aligned(bytes + 64);
    fill(src_dtype, 0.05f);
    colibri_pack_t pack = request(src_dtype, dst_dtype, dst);
    CHECK_EQ(colibri_packed_size(dst_dtype, ROWS, K), bytes);
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    int wrong = 0;
    double error = 0, norm = 0;
    for (int row = 0; row < PADDED_ROWS; row++)
        for (int c = 0; c < PADDED_K; c++) {
            const uint8_t *block = dst + (size_t)(row / 16) * 16 * PADDED_K * element;
            int r = row % 16;
            float expected = row < ROWS && c < K ? weights[row * STRIDE + c] : 0, stored;
            uint16_t half,
                expected_half = dst_dtype == COLIBRI_DTYPE_F16 ? coli_f32_to_f16(expected) : coli_f32_to_bf16(expected);
            memcpy(&half, block + ((c / 2) * 32 + r * 2 + c % 2) * 2, 2);
            if (dst_dtype == COLIBRI_DTYPE_F32)
                memcpy(&stored, block + (c * 16 + r) * 4, 4);
            else
                stored = dst_dtype == COLIBRI_DTYPE_F16 ? coli_f16_to_f32(half) : coli_bf16_to_f32(half);
            wrong += dst_dtype == COLIBRI_DTYPE_F32 ? memcmp(&stored, &expected, 4) != 0 : half != expected_half;
            error += ((double)expected - stored) * ((double)expected - stored);
            norm += (double)expected * expected;
        }
    CHECK_EQ(wrong, 0);
    CHECK(fabs(pack.squared_norm - norm) <= 1e-12 * norm);
    CHECK(fabs(pack.squared_error - error) <= 1e-12 * norm);
    if (src_dtype == dst_dtype || dst_dtype == COLIBRI_DTYPE_F32) CHECK(pack.squared_error == 0);
    for (int i = 0; i < 64; i++) wrong += dst[bytes + (size_t)i] != 0x5a;
    CHECK_EQ(wrong, 0);
}

static size_t block_bytes(int32_t dtype) { return dtype == COLIBRI_DTYPE_Q8 ? 16 * PADDED_K : PADDED_K / 128 * 1088; }

/* The integer of element (r, c) of a q8 or q4 block, as the format says. */
static int integer_at(int32_t dtype, const uint8_t *block, int r, int c) {
    static const int levels[16] = COLI_Q4_LEVELS;
    if (dtype == COLIBRI_DTYPE_Q8) return (int8_t)block[c / 4 * 64 + r * 4 + c % 4];
    const uint8_t *piece = block + c / 128 * 1088;
    uint8_t byte = piece[64 + c % 128 / 8 * 64 + r * 4 + c % 4];
    uint32_t scales;
    memcpy(&scales, piece + r * 4, 4);
    return levels[c % 8 < 4 ? byte & 15 : byte >> 4] * (int)(scales >> c % 128 / 16 * 4 & 15);
}

/* Row `row` as the reader sees it: scale * q, turned back. */
static void unpack_row(int32_t dtype, const uint8_t *tiles, float scale, int row, float *out) {
    const uint8_t *block = tiles + (size_t)(row / 16) * block_bytes(dtype);
    for (int c = 0; c < PADDED_K; c++) out[c] = scale * (float)integer_at(dtype, block, row % 16, c);
    coli_kernels_select(COLIBRI_ISA_REF)->hadamard(out, PADDED_K, 128); /* 384 = 3 * 128 */
}

/* The largest squared error that a rule may leave, of a squared norm. */
static double tolerance(int32_t dtype, int32_t rule) {
    if (dtype == COLIBRI_DTYPE_Q8) return rule == COLIBRI_SCALE_PERCENTILE ? 1e-3 : 1e-4;
    return rule == COLIBRI_SCALE_LEAST_SQUARES ? 0.0055 : 0.0085;
}

/* Random rows but for row 1: zeros; row 2: constant, one element after rotation; row 3: one element. */
static void fill_special(int32_t src_dtype, float constant) {
    fill(src_dtype, 0.05f);
    memset(weights + STRIDE, 0, K * 4);
    memset(weights16 + STRIDE, 0, K * 2);
    for (int c = 0; c < K; c++) {
        weights[2 * STRIDE + c] = constant;
        weights[3 * STRIDE + c] = c == 17 ? -2.0f : 0.0f;
        for (int r = 2; r < 4; r++) {
            float w = weights[r * STRIDE + c];
            weights16[r * STRIDE + c] = src_dtype == COLIBRI_DTYPE_F16 ? coli_f32_to_f16(w) : coli_f32_to_bf16(w);
        }
    }
}

static double test_quantised(int32_t src_dtype, int32_t dst_dtype, int32_t rule) {
    static _Alignas(64) float back[PADDED_K];
    size_t bytes = 2 * block_bytes(dst_dtype);
    uint8_t *dst = aligned(bytes + PADDED_ROWS * 4 + 64);
    const float *scales = (const float *)(const void *)(dst + bytes);
    rng_state = 7;
    fill_special(src_dtype, dst_dtype == COLIBRI_DTYPE_Q8 ? 0.25f : 0.015625f); /* q4 has no zeros beside one large element */
    colibri_pack_t pack = request(src_dtype, dst_dtype, dst);
    pack.scale_rule = rule;
    CHECK_EQ(colibri_packed_size(dst_dtype, ROWS, K), bytes + PADDED_ROWS * 4);
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    double error = 0, norm = 0;
    for (int row = 0; row < PADDED_ROWS; row++) {
        unpack_row(dst_dtype, dst, scales[row], row, back);
        for (int c = 0; c < PADDED_K; c++) {
            double w = row < ROWS && c < K ? weights[row * STRIDE + c] : 0, d = w - (double)back[c];
            error += d * d;
            norm += w * w;
        }
    }
    CHECK(scales[0] > 0 && scales[1] == 0 && scales[ROWS] == 0);
    CHECK(fabs(pack.squared_norm - norm) <= 1e-9 * norm);
    CHECK(fabs(pack.squared_error - error) <= 1e-4 * error);
    CHECK(error < norm * tolerance(dst_dtype, rule));
    for (size_t i = 0; i < bytes; i++)
        if (dst_dtype == COLIBRI_DTYPE_Q8)
            check_failures += dst[i] == 0x80; /* -128 is never stored */
        else if (i % 1088 < 64)
            check_failures += (dst[i] & 0x88) != 0; /* nor the top bit of a scale */
    for (int i = 0; i < 64; i++) CHECK_EQ(dst[bytes + PADDED_ROWS * 4 + (size_t)i], 0x5a);
    return pack.squared_error;
}

/* The same on every machine and instruction set: a checksum of this very result. */
static void test_bytes(int32_t dst_dtype, const uint32_t expected[3]) {
    size_t size = (size_t)colibri_packed_size(dst_dtype, ROWS, K);
    uint8_t *dst = aligned(size);
    for (int rule = 0; rule < 3; rule++) {
        rng_state = 99;
        fill(COLIBRI_DTYPE_BF16, 1);
        colibri_pack_t pack = request(COLIBRI_DTYPE_BF16, dst_dtype, dst);
        pack.scale_rule = rule;
        CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
        CHECK_EQ(colibri_crc32(0, dst, size), expected[rule]);
    }
}

/* Weights that q4 holds exactly come back as they are: rows of one element (rotated: all of one size), and of zeros in the
 * rotated space but for one group of 16. */
static void test_q4_exact(void) {
    static _Alignas(64) float row[16][128], back[PADDED_K];
    uint8_t *dst = aligned(1088 + 64);
    const coli_kernels_t *ref = coli_kernels_select(COLIBRI_ISA_REF);
    memset(row, 0, sizeof row);
    for (int r = 0; r < 16; r++) {
        if (r < 8) row[r][r * 9] = 0.75f;
        for (int c = 0; r >= 8 && c < 16; c++) row[r][(r - 8) * 16 + c] = (float)((int[])COLI_Q4_LEVELS)[c] / 128;
        if (r >= 8) ref->hadamard(row[r], 128, 128);
    }
    colibri_pack_t pack = request(COLIBRI_DTYPE_F32, COLIBRI_DTYPE_Q4, dst);
    pack.src = row;
    pack.src_stride = 0;
    pack.rows = 16;
    pack.k = 128;
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    CHECK(pack.squared_error < 1e-10 * pack.squared_norm);
    for (int r = 0; r < 16; r++) {
        uint32_t scales;
        memcpy(&scales, dst + r * 4, 4);
        if (r >= 8) CHECK_EQ(scales & ~(7u << (r - 8) * 4), 0); /* the other groups are zeros */
        for (int c = 0; c < 128; c++) back[c] = 0;
        for (int c = 0; c < 128; c++)
            back[c] = ((const float *)(const void *)(dst + 1088))[r] * (float)integer_at(COLIBRI_DTYPE_Q4, dst, r, c);
        ref->hadamard(back, 128, 128);
        for (int c = 0; c < 128; c++) CHECK(fabsf(back[c] - row[r][c]) < 1e-5f);
    }
}

/* Of 4096 elements the percentile rule leaves four above the range: they and the fifth, which is the range, saturate. */
static void test_percentile(void) {
    static float row[4096];
    uint8_t *dst = aligned(16 * 4096 + 64);
    int saturated = 0;
    for (int i = 0; i < 4096; i++) row[i] = normal();
    colibri_pack_t pack = request(COLIBRI_DTYPE_F32, COLIBRI_DTYPE_Q8, dst);
    pack.src = row;
    pack.src_stride = 0;
    pack.rows = 1;
    pack.k = 4096;
    pack.scale_rule = COLIBRI_SCALE_PERCENTILE;
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    for (int c = 0; c < 4096; c++) saturated += abs((int8_t)dst[c / 4 * 64 + c % 4]) == 127;
    CHECK(saturated >= 5 && saturated < 12);
}

/* gate and up written into alternating blocks, their scales too, equal each packed alone. */
static void test_strides(int32_t dtype) {
    size_t block = block_bytes(dtype);
    uint8_t *both = aligned(4 * block + 64 * 4), *alone = aligned(2 * block + 32 * 4);
    float *scales = (float *)(void *)(both + 4 * block);
    for (int which = 0; which < 2; which++) {
        fill(COLIBRI_DTYPE_F32, 1);
        colibri_pack_t pack = request(COLIBRI_DTYPE_F32, dtype, alone);
        CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
        pack.dst = both + (size_t)which * block;
        pack.dst_block_stride = 2 * block;
        pack.dst_scale = scales + which * 16;
        pack.dst_scale_stride = 32;
        CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
        for (size_t b = 0; b < 2; b++) {
            CHECK(!memcmp(both + (2 * b + (size_t)which) * block, alone + b * block, block));
            CHECK(!memcmp(scales + (2 * b + (size_t)which) * 16, alone + 2 * block + b * 64, 64));
        }
    }
}

static void test_known_bits(void) {
    static const uint32_t f32[5] = { 0x3f808000u, 0x3f818000u, 0x007fffffu, 0x38000000u,
                                     0x33800000u }; /* the last two: 2^-15, 2^-24 */
    uint16_t *dst = aligned(16 * 128 * 2);
    memset(weights, 0, sizeof weights);
    memcpy(weights, f32, sizeof f32);
    colibri_pack_t pack = request(COLIBRI_DTYPE_F32, COLIBRI_DTYPE_BF16, dst);
    pack.rows = 1;
    pack.k = 5;
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    CHECK(dst[0] == 0x3f80 && dst[1] == 0x3f82 && dst[32] == 0x0080);
    pack.dst_dtype = COLIBRI_DTYPE_F16;
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    CHECK(dst[33] == 0x0200 && dst[64] == 0x0001);
}

static int says(const char *text) { return strstr(colibri_last_error(), text) != NULL; }

static void test_not_finite(void) {
    static const uint32_t bad[] = { 0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f800001u };
    void *dst = aligned(PADDED_ROWS * PADDED_K * 4 + 128);
    for (int i = 0; i < 4; i++)
        for (int32_t dst_dtype = COLIBRI_DTYPE_F32; dst_dtype <= COLIBRI_DTYPE_Q4; dst_dtype++) {
            fill(COLIBRI_DTYPE_F32, 1);
            memcpy(&weights[19 * STRIDE + 299], &bad[i], 4);
            colibri_pack_t pack = request(COLIBRI_DTYPE_F32, dst_dtype, dst);
            CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_ERR_NOT_FINITE);
            CHECK(says("[19][299]"));
        }
    fill(COLIBRI_DTYPE_F32, 1);
    weights[3 * STRIDE + 5] = 65520;
    colibri_pack_t pack = request(COLIBRI_DTYPE_F32, COLIBRI_DTYPE_F16, dst);
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_ERR_NOT_FINITE);
    CHECK(says("[3][5]") && says("f16"));
    weights[3 * STRIDE + 5] = 65519; /* rounds to 65504, the largest */
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
    weights[3 * STRIDE + 5] = 0x1.fffffep+127f;
    pack.dst_dtype = COLIBRI_DTYPE_BF16;
    CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_ERR_NOT_FINITE);
    for (pack.dst_dtype = COLIBRI_DTYPE_Q8; pack.dst_dtype <= COLIBRI_DTYPE_Q4; pack.dst_dtype++) {
        weights[3 * STRIDE + 5] = 0x1.fffffep+127f; /* huge but finite weights can be rotated */
        CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
        CHECK(isfinite(pack.squared_error) && isfinite(pack.squared_norm));
        CHECK(pack.squared_error < 0.01 * pack.squared_norm);
        for (int i = 0; i < ROWS * STRIDE; i++) weights[i] = 0x1p-149f; /* and the smallest are zeros */
        CHECK_EQ(colibri_pack_matrix(&pack), COLIBRI_OK);
        const float *scales = (const float *)(const void *)((const uint8_t *)dst + 2 * block_bytes(pack.dst_dtype));
        CHECK(scales[0] == 0 && scales[3] == 0);
    }
}

#define REFUSED(status, change)                                                  \
    do {                                                                         \
        colibri_pack_t pack = request(COLIBRI_DTYPE_F32, COLIBRI_DTYPE_Q8, dst); \
        change;                                                                  \
        CHECK_EQ(colibri_pack_matrix(&pack), status);                            \
        CHECK(colibri_last_status() == status && colibri_last_error()[0] != 0);  \
    } while (0)

static void test_arguments(void) {
    uint8_t *dst = aligned(PADDED_ROWS * PADDED_K + 128);
    fill(COLIBRI_DTYPE_F32, 1);
    CHECK_EQ(colibri_pack_matrix(NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.struct_size = 8);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.src = NULL);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.dst = NULL);
    REFUSED(COLIBRI_ERR_ALIGNMENT, pack.dst = dst + 16);
    REFUSED(COLIBRI_ERR_ALIGNMENT, (pack.dst_block_stride = 16 * PADDED_K + 16, pack.dst_scale = (float *)(void *)dst));
    REFUSED(COLIBRI_ERR_ALIGNMENT, pack.dst_scale = (float *)(void *)(dst + 2));
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.rows = 0);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.k = 0);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.rows = 0xffffffffu);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, (pack.k = 131073, pack.src_stride = 0));
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.src_stride = K - 1);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.src_stride = UINT64_MAX / 8);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.src_dtype = COLIBRI_DTYPE_Q8);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.src_dtype = 0);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.src_dtype = COLIBRI_DTYPE_Q4);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.dst_dtype = COLIBRI_DTYPE_Q4 + 1);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, (pack.dst_dtype = COLIBRI_DTYPE_Q4, pack.k = 131073, pack.src_stride = 0));
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, (pack.dst_dtype = COLIBRI_DTYPE_Q4, pack.dst_block_stride = 3 * 1088 - 64));
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.scale_rule = 3);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.dst_block_stride = 64);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.dst_scale_stride = 15);
    REFUSED(COLIBRI_ERR_INVALID_ARGUMENT, pack.dst_block_stride = 32 * PADDED_K); /* and no place for the scales */
    CHECK_EQ(colibri_packed_size(COLIBRI_DTYPE_Q8, 16, 131073), 0);
    CHECK_EQ(colibri_packed_size(COLIBRI_DTYPE_Q8, 0, 16), 0);
    CHECK_EQ(colibri_packed_size(COLIBRI_DTYPE_Q4, 16, 16), 1088 + 64);
    CHECK_EQ(colibri_packed_size(COLIBRI_DTYPE_Q4, 16, 131073), 0);
    CHECK_EQ(colibri_packed_size(99, 16, 16), 0);
    CHECK_EQ(colibri_packed_size(COLIBRI_DTYPE_F32, 0x7fffffffu, 0x7fffffffu), 0);
    CHECK_EQ(colibri_packed_size(COLIBRI_DTYPE_F32, 0x40000000u, 0x40000000u), (long long)(1ull << 62));
}

int main(void) {
    for (int32_t src = COLIBRI_DTYPE_F32; src <= COLIBRI_DTYPE_BF16; src++) {
        for (int32_t dst = COLIBRI_DTYPE_F32; dst <= COLIBRI_DTYPE_BF16; dst++) test_float_layout(src, dst);
        for (int32_t dst = COLIBRI_DTYPE_Q8; dst <= COLIBRI_DTYPE_Q4; dst++) {
            double least = test_quantised(src, dst, COLIBRI_SCALE_LEAST_SQUARES);
            CHECK(least < test_quantised(src, dst, COLIBRI_SCALE_MAX));
            CHECK(least < test_quantised(src, dst, COLIBRI_SCALE_PERCENTILE));
        }
    }
    test_bytes(COLIBRI_DTYPE_Q8, (uint32_t[]){ 2153808435u, 1501656999u, 1501656999u });
    test_bytes(COLIBRI_DTYPE_Q4, (uint32_t[]){ 3763883910u, 3286233204u, 3286233204u });
    test_q4_exact();
    test_percentile();
    test_strides(COLIBRI_DTYPE_Q8);
    test_strides(COLIBRI_DTYPE_Q4);
    test_known_bits();
    test_not_finite();
    test_arguments();
    return check_report();
}
