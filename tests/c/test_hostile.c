/* test_hostile.c: files whose structure is right and whose numbers are not: huge and non-finite weights and shapes, through
 * whole sessions. What fails is named, and leaves no trace in other slots and later calls. A caller's workspace ends where a
 * page that must not be touched begins. */
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "forward/plan.h"
#include "make_file.h"


#define TOKENS 20
static char path[64];

typedef struct damage {
    uint32_t role, layer; /* of the tensor */
    uint64_t word, count; /* its f32 words to set */
    float value;
} damage_t;

static void write_damaged(const make_spec_t *spec, const damage_t *d) {
    size_t size;
    uint8_t *file = make_model_file(spec, &size);
    CHECK(file != NULL);
    const colibri_file_header *h = (const void *)file;
    const colibri_file_entry *e =
        (const void *)(file + h->directory_offset + sizeof(colibri_file_params) + spec->layers * sizeof(colibri_file_layer));
    for (uint32_t i = 0; d && i < h->num_entries; i++)
        if (e[i].role == d->role && e[i].layer == d->layer)
            for (uint64_t w = d->word; w < d->word + d->count; w++) memcpy(file + e[i].offset + w * 4, &d->value, 4);
    CHECK(write_model_file(path, file, size));
    free(file);
}

static colibri_config_t config(int32_t outputs) {
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model_path = path;
    c.max_seq_len = 64;
    c.max_batch_size = 2;
    c.num_threads = 2;
    c.outputs = outputs;
    return c;
}

static colibri_t *start(const colibri_config_t *c) {
    colibri_t *s = colibri_init(c);
    if (!s) fprintf(stderr, "%s\n", colibri_last_error());
    CHECK(s != NULL);
    return s;
}

/* `n` tokens from `first` on, for one slot. */
static colibri_status_t feed(colibri_t *s, int32_t slot, int32_t first, int32_t n) {
    int32_t tokens[TOKENS], lengths[2] = {0, 0};
    for (int32_t i = 0; i < n; i++) tokens[i] = first + i;
    lengths[slot] = n;
    CHECK_EQ(colibri_set_input(s, tokens, lengths, 2), COLIBRI_OK);
    return colibri_infer(s);
}

static float *output_of(colibri_t *s, size_t *bytes) {
    CHECK_EQ(colibri_output_size(s, bytes), COLIBRI_OK);
    float *out = aligned_alloc(64, (*bytes + 127) / 64 * 64);
    CHECK_EQ(colibri_get_output(s, out, *bytes), COLIBRI_OK);
    return out;
}

/* ---- shapes ---- */

/* What the limits of the format allow, times the greatest batch and sequence, is more than 64 bits can count. */
static void test_huge_cache(void) {
    colibri_file_params p = {.vocab_size = 16, .hidden_size = 128, .num_layers = 65535, .num_heads = 128, .num_kv_heads = 128,
                             .head_dim = 1024, .rotary_dim = 1024, .max_position = 1 << 30, .dense_intermediate = 128};
    colibri_model_t model = {.directory = {.params = &p},
                             .weights = {.params = &p, .head_dim_padded = 1024, .q_rows = 131072, .kv_rows = 131072}};
    coli_options_t o = {.batch = 4096, .seq = 1 << 24, .threads = 1, .chunk = 1, .expert_bits = 8, .other_bits = 16};
    static colibri_t s;
    coli_arena_t arena = {0};
    coli_plan(&arena, &model, &o, &s);
    CHECK(arena.overflow);
    p.num_layers = 1;
    arena = (coli_arena_t){0};
    coli_plan(&arena, &model, &o, &s);
    CHECK(!arena.overflow && arena.used > (uint64_t)1 << 55);
}

/* ---- numbers ---- */

/* Angles beyond all reason: every instruction set says the same, and nobody converts them to integers. */
static void test_frequencies(void) {
    const float values[] = {NAN, INFINITY, -INFINITY, 3e38f, -1e30f, 1e19f};
    make_spec_t spec = MAKE_SPEC_TINY;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        damage_t d = {COLIBRI_ROLE_ROPE_INV_FREQ, 0, 3, 1, values[i]};
        write_damaged(&spec, &d);
        for (int32_t isa = COLIBRI_ISA_AUTO; isa <= COLIBRI_ISA_REF; isa++) {
            colibri_config_t c = config(COLIBRI_OUTPUT_LAST);
            c.isa = isa;
            colibri_t *s = start(&c);
            CHECK_EQ(feed(s, 0, 1, TOKENS), COLIBRI_ERR_NOT_FINITE);
            colibri_free(s);
        }
    }
}

/* The final norm is the last place where a number can go wrong before hidden states are handed out. */
static void test_final_norm(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    damage_t d = {COLIBRI_ROLE_FINAL_NORM, 0, 7, 1, NAN};
    for (int huge = 0; huge < 2; huge++) {
        if (huge) d.value = 3e38f;
        write_damaged(&spec, &d);
        for (int32_t outputs = COLIBRI_OUTPUT_LAST; outputs <= COLIBRI_OUTPUT_HIDDEN; outputs++) {
            colibri_config_t c = config(outputs);
            colibri_t *s = start(&c);
            size_t bytes;
            CHECK_EQ(feed(s, 0, 1, TOKENS), COLIBRI_ERR_NOT_FINITE);
            CHECK_EQ(colibri_slot_status(s, 0), COLIBRI_ERR_NOT_FINITE);
            float *out = output_of(s, &bytes);
            for (size_t i = 0; i < bytes / sizeof(float); i++) CHECK(out[i] == 0);
            free(out);
            colibri_free(s);
        }
    }
}

/* Every stage has been through with NaN in all of its rows; then healthy tokens, on the same and on the other slot, and a
 * host's rows to the router. Widths alternate: dense layers, routed and shared experts share buffers. */
static void check_no_trace(uint32_t dtype, int32_t kv_dtype) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.dtype = dtype, spec.layers = 4, spec.dense_layers = 1, spec.dense_inter = 150, spec.shared = 56, spec.shared_gate = 1;
    damage_t d = {COLIBRI_ROLE_EMBEDDING, 0, 0, 0, NAN};
    uint32_t element = dtype == COLIBRI_FILE_F16 || dtype == COLIBRI_FILE_BF16 ? 2 : 4;
    d.count = 8 * make_pad(spec.hidden * element, 64) / 4; /* tokens 0 to 7 */
    write_damaged(&spec, &d);
    colibri_config_t c = config(COLIBRI_OUTPUT_LAST);
    c.kv_dtype = kv_dtype;
    colibri_t *s = start(&c), *fresh = start(&c);
    size_t bytes;
    for (int32_t slot = 0; slot < 2; slot++) {
        CHECK_EQ(feed(s, slot, 10, 3), COLIBRI_OK);
        CHECK_EQ(feed(s, slot, 0, 8), COLIBRI_ERR_NOT_FINITE);
        CHECK_EQ(feed(fresh, slot, 10, 3), COLIBRI_OK);
    }
    static _Alignas(64) float rows[5 * 72];
    int32_t ids[2][10];
    float weights[2][10];
    for (int i = 0; i < 5 * 72; i++) rows[i] = (float)(i * 7919 % 201) / 100 - 1;
    CHECK_EQ(colibri_route_tokens(s, 2, rows, 5, ids[0], weights[0]), COLIBRI_OK);
    CHECK_EQ(colibri_route_tokens(fresh, 2, rows, 5, ids[1], weights[1]), COLIBRI_OK);
    CHECK(memcmp(ids[0], ids[1], sizeof ids[0]) == 0 && memcmp(weights[0], weights[1], sizeof weights[0]) == 0);
    for (int32_t slot = 0; slot < 2; slot++) {
        CHECK_EQ(feed(s, slot, 20, TOKENS), COLIBRI_OK);
        CHECK_EQ(feed(fresh, slot, 20, TOKENS), COLIBRI_OK);
    }
    float *a = output_of(s, &bytes), *b = output_of(fresh, &bytes);
    CHECK(memcmp(a, b, bytes) == 0);
    free(a), free(b);
    colibri_free(s), colibri_free(fresh);
}

/* Vectors of the file that are not zero where they should be padding: what they say must not pile up from call to call. */
static void test_padding(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.biases = 2, spec.qk_norm = COLIBRI_QK_NORM_WIDTH;
    const uint32_t roles[] = {COLIBRI_ROLE_ATTN_OUT_BIAS, COLIBRI_ROLE_ATTN_NORM, COLIBRI_ROLE_MLP_NORM,
                              COLIBRI_ROLE_ATTN_Q_NORM};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        damage_t d = {roles[i], 1, spec.hidden, 128 - spec.hidden, 1000};
        write_damaged(&spec, &d);
        colibri_config_t c = config(COLIBRI_OUTPUT_LAST);
        colibri_t *s = start(&c);
        size_t bytes;
        CHECK_EQ(feed(s, 0, 1, TOKENS), COLIBRI_OK);
        float *first = output_of(s, &bytes);
        CHECK_EQ(colibri_reset(s), COLIBRI_OK);
        CHECK_EQ(feed(s, 0, 1, 9), COLIBRI_OK);
        CHECK_EQ(feed(s, 0, 10, TOKENS - 9), COLIBRI_OK);
        float *again = output_of(s, &bytes);
        CHECK(memcmp(first, again, bytes) == 0);
        free(first), free(again);
        colibri_free(s);
    }
}

/* ---- workspace: exact for any config ---- */

static uint32_t pick(uint64_t *random, uint32_t low, uint32_t high) {
    make_random(random);
    return low + (uint32_t)(*random >> 33) % (high - low + 1);
}

static colibri_config_t random_config(uint64_t *random) {
    colibri_config_t c = config((int32_t)pick(random, 0, 2));
    c.max_batch_size = (int32_t)pick(random, 2, 5);
    c.max_seq_len = (int32_t)pick(random, TOKENS, 70);
    c.max_chunk_tokens = (int32_t)pick(random, 0, 30);
    c.num_threads = (int32_t)pick(random, 1, 3);
    c.kv_dtype = (int32_t)pick(random, 0, 2);
    c.activation_bits = (int32_t)pick(random, 0, 2) * 8;
    c.isa = (int32_t)pick(random, 0, 1);
    return c;
}

static make_spec_t random_spec(uint64_t *random) {
    make_spec_t s = {.hidden = pick(random, 1, 150), .inter = pick(random, 1, 150), .layers = pick(random, 1, 3),
                     .kv_heads = pick(random, 1, 3), .head_dim = 2 * pick(random, 1, 20), .experts = pick(random, 1, 20),
                     .vocab = pick(random, 40, 400), .dtype = pick(random, 0, 4), .seed = *random};
    s.heads = s.kv_heads * pick(random, 1, 5);
    s.top_k = pick(random, 1, s.experts);
    s.shared = pick(random, 0, 1) * pick(random, 1, 300);
    s.dense_layers = pick(random, 0, s.layers);
    s.dense_inter = pick(random, 1, 300);
    s.qk_norm = pick(random, 0, 2);
    s.window = pick(random, 0, 9);
    return s;
}

static void test_workspace_ends(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint64_t random = 7;
    for (int round = 0; round < 60; round++) {
        make_spec_t spec = random_spec(&random);
        colibri_config_t c = random_config(&random);
        write_damaged(&spec, NULL);
        CHECK_EQ(colibri_workspace_size(&c, &c.workspace_size), COLIBRI_OK);
        size_t kept = make_pad(c.workspace_size, page);
        uint8_t *memory = mmap(NULL, kept + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED && mprotect(memory + kept, page, PROT_NONE) == 0);
        c.workspace = memory + kept - c.workspace_size;
        memset(c.workspace, 0xA5, c.workspace_size);
        colibri_t *s = start(&c);
        size_t bytes;
        CHECK_EQ(feed(s, 1, 3, TOKENS), COLIBRI_OK);
        free(output_of(s, &bytes));
        for (const uint8_t *p = memory; p < (uint8_t *)c.workspace; p++) CHECK(*p == 0);
        colibri_free(s);
        munmap(memory, kept + page);
    }
}

int main(void) {
    snprintf(path, sizeof path, "test_hostile_%d.colibri", (int)getpid()); /* several may run in one folder */
    test_huge_cache();
    test_frequencies();
    test_final_norm();
    for (uint32_t dtype = COLIBRI_FILE_F32; dtype <= COLIBRI_FILE_Q4; dtype++)
        for (int32_t kv = COLIBRI_DTYPE_F32; kv <= COLIBRI_DTYPE_F16; kv++) check_no_trace(dtype, kv);
    test_padding();
    test_workspace_ends();
    remove(path);
    return check_report();
}
