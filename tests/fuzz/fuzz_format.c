/* fuzz_format.c: libFuzzer harness for opening files. The input is header and directory; the payloads after it are zeros up to
 * the file size that the header names (at most 1 MiB). File size and checksum are put right, so that mutations get past the
 * first doors. What opens is walked: first and last byte of every tensor and of every expert must lie inside the file. What is
 * read as a file opens, or not, as it does in memory.
 *
 *     clang -std=gnu11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -DMAKE_FILE_F32_ONLY \
 *         -Iinclude -Ilib -Itests/c tests/fuzz/fuzz_format.c lib/model/crc32.c lib/model/format.c lib/model/weights.c \
 *         lib/base/status.c -o fuzz_format
 *     mkdir -p corpus && ./fuzz_format corpus -seed_corpus=1      writes the first inputs, then
 *     ./fuzz_format corpus -use_value_profile=1 -max_len=8192 -max_total_time=180
 */
#include "make_file.h"

#include "model/weights.h"

#define MAX_FILE (1u << 20)

static volatile unsigned sink; /* so that no read is optimised away */

static void touch(const void *data, uint64_t size) {
    const uint8_t *p = data;
    if (p != NULL && size > 0) sink += (unsigned)p[0] + p[size - 1];
}

static void touch_vector(const float *v, uint32_t n) { touch(v, (uint64_t)coli_pad_k(n) * 4); }

static void touch_matrix(const coli_matrix_t *m) {
    uint64_t blocks = coli_pad_rows(m->rows) / COLIBRI_TILE_ROWS;
    touch(m->tiles, blocks * m->block_bytes);
    if (m->scale != NULL) touch(m->scale, blocks * COLIBRI_TILE_ROWS * 4);
}

static void touch_mlp(const coli_mlp_t *m) {
    touch_matrix(&m->gate_up);
    touch_matrix(&m->down);
}

static void walk_layer(const coli_weights_t *w, uint32_t index) {
    const colibri_file_params *p = w->params;
    const coli_layer_t *l = &w->layers[index];
    bool wide = p->qk_norm == COLIBRI_QK_NORM_WIDTH;
    touch_vector(l->attn_norm, p->hidden_size);
    touch_vector(l->mlp_norm, p->hidden_size);
    touch_vector(l->qkv_bias, w->q_rows + 2 * w->kv_rows);
    touch_vector(l->out_bias, p->hidden_size);
    touch_vector(l->q_norm, wide ? w->q_rows : w->head_dim_padded);
    touch_vector(l->k_norm, wide ? w->kv_rows : w->head_dim_padded);
    touch_matrix(&l->qkv);
    touch_matrix(&l->out);
    if (!l->is_moe) {
        touch_mlp(&l->dense);
        return;
    }
    touch_matrix(&l->router);
    if (l->has_shared) touch_mlp(&l->shared);
    if (l->shared_gate.rows > 0) touch_matrix(&l->shared_gate);
    for (uint32_t e = 0; e < p->num_experts; e++) {
        coli_mlp_t mlp = coli_mlp_view(l->experts + e * l->expert_stride, l->expert_dtype, p->moe_intermediate, p->hidden_size);
        touch_mlp(&mlp);
    }
}

static void walk(const coli_directory_t *d) {
    coli_layer_t *layers = calloc(d->params->num_layers, sizeof *layers);
    coli_weights_t w;
    uint64_t parameters, active;
    if (layers == NULL) return;
    coli_weights_view(d, NULL, NULL, layers, &w);
    coli_weights_totals(d, &parameters, &active);
    if (active > d->file_size) __builtin_trap(); /* no product reads more than there is */
    touch(w.embedding, w.params->vocab_size * w.embedding_stride);
    touch_vector(w.final_norm, w.params->hidden_size);
    touch_vector(w.rope_inv_freq, w.params->rotary_dim / 2);
    touch_matrix(&w.head);
    for (uint32_t i = 0; i < w.params->num_layers; i++) walk_layer(&w, i);
    free(layers);
    (void)coli_format_verify(d, "fuzz");
}

/* In place of os.c: the file is memory. */
static const uint8_t *source_bytes;

int64_t coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    uint64_t most = offset < file->size ? file->size - offset : 0, count = bytes < most ? bytes : most;
    if (count > 0) memcpy(to, source_bytes + offset, (size_t)count);
    return (int64_t)count;
}

const char *coli_os_reason(int error) {
    (void)error;
    return "?";
}

/* As it lies, and read from a file: the same. */
static void open_bytes(const uint8_t *file, size_t size) {
    coli_directory_t d, copied;
    coli_file_t source = {.handle = 0, .size = size, .alignment = 1};
    source_bytes = file;
    colibri_status_t status = coli_format_open(file, size, NULL, "fuzz", &d);
    if (coli_format_open(file, size, &source, "fuzz", &copied) != status) __builtin_trap();
    if (status != COLIBRI_OK) return;
    walk(&d);
    walk(&copied);
    for (uint32_t role = COLIBRI_ROLE_TOKENIZER; role <= COLIBRI_ROLE_METADATA; role++) {
        size_t size_of[2];
        const uint8_t *lies = coli_format_bytes(&d, role, &size_of[0]), *copy = coli_format_bytes(&copied, role, &size_of[1]);
        if (size_of[0] != size_of[1] || (lies && memcmp(lies, copy, size_of[0]) != 0)) __builtin_trap();
    }
    coli_format_close(&copied);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    colibri_file_header h = {.version = 0};
    size_t size = n;
    if (n >= sizeof h) {
        memcpy(&h, data, sizeof h);
        if (h.file_size > n && h.file_size <= MAX_FILE) size = (size_t)h.file_size;
    }
    uint8_t *file = calloc(1, size == 0 ? 1 : size);
    if (file == NULL) return 0;
    memcpy(file, data, n);
    open_bytes(file, size); /* as it is */
    if (n >= sizeof h) {
        h.file_size = size;
        memcpy(file, &h, sizeof h);
        make_checksum(file, size);
        open_bytes(file, size);
    }
    free(file);
    return 0;
}

/* ---- The first inputs ----------------------------------------------------------------------------------------------- */

static void write_seed(const char *folder, const char *name, const make_spec_t *spec) {
    size_t size;
    uint8_t *file = make_model_file(spec, &size);
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (file != NULL && size <= MAX_FILE) {
        write_model_file(path, file, 64 + (size_t)((colibri_file_header *)file)->directory_size);
    }
    free(file);
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    if (*argc < 3 || strcmp((*argv)[2], "-seed_corpus=1") != 0) return 0;
    make_spec_t s = {.hidden = 40,
                     .inter = 20,
                     .heads = 2,
                     .kv_heads = 1,
                     .head_dim = 10,
                     .layers = 1,
                     .experts = 2,
                     .top_k = 1,
                     .vocab = 20,
                     .seed = 1};
    write_seed((*argv)[1], "moe", &s);
    s.layers = 3, s.dense_layers = 1, s.shared = 24, s.shared_gate = 1, s.biases = 2, s.qk_norm = 2, s.window = 3,
    s.texts = true;
    write_seed((*argv)[1], "all", &s);
    s.qk_norm = 1, s.shared_gate = 0, s.texts = false, s.norm_topk = 1;
    write_seed((*argv)[1], "heads", &s);
    s.dense_layers = 3;
    write_seed((*argv)[1], "dense", &s);
    exit(0);
}
