/* test_session.c: sessions over tiny random models: the same bits for any threads, chunking, batch and instruction set; slots,
 * truncation, cancelling, damaged numbers, a caller's workspace, and every refused argument. */
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fpenv.h"
#include "check.h"
#include "make_file.h"

#define TOKENS 40
static char path[64]; /* of this process: several may run in one folder */
static bool quick;    /* under emulation: fewer pairs of threads and pieces, and only what depends on the processor */

/* ---- helpers ---- */

static void write_spec(const make_spec_t *spec) {
    size_t size;
    uint8_t *file = make_model_file(spec, &size);
    CHECK(file && write_model_file(path, file, size));
    free(file);
}

static colibri_config_t config(void) {
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model_path = path;
    c.max_seq_len = 64;
    c.num_threads = 1;
    c.outputs = COLIBRI_OUTPUT_ALL;
    return c;
}

static colibri_t *start(const colibri_config_t *c) {
    colibri_t *s = colibri_init(c);
    if (!s) fprintf(stderr, "%s\n", colibri_last_error());
    CHECK(s != NULL);
    return s;
}

static uint32_t vocab_of(const colibri_t *s) {
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    CHECK_EQ(colibri_model_info(colibri_model(s), &info), COLIBRI_OK);
    return (uint32_t)info.vocab_size;
}

static void fill_tokens(int32_t *tokens, uint32_t n, uint32_t vocab, uint32_t seed) {
    for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)((i * 2654435761u + seed * 40503u) % 65521 % vocab);
}

static float *output_of(colibri_t *s, size_t *bytes) {
    CHECK_EQ(colibri_output_size(s, bytes), COLIBRI_OK);
    float *out = aligned_alloc(64, (*bytes + 127) / 64 * 64);
    CHECK_EQ(colibri_get_output(s, out, *bytes), COLIBRI_OK);
    return out;
}

/* Logits of every token of one sequence in slot 0, fed in pieces of `piece` tokens. */
static float *run_pieces(colibri_t *s, const int32_t *tokens, uint32_t n, uint32_t piece, uint32_t vocab) {
    float *all = malloc(n * vocab * sizeof(float));
    for (uint32_t at = 0; at < n; at += piece) {
        int32_t length = (int32_t)(n - at < piece ? n - at : piece);
        size_t bytes;
        CHECK_EQ(colibri_set_input(s, tokens + at, &length, 1), COLIBRI_OK);
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
        float *out = output_of(s, &bytes);
        CHECK_EQ(bytes, (size_t)length * vocab * sizeof(float));
        memcpy(all + (size_t)at * vocab, out, bytes);
        free(out);
    }
    return all;
}

static float *run_config(const colibri_config_t *c, uint32_t piece) {
    int32_t tokens[TOKENS];
    colibri_t *s = start(c);
    uint32_t vocab = vocab_of(s);
    fill_tokens(tokens, TOKENS, vocab, 1);
    float *out = run_pieces(s, tokens, TOKENS, piece, vocab);
    colibri_free(s);
    return out;
}

/* ---- the same bits ---- */

static void check_same_bits(const make_spec_t *spec, colibri_dtype_t kv) {
    const uint32_t pieces[] = {1, 2, 3, 7, TOKENS}, threads[] = {1, 2, 3, 8};
    size_t bytes = (size_t)TOKENS * spec->vocab * sizeof(float);
    write_spec(spec);
    colibri_config_t c = config();
    c.kv_dtype = kv;
    c.isa = COLIBRI_ISA_REF;
    float *expected = run_config(&c, TOKENS);
    bool varied = false;
    for (uint32_t i = 1; i < TOKENS * spec->vocab; i++) varied |= expected[i] != expected[0] && isfinite(expected[i]);
    CHECK(varied);
    for (uint32_t isa = COLIBRI_ISA_REF; isa < COLIBRI_ISA_COUNT_; isa++) {
        if (!colibri_isa_supported((colibri_isa_t)isa)) {
            fprintf(stderr, "skipped: %s is not usable on this machine\n", colibri_isa_name((colibri_isa_t)isa));
            continue;
        }
        for (uint32_t t = 0; t < 4; t++)
            for (uint32_t p = 0; p < 5; p++) {
                if (isa == COLIBRI_ISA_REF && t > 1 && p != 3) continue; /* slow; the pairs left cover it */
                if (quick && (isa == COLIBRI_ISA_REF || (t + p) % 4 != 0)) continue;
                c.isa = (int32_t)isa;
                c.num_threads = (int32_t)threads[t];
                c.max_chunk_tokens = p == 4 ? 11 : 0;
                float *out = run_config(&c, pieces[p]);
                CHECK(memcmp(out, expected, bytes) == 0);
                free(out);
            }
    }
    free(expected);
}

/* Three sequences of different lengths side by side, in two ragged calls, against each alone. */
static void check_batch(const make_spec_t *spec, colibri_dtype_t kv) {
    enum { SLOTS = 3 };
    const int32_t first[SLOTS] = {9, 0, 17}, second[SLOTS] = {1, 12, 5};
    write_spec(spec);
    colibri_config_t c = config();
    c.kv_dtype = kv;
    c.max_batch_size = SLOTS;
    c.num_threads = 2;
    c.max_chunk_tokens = 13;
    colibri_t *s = start(&c);
    uint32_t vocab = spec->vocab;
    int32_t sequences[SLOTS][TOKENS], packed[SLOTS * TOKENS];
    for (uint32_t i = 0; i < SLOTS; i++) fill_tokens(sequences[i], TOKENS, vocab, 10 + i);
    float *alone[SLOTS];
    c.max_batch_size = 1;
    for (uint32_t i = 0; i < SLOTS; i++) {
        colibri_t *one = start(&c);
        alone[i] = run_pieces(one, sequences[i], (uint32_t)(first[i] + second[i]), TOKENS, vocab);
        colibri_free(one);
    }
    for (uint32_t call = 0; call < 2; call++) {
        const int32_t *lengths = call ? second : first;
        uint32_t n = 0;
        for (uint32_t i = 0; i < SLOTS; i++)
            for (int32_t t = 0; t < lengths[i]; t++) packed[n++] = sequences[i][(call ? first[i] : 0) + t];
        CHECK_EQ(colibri_set_input(s, packed, lengths, SLOTS), COLIBRI_OK);
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
        size_t bytes;
        float *out = output_of(s, &bytes), *row = out;
        for (uint32_t i = 0; i < SLOTS; i++) {
            size_t count = (size_t)lengths[i] * vocab;
            CHECK(memcmp(row, alone[i] + (size_t)(call ? first[i] : 0) * vocab, count * sizeof(float)) == 0);
            row += count;
        }
        free(out);
    }
    for (uint32_t i = 0; i < SLOTS; i++) free(alone[i]);
    colibri_free(s);
}

static void test_same_bits(void) {
    make_spec_t plain = MAKE_SPEC_TINY, rich = MAKE_SPEC_TINY;
    for (uint32_t dtype = COLIBRI_FILE_F32; dtype <= COLIBRI_FILE_Q4; dtype++) {
        plain.dtype = rich.dtype = dtype;
        if (!quick) check_same_bits(&plain, 0);
        rich.experts = 9; rich.top_k = 4; rich.layers = 3; rich.dense_layers = 1; rich.shared = 56; rich.shared_gate = 1;
        rich.qk_norm = COLIBRI_QK_NORM_HEAD; rich.biases = 2; rich.window = 7; rich.norm_topk = 0; rich.head_dim = 16;
        check_same_bits(&rich, 0);
        check_batch(&rich, 0);
    }
    static const uint32_t mixed[][2] = {{COLIBRI_FILE_Q4, COLIBRI_FILE_Q8}, {COLIBRI_FILE_Q8, COLIBRI_FILE_F16},
                                        {COLIBRI_FILE_BF16, COLIBRI_FILE_Q4}};
    for (size_t i = 0; i < sizeof mixed / sizeof *mixed; i++) {
        rich.dtype = mixed[i][0];
        rich.other_dtype = mixed[i][1] + 1;
        check_same_bits(&rich, 0);
    }
    plain.dtype = COLIBRI_FILE_F32;
    plain.qk_norm = COLIBRI_QK_NORM_WIDTH; plain.clip_qkv = 0.5f; plain.experts = 60; plain.top_k = 8;
    check_same_bits(&plain, 0);
    rich.dtype = COLIBRI_FILE_Q8;
    rich.other_dtype = 0;
    check_same_bits(&rich, COLIBRI_DTYPE_Q8);
    check_batch(&rich, COLIBRI_DTYPE_Q8);
}

/* Logits of a model with an 8-bit KV cache are those of f32 and f16 up to a small error, and not the same. */
static void test_kv_types(void) {
    static const colibri_dtype_t types[] = {COLIBRI_DTYPE_F32, COLIBRI_DTYPE_F16, COLIBRI_DTYPE_Q8};
    static const double limit[] = {0, 1e-3, 2e-2};
    make_spec_t spec = MAKE_SPEC_TINY;
    float *logits[3];
    spec.top_k = spec.experts; /* a small error would choose other experts */
    write_spec(&spec);
    for (int kv = 0; kv < 3; kv++) {
        colibri_config_t c = config();
        double error = 0, square = 0;
        c.kv_dtype = types[kv];
        logits[kv] = run_config(&c, TOKENS);
        for (uint32_t i = 0; i < TOKENS * spec.vocab; i++) {
            double d = logits[kv][i] - logits[0][i];
            error += d * d;
            square += logits[0][i] * logits[0][i];
        }
        CHECK((error > 0) == (kv > 0));
        CHECK(error <= limit[kv] * limit[kv] * square);
    }
    for (int kv = 0; kv < 3; kv++) free(logits[kv]);
}

/* 519 tokens: across the default chunk of 512, with tails of 1 to 9, and one by one. */
static void test_long_prompt(void) {
    enum { LONG = 519 };
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.dtype = COLIBRI_FILE_Q8;
    spec.max_position = 1024;
    spec.window = 100;
    write_spec(&spec);
    colibri_config_t c = config();
    c.max_seq_len = 600;
    c.num_threads = 2;
    colibri_t *s = start(&c);
    int32_t tokens[LONG];
    size_t row = spec.vocab * sizeof(float);
    fill_tokens(tokens, LONG, spec.vocab, 3);
    float *whole = run_pieces(s, tokens, LONG, LONG, spec.vocab);
    for (uint32_t tail = 1; tail <= 9; tail++) {
        CHECK_EQ(colibri_reset(s), COLIBRI_OK);
        float *most = run_pieces(s, tokens, LONG - tail, 512, spec.vocab);
        float *rest = run_pieces(s, tokens + LONG - tail, tail, tail, spec.vocab);
        CHECK(memcmp(most, whole, (LONG - tail) * row) == 0);
        CHECK(memcmp(rest, whole + (size_t)(LONG - tail) * spec.vocab, tail * row) == 0);
        free(most);
        free(rest);
    }
    CHECK_EQ(colibri_reset(s), COLIBRI_OK);
    float *single = run_pieces(s, tokens, LONG, 1, spec.vocab);
    CHECK(memcmp(single, whole, LONG * row) == 0);
    free(single);
    free(whole);
    colibri_free(s);
}

/* Expert outputs of 70,000 and more, beyond what f16 holds, stay numbers. */
static void test_large_outputs(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    size_t size;
    uint8_t *file = make_model_file(&spec, &size);
    const colibri_file_header *h = (const void *)file;
    const colibri_file_entry *e = (const void *)(file + h->directory_offset + sizeof(colibri_file_params) + spec.layers * sizeof(colibri_file_layer));
    for (uint32_t i = 0; i < h->num_entries; i++)
        if (e[i].role == COLIBRI_ROLE_EXPERTS)
            for (uint64_t at = 0; at < e[i].size; at += 4) *(float *)(file + e[i].offset + at) *= 1000; /* gate, up and down: 1e9 and less */
    CHECK(write_model_file(path, file, size));
    free(file);
    colibri_config_t c = config();
    c.outputs = COLIBRI_OUTPUT_HIDDEN;
    for (int32_t kv = COLIBRI_DTYPE_F32; kv <= COLIBRI_DTYPE_F16; kv++) {
        c.kv_dtype = kv;
        colibri_t *s = start(&c);
        int32_t tokens[TOKENS], length = TOKENS;
        fill_tokens(tokens, TOKENS, spec.vocab, 1);
        CHECK_EQ(colibri_set_input(s, tokens, &length, 1), COLIBRI_OK);
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
        colibri_free(s);
    }
}

/* ---- slots ---- */

static void test_truncate(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.window = 5; /* wrapped many times before the cut */
    write_spec(&spec);
    colibri_config_t c = config();
    c.max_seq_len = TOKENS;
    colibri_t *s = start(&c);
    int32_t tokens[TOKENS], length = TOKENS, one = 1, zero = 0;
    fill_tokens(tokens, TOKENS, spec.vocab, 1);
    float *whole = run_pieces(s, tokens, TOKENS, TOKENS, spec.vocab);
    CHECK_EQ(colibri_slot_length(s, 0), TOKENS);
    CHECK_EQ(colibri_set_input(s, tokens, &one, 1), COLIBRI_ERR_SLOT_FULL);
    CHECK_EQ(colibri_truncate(s, 0, 9), COLIBRI_OK);
    float *rest = run_pieces(s, tokens + 9, TOKENS - 9, 4, spec.vocab);
    CHECK(memcmp(rest, whole + 9 * spec.vocab, (size_t)(TOKENS - 9) * spec.vocab * sizeof(float)) == 0);
    CHECK_EQ(colibri_truncate(s, 0, TOKENS + 1), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_truncate(s, 0, -1), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_truncate(s, 1, 0), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_reset(s), COLIBRI_OK);
    CHECK_EQ(colibri_slot_length(s, 0), 0);
    CHECK_EQ(colibri_infer(s), COLIBRI_ERR_STATE);
    CHECK_EQ(colibri_set_input(s, tokens, &zero, 1), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_set_input(s, tokens, &length, 2), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_set_input(s, tokens, &length, 0), COLIBRI_ERR_INVALID_ARGUMENT);
    length = INT32_MAX;
    CHECK_EQ(colibri_set_input(s, tokens, &length, 1), COLIBRI_ERR_SLOT_FULL);
    length = -1;
    CHECK_EQ(colibri_set_input(s, tokens, &length, 1), COLIBRI_ERR_INVALID_ARGUMENT);
    int32_t bad[] = {0, (int32_t)spec.vocab}, two = 2;
    CHECK_EQ(colibri_set_input(s, bad, &two, 1), COLIBRI_ERR_TOKEN);
    bad[1] = -1;
    CHECK_EQ(colibri_set_input(s, bad, &two, 1), COLIBRI_ERR_TOKEN);
    CHECK(strstr(colibri_last_error(), "-1") != NULL);
    free(whole);
    free(rest);
    colibri_free(s);
}

/* LAST gives the last row of ALL; an idle slot keeps its row; HIDDEN gives rows of the model's width. */
static void test_outputs(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.dtype = COLIBRI_FILE_Q8;
    write_spec(&spec);
    colibri_config_t c = config();
    int32_t tokens[TOKENS], lengths[2] = {TOKENS, 0}, token, sampled;
    fill_tokens(tokens, TOKENS, spec.vocab, 1);
    colibri_t *s = start(&c);
    float *all = run_pieces(s, tokens, TOKENS, TOKENS, spec.vocab);
    CHECK_EQ(colibri_sample(s, 0, NULL, &sampled), COLIBRI_OK);
    colibri_free(s);
    c.outputs = COLIBRI_OUTPUT_LAST;
    c.max_batch_size = 2;
    s = start(&c);
    CHECK_EQ(colibri_set_input(s, tokens, lengths, 2), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    size_t bytes, row = spec.vocab * sizeof(float);
    float *last = output_of(s, &bytes);
    CHECK_EQ(bytes, 2 * row);
    CHECK(memcmp(last, all + (TOKENS - 1) * spec.vocab, row) == 0);
    for (uint32_t i = 0; i < spec.vocab; i++) CHECK(last[spec.vocab + i] == 0);
    CHECK_EQ(colibri_sample(s, 1, NULL, &token), COLIBRI_ERR_STATE);
    CHECK_EQ(colibri_sample(s, 0, NULL, &token), COLIBRI_OK);
    CHECK_EQ(token, sampled);
    int32_t other[2] = {0, 3};
    CHECK_EQ(colibri_set_input(s, tokens, other, 2), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    float *again = output_of(s, &bytes);
    CHECK(memcmp(again, last, row) == 0);
    CHECK(memcmp(again + spec.vocab, all + 2 * spec.vocab, row) == 0);
    CHECK_EQ(colibri_get_output(s, again + 1, bytes), COLIBRI_ERR_ALIGNMENT);
    CHECK_EQ(colibri_get_output(s, again, bytes - 1), COLIBRI_ERR_BUFFER_TOO_SMALL);
    lengths[0] = 1;
    CHECK_EQ(colibri_set_input(s, tokens, lengths, 1), COLIBRI_OK); /* the output is still the latest infer's: two rows */
    CHECK_EQ(colibri_output_size(s, &bytes), COLIBRI_OK);
    CHECK_EQ(bytes, 2 * row);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    CHECK_EQ(colibri_set_input(s, tokens, (const int32_t[]){1, 1}, 2), COLIBRI_OK);
    CHECK_EQ(colibri_get_output(s, again, row), COLIBRI_OK);
    CHECK_EQ(colibri_get_output(NULL, again, row), COLIBRI_ERR_INVALID_ARGUMENT);
    colibri_free(s);
    lengths[0] = TOKENS;
    c.outputs = COLIBRI_OUTPUT_HIDDEN;
    s = start(&c);
    CHECK_EQ(colibri_set_input(s, tokens, lengths, 1), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    float *hidden = output_of(s, &bytes);
    CHECK_EQ(bytes, TOKENS * spec.hidden * sizeof(float));
    CHECK_EQ(colibri_sample(s, 0, NULL, &token), COLIBRI_ERR_STATE);
    colibri_free(s);
    free(all); free(last); free(again); free(hidden);
}

/* ---- a model with NaN: only the slots that meet it fail ---- */

static void test_not_finite(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    size_t size, bytes;
    uint8_t *file = make_model_file(&spec, &size);
    const colibri_file_header *h = (const void *)file;
    const colibri_file_entry *e = (const void *)(file + h->directory_offset + sizeof(colibri_file_params) + spec.layers * sizeof(colibri_file_layer));
    for (uint32_t i = 0; i < h->num_entries; i++)
        if (e[i].role == COLIBRI_ROLE_EMBEDDING) ((float *)(file + e[i].offset + 5 * e[i].stride))[3] = NAN; /* token 5 */
    CHECK(write_model_file(path, file, size));
    free(file);
    colibri_config_t c = config();
    c.max_batch_size = 2;
    c.num_threads = 2;
    colibri_t *s = start(&c);
    const int32_t tokens[] = {1, 5, 2, 1, 2, 3}, lengths[] = {3, 3}, fine[] = {0, 3};
    CHECK_EQ(colibri_set_input(s, tokens, lengths, 2), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_ERR_NOT_FINITE);
    CHECK_EQ(colibri_slot_status(s, 0), COLIBRI_ERR_NOT_FINITE);
    CHECK_EQ(colibri_slot_status(s, 1), COLIBRI_OK);
    CHECK_EQ(colibri_slot_length(s, 0), 0);
    CHECK_EQ(colibri_slot_length(s, 1), 3);
    float *out = output_of(s, &bytes);
    for (uint32_t i = 0; i < 3 * spec.vocab; i++) CHECK(out[i] == 0);
    CHECK_EQ(colibri_truncate(s, 0, 0), COLIBRI_OK); /* what the latest infer gave stays as it is */
    CHECK_EQ(colibri_slot_status(s, 0), COLIBRI_ERR_NOT_FINITE);
    float *after = output_of(s, &bytes);
    CHECK(memcmp(after, out, bytes) == 0);
    free(after);
    CHECK_EQ(colibri_reset(s), COLIBRI_OK);
    CHECK_EQ(colibri_slot_status(s, 0), COLIBRI_OK);
    CHECK_EQ(colibri_set_input(s, tokens + 3, fine, 2), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    float *alone = output_of(s, &bytes);
    CHECK(memcmp(alone, out + 3 * spec.vocab, 3 * spec.vocab * sizeof(float)) == 0);
    free(out); free(alone);
    colibri_free(s);
}

static void test_cancel(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    colibri_t *s = start(&c);
    int32_t tokens[TOKENS], length = 5;
    fill_tokens(tokens, TOKENS, spec.vocab, 1);
    float *first = run_pieces(s, tokens, TOKENS, TOKENS, spec.vocab);
    CHECK_EQ(colibri_truncate(s, 0, 5), COLIBRI_OK);
    colibri_cancel(s);
    CHECK_EQ(colibri_set_input(s, tokens + 5, &length, 1), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_ERR_CANCELLED);
    CHECK_EQ(colibri_slot_length(s, 0), 5);
    CHECK_EQ(colibri_infer(s), COLIBRI_ERR_STATE);
    float *rest = run_pieces(s, tokens + 5, TOKENS - 5, TOKENS, spec.vocab);
    CHECK(memcmp(rest, first + 5 * spec.vocab, (size_t)(TOKENS - 5) * spec.vocab * sizeof(float)) == 0);
    free(first); free(rest);
    colibri_free(s);
}

/* ---- config and memory ---- */

static void check_refused(colibri_config_t c, colibri_status_t status) {
    CHECK(colibri_init(&c) == NULL);
    CHECK_EQ(colibri_last_status(), status);
    CHECK(colibri_last_error()[0] != 0);
}

static void test_config(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    CHECK(colibri_init(NULL) == NULL);
    struct { size_t offset; int32_t value; colibri_status_t status; } cases[] = {
        {offsetof(colibri_config_t, device_id), 1, COLIBRI_ERR_UNSUPPORTED},
        {offsetof(colibri_config_t, max_batch_size), -1, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, max_batch_size), 5000, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, max_seq_len), -1, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, max_seq_len), INT32_MAX, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, dtype), COLIBRI_DTYPE_Q8, COLIBRI_ERR_UNSUPPORTED},
        {offsetof(colibri_config_t, dtype), 99, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, top_k), 6, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, top_k), -1, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, num_threads), 257, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, isa), 77, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, isa), COLIBRI_ISA_NEON, COLIBRI_ERR_ISA},
        {offsetof(colibri_config_t, outputs), 3, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, kv_dtype), COLIBRI_DTYPE_Q4, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, activation_bits), 4, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, max_chunk_tokens), -3, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, load_balancing_strategy), 3, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, residency), COLIBRI_RESIDENCY_COUNT_, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, residency), -1, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, guard_mapping), 2, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, reserved1), 1, COLIBRI_ERR_INVALID_ARGUMENT},
        {offsetof(colibri_config_t, struct_size), 8, COLIBRI_ERR_INVALID_ARGUMENT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        colibri_config_t bad = c;
        memcpy((char *)&bad + cases[i].offset, &cases[i].value, sizeof(int32_t));
        check_refused(bad, cases[i].status);
    }
    c.expert_cache_size = 1; /* no room for two */
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.expert_cache_size = 8;
    c.residency = COLIBRI_RESIDENCY_MAP; /* belongs to STREAM */
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c = config();
    c.hugepage_size = 4096;
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.hugepage_size = 2 << 20;
    c.residency = COLIBRI_RESIDENCY_STREAM; /* belongs to HUGE */
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c = config();
    c.capacity_factor = 1.5f; /* without a strategy */
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.load_balancing_strategy = COLIBRI_BALANCE_HARD_CAPACITY;
    c.capacity_factor = -1;
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c = config();
    c.numa_policy = "everywhere";
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.numa_policy = "none";
    colibri_free(start(&c));
    c.expert_profile = "missing.profile";
    check_refused(c, COLIBRI_ERR_NOT_FOUND);
    c.expert_profile = NULL;
    c.model_path = NULL;
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.model_path = "missing.colibri";
    check_refused(c, COLIBRI_ERR_NOT_FOUND);
}

/* ---- a model in memory ---- */

/* Bytes of the spec's file at an address that is `off` bytes after one that is 64-byte aligned; free(*memory). */
static uint8_t *in_memory(const make_spec_t *spec, uint32_t off, size_t *size, uint8_t **memory) {
    uint8_t *file = make_model_file(spec, size);
    *memory = malloc(*size + 192);
    uint8_t *data = *memory + (64 - (uintptr_t)*memory % 64) % 64 + off;
    memcpy(data, file, *size);
    free(file);
    return data;
}

static void test_memory(void) {
    static const int32_t modes[] = {0, COLIBRI_RESIDENCY_MAP, COLIBRI_RESIDENCY_LOCK, COLIBRI_RESIDENCY_HUGE};
    make_spec_t spec = MAKE_SPEC_TINY;
    size_t bytes = (size_t)TOKENS * spec.vocab * sizeof(float);
    for (spec.dtype = COLIBRI_FILE_F32; spec.dtype <= COLIBRI_FILE_Q4; spec.dtype++) {
        uint8_t *memory;
        colibri_config_t c = config();
        write_spec(&spec);
        float *expected = run_config(&c, TOKENS);
        c.model_path = NULL;
        c.model_data = in_memory(&spec, 0, &c.model_size, &memory);
        uint32_t before = colibri_crc32(0, c.model_data, c.model_size);
        for (uint32_t i = 0; i < 4; i++) {
            c.residency = modes[i];
            c.num_threads = i % 2 ? 3 : 1;
            float *out = run_config(&c, 7);
            CHECK(memcmp(out, expected, bytes) == 0);
            free(out);
        }
        CHECK_EQ(colibri_crc32(0, c.model_data, c.model_size), before);
        free(memory);
        free(expected);
    }
}

/* Two sessions on one model in memory that its owner has closed already; the same bits as from the file. */
static void test_memory_shared(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    uint8_t *memory;
    size_t size;
    colibri_model_t *model = NULL;
    write_spec(&spec);
    colibri_config_t c = config();
    float *expected = run_config(&c, TOKENS);
    const uint8_t *data = in_memory(&spec, 0, &size, &memory);
    CHECK_EQ(colibri_model_open_memory(data, size, &model), COLIBRI_OK);
    CHECK_EQ(colibri_model_verify(model), COLIBRI_OK);
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    CHECK_EQ(colibri_model_info(model, &info), COLIBRI_OK);
    CHECK_EQ(info.file_size, size);
    c.model_path = NULL;
    c.model = model;
    colibri_t *a = start(&c), *b = start(&c);
    colibri_model_close(model);
    int32_t tokens[TOKENS];
    fill_tokens(tokens, TOKENS, spec.vocab, 1);
    for (int i = 0; i < 2; i++) {
        float *out = run_pieces(i ? b : a, tokens, TOKENS, TOKENS, spec.vocab);
        CHECK(memcmp(out, expected, (size_t)TOKENS * spec.vocab * sizeof(float)) == 0);
        free(out);
        colibri_free(i ? b : a);
    }
    free(memory);
    free(expected);
}

static void test_memory_refused(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    uint8_t *memory, *off_by_16;
    size_t size;
    colibri_model_t *model = NULL;
    write_spec(&spec);
    uint8_t *data = in_memory(&spec, 0, &size, &memory), *odd = in_memory(&spec, 16, &size, &off_by_16);
    colibri_config_t c = config();
    c.model_data = data; /* and a path */
    c.model_size = size;
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.model_data = NULL; /* a size of nothing */
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.model_path = NULL;
    c.model_data = odd;
    check_refused(c, COLIBRI_ERR_ALIGNMENT);
    c.model_data = data;
    c.residency = COLIBRI_RESIDENCY_STREAM;
    check_refused(c, COLIBRI_ERR_UNSUPPORTED);
    c.residency = COLIBRI_RESIDENCY_MAP;
    c.guard_mapping = 1;
    check_refused(c, COLIBRI_ERR_UNSUPPORTED);
    c.guard_mapping = 0;
    for (size_t cut = 0; cut < 4; cut++) {
        c.model_size = cut * 63;
        check_refused(c, COLIBRI_ERR_FORMAT);
        CHECK_EQ(colibri_model_open_memory(data, c.model_size, &model), COLIBRI_ERR_FORMAT);
    }
    CHECK_EQ(colibri_model_open_memory(NULL, size, &model), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_open_memory(data, size, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    data[size - 1] ^= 1;
    CHECK_EQ(colibri_model_open_memory(data, size, &model), COLIBRI_OK);
    CHECK_EQ(colibri_model_verify(model), COLIBRI_ERR_CHECKSUM);
    CHECK(strstr(colibri_last_error(), "in memory") != NULL);
    colibri_model_close(model);
    free(memory);
    free(off_by_16);
}

static void test_workspace(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    c.num_threads = 2;
    size_t bytes;
    CHECK_EQ(colibri_workspace_size(&c, &bytes), COLIBRI_OK);
    uint8_t *memory = aligned_alloc(64, bytes + 128);
    memset(memory, 0xA5, bytes + 128);
    c.workspace = memory;
    c.workspace_size = bytes - 1;
    check_refused(c, COLIBRI_ERR_WORKSPACE);
    c.workspace = memory + 4;
    c.workspace_size = bytes + 64;
    check_refused(c, COLIBRI_ERR_ALIGNMENT);
    c.workspace = memory;
    c.workspace_size = bytes;
    float *mine = run_config(&c, 7);
    for (size_t i = bytes; i < bytes + 128; i++) CHECK(memory[i] == 0xA5);
    c.workspace_size = 0; /* "as colibri_workspace_size said" */
    float *unsaid = run_config(&c, 7);
    CHECK(memcmp(mine, unsaid, TOKENS * spec.vocab * sizeof(float)) == 0);
    for (size_t i = bytes; i < bytes + 128; i++) CHECK(memory[i] == 0xA5);
    free(unsaid);
    c.workspace_size = bytes;
    c.workspace = NULL;
    check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    c.workspace_size = 0;
    float *own = run_config(&c, 7);
    CHECK(memcmp(mine, own, TOKENS * spec.vocab * sizeof(float)) == 0);
    free(mine); free(own); free(memory);
}

/* ---- sampling and routing ---- */

static void test_sampling(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    c.outputs = COLIBRI_OUTPUT_LAST;
    colibri_t *s = start(&c);
    int32_t tokens[TOKENS], length = 6, token, best;
    fill_tokens(tokens, TOKENS, spec.vocab, 1);
    CHECK_EQ(colibri_set_input(s, tokens, &length, 1), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    CHECK_EQ(colibri_sample(s, 0, NULL, &best), COLIBRI_OK);
    size_t bytes;
    float *logits = output_of(s, &bytes);
    for (uint32_t i = 0; i < spec.vocab; i++) CHECK(logits[i] <= logits[best]);
    colibri_sampling_t o = COLIBRI_SAMPLING_INIT;
    o.temperature = 5;
    uint32_t counts[1024] = {0}, draws = 20000, different = 0;
    for (o.seed = 0; o.seed < draws; o.seed++) {
        int32_t twice;
        CHECK_EQ(colibri_sample(s, 0, &o, &token), COLIBRI_OK);
        CHECK_EQ(colibri_sample(s, 0, &o, &twice), COLIBRI_OK);
        CHECK_EQ(token, twice);
        counts[token]++;
    }
    double sum = 0;
    for (uint32_t i = 0; i < spec.vocab; i++) sum += exp((logits[i] - logits[best]) / 5);
    for (uint32_t i = 0; i < spec.vocab; i++) {
        double p = exp((logits[i] - logits[best]) / 5) / sum, expected = p * draws;
        CHECK(fabs(counts[i] - expected) < 6 * sqrt(expected) + 6);
        different += counts[i] > 0;
    }
    CHECK(different > 10);
    for (int cut = 0; cut < 4; cut++) { /* each cut alone leaves few tokens, the best among them */
        colibri_sampling_t few = o;
        few.top_k = cut == 0 ? 3 : cut == 3 ? 5 : 0;
        few.top_p = cut == 1 || cut == 3 ? 0.02f : 0;
        few.min_p = cut == 2 ? 0.97f : 0;
        bool seen[1024] = {false}, has_best = false;
        uint32_t kinds = 0;
        for (few.seed = 0; few.seed < 2000; few.seed++) {
            CHECK_EQ(colibri_sample(s, 0, &few, &token), COLIBRI_OK);
            if (!seen[token]) kinds++;
            seen[token] = true;
            has_best |= token == best;
        }
        CHECK(has_best && kinds >= 1 && kinds <= (cut == 0 ? 3u : 5u));
        if (cut == 0) CHECK_EQ(kinds, 3);
    }
    colibri_sampling_t greedy = COLIBRI_SAMPLING_INIT;
    greedy.repetition_penalty = 1e6f; /* whatever was in the prompt is out */
    CHECK_EQ(colibri_sample(s, 0, &greedy, &token), COLIBRI_OK);
    for (int i = 0; i < 6; i++) CHECK(token != tokens[i]);
    for (int cut = 0; cut < 2; cut++) { /* logits that overflow when they are divided: the best one is left */
        colibri_sampling_t cold = COLIBRI_SAMPLING_INIT;
        cold.temperature = 1e-42f;
        cold.top_p = cut ? 0.9f : 0;
        CHECK_EQ(colibri_sample(s, 0, &cold, &token), COLIBRI_OK);
        CHECK_EQ(token, best);
    }
    o.top_p = NAN;
    CHECK_EQ(colibri_sample(s, 0, &o, &token), COLIBRI_ERR_INVALID_ARGUMENT);
    o.top_p = 0;
    o.temperature = -1;
    CHECK_EQ(colibri_sample(s, 0, &o, &token), COLIBRI_ERR_INVALID_ARGUMENT);
    free(logits);
    colibri_free(s);
}

/* With fewer experts for a token, the first of those it had: most are told apart from the rest in another way. */
static void test_route_many(void) {
    enum { ROWS = 20, MOST = 40 };
    static const int32_t fewer[] = {1, 2, 8, 9, 16, 17, 32};
    static _Alignas(64) float hidden[ROWS * 72];
    static int32_t all[ROWS * MOST], ids[ROWS * MOST];
    static float weights[ROWS * MOST];
    for (uint32_t i = 0; i < ROWS * 72; i++) hidden[i] = (float)((i * 7919u) % 201) / 100 - 1;
    memset(hidden, 0, 72 * sizeof(float)); /* equal logits */
    for (uint32_t experts = 40; experts <= 300; experts += 65) {
        make_spec_t spec = MAKE_SPEC_TINY;
        spec.inter = 16;
        spec.experts = experts;
        spec.top_k = MOST;
        write_spec(&spec);
        for (int i = -1; i < 7; i++) {
            colibri_config_t c = config();
            c.top_k = i < 0 ? MOST : fewer[i];
            colibri_t *s = start(&c);
            CHECK_EQ(colibri_route_tokens(s, 0, hidden, ROWS, i < 0 ? all : ids, weights), COLIBRI_OK);
            for (int32_t t = 0; i >= 0 && t < ROWS; t++)
                CHECK(memcmp(ids + t * c.top_k, all + t * MOST, (size_t)c.top_k * sizeof *ids) == 0);
            colibri_free(s);
        }
        for (int32_t n = 0; n < MOST; n++) CHECK_EQ(all[n], n);
    }
}

static void test_route(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.experts = 60;
    spec.top_k = 8;
    spec.dense_layers = 1;
    write_spec(&spec);
    colibri_config_t c = config();
    c.max_chunk_tokens = 4;
    colibri_t *s = start(&c);
    enum { ROWS = 10 };
    static _Alignas(64) float hidden[ROWS * 72];
    int32_t ids[ROWS * 8];
    float weights[ROWS * 8];
    for (uint32_t i = 0; i < ROWS * spec.hidden; i++) hidden[i] = (float)((i * 7919u) % 201) / 100 - 1;
    CHECK_EQ(colibri_route_tokens(s, 1, hidden, ROWS, ids, weights), COLIBRI_OK);
    for (int t = 0; t < ROWS; t++) {
        float sum = 0;
        for (int i = 0; i < 8; i++) {
            sum += weights[t * 8 + i];
            CHECK(ids[t * 8 + i] >= 0 && ids[t * 8 + i] < 60);
            CHECK(i == 0 || weights[t * 8 + i] <= weights[t * 8 + i - 1]);
        }
        CHECK(fabsf(sum - 1) < 1e-5f);
    }
    memset(hidden, 0, sizeof hidden); /* equal logits: the lowest ids, in order */
    hidden[3 * 72 + 5] = NAN;
    CHECK_EQ(colibri_route_tokens(s, 1, hidden, ROWS, ids, weights), COLIBRI_ERR_NOT_FINITE);
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(ids[i], i);
        CHECK(weights[i] == 0.125f);
        CHECK_EQ(ids[3 * 8 + i], -1);
        CHECK(weights[3 * 8 + i] == 0);
        CHECK_EQ(ids[4 * 8 + i], i);
    }
    CHECK_EQ(colibri_route_tokens(s, 0, hidden, ROWS, ids, weights), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_route_tokens(s, 2, hidden, ROWS, ids, weights), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_route_tokens(s, 1, hidden + 1, 1, ids, weights), COLIBRI_ERR_ALIGNMENT);
    colibri_free(s);
}

/* ---- one layer's experts for hosts ---- */

#define MOE_ROWS 9

static void moe_input(float *rows, uint32_t width, uint64_t seed) {
    for (uint32_t i = 0; i < MOE_ROWS * width; i++) rows[i] = make_random(&seed);
}

/* All rows at once, one by one, on other threads and chunks: the same bits; in place too. */
static void check_moe_layer(const make_spec_t *spec, int32_t layer) {
    colibri_config_t c = config();
    float *in = aligned_alloc(64, MOE_ROWS * 512 * sizeof(float)), *all = aligned_alloc(64, MOE_ROWS * 512 * sizeof(float));
    float *row = aligned_alloc(64, 512 * sizeof(float));
    moe_input(in, spec->hidden, 7);
    colibri_t *s = start(&c);
    CHECK_EQ(colibri_moe_forward(s, layer, in, MOE_ROWS, all), COLIBRI_OK);
    for (uint32_t r = 0; r < MOE_ROWS; r++) {
        memcpy(row, in + r * spec->hidden, spec->hidden * sizeof(float));
        CHECK_EQ(colibri_moe_forward(s, layer, row, 1, row), COLIBRI_OK);
        CHECK(memcmp(row, all + r * spec->hidden, spec->hidden * sizeof(float)) == 0);
        bool zero = true;
        for (uint32_t i = 0; i < spec->hidden; i++) zero = zero && row[i] == 0;
        CHECK(!zero);
    }
    colibri_free(s);
    c.num_threads = 3;
    c.max_chunk_tokens = 4;
    s = start(&c);
    CHECK_EQ(colibri_moe_forward(s, layer, in, MOE_ROWS, in), COLIBRI_OK);
    CHECK(memcmp(in, all, MOE_ROWS * spec->hidden * sizeof(float)) == 0);
    colibri_free(s);
    free(in), free(all), free(row);
}

static void test_moe_forward(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    for (spec.dtype = COLIBRI_FILE_F32; spec.dtype <= COLIBRI_FILE_Q4; spec.dtype++) {
        write_spec(&spec);
        for (int32_t layer = 0; layer < (int32_t)spec.layers; layer++) check_moe_layer(&spec, layer);
    }
    colibri_config_t c = config();
    colibri_t *s = start(&c);
    float *rows = aligned_alloc(64, MOE_ROWS * 512 * sizeof(float)), *out = aligned_alloc(64, MOE_ROWS * 512 * sizeof(float));
    moe_input(rows, spec.hidden, 8);
    CHECK_EQ(colibri_moe_forward(s, 0, rows, MOE_ROWS, out), COLIBRI_OK);
    float kept = out[5 * spec.hidden];
    rows[4 * spec.hidden + 3] = NAN;
    rows[7 * spec.hidden] = INFINITY;
    CHECK_EQ(colibri_moe_forward(s, 0, rows, MOE_ROWS, out), COLIBRI_ERR_NOT_FINITE);
    CHECK(strstr(colibri_last_error(), "row 4") != NULL);
    CHECK(out[5 * spec.hidden] == kept && out[4 * spec.hidden + 1] == 0 && out[8 * spec.hidden] != 0);
    CHECK_EQ(colibri_moe_forward(s, 99, rows, 1, out), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_moe_forward(s, 0, rows, 0, out), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_moe_forward(s, 0, rows + 1, 1, out), COLIBRI_ERR_ALIGNMENT);
    CHECK_EQ(colibri_moe_forward(s, 0, rows, 1, out + 4), COLIBRI_ERR_ALIGNMENT);
    CHECK_EQ(colibri_moe_forward(s, 0, rows, 1, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    free(rows), free(out);
    colibri_free(s);
}

/* ---- threads on CPUs of their own ---- */

static void test_affinity(void) {
    static const char *const bad[] = {"", "x", "0,", "1-0", "0,0", "-1", "99999999999", "0-", "0 1", "Auto", "8191"};
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    c.num_threads = 1;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        c.cpu_affinity = bad[i];
        CHECK(colibri_init(&c) == NULL);
        CHECK(colibri_last_status() == COLIBRI_ERR_INVALID_ARGUMENT || colibri_last_status() == COLIBRI_ERR_UNSUPPORTED);
    }
    c.cpu_affinity = "none";
    float *expected = run_config(&c, 7);
    c.cpu_affinity = "auto";
    c.num_threads = 0;
    colibri_t *s = colibri_init(&c);
    if (s == NULL) {
        CHECK_EQ(colibri_last_status(), COLIBRI_ERR_UNSUPPORTED); /* a system without */
    } else {
        colibri_free(s);
        float *there = run_config(&c, 7);
        CHECK(memcmp(there, expected, TOKENS * spec.vocab * sizeof(float)) == 0);
        free(there);
        c.num_threads = 256;
        check_refused(c, COLIBRI_ERR_INVALID_ARGUMENT);
    }
    free(expected);
}

/* ---- statistics, fork ---- */

static void test_stats(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    c.num_threads = 2;
    colibri_t *s = start(&c);
    int32_t tokens[TOKENS];
    fill_tokens(tokens, TOKENS, spec.vocab, 1);
    free(run_pieces(s, tokens, TOKENS - 1, TOKENS, spec.vocab));
    free(run_pieces(s, tokens + TOKENS - 1, 1, 1, spec.vocab));
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    CHECK_EQ(colibri_stats(s, &stats), COLIBRI_OK);
    CHECK_EQ(stats.prompt_tokens, TOKENS - 1);
    CHECK_EQ(stats.decode_tokens, 1);
    CHECK_EQ(stats.infer_calls, 2);
    CHECK(stats.infer_ns > 0 && stats.weight_bytes > 0 && stats.kv_bytes > 0 && stats.workspace_bytes > stats.kv_bytes);
    colibri_expert_stats_t rows[5];
    for (int32_t layer = 0; layer < 2; layer++) {
        uint64_t sum = 0;
        CHECK_EQ(colibri_expert_stats(s, layer, rows, 5), COLIBRI_OK);
        for (int e = 0; e < 5; e++) {
            sum += rows[e].tokens;
            CHECK((rows[e].tokens > 0) == (rows[e].compute_ns > 0));
        }
        CHECK_EQ(sum, TOKENS * 2);
    }
    CHECK_EQ(colibri_expert_stats(s, 0, rows, 4), COLIBRI_ERR_BUFFER_TOO_SMALL);
    CHECK_EQ(colibri_expert_stats(s, 2, rows, 5), COLIBRI_ERR_INVALID_ARGUMENT);
    colibri_stats_reset(s);
    CHECK_EQ(colibri_stats(s, &stats), COLIBRI_OK);
    CHECK_EQ(stats.infer_calls, 0);
    colibri_free(s);
}

/* A host that rounds upward and flushes subnormals gets the same bits, and its own settings back. */
static void test_float_environment(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    for (uint32_t dtype = COLIBRI_FILE_F32; dtype <= COLIBRI_FILE_Q4; dtype++) {
        spec.dtype = dtype;
        write_spec(&spec);
        colibri_config_t c = config();
        c.num_threads = 3;
        float *expected = run_config(&c, 7);
        uint64_t usual = coli_fp_get(), odd = usual;
#if defined(__x86_64__)
        odd = 0x1F80 | 0x4000 | 0x8000 | 0x0040; /* upward, flush to zero, subnormals are zero */
#elif defined(__aarch64__)
        odd = 1u << 22 | 1u << 24;
#endif
        coli_fp_set(odd);
        float *there = run_config(&c, 7);
        uint64_t after = coli_fp_get();
        coli_fp_set(usual);
        CHECK_EQ(after & ~0x3Fu, odd & ~0x3Fu); /* x86: but for the sticky flags of the test's own arithmetic */
        CHECK(memcmp(there, expected, TOKENS * spec.vocab * sizeof(float)) == 0);
        free(there);
        free(expected);
    }
}

/* A host's thread with musl's default stack of 128 KiB is enough. */
static void *whole_life(void *argument) {
    colibri_config_t c = config();
    c.num_threads = 2;
    *(float **)argument = run_config(&c, 7);
    return NULL;
}

static void test_small_stack(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.dtype = COLIBRI_FILE_Q8;
    write_spec(&spec);
    pthread_attr_t attributes;
    pthread_t thread;
    float *there = NULL, *here = NULL;
    CHECK_EQ(pthread_attr_init(&attributes), 0);
    CHECK_EQ(pthread_attr_setstacksize(&attributes, 128 << 10), 0);
    if (pthread_create(&thread, &attributes, whole_life, &there) != 0) { /* a sanitizer's thread-local data needs more */
        fprintf(stderr, "skipped: this build's threads need more than 128 KiB\n");
#if defined(NDEBUG)
        CHECK(false);
#endif
        return;
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    whole_life(&here);
    CHECK(there && here && memcmp(there, here, TOKENS * spec.vocab * sizeof(float)) == 0);
    free(there);
    free(here);
}

static void test_fork(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    write_spec(&spec);
    colibri_config_t c = config();
    c.num_threads = 2;
    colibri_t *s = start(&c);
    int32_t tokens[] = {1, 2, 3}, length = 3, result = -1;
    CHECK_EQ(colibri_set_input(s, tokens, &length, 1), COLIBRI_OK);
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        colibri_status_t status = colibri_infer(s);
        colibri_free(s);
        _exit(status == COLIBRI_OK || status == COLIBRI_ERR_THREAD ? 0 : 1);
    }
    CHECK_EQ(waitpid(child, &result, 0), child);
    CHECK_EQ(result, 0);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    colibri_free(s);
}

int main(int argc, char **argv) {
    snprintf(path, sizeof path, "test_session_%d.colibri", (int)getpid());
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    test_same_bits();
    test_kv_types();
    if (quick) {
        test_not_finite();
        test_float_environment();
        remove(path);
        return check_report();
    }
    test_long_prompt();
    test_large_outputs();
    test_truncate();
    test_outputs();
    test_not_finite();
    test_cancel();
    test_config();
    test_memory();
    test_memory_shared();
    test_memory_refused();
    test_workspace();
    test_sampling();
    test_route();
    test_route_many();
    test_moe_forward();
    test_affinity();
    test_stats();
    test_float_environment();
    test_small_stack();
    test_fork();
    remove(path);
    return check_report();
}
