/* fuzz_infer.c: libFuzzer harness for everything behind an opened file: small models whose parameters, layers and weights were
 * changed, checksum put right, run through a whole session. Nothing may crash, hang or leave its memory; a slot is finite or
 * named as failed; and two instruction sets, thread counts and ways to cut the prompt agree bit for bit, also on such numbers.
 *
 * The linker puts five functions of ours before the library's: files come from the heap, of their exact size, and every
 * buffer of the arena is followed by forbidden bytes, so that AddressSanitizer sees what runs from one into the next.
 *
 *     WRAP="-Wl,--wrap=coli_os_open,--wrap=coli_os_read,--wrap=coli_os_map,--wrap=coli_os_unmap,--wrap=coli_arena_take"
 *                                                                                      (and clang 16 or later)
 *     FLAGS="-std=gnu11 -g -O1 -ffp-contract=off -fsanitize=fuzzer-no-link,address,undefined,float-cast-overflow \
 *         -fno-sanitize-recover=undefined,float-cast-overflow -march=x86-64-v3 -Iinclude -Ilib -Itests/c"
 *     clang $FLAGS -c $(find lib -name '*.c') tests/fuzz/fuzz_infer.c && rm avx512.o
 *     clang $FLAGS -mavx512f -mavx512bw -mavx512vl -mavx512dq -c lib/kernels/avx512.c
 *     clang -fsanitize=fuzzer,address,undefined $WRAP *.o -o fuzz_infer
 *     mkdir -p corpus && ./fuzz_infer corpus -len_control=0 -max_len=72 -max_total_time=600
 */
#include <math.h>
#include <sanitizer/asan_interface.h>

#include "base/arena.h"
#include "base/os.h"
#include "make_file.h"

#define REQUIRE(condition) ((condition) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #condition), __builtin_trap()))
#define SLOTS 2
#define SEQ 40
#define MAX_VOCAB 64
#define NUM_SPECS 10

/* ---- In place of the library's functions ---------------------------------------------------------------------------- */

static const uint8_t *file_bytes;
static size_t file_size;

colibri_status_t __wrap_coli_os_open(const char *path, coli_file_t *file);
colibri_status_t __wrap_coli_os_open(const char *path, coli_file_t *file) {
    (void)path;
    *file = (coli_file_t){-1, file_size, 1}; /* closing it does nothing, and it cannot be opened again */
    return COLIBRI_OK;
}

int64_t __wrap_coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset);
int64_t __wrap_coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    uint64_t most = offset < file->size ? file->size - offset : 0, count = bytes < most ? bytes : most;
    if (count) memcpy(to, file_bytes + offset, (size_t)count);
    return (int64_t)count;
}

colibri_status_t __wrap_coli_os_map(const coli_file_t *file, const char *path, coli_file_map_t *map);
colibri_status_t __wrap_coli_os_map(const coli_file_t *file, const char *path, coli_file_map_t *map) {
    void *copy;
    (void)file, (void)path;
    REQUIRE(posix_memalign(&copy, 64, file_size) == 0);
    map->data = memcpy(copy, file_bytes, file_size);
    map->size = file_size;
    return COLIBRI_OK;
}

void __wrap_coli_os_unmap(coli_file_map_t *map);
void __wrap_coli_os_unmap(coli_file_map_t *map) { free((void *)(uintptr_t)map->data); }

void *__real_coli_arena_take(coli_arena_t *arena, uint64_t count, uint64_t size);
void *__wrap_coli_arena_take(coli_arena_t *arena, uint64_t count, uint64_t size);
void *__wrap_coli_arena_take(coli_arena_t *arena, uint64_t count, uint64_t size) {
    uint8_t *piece = __real_coli_arena_take(arena, count, size);
    __real_coli_arena_take(arena, 1, COLI_ALIGN);
    if (piece) __asan_poison_memory_region(piece + count * size, (size_t)(arena->base + arena->used - (piece + count * size)));
    return piece;
}

/* ---- Models --------------------------------------------------------------------------------------------------------- */

static make_spec_t spec_of(uint32_t index) {
    make_spec_t s = {.hidden = 40, .inter = 20, .heads = 4, .kv_heads = 2, .head_dim = 10, .layers = 2, .experts = 3,
                     .top_k = 2, .vocab = 50, .seed = 1, .norm_topk = 1};
    s.dtype = index % 6 < 3 ? index % 6 : index % 6 < 5 ? COLIBRI_FILE_Q8 : COLIBRI_FILE_Q4;
    if (index % 4 == 3) s.other_dtype = COLIBRI_FILE_Q4 + 1;
    if (index % 2) s.shared = 24, s.shared_gate = 1, s.biases = 2, s.qk_norm = COLIBRI_QK_NORM_HEAD, s.window = 3;
    if (index % 3 == 1) s.layers = 3, s.dense_layers = 1, s.dense_inter = 130, s.rotary_dim = 6;
    if (index % 3 == 2) s.qk_norm = COLIBRI_QK_NORM_WIDTH, s.clip_qkv = 1, s.heads = 5, s.kv_heads = 1;
    if (index % 3 == 2) s.experts = 20, s.top_k = 5;
    if (index == 4) s.hidden = s.inter = s.vocab = s.experts = s.top_k = 1, s.head_dim = 2, s.heads = s.kv_heads = 1;
    return s;
}

static uint8_t *models[NUM_SPECS];
static size_t sizes[NUM_SPECS];

static uint8_t *model_of(uint32_t index) { /* a copy to change; file_size is set */
    make_spec_t spec = spec_of(index);
    if (models[index] == NULL) models[index] = make_model_file(&spec, &sizes[index]);
    REQUIRE(models[index] != NULL);
    file_size = sizes[index];
    uint8_t *copy = malloc(file_size);
    REQUIRE(copy != NULL);
    return memcpy(copy, models[index], file_size);
}

/* ---- Changes: 8 bytes each ------------------------------------------------------------------------------------------ */

static uint32_t strange_bits(uint8_t which, uint32_t raw) {
    static const float floats[] = {NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e30f, -1e30f, 1e19f, 65520.0f,
                                   -65520.0f, 1e-38f, 1e-45f, -1e-45f, 0.0f, -0.0f, 1e10f, -1e10f, 2147483648.0f};
    static const uint32_t integers[] = {0, 1, 2, 3, 15, 16, 17, 127, 128, 129, 4096, 65535, 65536, 1u << 24,
                                        1u << 30, UINT32_MAX};
    uint32_t bits;
    if (which < 16) return integers[which];
    if (which >= 128) return raw;
    memcpy(&bits, &floats[(which - 16) % (sizeof floats / sizeof *floats)], 4);
    return bits;
}

/* One change of the file: a parameter, a layer's kind or window, 1 to 64 words of a payload, or bytes of a directory entry. */
static void change(uint8_t *file, const uint8_t *b) {
    const colibri_file_header *h = (const void *)file;
    uint8_t *params = file + h->directory_offset, *layers = params + sizeof(colibri_file_params);
    colibri_file_entry *entries = (void *)(layers + h->num_layers * sizeof(colibri_file_layer));
    uint32_t raw, bits;
    memcpy(&raw, b + 4, 4);
    bits = strange_bits(b[1], raw);
    if (b[0] < 64) memcpy(params + (b[2] % 46 + 2) * 4, &bits, 4);
    else if (b[0] < 80) memcpy(layers + b[2] % (h->num_layers * 2) / 2 * sizeof(colibri_file_layer) + b[2] % 2 * 4, &bits, 4);
    else if (b[0] < 84) ((uint8_t *)&entries[b[2] % h->num_entries])[b[3] % 24] = b[4];
    else {
        const colibri_file_entry *e = &entries[b[2] % h->num_entries];
        uint64_t words = e->size / 4, first = ((uint64_t)b[3] << 8 | b[7]) * 2654435761u % (words ? words : 1);
        for (uint64_t i = first; i < words && i < first + (b[0] % 64 + 1); i++) memcpy(file + e->offset + i * 4, &bits, 4);
    }
}

/* ---- A session's life ----------------------------------------------------------------------------------------------- */

typedef struct result {
    colibri_status_t status, slots[SLOTS];
    size_t bytes;
    float output[SLOTS * SEQ * MAX_VOCAB];
    int32_t sampled[SLOTS];
} result_t;

typedef struct plan {
    colibri_config_t config;
    int32_t lengths[SLOTS]; /* of the prompt */
    int32_t piece;          /* tokens of one call, 0: all */
    colibri_sampling_t sampling;
} plan_t;

static bool all_finite(const float *x, size_t n) {
    bool yes = true;
    for (size_t i = 0; i < n; i++) yes = yes && isfinite(x[i]);
    return yes;
}

static bool same(const float *a, const float *b, size_t n) { /* what a NaN looks like is not promised */
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], 4) != 0 && !(isnan(a[i]) && isnan(b[i]))) return false;
    return true;
}

/* Prompt and one more call for slot 0 alone; results of the prompt. */
static void run(colibri_t *s, const plan_t *plan, uint32_t vocab, result_t *r) {
    int32_t tokens[SLOTS * SEQ], n = 0, one[SLOTS] = {1, 0};
    for (int i = 0; i < SLOTS; i++)
        for (int32_t t = 0; t < plan->lengths[i]; t++) tokens[n++] = (int32_t)((uint32_t)(t * 7 + i * 3) % vocab);
    REQUIRE(colibri_set_input(s, tokens, plan->lengths, SLOTS) == COLIBRI_OK);
    r->status = colibri_infer(s);
    REQUIRE(r->status == COLIBRI_OK || r->status == COLIBRI_ERR_NOT_FINITE);
    for (int i = 0; i < SLOTS; i++) {
        r->slots[i] = colibri_slot_status(s, i);
        REQUIRE(colibri_slot_length(s, i) == (r->slots[i] ? 0 : plan->lengths[i]));
    }
    REQUIRE(colibri_output_size(s, &r->bytes) == COLIBRI_OK && r->bytes <= sizeof r->output);
    float *output;
    REQUIRE(posix_memalign((void **)&output, 64, r->bytes) == 0);
    REQUIRE(colibri_get_output(s, output, r->bytes) == COLIBRI_OK);
    memcpy(r->output, output, r->bytes);
    free(output);
    if (plan->config.outputs != COLIBRI_OUTPUT_ALL) REQUIRE(all_finite(r->output, r->bytes / sizeof(float)));
    for (int i = 0; i < SLOTS; i++) {
        r->sampled[i] = -1;
        colibri_status_t status = colibri_sample(s, i, &plan->sampling, &r->sampled[i]);
        if (status == COLIBRI_OK) REQUIRE(r->sampled[i] >= 0 && (uint32_t)r->sampled[i] < vocab);
    }
    (void)colibri_set_input(s, tokens, one, SLOTS);
    (void)colibri_infer(s);
    REQUIRE(colibri_truncate(s, 0, colibri_slot_length(s, 0) / 2) == COLIBRI_OK);
}

/* A host's own healthy rows, after whatever went through the session before. */
static void route(colibri_t *s, uint32_t hidden, uint32_t layers, int32_t top_k) {
    float *rows;
    int32_t *ids = malloc((size_t)top_k * 3 * 4);
    float *weights = malloc((size_t)top_k * 3 * 4);
    REQUIRE(posix_memalign((void **)&rows, 64, (size_t)hidden * 3 * 4) == 0);
    for (uint32_t i = 0; i < hidden * 3; i++) rows[i] = (float)(i % 11) * 0.1f - 0.5f;
    for (uint32_t layer = 0; layer < layers; layer++) (void)colibri_route_tokens(s, (int32_t)layer, rows, 3, ids, weights);
    free(rows), free(ids), free(weights);
}

/* False: this model cannot run it. */
static bool life(const plan_t *plan, result_t *r) {
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    colibri_config_t c = plan->config;
    size_t bytes;
    void *workspace;
    if (colibri_workspace_size(&c, &bytes) != COLIBRI_OK) return false;
    REQUIRE(bytes < (size_t)1 << 30);
    REQUIRE(posix_memalign(&workspace, 64, bytes) == 0);
    memset(workspace, 0xA5, bytes);
    c.workspace = workspace;
    c.workspace_size = bytes;
    colibri_t *s = colibri_init(&c);
    REQUIRE(s != NULL);
    REQUIRE(colibri_model_info(colibri_model(s), &info) == COLIBRI_OK);
    run(s, plan, (uint32_t)info.vocab_size, r);
    route(s, (uint32_t)info.hidden_size, (uint32_t)info.num_layers, info.top_k);
    REQUIRE(colibri_reset(s) == COLIBRI_OK);
    result_t *again = malloc(sizeof *again);
    run(s, plan, (uint32_t)info.vocab_size, again);
    REQUIRE(again->bytes == r->bytes && again->status == r->status);
    REQUIRE(same(again->output, r->output, r->bytes / sizeof(float)));
    free(again);
    colibri_free(s);
    __asan_unpoison_memory_region(workspace, bytes);
    free(workspace);
    return true;
}

static plan_t plan_of(const uint8_t *b) {
    plan_t p = {.config = COLIBRI_CONFIG_INIT, .sampling = COLIBRI_SAMPLING_INIT};
    p.config.model_path = "fuzz";
    p.config.max_batch_size = SLOTS;
    p.config.max_seq_len = SEQ;
    p.config.outputs = b[1] % 3;
    p.config.kv_dtype = b[2] % 3;
    p.config.activation_bits = b[3] % 3 * 8;
    p.config.num_threads = 1;
    p.config.isa = COLIBRI_ISA_REF;
    p.lengths[0] = b[4] % 18 + 1;
    p.lengths[1] = b[5] % 6;
    uint32_t bits = strange_bits(b[6], 0x3f800000);
    memcpy(&p.sampling.temperature, &bits, 4);
    if (!(p.sampling.temperature >= 0)) p.sampling.temperature = 1e-38f;
    if (b[7] & 1) p.sampling.top_k = b[7] / 16 + 1;
    if (b[7] & 2) p.sampling.top_p = (float)b[7] / 255;
    if (b[7] & 4) p.sampling.min_p = 0.3f;
    if (b[7] & 8) p.sampling.repetition_penalty = b[7] & 16 ? 1e-38f : 3e38f;
    return p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static result_t reference, other;
    if (n < 16) return 0;
    uint8_t *file = model_of(data[0] % NUM_SPECS);
    for (size_t i = 8; i + 8 <= n; i += 8) change(file, data + i);
    make_checksum(file, file_size);
    file_bytes = file;
    plan_t plan = plan_of(data);
    if (life(&plan, &reference)) {
        plan.config.isa = COLIBRI_ISA_AUTO;
        plan.config.num_threads = data[0] & 64 ? 3 : 1;
        plan.config.max_chunk_tokens = data[0] & 128 ? 5 : 0;
        REQUIRE(life(&plan, &other));
        REQUIRE(other.status == reference.status && other.bytes == reference.bytes);
        REQUIRE(memcmp(other.slots, reference.slots, sizeof other.slots) == 0);
        REQUIRE(same(other.output, reference.output, other.bytes / sizeof(float)));
        REQUIRE(memcmp(other.sampled, reference.sampled, sizeof other.sampled) == 0);
        plan.config.isa = colibri_isa_supported(COLIBRI_ISA_AVX2) ? COLIBRI_ISA_AVX2 : COLIBRI_ISA_REF;
        REQUIRE(life(&plan, &other));
        REQUIRE(same(other.output, reference.output, other.bytes / sizeof(float)));
    }
    free(file);
    return 0;
}
