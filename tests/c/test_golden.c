/* test_golden.c: the same bits everywhere. A tiny model of each storage type is made, a fixed script is run on it, and the
 * SHA-256 of the file and of all logits must be the committed ones: with every instruction set that is usable here, with any
 * number of threads, in one call, in pieces or beside other slots. The same values hold for every processor and system.
 *
 * Where the definition of a kernel or of a packer is changed on purpose, print new values (by the reference, one thread):
 *     zig build golden > golden.tmp && mv golden.tmp tests/c/golden_sums.h */
#include <unistd.h>

#include "base/os.h"
#include "check.h"
#include "make_file.h"
#include "sha256.h"

typedef struct golden {
    const char *name;
    uint32_t dtype;
    const char *file;       /* SHA-256 of the model file */
    const char *logits;     /* of the script's logits */
    const char *logits_kv8; /* with an 8-bit KV cache */
} golden_t;

#include "golden_sums.h"

enum { SEQUENCES = 3, PROMPT = 40, LENGTH = 50, VOCAB = 61 };

/* Dense first layer, window in the second, shared expert with gate, norms of heads, biases; nothing round. */
static const make_spec_t spec_of_all = { .hidden = 120,
                                         .inter = 40,
                                         .heads = 6,
                                         .kv_heads = 2,
                                         .head_dim = 20,
                                         .rotary_dim = 12,
                                         .layers = 3,
                                         .experts = 7,
                                         .top_k = 2,
                                         .vocab = VOCAB,
                                         .shared = 56,
                                         .shared_gate = 1,
                                         .dense_layers = 1,
                                         .dense_inter = 100,
                                         .qk_norm = COLIBRI_QK_NORM_HEAD,
                                         .biases = 2,
                                         .window = 19,
                                         .norm_topk = 1,
                                         .seed = 20 };

/* How the script is given: tokens of each call by sequence; after them one by one. 0: that slot is idle. */
typedef struct way {
    int slots; /* 1: one sequence after the other */
    int threads, chunk;
    int pieces[SEQUENCES][4];
} way_t;

static const way_t ways[] = {
    { 1, 1, 0, { { 40 }, { 40 }, { 40 } } },
    { 1, 2, 16, { { 7, 1, 32 }, { 40 }, { 3, 37 } } },
    { SEQUENCES, 3, 0, { { 40 }, { 13, 27 }, { 0, 9, 31 } } },
    { SEQUENCES, 8, 64, { { 0, 0, 40 }, { 40 }, { 40 } } },
    { SEQUENCES, 2, 5, { { 20, 20 }, { 40 }, { 39, 1 } } },
};

static int32_t token_of(int sequence, int position) { return (position * position * 7 + position * 5 + sequence * 11) % VOCAB; }

/* One call of the slots from `first`; done[sequence] tokens are behind. False: nothing was left to do. */
static bool call(colibri_t *s, const way_t *way, int step, int first, int done[], float *logits, float *output) {
    int32_t tokens[SEQUENCES * PROMPT], lengths[SEQUENCES];
    int n = 0, at = 0;
    for (int slot = 0; slot < way->slots; slot++) {
        int q = first + slot, piece = step < 4 ? way->pieces[q][step] : 0;
        if (done[q] >= PROMPT && done[q] < LENGTH) piece = 1;
        for (int i = 0; i < piece; i++) tokens[n++] = token_of(q, done[q] + i);
        lengths[slot] = piece;
    }
    if (!n) return false;
    CHECK_EQ(colibri_set_input(s, tokens, lengths, way->slots), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    CHECK_EQ(colibri_get_output(s, output, (size_t)n * VOCAB * sizeof(float)), COLIBRI_OK);
    for (int slot = 0; slot < way->slots; slot++) { /* rows in order of slots */
        int q = first + slot;
        memcpy(logits + (size_t)(q * LENGTH + done[q]) * VOCAB, output + (size_t)at * VOCAB,
               (size_t)lengths[slot] * VOCAB * sizeof(float));
        at += lengths[slot];
        done[q] += lengths[slot];
    }
    return true;
}

/* In the place of threads, where a build has none. */
static void one_after_another(colibri_task_fn task, void *argument, int32_t n, void *user_data) {
    (void)user_data;
    for (int32_t i = n; i-- > 0;) task(argument, i);
}

/* The SHA-256 of logits [SEQUENCES][LENGTH][VOCAB]. */
static void run_script(colibri_model_t *model, int isa, const way_t *way, int kv_dtype, char sum[65]) {
    static _Alignas(64) float logits[SEQUENCES * LENGTH * VOCAB], output[SEQUENCES * PROMPT * VOCAB];
    int done[SEQUENCES] = { 0 };
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model = model;
    c.max_batch_size = way->slots;
    c.max_seq_len = LENGTH;
    c.num_threads = way->threads;
    if (!COLI_THREADS) c.parallel_for = one_after_another;
    c.max_chunk_tokens = way->chunk;
    c.isa = isa;
    c.kv_dtype = kv_dtype;
    c.outputs = COLIBRI_OUTPUT_ALL;
    colibri_t *s = colibri_init(&c);
    CHECK(s != NULL);
    memset(logits, 0, sizeof logits);
    for (int first = 0; s && first < SEQUENCES; first += way->slots) {
        CHECK_EQ(colibri_reset(s), COLIBRI_OK);
        for (int step = 0; call(s, way, step, first, done, logits, output); step++) {}
    }
    for (int q = 0; s && q < SEQUENCES; q++) CHECK_EQ(done[q], LENGTH);
    colibri_free(s);
    sha256(logits, sizeof logits, sum);
}

static void check_sum(const char *model, const char *what, const char *sum, const char *expected) {
    check_count++;
    if (strcmp(sum, expected) == 0) return;
    check_failures++;
    fprintf(stderr, "%s, %s: SHA-256 is %s, expected %s\n", model, what, sum, expected);
}

static void check_model(const golden_t *g, colibri_model_t *model) {
    char sum[65], what[64];
    for (int isa = COLIBRI_ISA_REF; isa < COLIBRI_ISA_COUNT_; isa++) {
        if (!colibri_isa_supported(isa)) continue;
        for (int i = 0; i < 5; i++) {
            if (isa == COLIBRI_ISA_REF && i > 0 && i < 4) continue; /* slow */
            run_script(model, isa, &ways[i], i == 4 ? COLIBRI_DTYPE_Q8 : 0, sum);
            snprintf(what, sizeof what, "logits, %s, way %d", colibri_isa_name(isa), i);
            check_sum(g->name, what, sum, i == 4 ? g->logits_kv8 : g->logits);
        }
    }
}

static void print_model(const golden_t *g, colibri_model_t *model, const char *file) {
    static const char *const types[] = { "F32", "F16", "BF16", "Q8", "Q4" };
    char sum[65];
    printf("    { \"%s\", COLIBRI_FILE_%s,\n      \"%s\",\n", g->name, types[g->dtype], file);
    run_script(model, COLIBRI_ISA_REF, &ways[0], 0, sum);
    printf("      \"%s\",\n", sum);
    run_script(model, COLIBRI_ISA_REF, &ways[0], COLIBRI_DTYPE_Q8, sum);
    printf("      \"%s\" },\n", sum);
}

static void test_sha256(void) {
    static uint8_t million[1000000];
    char sum[65];
    sha256("", 0, sum);
    check_sum("sha256", "nothing", sum, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    sha256("abc", 3, sum);
    check_sum("sha256", "abc", sum, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, sum);
    check_sum("sha256", "56 letters", sum, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    memset(million, 'a', sizeof million);
    sha256(million, sizeof million, sum);
    check_sum("sha256", "a million", sum, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* By way of a file where the build has files, else from memory, which is *memory then. */
static colibri_model_t *open_model(const char *path, const uint8_t *file, size_t size, uint8_t **memory) {
    colibri_model_t *model = NULL;
    *memory = NULL;
#if defined(COLI_NO_FILES)
    (void)path;
    *memory = malloc(size + 64);
    uint8_t *data = *memory + (64 - (uintptr_t)*memory % 64) % 64;
    memcpy(data, file, size);
    CHECK_EQ(colibri_model_open("golden.colibri", &model), COLIBRI_ERR_UNSUPPORTED);
    CHECK_EQ(colibri_model_open_memory(data, size, &model), COLIBRI_OK);
#else
    CHECK(write_model_file(path, file, size) && colibri_model_open(path, &model) == COLIBRI_OK);
#endif
    return model;
}

int main(int argc, char **argv) {
    bool print = argc > 1 && strcmp(argv[1], "--print") == 0;
    char path[64], sum[65];
    snprintf(path, sizeof path, "test_golden_%d.colibri", (int)getpid());
    test_sha256();
    if (print) printf("/* golden_sums.h: printed by test_golden --print. */\nstatic const golden_t golden[] = {\n");
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        make_spec_t spec = spec_of_all;
        size_t size;
        spec.dtype = golden[i].dtype;
        uint8_t *file = make_model_file(&spec, &size), *memory;
        CHECK(file != NULL);
        colibri_model_t *model = file ? open_model(path, file, size, &memory) : NULL;
        if (!model) {
            fprintf(stderr, "%s\n", colibri_last_error());
            return check_report();
        }
        sha256(file, size, sum);
        free(file);
        if (!print) check_sum(golden[i].name, "file", sum, golden[i].file);
        if (print) print_model(&golden[i], model, sum);
        else check_model(&golden[i], model);
        colibri_model_close(model);
        free(memory);
        remove(path);
    }
    if (print) printf("};\n");
    return check_report();
}
