/* test_format.c: files as untrusted bytes. Good files of many shapes open and their weights lie where they should; every
 * truncation and every flipped byte of header and directory is refused; so is every kind of lie under a right checksum, by a
 * sentence that names it; damaged payloads are found by verify; failed opens leave nothing behind. Read from a file they give
 * the same, and what happens to the file after that changes nothing but weights. */
#include "check.h"
#include "make_file.h"
#include "make_tokenizer.h"

#include "base/status.h"
#include "base/structs.h"
#include "model/residency.h"
#include "model/weights.h"

#if defined(__linux__)
#include <dirent.h>
#endif
#if !defined(_WIN32)
#include <unistd.h>
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER 1
#endif
#endif

static const make_spec_t tiny = MAKE_SPEC_TINY;

static make_spec_t full_spec(uint32_t dtype) { /* every optional thing at once */
    make_spec_t s = tiny;
    s.layers = 3, s.dense_layers = 1, s.shared = 56, s.shared_gate = 1, s.qk_norm = COLIBRI_QK_NORM_WIDTH, s.biases = 2;
    s.window = 7, s.texts = true, s.dtype = dtype;
    return s;
}

/* Does opening these bytes fail with this status and a sentence that holds these words (NULL: any)? */
static bool refused(const uint8_t *file, uint64_t size, colibri_status_t status, const char *words) {
    coli_directory_t d;
    colibri_status_t got = coli_format_open(file, size, NULL, "some/model.colibri", &d);
    bool ok = got == status && (words == NULL || strstr(colibri_last_error(), words) != NULL) &&
              strstr(colibri_last_error(), "some/model.colibri: ") != NULL;
    if (!ok) {
        fprintf(stderr, "status %s instead of %s \"%s\": %s\n", colibri_status_name(got), colibri_status_name(status),
                words == NULL ? "" : words, got == COLIBRI_OK ? "" : colibri_last_error());
    }
    return ok;
}

#define PATH "test_format.tmp.colibri"

/* The same from a file: the same status, the same sentence. There is no mapping: nothing may be looked up in it. */
static bool same_from_file(const uint8_t *file, size_t size) {
    coli_directory_t d = {0};
    coli_file_t source = {.handle = -1};
    char sentence[512] = "";
    colibri_status_t expected = coli_format_open(file, size, NULL, "some/model.colibri", &d);
    if (expected != COLIBRI_OK) snprintf(sentence, sizeof sentence, "%s", colibri_last_error());
    CHECK(write_model_file(PATH, file, size) && coli_os_open(PATH, &source) == COLIBRI_OK);
    colibri_status_t got = coli_format_open(NULL, size, &source, "some/model.colibri", &d);
    coli_os_close(&source);
    remove(PATH);
    bool ok = got == expected && (got == COLIBRI_OK || strcmp(sentence, colibri_last_error()) == 0);
    if (!ok) fprintf(stderr, "from memory: \"%s\", from a file: \"%s\"\n", sentence, got ? colibri_last_error() : "");
    coli_format_close(&d);
    return ok;
}

static uint8_t *copy_of(const uint8_t *file, size_t size) { /* exactly sized, so that a sanitizer sees one byte too many */
    uint8_t *copy = malloc(size == 0 ? 1 : size);
    memcpy(copy, file, size);
    return copy;
}

/* Sum of the first and last byte of all weights: out of range would crash, or be seen by a sanitizer. */
static unsigned touch(const void *data, uint64_t size) {
    const uint8_t *p = data;
    return p == NULL || size == 0 ? 0 : (unsigned)p[0] + p[size - 1];
}

static unsigned touch_matrix(const coli_matrix_t *m) {
    if (m->rows == 0) return 0;
    uint64_t blocks = coli_pad_rows(m->rows) / 16;
    return touch(m->tiles, blocks * m->block_bytes) + touch(m->scale, m->scale == NULL ? 0 : blocks * 64);
}

static unsigned touch_mlp(const coli_mlp_t *m) { return touch_matrix(&m->gate_up) + touch_matrix(&m->down); }

static void check_weights(const make_spec_t *s, const coli_weights_t *w, uint32_t layer) {
    const coli_layer_t *l = &w->layers[layer];
    uint32_t d = coli_pad_rows(s->head_dim);
    bool moe = layer >= s->dense_layers;
    CHECK(l->attn_norm != NULL && l->mlp_norm != NULL);
    CHECK_EQ(l->qkv.rows, (s->heads + 2 * s->kv_heads) * d);
    CHECK_EQ(l->qkv.k, s->hidden);
    CHECK_EQ(l->out.k, s->heads * d);
    CHECK_EQ(l->qkv_bias != NULL, s->biases >= 1);
    CHECK_EQ(l->out_bias != NULL, s->biases >= 2);
    CHECK_EQ(l->q_norm != NULL && l->k_norm != NULL, s->qk_norm != 0);
    CHECK_EQ(l->window, layer % 2 ? s->window : 0);
    CHECK_EQ(l->is_moe, moe);
    CHECK_EQ(l->router.rows, moe ? s->experts : 0);
    CHECK_EQ(l->has_shared, moe && s->shared != 0);
    CHECK_EQ(l->shared_gate.rows, moe ? s->shared_gate : 0);
    CHECK_EQ(l->dense.intermediate, moe ? 0 : make_dense_inter(s));
    touch_matrix(&l->qkv), touch_matrix(&l->out), touch_matrix(&l->router), touch_matrix(&l->shared_gate);
    touch_mlp(&l->shared), touch_mlp(&l->dense);
    for (uint32_t e = 0; moe && e < s->experts; e++) {
        coli_residency_t mapped = {.mode = COLIBRI_RESIDENCY_MAP, .weights = w};
        coli_mlp_t mlp = coli_residency_expert(&mapped, layer, e);
        CHECK(mlp.gate_up.tiles == l->experts + e * l->expert_stride);
        CHECK(mlp.down.tiles + coli_matrix_bytes(s->dtype, s->hidden, s->inter) == mlp.gate_up.tiles + mlp.bytes);
        CHECK((mlp.gate_up.scale != NULL) == make_quantised(s->dtype));
        touch_mlp(&mlp);
    }
}

static void opens(const make_spec_t *s) {
    size_t size = 0;
    uint8_t *file = make_model_file(s, &size);
    CHECK(file != NULL);
    if (file == NULL) return;
    coli_directory_t d;
    CHECK_EQ(coli_format_open(file, size, NULL, "tiny", &d), COLIBRI_OK);
    CHECK_EQ(coli_format_verify(&d, "tiny"), COLIBRI_OK);
    CHECK(coli_format_find(&d, COLIBRI_ROLE_HEAD, 0) != NULL && coli_format_find(&d, COLIBRI_ROLE_HEAD, 1) == NULL);
    coli_layer_t *layers = calloc(s->layers, sizeof *layers);
    coli_weights_t w;
    coli_weights_view(&d, NULL, NULL, layers, &w);
    CHECK_EQ(w.q_rows, s->heads * coli_pad_rows(s->head_dim));
    CHECK_EQ(w.head.rows, s->vocab);
    CHECK(w.embedding != NULL && w.final_norm != NULL && w.rope_inv_freq != NULL);
    touch_matrix(&w.head), touch(w.embedding, s->vocab * w.embedding_stride);
    for (uint32_t i = 0; i < s->layers; i++) check_weights(s, &w, i);
    free(layers);
    free(file);
}

static void test_good_files(void) {
    make_spec_t s = tiny;
    opens(&s);
    s.dense_layers = s.layers; /* no experts at all */
    opens(&s);
    s = full_spec(COLIBRI_FILE_F32);
    opens(&s);
    s.qk_norm = COLIBRI_QK_NORM_HEAD, s.head_dim = 6, s.rotary_dim = 4, s.kv_heads = 6, s.experts = 1, s.top_k = 1;
    opens(&s);
#ifndef MAKE_FILE_F32_ONLY
    for (uint32_t dtype = COLIBRI_FILE_F16; dtype <= COLIBRI_FILE_Q4; dtype++) {
        s = full_spec(dtype);
        opens(&s);
    }
#endif
    s = tiny; /* experts of a layer beyond 2 MiB: the large alignment */
    s.hidden = 256, s.inter = 1024;
    opens(&s);
}

/* One value of the tiles by the words of colibri_format.h: expert 3's up[37][70] of layer 1. */
static void test_tile_address(void) {
    size_t size;
    uint8_t *file = make_model_file(&tiny, &size);
    coli_directory_t d;
    coli_layer_t layers[2];
    coli_weights_t w;
    CHECK_EQ(coli_format_open(file, size, NULL, "tiny", &d), COLIBRI_OK);
    coli_weights_view(&d, NULL, NULL, layers, &w);
    coli_residency_t mapped = {.mode = COLIBRI_RESIDENCY_MAP, .weights = &w};
    coli_mlp_t mlp = coli_residency_expert(&mapped, 1, 3);
    const float *block = (const float *)(mlp.gate_up.tiles + (37 / 16 * 2 + 1) * mlp.gate_up.block_bytes);
    CHECK_EQ(mlp.gate_up.block_bytes, 16 * 128 * 4);
    CHECK(block[70 * 16 + 37 % 16] != 0.0f && block[72 * 16 + 37 % 16] == 0.0f); /* hidden is 72: then padding */
    CHECK(block[70 * 16 + 7] != 0.0f && block[70 * 16 + 8] == 0.0f);             /* inter is 40: row 8 of block 2 is none */
    free(file);
}

/* ---- Damage --------------------------------------------------------------------------------------------------------- */

static void test_truncation(const uint8_t *file, size_t size, size_t header_and_directory) {
    for (size_t n = 0; n < size; n += n < header_and_directory + 70 ? 1 : 997) {
        uint8_t *copy = copy_of(file, n);
        CHECK(refused(copy, n, COLIBRI_ERR_FORMAT, n >= 64 ? "truncated" : NULL));
        if (n > 0 && (n < 70 || n % 499 == 0)) CHECK(same_from_file(copy, n));
        free(copy);
    }
    uint8_t *longer = calloc(1, size + 1);
    memcpy(longer, file, size);
    CHECK(refused(longer, size + 1, COLIBRI_ERR_FORMAT, "trailing bytes"));
    free(longer);
}

static void test_flips(uint8_t *file, size_t size, size_t header_and_directory) {
    coli_directory_t d;
    for (size_t i = 0; i < header_and_directory; i++) {
        for (unsigned mask = 1; mask < 256; mask = mask * 16 + 15) { /* one bit, the byte */
            file[i] ^= (uint8_t)mask;
            CHECK(coli_format_open(file, size, NULL, "flipped", &d) != COLIBRI_OK);
            file[i] ^= (uint8_t)mask;
        }
    }
}

/* With the checksum put right, what opens must still be safe to walk; most does not open. */
static void test_flips_with_checksum(const uint8_t *file, size_t size, size_t header_and_directory) {
    static const uint8_t masks[] = {1, 0x80, 0xff, 0x10};
    uint8_t *copy = copy_of(file, size);
    unsigned opened = 0;
    for (size_t i = 0; i < header_and_directory; i++) {
        for (size_t m = 0; m < sizeof masks; m++) {
            copy[i] ^= masks[m];
            make_checksum(copy, size);
            coli_directory_t d;
            if (coli_format_open(copy, size, NULL, "flipped", &d) == COLIBRI_OK) {
                coli_layer_t *layers = calloc(d.params->num_layers, sizeof *layers);
                coli_weights_t w;
                coli_weights_view(&d, NULL, NULL, layers, &w);
                for (uint32_t l = 0; l < d.params->num_layers; l++) {
                    touch_matrix(&layers[l].qkv), touch_matrix(&layers[l].out), touch_mlp(&layers[l].dense);
                }
                free(layers);
                opened++;
            }
            copy[i] ^= masks[m];
        }
    }
    CHECK(opened > 0); /* a float's low bits, checksums of payloads */
    free(copy);
}

static void test_verify(uint8_t *file, size_t size) {
    coli_directory_t d;
    CHECK_EQ(coli_format_open(file, size, NULL, "m", &d), COLIBRI_OK);
    for (uint32_t i = 0; i < d.num_entries; i++) {
        const colibri_file_entry *e = &d.entries[i];
        uint64_t places[] = {0, e->size / 2, e->size - 1};
        for (int p = 0; p < 3; p++) {
            file[e->offset + places[p]] ^= 4;
            CHECK_EQ(coli_format_verify(&d, "m"), COLIBRI_ERR_CHECKSUM);
            CHECK(strstr(colibri_last_error(), coli_role_name(e->role)) != NULL);
            file[e->offset + places[p]] ^= 4;
        }
    }
    CHECK_EQ(coli_format_verify(&d, "m"), COLIBRI_OK);
}

/* ---- Lies under a right checksum ------------------------------------------------------------------------------------ */

typedef struct victim { /* a copy to lie in */
    uint8_t *file;
    size_t size;
    colibri_file_header *h;
    colibri_file_params *p;
    colibri_file_layer *l;
    colibri_file_entry *e;
} victim_t;

static victim_t take(const uint8_t *file, size_t size) {
    victim_t v = {.file = copy_of(file, size), .size = size};
    v.h = (colibri_file_header *)v.file;
    v.p = (colibri_file_params *)(v.file + v.h->directory_offset);
    v.l = (colibri_file_layer *)(v.p + 1);
    v.e = (colibri_file_entry *)(v.l + v.h->num_layers);
    return v;
}

static colibri_file_entry *entry_of(const victim_t *v, uint32_t role) {
    for (uint32_t i = 0; i < v->h->num_entries; i++) {
        if (v->e[i].role == role) return &v->e[i];
    }
    return NULL;
}

/* Change something in a copy, put the checksum right, expect this refusal. */
#define LIE(status, words, change)                                                                                             \
    do {                                                                                                                       \
        victim_t v = take(file, size);                                                                                         \
        change;                                                                                                                \
        make_checksum(v.file, v.size);                                                                                         \
        CHECK(refused(v.file, v.size, status, words));                                                                         \
        CHECK(same_from_file(v.file, v.size));                                                                                 \
        free(v.file);                                                                                                          \
    } while (0)

static void test_header_lies(const uint8_t *file, size_t size) {
    LIE(COLIBRI_ERR_FORMAT, "47 47 55 46", memcpy(v.file, "GGUF", 4));
    LIE(COLIBRI_ERR_UNSUPPORTED, "bare", v.h->version = 0x0100);
    LIE(COLIBRI_ERR_VERSION, "0x0300", v.h->version = 0x0300);
    LIE(COLIBRI_ERR_VERSION, "0x0201", v.h->version = 0x0201);
    LIE(COLIBRI_ERR_FORMAT, "0x0002", v.h->version = 0x0002);
    LIE(COLIBRI_ERR_VERSION, "reserved", v.h->reserved0[2] = 1);
    LIE(COLIBRI_ERR_VERSION, "reserved", v.h->reserved1 = 1);
    LIE(COLIBRI_ERR_FORMAT, "which is not the header's", v.h->dtype = COLIBRI_FILE_Q4);
    LIE(COLIBRI_ERR_FORMAT, "dtype 5", v.h->dtype = 5);
    LIE(COLIBRI_ERR_FORMAT, "top_k is 3 in the header and 2", v.h->top_k = 3);
    LIE(COLIBRI_ERR_FORMAT, "hidden_size", v.h->hidden_size++);
    LIE(COLIBRI_ERR_FORMAT, "intermediate_size", v.h->intermediate_size++);
    LIE(COLIBRI_ERR_FORMAT, "num_experts", v.h->num_experts++);
    LIE(COLIBRI_ERR_FORMAT, "directory", v.h->num_layers++);
    LIE(COLIBRI_ERR_FORMAT, "directory", v.h->num_entries--);
    LIE(COLIBRI_ERR_FORMAT, "4294967295 tensors", v.h->num_entries = UINT32_MAX);
    LIE(COLIBRI_ERR_FORMAT, "offset", v.h->directory_offset = UINT64_MAX - 63);
    LIE(COLIBRI_ERR_FORMAT, "offset", v.h->directory_offset = size / 64 * 64);
    LIE(COLIBRI_ERR_FORMAT, "offset", v.h->directory_offset += 8);
    LIE(COLIBRI_ERR_FORMAT, "offset", v.h->directory_offset = 0);
    LIE(COLIBRI_ERR_FORMAT, "directory", v.h->directory_size = UINT64_MAX);
    LIE(COLIBRI_ERR_FORMAT, "truncated", v.h->file_size = UINT64_MAX);
}

static float not_a_number(void) {
    uint32_t u = 0x7fc00000;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static void test_param_lies(const uint8_t *file, size_t size) {
    LIE(COLIBRI_ERR_VERSION, "version 2", v.p->params_version = 2);
    LIE(COLIBRI_ERR_FORMAT, "version 0", v.p->params_version = 0);
    LIE(COLIBRI_ERR_FORMAT, "511 bytes", v.p->params_size = 511);
    LIE(COLIBRI_ERR_VERSION, "reserved", v.p->reserved[295] = 1);
    LIE(COLIBRI_ERR_FORMAT, "vocab_size is 0", v.p->vocab_size = 0);
    LIE(COLIBRI_ERR_FORMAT, "vocab_size", v.p->vocab_size = (1u << 24) + 1);
    LIE(COLIBRI_ERR_FORMAT, "num_heads is 0", v.p->num_heads = 0);
    LIE(COLIBRI_ERR_FORMAT, "num_kv_heads is 0", v.p->num_kv_heads = 0);
    LIE(COLIBRI_ERR_FORMAT, "share 4", v.p->num_kv_heads = 4);
    LIE(COLIBRI_ERR_FORMAT, "wider than 131072", (v.p->num_heads = 65534, v.p->num_kv_heads = 2));
    LIE(COLIBRI_ERR_FORMAT, "even", v.p->head_dim = 21);
    LIE(COLIBRI_ERR_FORMAT, "even", v.p->rotary_dim = 22);
    LIE(COLIBRI_ERR_FORMAT, "head_dim is 1026", v.p->head_dim = 1026);
    LIE(COLIBRI_ERR_FORMAT, "max_position", v.p->max_position = 0);
    LIE(COLIBRI_ERR_UNSUPPORTED, "attention_kind is 1", v.p->attention_kind = 1);
    LIE(COLIBRI_ERR_UNSUPPORTED, "norm_kind", v.p->norm_kind = 1);
    LIE(COLIBRI_ERR_UNSUPPORTED, "qk_norm", v.p->qk_norm = 3);
    LIE(COLIBRI_ERR_UNSUPPORTED, "rope_kind", v.p->rope_kind = 2);
    LIE(COLIBRI_ERR_UNSUPPORTED, "router_kind", v.p->router_kind = 1);
    LIE(COLIBRI_ERR_UNSUPPORTED, "activation", v.p->activation = 1);
    LIE(COLIBRI_ERR_FORMAT, "dynamic RoPE", v.p->rope_kind = COLIBRI_ROPE_DYNAMIC); /* rope_original_max is 0 */
    LIE(COLIBRI_ERR_FORMAT, "rope_inv_freq is left over", (v.p->rope_kind = COLIBRI_ROPE_DYNAMIC, v.p->rope_original_max = 64));
    LIE(COLIBRI_ERR_FORMAT, "norm_topk is 2", v.p->norm_topk = 2);
    LIE(COLIBRI_ERR_FORMAT, "top_k is 6", v.p->top_k = v.h->top_k = 6);
    LIE(COLIBRI_ERR_FORMAT, "top_k is 0", v.p->top_k = v.h->top_k = 0);
    LIE(COLIBRI_ERR_FORMAT, "must be 0 too", v.p->num_experts = v.h->num_experts = 0);
    LIE(COLIBRI_ERR_FORMAT, "num_experts is 0, but 2 of 3",
        (v.p->num_experts = v.h->num_experts = v.p->top_k = v.h->top_k = 0, v.p->moe_intermediate = v.h->intermediate_size = 0,
         v.p->shared_intermediate = v.p->shared_gate = 0));
    LIE(COLIBRI_ERR_FORMAT, "rotary_dim is 0", v.p->rotary_dim = 0);
    LIE(COLIBRI_ERR_FORMAT, "rope_original_max", v.p->rope_original_max = (1u << 30) + 1);
    LIE(COLIBRI_ERR_FORMAT, "shared_intermediate is 131073", v.p->shared_intermediate = 131073);
    LIE(COLIBRI_ERR_FORMAT, "shared_gate is 2", v.p->shared_gate = 2);
    LIE(COLIBRI_ERR_FORMAT, "dense_intermediate is 4294967295", v.p->dense_intermediate = UINT32_MAX);
    LIE(COLIBRI_ERR_FORMAT, "tied_embeddings is 2", v.p->tied_embeddings = 2);
    LIE(COLIBRI_ERR_FORMAT, "hidden_size is 65536", v.p->hidden_size = 65536);
    LIE(COLIBRI_ERR_FORMAT, "num_layers is 65536", v.p->num_layers = 65536);
    LIE(COLIBRI_ERR_FORMAT, "num_experts is 65536", v.p->num_experts = 65536);
    LIE(COLIBRI_ERR_FORMAT, "parameter top_k is 65536", v.p->top_k = 65536);
    LIE(COLIBRI_ERR_FORMAT, "moe_intermediate is 65536", v.p->moe_intermediate = 65536);
    LIE(COLIBRI_ERR_FORMAT, "moe_intermediate", v.p->moe_intermediate = v.h->intermediate_size = 0);
    LIE(COLIBRI_ERR_FORMAT, "shared_gate", v.p->shared_intermediate = 0);
    LIE(COLIBRI_ERR_FORMAT, "dense_intermediate is 0", v.p->dense_intermediate = 0);
    LIE(COLIBRI_ERR_FORMAT, "bos_token is 97", v.p->bos_token = 97);
    LIE(COLIBRI_ERR_FORMAT, "eos_token is -1", v.p->eos_token[0] = -1);
    LIE(COLIBRI_ERR_FORMAT, "num_eos is 9", v.p->num_eos = 9);
    LIE(COLIBRI_ERR_FORMAT, "pad_token is -2", v.p->pad_token = -2);
    LIE(COLIBRI_ERR_FORMAT, "rms_norm_eps is nan", v.p->rms_norm_eps = not_a_number());
    LIE(COLIBRI_ERR_FORMAT, "rms_norm_eps is 0", v.p->rms_norm_eps = 0);
    LIE(COLIBRI_ERR_FORMAT, "clip_qkv is -1", v.p->clip_qkv = -1);
    LIE(COLIBRI_ERR_FORMAT, "attention_scale is inf", v.p->attention_scale = 1e38f * 10);
    LIE(COLIBRI_ERR_FORMAT, "logit_scale is 0", v.p->logit_scale = 0);
    LIE(COLIBRI_ERR_FORMAT, "model_type", memset(v.p->model_type, 'x', 32));
    LIE(COLIBRI_ERR_FORMAT, "model_type", v.p->model_type[1] = '\n');
    LIE(COLIBRI_ERR_UNSUPPORTED, "layer 2 is of kind 2", v.l[2].kind = 2);
    LIE(COLIBRI_ERR_FORMAT, "window", v.l[1].window = UINT32_MAX);
    LIE(COLIBRI_ERR_VERSION, "layer 0", v.l[0].reserved[1] = 1);
    LIE(COLIBRI_ERR_FORMAT, "dense_intermediate is 80", v.l[0].kind = COLIBRI_LAYER_MOE);
    LIE(COLIBRI_ERR_FORMAT, "tensor router of layer 1 is left over", v.l[1].kind = COLIBRI_LAYER_DENSE);
}

static void test_entry_lies(const uint8_t *file, size_t size) {
    LIE(COLIBRI_ERR_UNSUPPORTED, "role 99", v.e[3].role = 99);
    LIE(COLIBRI_ERR_UNSUPPORTED, "role 65535", v.e[3].role = UINT16_MAX);
    LIE(COLIBRI_ERR_FORMAT, "layer 3", entry_of(&v, COLIBRI_ROLE_ATTN_QKV)->layer = 3);
    LIE(COLIBRI_ERR_FORMAT, "layer 1", entry_of(&v, COLIBRI_ROLE_HEAD)->layer = 1);
    LIE(COLIBRI_ERR_FORMAT, "rows 98", entry_of(&v, COLIBRI_ROLE_HEAD)->rows = 98);
    LIE(COLIBRI_ERR_FORMAT, "k 73", entry_of(&v, COLIBRI_ROLE_ROUTER)->k = 73);
    LIE(COLIBRI_ERR_FORMAT, "count 4", entry_of(&v, COLIBRI_ROLE_EXPERTS)->count = 4);
    LIE(COLIBRI_ERR_FORMAT, "tensor head has 1 bytes", entry_of(&v, COLIBRI_ROLE_HEAD)->size = 1);
    LIE(COLIBRI_ERR_FORMAT, "stride 64", entry_of(&v, COLIBRI_ROLE_HEAD)->stride = 64);
    LIE(COLIBRI_ERR_FORMAT, "stride", entry_of(&v, COLIBRI_ROLE_EMBEDDING)->stride += 64);
    LIE(COLIBRI_ERR_FORMAT, "tensor experts of layer 1 has stride 0", entry_of(&v, COLIBRI_ROLE_EXPERTS)->stride = 0);
    LIE(COLIBRI_ERR_FORMAT, "stride", entry_of(&v, COLIBRI_ROLE_EXPERTS)->stride += 64);
    LIE(COLIBRI_ERR_FORMAT, "bytes", entry_of(&v, COLIBRI_ROLE_EXPERTS)->stride = UINT64_MAX - 4095);
    LIE(COLIBRI_ERR_FORMAT, "bytes", entry_of(&v, COLIBRI_ROLE_METADATA)->size = 0);
    LIE(COLIBRI_ERR_FORMAT, "past the end", entry_of(&v, COLIBRI_ROLE_METADATA)->size = UINT64_MAX);
    LIE(COLIBRI_ERR_FORMAT, "past the end", entry_of(&v, COLIBRI_ROLE_METADATA)->offset = UINT64_MAX - 63);
    LIE(COLIBRI_ERR_FORMAT, "multiple of 64", entry_of(&v, COLIBRI_ROLE_HEAD)->offset += 1);
    LIE(COLIBRI_ERR_FORMAT, "multiple of 4096", entry_of(&v, COLIBRI_ROLE_EXPERTS)->offset += 64);
    LIE(COLIBRI_ERR_FORMAT, "before", entry_of(&v, COLIBRI_ROLE_HEAD)->offset -= 64);
    LIE(COLIBRI_ERR_FORMAT, "directory ends", v.e[0].offset = 64);
    LIE(COLIBRI_ERR_FORMAT, "does not exist", entry_of(&v, COLIBRI_ROLE_EXPERTS)->dtype = 17);
    LIE(COLIBRI_ERR_FORMAT, "router", entry_of(&v, COLIBRI_ROLE_ROUTER)->dtype = COLIBRI_FILE_F16);
    LIE(COLIBRI_ERR_FORMAT, "embedding", entry_of(&v, COLIBRI_ROLE_EMBEDDING)->dtype = COLIBRI_FILE_Q8);
    LIE(COLIBRI_ERR_FORMAT, "bf16", entry_of(&v, COLIBRI_ROLE_EXPERTS)->dtype = COLIBRI_FILE_BF16);
    LIE(COLIBRI_ERR_FORMAT, "instead of", entry_of(&v, COLIBRI_ROLE_HEAD)->dtype = COLIBRI_FILE_Q4);
    LIE(COLIBRI_ERR_FORMAT, "metadata", entry_of(&v, COLIBRI_ROLE_METADATA)->dtype = COLIBRI_FILE_F32);
    LIE(COLIBRI_ERR_VERSION, "reserved", v.e[1].reserved2 = 1);
    LIE(COLIBRI_ERR_FORMAT, "twice", entry_of(&v, COLIBRI_ROLE_METADATA)->role = COLIBRI_ROLE_CHAT_TEMPLATE);
}

/* More bytes than a text may have, in a file that is large enough, or said to be: payloads in memory are not looked at. */
static void test_too_many_bytes(const uint8_t *file, size_t size) {
    victim_t v = take(file, size);
    colibri_file_entry *e = entry_of(&v, COLIBRI_ROLE_METADATA);
    coli_directory_t d;
    for (uint64_t more = 0; more < 2; more++) {
        e->size = COLIBRI_FILE_MAX_BYTES + more;
        v.h->file_size = e->offset + e->size;
        v.h->checksum = 0;
        v.h->checksum = coli_crc32(coli_crc32(0, v.h, sizeof *v.h), v.p, (size_t)v.h->directory_size);
        if (!more) CHECK_EQ(coli_format_open(v.file, v.h->file_size, NULL, "m", &d), COLIBRI_OK);
        if (more) CHECK(refused(v.file, v.h->file_size, COLIBRI_ERR_FORMAT, "metadata has 1073741825 bytes, more than"));
    }
    free(v.file);
}

/* Take away each entry in turn: the optional ones may go, the others are missed by name. */
static void test_missing(const uint8_t *file, size_t size) {
    uint32_t n = ((const colibri_file_header *)file)->num_entries;
    for (uint32_t i = 0; i < n; i++) {
        victim_t v = take(file, size);
        colibri_file_entry gone = v.e[i];
        memmove(&v.e[i], &v.e[i + 1], (n - 1 - i) * sizeof gone);
        v.h->num_entries--;
        v.h->directory_size -= sizeof gone;
        make_checksum(v.file, v.size);
        bool optional = gone.dtype == COLIBRI_FILE_BYTES || gone.role == COLIBRI_ROLE_ATTN_QKV_BIAS ||
                        gone.role == COLIBRI_ROLE_ATTN_OUT_BIAS;
        bool of_layer = gone.role >= COLIBRI_ROLE_ATTN_NORM && gone.role <= COLIBRI_ROLE_DENSE_MLP;
        char words[80];
        snprintf(words, sizeof words, of_layer ? "tensor %s of layer %u is missing" : "tensor %s is missing",
                 coli_role_name(gone.role), (unsigned)gone.layer);
        coli_directory_t d;
        if (optional) CHECK_EQ(coli_format_open(v.file, v.size, NULL, "m", &d), COLIBRI_OK);
        if (!optional) CHECK(refused(v.file, v.size, COLIBRI_ERR_FORMAT, words));
        free(v.file);
    }
}

/* ---- Model objects -------------------------------------------------------------------------------------------------- */

static void test_model(const make_spec_t *s, uint8_t *file, size_t size) {
    CHECK(write_model_file(PATH, file, size));
    colibri_model_t *model = NULL;
    CHECK_EQ(colibri_model_open(PATH, &model), COLIBRI_OK);
    if (model == NULL) return;
    CHECK_EQ(((uintptr_t)model->weights.embedding) % 64, 0);
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    CHECK_EQ(colibri_model_info(model, &info), COLIBRI_OK);
    CHECK_EQ(info.vocab_size, s->vocab);
    CHECK_EQ(info.head_dim, s->head_dim);
    CHECK_EQ(info.num_experts, s->experts);
    CHECK_EQ(info.shared_intermediate_size, s->shared);
    CHECK_EQ(info.dense_intermediate_size, make_dense_inter(s));
    CHECK_EQ(info.dtype, COLIBRI_DTYPE_F32);
    CHECK_EQ(info.bos_token, 1);
    CHECK_EQ(info.eos_token[0], 2);
    CHECK_EQ(info.eos_token[1], -1);
    CHECK_EQ(info.has_tokenizer, 0);
    CHECK_EQ(info.has_chat_template, 1);
    CHECK_EQ(info.file_size, size);
    CHECK(strcmp(info.model_type, "tiny") == 0);
    /* by hand: embedding, head, final norm; per layer norms, qkv, out, biases, q and k norm; one dense MLP, two MoE layers */
    uint64_t h = s->hidden, q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    uint64_t layer = 2 * h + (q + 2 * kv) * h + q * h + (q + 2 * kv) + h + q + kv;
    uint64_t moe = s->experts * h + 3 * h * s->inter * s->experts + 3 * h * s->shared + h;
    CHECK_EQ(info.num_parameters, 2 * s->vocab * h + h + 3 * layer + 3 * h * make_dense_inter(s) + 2 * moe);
    uint64_t active = 112 * 128 * 4;                                                  /* the head: 97 rows of 72 */
    active += 3 * (320 * 128 + 80 * 256) * 4;                                         /* qkv 10 * 32 rows, out 72 rows of 192 */
    active += (160 * 128 + 80 * 128) * 4;                                             /* the dense MLP of 80 */
    active += 2 * (16 * 128 + 2 * (96 + 80) * 128 + (128 + 80) * 128 + 16 * 128) * 4; /* router, top-2, shared, its gate */
    CHECK_EQ(info.active_bytes, active);
    CHECK_EQ(colibri_model_verify(model), COLIBRI_OK);
    const char *text;
    size_t bytes;
    CHECK_EQ(colibri_model_chat_template(model, &text, &bytes), COLIBRI_OK);
    CHECK(bytes == strlen(make_template) && memcmp(text, make_template, bytes) == 0);
    CHECK_EQ(colibri_model_metadata(model, &text, &bytes), COLIBRI_OK);
    CHECK(bytes == strlen(make_metadata) && memcmp(text, make_metadata, bytes) == 0);
    size_t n = 0;
    colibri_tensor_info_t t = COLIBRI_TENSOR_INFO_INIT;
    while (colibri_model_tensor(model, n, &t) == COLIBRI_OK) n++;
    CHECK_EQ(n, model->directory.num_entries);
    CHECK_EQ(colibri_last_status(), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK(strcmp(t.role, "metadata") == 0 && t.dtype == -1 && t.layer == -1 && t.size == strlen(make_metadata));
    coli_model_retain(model);
    colibri_model_close(model);
    CHECK_EQ(colibri_model_verify(model), COLIBRI_OK); /* one reference is left */
    colibri_model_close(model);
    colibri_model_close(NULL);
    remove(PATH);
}

/* ---- From a file ---------------------------------------------------------------------------------------------------- */

/* What is copied is what is there in memory; weights are left where they were. */
static void test_source(const uint8_t *file, size_t size) {
    coli_directory_t memory, d;
    coli_file_t source = {.handle = -1}, none = {.handle = -1, .size = size, .alignment = 1};
    CHECK_EQ(coli_format_open(file, size, NULL, "m", &memory), COLIBRI_OK);
    CHECK(memory.head == NULL && memory.texts == NULL && memory.header == (const void *)file);
    CHECK(write_model_file(PATH, file, size) && coli_os_open(PATH, &source) == COLIBRI_OK);
    CHECK_EQ(coli_format_open(file, size, &source, "m", &d), COLIBRI_OK);
    CHECK(d.file == file && d.file_size == size && d.num_entries == memory.num_entries);
    CHECK(d.header != memory.header && memcmp(d.header, memory.header, sizeof *d.header) == 0);
    CHECK(d.params != memory.params && memcmp(d.params, memory.params, (size_t)d.header->directory_size) == 0);
    CHECK((const void *)d.layers == d.params + 1 && (const void *)d.entries == d.layers + d.params->num_layers);
    for (uint32_t role = COLIBRI_ROLE_TOKENIZER; role <= COLIBRI_ROLE_METADATA; role++) {
        size_t bytes, copied;
        const uint8_t *text = coli_format_bytes(&memory, role, &bytes), *copy = coli_format_bytes(&d, role, &copied);
        const colibri_file_entry *e = coli_format_find(&memory, role, 0);
        CHECK(text == (e ? file + e->offset : NULL) && bytes == (e ? e->size : 0) && copied == bytes);
        CHECK(!e || (copy != text && (uintptr_t)copy % 8 == 0 && memcmp(copy, text, bytes) == 0));
    }
    CHECK_EQ(coli_format_verify(&d, "m"), COLIBRI_OK);
    coli_format_close(&d), coli_format_close(&d), coli_format_close(&memory);
    CHECK_EQ(coli_format_open(file, size, &none, "m", &d), COLIBRI_ERR_IO); /* no such descriptor */
    CHECK(strstr(colibri_last_error(), "m: cannot read 64 bytes at offset 0: ") != NULL);
    coli_os_close(&source);
    remove(PATH);
}

/* The file becomes shorter between two looks at it. */
static void test_cut_while_opening(const uint8_t *file, size_t size) {
    size_t lengths[] = {10, 64, 1000, size - 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        coli_directory_t d;
        coli_file_t source = {.handle = -1};
        CHECK(write_model_file(PATH, file, lengths[i]) && coli_os_open(PATH, &source) == COLIBRI_OK);
        source.size = size; /* as it was */
        CHECK_EQ(coli_format_open(NULL, size, &source, "m", &d), COLIBRI_ERR_IO);
        CHECK(strstr(colibri_last_error(), "m: the file was cut off while it was opened") != NULL);
        coli_os_close(&source);
    }
    remove(PATH);
}

#if !defined(_WIN32)
typedef struct answers {
    colibri_model_info_t info;
    colibri_tensor_info_t last;
    int32_t tokens[16];
    char text[64];
    size_t count, bytes;
} answers_t;

static void ask(const colibri_model_t *model, answers_t *a) {
    static const char said[] = "abc ab";
    const char *text;
    size_t bytes = 0;
    *a = (answers_t){.info = COLIBRI_MODEL_INFO_INIT, .last = COLIBRI_TENSOR_INFO_INIT};
    CHECK_EQ(colibri_model_info(model, &a->info), COLIBRI_OK);
    CHECK_EQ(colibri_model_tensor(model, model->directory.num_entries - 1, &a->last), COLIBRI_OK);
    CHECK_EQ(colibri_tokenize(model, said, 6, COLIBRI_TOKENIZE_ADD_SPECIAL, a->tokens, 16, &a->count), COLIBRI_OK);
    CHECK_EQ(colibri_detokenize(model, a->tokens, a->count, 0, a->text, 64, &a->bytes), COLIBRI_OK);
    CHECK(a->count == 4 && a->tokens[0] == 258 && a->tokens[1] == 257 && a->bytes == 6 && memcmp(a->text, said, 6) == 0);
    CHECK_EQ(colibri_model_chat_template(model, &text, &bytes), COLIBRI_OK);
    CHECK(bytes == strlen(make_template) && memcmp(text, make_template, bytes) == 0);
    CHECK_EQ(colibri_model_metadata(model, &text, &bytes), COLIBRI_OK);
    CHECK(bytes == strlen(make_metadata) && memcmp(text, make_metadata, bytes) == 0);
}

/* Overwritten in place, then cut off, under an open model: everything but the weights is as it was. */
static void test_changed_file(void) {
    make_spec_t s = full_spec(COLIBRI_FILE_F32);
    payload *tokenizer = make_payload();
    s.tokenizer = tokenizer, s.tokenizer_size = sizeof *tokenizer, s.vocab = 300;
    size_t size;
    uint8_t *file = make_model_file(&s, &size), *junk = malloc(size);
    CHECK(file != NULL && junk != NULL && write_model_file(PATH, file, size));
    colibri_model_t *model = NULL;
    CHECK_EQ(colibri_model_open(PATH, &model), COLIBRI_OK);
    if (model == NULL) return;
    answers_t before, after;
    ask(model, &before);
    CHECK_EQ(colibri_model_verify(model), COLIBRI_OK);
    FILE *f = fopen(PATH, "r+b");
    CHECK(f != NULL && fwrite(memset(junk, 0xa5, size), 1, size, f) == size && fclose(f) == 0);
    CHECK(model->map.data[0] == 0xa5); /* the mapping has changed */
    ask(model, &after);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_EQ(colibri_model_verify(model), COLIBRI_ERR_CHECKSUM);
    CHECK(strstr(colibri_last_error(), "embedding") != NULL);
    for (size_t left = size / 2; left > 0; left /= 16) {
        CHECK_EQ(truncate(PATH, (off_t)left - 1), 0);
        ask(model, &after);
        CHECK(memcmp(&before, &after, sizeof before) == 0);
    }
    colibri_model_close(model);
    remove(PATH);
    free(junk), free(file), free(tokenizer);
}
#else
static void test_changed_file(void) {} /* there a mapped file cannot be cut off */
#endif

/* What a caller can get wrong, on a model without a tokenizer. */
static void test_arguments(const uint8_t *file, size_t size) {
    colibri_model_t *model = (colibri_model_t *)&size;
    CHECK_EQ(colibri_model_open(NULL, &model), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK(model == NULL);
    CHECK_EQ(colibri_model_open(PATH, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_open("no/such/file.colibri", &model), COLIBRI_ERR_NOT_FOUND);
    CHECK(strstr(colibri_last_error(), "no/such/file.colibri") != NULL);
    CHECK(write_model_file(PATH, file, size));
    CHECK_EQ(colibri_model_open(PATH, &model), COLIBRI_OK);
    if (model == NULL) return;
    CHECK_EQ(colibri_model_info(NULL, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_info(model, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_verify(NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_chat_template(model, NULL, &size), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_tensor(model, SIZE_MAX, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_model_tensor(model, 0, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    int32_t id = 3;
    char text[8];
    size_t n = 0;
    colibri_stream_t stream = COLIBRI_STREAM_INIT;
    CHECK_EQ(colibri_tokenize(model, "a", 1, 0, &id, 1, &n), COLIBRI_ERR_NO_TOKENIZER);
    CHECK_EQ(colibri_detokenize(model, &id, 1, 0, text, 8, &n), COLIBRI_ERR_NO_TOKENIZER);
    CHECK_EQ(colibri_stream_token(model, &stream, 1, text, 8, &n), COLIBRI_ERR_NO_TOKENIZER);
    CHECK_EQ(colibri_tokenize(NULL, "a", 1, 0, &id, 1, &n), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_tokenize(model, "a", 1, 4, &id, 1, &n), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_tokenize(model, "a", 1, 0, NULL, 1, &n), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_tokenize(model, "a", 1, 0, &id, 1, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_detokenize(model, &id, 1, 2, text, 8, &n), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_stream_token(model, NULL, 1, text, 8, &n), COLIBRI_ERR_INVALID_ARGUMENT);
    stream.struct_size = 8;
    CHECK_EQ(colibri_stream_token(model, &stream, 1, text, 8, &n), COLIBRI_ERR_INVALID_ARGUMENT);
    colibri_model_close(model);
    remove(PATH);
}

/* A payload that is no tokenizer, and a path longer than any sentence: the sentence has the file and the reason. */
static void test_damaged_tokenizer(void) {
    make_spec_t s = tiny;
    s.tokenizer = "this is not a tokenizer", s.tokenizer_size = 23;
    size_t size;
    uint8_t *file = make_model_file(&s, &size);
    CHECK(file != NULL && write_model_file(PATH, file, size));
    colibri_model_t *model = NULL;
    CHECK(colibri_model_open(PATH, &model) != COLIBRI_OK && model == NULL);
    CHECK(strstr(colibri_last_error(), PATH ": the tokenizer") != NULL);
    remove(PATH);
    char path[700];
    for (size_t i = 0; i + 3 < sizeof path; i += 2) memcpy(path + i, "\xd0\x97", 3);
    coli_directory_t d;
    CHECK_EQ(coli_format_open(file, 10, NULL, path, &d), COLIBRI_ERR_FORMAT);
    CHECK(strstr(colibri_last_error(), "it has 10 bytes") != NULL);
    CHECK(strncmp(colibri_last_error(), "...\xd0\x97", 5) == 0);
    free(file);
}

static void test_structs(void) {
    struct {
        colibri_tensor_info_t known;
        uint8_t tail[16];
    } given = {{.struct_size = sizeof given, .rows = 7}, {0}};
    const size_t known = sizeof given.known;
    colibri_tensor_info_t copy;
    CHECK_EQ(coli_struct_in(&given, 8, known, "s", &copy), COLIBRI_OK);
    CHECK_EQ(copy.rows, 7);
    given.tail[15] = 1;
    CHECK_EQ(coli_struct_in(&given, 8, known, "s", &copy), COLIBRI_ERR_VERSION);
    given.known.struct_size = (uint32_t)known;
    CHECK_EQ(coli_struct_in(&given, 8, known, "s", NULL), COLIBRI_OK);
    given.known.struct_size = 8; /* an older caller: struct_size and layer only */
    given.known.layer = 5;
    CHECK_EQ(coli_struct_in(&given, 8, known, "s", &copy), COLIBRI_OK);
    CHECK_EQ(copy.layer, 5);
    CHECK_EQ(copy.rows, 0);
    copy.layer = 6, copy.rows = 9;
    CHECK_EQ(coli_struct_out(&given, 8, known, "s", &copy), COLIBRI_OK);
    CHECK_EQ(given.known.struct_size, 8);
    CHECK_EQ(given.known.layer, 6);
    CHECK_EQ(given.known.rows, 7); /* beyond the caller's struct: not written */
    CHECK_EQ(coli_struct_in(&given, 12, known, "s", NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    given.known.struct_size = UINT32_MAX;
    CHECK_EQ(coli_struct_out(&given, 8, known, "s", &copy), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(coli_struct_in(NULL, 8, known, "s", NULL), COLIBRI_ERR_INVALID_ARGUMENT);
}

/* ---- Leaks ---------------------------------------------------------------------------------------------------------- */

#if defined(__linux__)
static int open_descriptors(void) {
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    if (dir == NULL) return 0;
    while (readdir(dir) != NULL) n++;
    closedir(dir);
    return n;
}

static long resident_pages(void) {
    long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f == NULL) return 0;
    if (fscanf(f, "%ld %ld", &size, &resident) != 2) resident = 0;
    fclose(f);
    return resident + size; /* mappings left behind count too */
}

#if !ADDRESS_SANITIZER
/* qemu-user shows the program's own mappings in maps, but in statm its whole process with the code that it translates. */
static bool emulated(void) {
    unsigned long from, to, mapped = 0;
    long size = 0;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r"), *statm = fopen("/proc/self/statm", "r");
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &from, &to) == 2) mapped += to - from;
    if (statm && fscanf(statm, "%ld", &size) != 1) size = 0;
    if (maps) fclose(maps);
    if (statm) fclose(statm);
    return (unsigned long)size * (unsigned long)sysconf(_SC_PAGESIZE) > 2 * mapped + (64ul << 20);
}
#endif

static void fail_to_open(const char *path, colibri_status_t status, int times) {
    colibri_model_t *model = NULL;
    for (int i = 0; i < times; i++) {
        if (colibri_model_open(path, &model) != status || model != NULL) {
            CHECK_EQ(colibri_last_status(), status);
            return;
        }
    }
}

static void test_leaks(uint8_t *file, size_t size) {
    static const char empty[] = "test_format.tmp.empty", damaged[] = "test_format.tmp.damaged", half[] = "test_format.tmp.half";
    CHECK(write_model_file(empty, file, 0) && write_model_file(half, file, size / 2));
    file[100] ^= 1;
    CHECK(write_model_file(damaged, file, size));
    file[100] ^= 1;
    long pages = 0;
    int descriptors = 0;
    for (int round = 0; round < 2; round++) { /* the first round fills what libc keeps */
        if (round == 1) descriptors = open_descriptors(), pages = resident_pages();
        int times = round == 0 ? 20 : 250;
        fail_to_open(empty, COLIBRI_ERR_FORMAT, times);
        fail_to_open(half, COLIBRI_ERR_FORMAT, times);
        fail_to_open(damaged, COLIBRI_ERR_CHECKSUM, times);
        fail_to_open("test_format.tmp.none", COLIBRI_ERR_NOT_FOUND, times);
    }
    CHECK_EQ(open_descriptors(), descriptors);
#if !ADDRESS_SANITIZER /* it keeps what was freed */
    if (emulated()) fprintf(stderr, "skipped: growth of memory, which under emulation is not the program's own\n");
    else CHECK(resident_pages() <= pages + 64);
#endif
    remove(empty), remove(damaged), remove(half);
}
#else
static void test_leaks(uint8_t *file, size_t size) { (void)file, (void)size; }
#endif

int main(void) {
    make_spec_t s = full_spec(COLIBRI_FILE_F32);
    size_t size = 0;
    uint8_t *file = make_model_file(&s, &size);
    CHECK(file != NULL);
    if (file == NULL) return check_report();
    size_t front = 64 + (size_t)((colibri_file_header *)file)->directory_size;
    CHECK_EQ(coli_crc32(0, "123456789", 9), 0xcbf43926);
    CHECK_EQ(colibri_crc32(colibri_crc32(0, file, 12345), file + 12345, 999), make_crc32(0, file, 13344));
    test_good_files();
    test_tile_address();
    test_truncation(file, size, front);
    test_flips(file, size, front);
    test_flips_with_checksum(file, size, front);
    test_verify(file, size);
    test_header_lies(file, size);
    test_param_lies(file, size);
    test_entry_lies(file, size);
    test_missing(file, size);
    test_too_many_bytes(file, size);
    test_source(file, size);
    test_cut_while_opening(file, size);
    test_changed_file();
    test_model(&s, file, size);
    test_arguments(file, size);
    test_damaged_tokenizer();
    test_structs();
    test_leaks(file, size);
    free(file);
    return check_report();
}
