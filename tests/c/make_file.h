/* make_file.h: writes a tiny MoE model of any shape, with random weights, as the bytes of a .colibri file: what the tests of
 * the format, of sessions and of everything above them open. The same spec gives the same bytes. Header-only, no libm.
 *
 *     make_spec_t spec = MAKE_SPEC_TINY;
 *     spec.shared = 48;
 *     size_t size;
 *     uint8_t *file = make_model_file(&spec, &size);      // free() it; NULL: no memory, or a matrix could not be packed
 *     write_model_file("tiny.colibri", file, size);
 *
 * f32 tiles are written here, from the words of colibri_format.h alone; the other types by colibri_pack_matrix. A test that
 * does without them defines MAKE_FILE_F32_ONLY and need not link it. */
#ifndef MAKE_FILE_H
#define MAKE_FILE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "colibri.h"
#include "colibri_format.h"

typedef struct make_spec {
    uint32_t hidden, inter; /* inter: of one routed expert */
    uint32_t heads, kv_heads, head_dim;
    uint32_t rotary_dim; /* 0: head_dim */
    uint32_t layers;
    uint32_t experts, top_k;
    uint32_t vocab;
    uint32_t dtype;        /* COLIBRI_FILE_*: of all matrices but router and shared gate; embedding f32 if this is q8 or q4 */
    uint32_t other_dtype;  /* of all of them but the experts, plus one; 0: dtype */
    uint32_t shared;       /* intermediate size of the shared expert, 0: none */
    uint32_t shared_gate;  /* 1: with gate */
    uint32_t dense_layers; /* the first so many layers are dense */
    uint32_t dense_inter;  /* 0: 2 * inter */
    uint32_t qk_norm;      /* COLIBRI_QK_NORM_* */
    uint32_t biases;       /* 1: qkv, 2: out as well */
    uint32_t window;       /* of every second layer (1, 3, ...), 0: none */
    uint32_t norm_topk;
    uint32_t max_position; /* 0: 256 */
    float clip_qkv;        /* 0: none */
    bool texts;            /* a chat template and metadata */
    const void *tokenizer; /* payload of a TOKENIZER entry, NULL: none */
    size_t tokenizer_size;
    uint64_t seed;
} make_spec_t;

/* A shape with nothing round in it: heads of 20 in rows of 32, widths that are no multiples of a tile. */
#define MAKE_SPEC_TINY                                                                                                         \
    {.hidden = 72,                                                                                                             \
     .inter = 40,                                                                                                              \
     .heads = 6,                                                                                                               \
     .kv_heads = 2,                                                                                                            \
     .head_dim = 20,                                                                                                           \
     .layers = 2,                                                                                                              \
     .experts = 5,                                                                                                             \
     .top_k = 2,                                                                                                               \
     .vocab = 97,                                                                                                              \
     .norm_topk = 1,                                                                                                           \
     .seed = 1}

/* ---- Numbers -------------------------------------------------------------------------------------------------------- */

static inline uint64_t make_pad(uint64_t x, uint64_t a) { return (x + a - 1) / a * a; }

/* Uniform in [-1, 1), 24 bits, from a linear congruential generator. */
static inline float make_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 40) / 8388608.0f - 1.0f;
}

static inline uint32_t make_crc32(uint32_t crc, const uint8_t *data,
                                  size_t n) { /* bit by bit: shares nothing with the library */
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int b = 0; b < 8; b++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

/* ---- Tiles ---------------------------------------------------------------------------------------------------------- */

static inline bool make_quantised(uint32_t dtype) { return dtype == COLIBRI_FILE_Q8 || dtype == COLIBRI_FILE_Q4; }

static inline uint32_t make_other(const make_spec_t *s) { return s->other_dtype ? s->other_dtype - 1 : s->dtype; }

static inline uint64_t make_block_bytes(uint32_t dtype, uint64_t k) {
    static const uint64_t piece[] = {8192, 4096, 4096, 2048, 1088};
    return make_pad(k, 128) / 128 * piece[dtype];
}

static inline uint64_t make_matrix_bytes(uint32_t dtype, uint64_t rows, uint64_t k) {
    return make_pad(rows, 16) / 16 * (make_block_bytes(dtype, k) + (make_quantised(dtype) ? 64 : 0));
}

/* Pack src [rows][k] into blocks block_stride bytes apart, scales (q8, q4) scale_stride floats apart. */
static inline bool make_pack(uint32_t dtype, const float *src, uint32_t rows, uint32_t k, uint8_t *dst, uint64_t block_stride,
                             float *scale, uint64_t scale_stride) {
    if (dtype == COLIBRI_FILE_F32) {
        for (uint32_t r = 0; r < rows; r++) {
            float *block = (float *)(dst + r / 16 * block_stride);
            for (uint32_t c = 0; c < k; c++) block[(uint64_t)c * 16 + r % 16] = src[(uint64_t)r * k + c];
        }
        return true;
    }
#ifdef MAKE_FILE_F32_ONLY
    (void)scale, (void)scale_stride;
    return false;
#else
    colibri_pack_t pack = {.struct_size = sizeof pack, .src_dtype = COLIBRI_DTYPE_F32, .dst_dtype = (int32_t)dtype + 1};
    pack.src = src;
    pack.rows = rows;
    pack.k = k;
    pack.dst = dst;
    pack.dst_block_stride = block_stride;
    pack.dst_scale = make_quantised(dtype) ? scale : NULL;
    pack.dst_scale_stride = scale_stride;
    return colibri_pack_matrix(&pack) == COLIBRI_OK;
#endif
}

/* Random [rows][k] of size about 1 / sqrt(k), so that outputs are about as large as inputs. Rows and columns of a padded head
 * (period, of which `used` are real; period 0: all are) are zero. */
static inline float *make_values(uint64_t *random, uint32_t rows, uint32_t row_period, uint32_t k, uint32_t k_period,
                                 uint32_t used) {
    float *m = (float *)malloc((size_t)rows * k * sizeof(float)), scale = 1.0f;
    while (scale * scale * (float)k > 3.0f) scale *= 0.9375f;
    if (m == NULL) return NULL;
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < k; c++) {
            bool real = (row_period == 0 || r % row_period < used) && (k_period == 0 || c % k_period < used);
            m[(uint64_t)r * k + c] = real ? scale * make_random(random) : 0.0f;
        }
    }
    return m;
}

static inline bool make_matrix(uint64_t *random, uint32_t dtype, uint32_t rows, uint32_t row_period, uint32_t k,
                               uint32_t k_period, uint32_t used, uint8_t *dst) {
    float *m = make_values(random, rows, row_period, k, k_period, used);
    uint64_t block = make_block_bytes(dtype, k);
    bool ok = m != NULL && make_pack(dtype, m, rows, k, dst, block, (float *)(dst + make_pad(rows, 16) / 16 * block), 16);
    free(m);
    return ok;
}

/* gate and up in alternating blocks, then down. */
static inline bool make_mlp(uint64_t *random, uint32_t dtype, uint32_t inter, uint32_t hidden, uint8_t *dst) {
    uint64_t block = make_block_bytes(dtype, hidden), blocks = make_pad(inter, 16) / 16;
    float *scale = (float *)(dst + 2 * blocks * block);
    bool ok = true;
    for (int up = 0; up < 2; up++) {
        float *m = make_values(random, inter, 0, hidden, 0, 0);
        ok =
            ok && m != NULL && make_pack(dtype, m, inter, hidden, dst + (up ? block : 0), 2 * block, scale + (up ? 16 : 0), 32);
        free(m);
    }
    return ok &&
           make_matrix(random, dtype, hidden, 0, inter, 0, 0, dst + make_matrix_bytes(dtype, 2 * make_pad(inter, 16), hidden));
}

/* ---- The directory -------------------------------------------------------------------------------------------------- */

#define MAKE_MAX_ENTRIES 1024
static const char make_template[] = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}";
static const char make_metadata[] = "{\"source\": \"make_file.h\"}";

typedef struct make_list {
    colibri_file_entry entries[MAKE_MAX_ENTRIES];
    uint32_t n;
    uint64_t end; /* bytes of payloads so far, from the file's start */
} make_list_t;

static inline void make_entry(make_list_t *list, uint32_t role, uint32_t layer, uint32_t dtype, uint32_t rows, uint32_t k,
                              uint32_t count, uint64_t size, uint64_t stride) {
    if (list->n == MAKE_MAX_ENTRIES) return;
    uint64_t align = role != COLIBRI_ROLE_EXPERTS            ? 64
                     : size >= COLIBRI_FILE_EXPERT_ALIGNMENT ? COLIBRI_FILE_EXPERT_ALIGNMENT
                                                             : 4096;
    colibri_file_entry e = {
        .role = (uint16_t)role, .dtype = (uint16_t)dtype, .layer = layer, .rows = rows, .k = k, .count = count};
    e.size = size;
    e.stride = stride;
    e.offset = list->end = make_pad(list->end, align);
    list->end += size;
    list->entries[list->n++] = e;
}

static inline void make_vector(make_list_t *list, uint32_t role, uint32_t layer, uint32_t length) {
    make_entry(list, role, layer, COLIBRI_FILE_F32, 1, length, 1, make_pad(length, 128) * 4, 0);
}
static inline void make_tensor(make_list_t *list, uint32_t role, uint32_t layer, uint32_t dtype, uint32_t rows, uint32_t k) {
    make_entry(list, role, layer, dtype, rows, k, 1, make_matrix_bytes(dtype, rows, k), 0);
}
static inline uint64_t make_mlp_bytes(uint32_t dtype, uint32_t inter, uint32_t hidden) {
    return make_matrix_bytes(dtype, 2 * make_pad(inter, 16), hidden) + make_matrix_bytes(dtype, hidden, inter);
}
static inline uint32_t make_dense_inter(const make_spec_t *s) { return s->dense_inter ? s->dense_inter : 2 * s->inter; }

static inline void make_layer(const make_spec_t *s, make_list_t *list, uint32_t layer) {
    uint32_t d = (uint32_t)make_pad(s->head_dim, 16), qkv = (s->heads + 2 * s->kv_heads) * d;
    bool wide = s->qk_norm == COLIBRI_QK_NORM_WIDTH;
    make_vector(list, COLIBRI_ROLE_ATTN_NORM, layer, s->hidden);
    make_tensor(list, COLIBRI_ROLE_ATTN_QKV, layer, make_other(s), qkv, s->hidden);
    if (s->biases >= 1) make_vector(list, COLIBRI_ROLE_ATTN_QKV_BIAS, layer, qkv);
    if (s->qk_norm) make_vector(list, COLIBRI_ROLE_ATTN_Q_NORM, layer, wide ? s->heads * d : d);
    if (s->qk_norm) make_vector(list, COLIBRI_ROLE_ATTN_K_NORM, layer, wide ? s->kv_heads * d : d);
    make_tensor(list, COLIBRI_ROLE_ATTN_OUT, layer, make_other(s), s->hidden, s->heads * d);
    if (s->biases >= 2) make_vector(list, COLIBRI_ROLE_ATTN_OUT_BIAS, layer, s->hidden);
    make_vector(list, COLIBRI_ROLE_MLP_NORM, layer, s->hidden);
    if (layer < s->dense_layers) {
        uint32_t inter = make_dense_inter(s);
        make_entry(list, COLIBRI_ROLE_DENSE_MLP, layer, make_other(s), inter, s->hidden, 1,
                   make_mlp_bytes(make_other(s), inter, s->hidden), 0);
        return;
    }
    uint64_t stride = make_pad(make_mlp_bytes(s->dtype, s->inter, s->hidden), 4096);
    make_tensor(list, COLIBRI_ROLE_ROUTER, layer, COLIBRI_FILE_F32, s->experts, s->hidden);
    make_entry(list, COLIBRI_ROLE_EXPERTS, layer, s->dtype, s->inter, s->hidden, s->experts, s->experts * stride, stride);
    if (s->shared) {
        make_entry(list, COLIBRI_ROLE_SHARED_EXPERT, layer, make_other(s), s->shared, s->hidden, 1,
                   make_mlp_bytes(make_other(s), s->shared, s->hidden), 0);
    }
    if (s->shared_gate) make_tensor(list, COLIBRI_ROLE_SHARED_GATE, layer, COLIBRI_FILE_F32, 1, s->hidden);
}

static inline void make_directory(const make_spec_t *s, make_list_t *list) {
    uint32_t embedding = make_quantised(make_other(s)) ? COLIBRI_FILE_F32 : make_other(s);
    uint64_t row = make_pad((uint64_t)s->hidden * (embedding == COLIBRI_FILE_F32 ? 4 : 2), 64);
    make_entry(list, COLIBRI_ROLE_EMBEDDING, 0, embedding, s->vocab, s->hidden, 1, s->vocab * row, row);
    for (uint32_t i = 0; i < s->layers; i++) make_layer(s, list, i);
    make_vector(list, COLIBRI_ROLE_FINAL_NORM, 0, s->hidden);
    make_tensor(list, COLIBRI_ROLE_HEAD, 0, make_other(s), s->vocab, s->hidden);
    make_vector(list, COLIBRI_ROLE_ROPE_INV_FREQ, 0, (s->rotary_dim ? s->rotary_dim : s->head_dim) / 2);
    if (s->tokenizer) make_entry(list, COLIBRI_ROLE_TOKENIZER, 0, COLIBRI_FILE_BYTES, 1, 0, 1, s->tokenizer_size, 0);
    if (!s->texts) return;
    make_entry(list, COLIBRI_ROLE_CHAT_TEMPLATE, 0, COLIBRI_FILE_BYTES, 1, 0, 1, sizeof make_template - 1, 0);
    make_entry(list, COLIBRI_ROLE_METADATA, 0, COLIBRI_FILE_BYTES, 1, 0, 1, sizeof make_metadata - 1, 0);
}

static inline float make_inverse_sqrt(float x) { /* Newton's steps: good to the last bits, and no libm */
    float y = 1.0f;
    while (y * y * x > 1.5f) y *= 0.5f;
    for (int i = 0; i < 40; i++) y = y * (1.5f - 0.5f * x * y * y);
    return y;
}

static inline colibri_file_params make_params(const make_spec_t *s) {
    bool moe = s->dense_layers < s->layers;
    colibri_file_params p = {.params_size = sizeof p, .params_version = COLIBRI_FILE_PARAMS_VERSION};
    p.vocab_size = s->vocab, p.hidden_size = s->hidden, p.num_layers = s->layers;
    p.num_heads = s->heads, p.num_kv_heads = s->kv_heads, p.head_dim = s->head_dim;
    p.rotary_dim = s->rotary_dim ? s->rotary_dim : s->head_dim;
    p.max_position = s->max_position ? s->max_position : 256;
    p.qk_norm = s->qk_norm, p.norm_topk = s->norm_topk;
    if (moe) p.num_experts = s->experts, p.top_k = s->top_k, p.moe_intermediate = s->inter;
    if (moe) p.shared_intermediate = s->shared, p.shared_gate = s->shared_gate;
    p.dense_intermediate = s->dense_layers ? make_dense_inter(s) : 0;
    p.bos_token = 1, p.num_eos = 1, p.eos_token[0] = 2, p.pad_token = -1;
    p.rms_norm_eps = 1e-5f, p.rope_theta = 10000.0f, p.rope_factor = 1.0f, p.rope_attention_factor = 1.0f;
    p.clip_qkv = s->clip_qkv, p.attention_scale = make_inverse_sqrt((float)s->head_dim);
    p.routed_scale = p.embedding_scale = p.residual_scale = p.logit_scale = 1.0f;
    memcpy(p.model_type, "tiny", 4);
    return p;
}

/* ---- Payloads ------------------------------------------------------------------------------------------------------- */

static inline void make_fill_vector(const make_spec_t *s, uint64_t *random, const colibri_file_entry *e, float *v) {
    uint32_t d = (uint32_t)make_pad(s->head_dim, 16);
    bool heads =
        e->role == COLIBRI_ROLE_ATTN_QKV_BIAS || e->role == COLIBRI_ROLE_ATTN_Q_NORM || e->role == COLIBRI_ROLE_ATTN_K_NORM;
    bool bias = e->role == COLIBRI_ROLE_ATTN_QKV_BIAS || e->role == COLIBRI_ROLE_ATTN_OUT_BIAS;
    float frequency = 1.0f;
    for (uint32_t i = 0; i < e->k; i++) {
        float r = make_random(random);
        v[i] = e->role == COLIBRI_ROLE_ROPE_INV_FREQ ? frequency : bias ? 0.1f * r : 1.0f + 0.25f * r;
        if (heads && i % d >= s->head_dim) v[i] = 0.0f;
        frequency *= 0.4375f;
    }
}

static inline uint16_t make_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)(u >> 16);
}

/* An f16 of a number in [-1, 1], cut to 10 bits: exact enough for a random number. */
static inline uint16_t make_f16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    int exponent = (int)(u >> 23 & 255) - 127 + 15;
    return (uint16_t)((u >> 16 & 0x8000) | (exponent <= 0 ? 0 : (uint32_t)exponent << 10 | (u >> 13 & 0x3ff)));
}

static inline void make_fill_embedding(uint64_t *random, const colibri_file_entry *e, uint8_t *dst) {
    for (uint32_t r = 0; r < e->rows; r++, dst += e->stride) {
        for (uint32_t c = 0; c < e->k; c++) {
            float x = make_random(random);
            if (e->dtype == COLIBRI_FILE_F32) ((float *)dst)[c] = x;
            if (e->dtype == COLIBRI_FILE_F16) ((uint16_t *)dst)[c] = make_f16(x);
            if (e->dtype == COLIBRI_FILE_BF16) ((uint16_t *)dst)[c] = make_bf16(x);
        }
    }
}

static inline bool make_fill(const make_spec_t *s, uint64_t *random, const colibri_file_entry *e, uint8_t *dst) {
    uint32_t d = (uint32_t)make_pad(s->head_dim, 16);
    bool ok = true;
    switch (e->role) {
    case COLIBRI_ROLE_EMBEDDING: make_fill_embedding(random, e, dst); return true;
    case COLIBRI_ROLE_HEAD:
    case COLIBRI_ROLE_ROUTER:
    case COLIBRI_ROLE_SHARED_GATE: return make_matrix(random, e->dtype, e->rows, 0, e->k, 0, 0, dst);
    case COLIBRI_ROLE_ATTN_QKV: return make_matrix(random, e->dtype, e->rows, d, e->k, 0, s->head_dim, dst);
    case COLIBRI_ROLE_ATTN_OUT: return make_matrix(random, e->dtype, e->rows, 0, e->k, d, s->head_dim, dst);
    case COLIBRI_ROLE_EXPERTS:
        for (uint32_t i = 0; i < e->count; i++) ok = ok && make_mlp(random, e->dtype, e->rows, e->k, dst + i * e->stride);
        return ok;
    case COLIBRI_ROLE_SHARED_EXPERT:
    case COLIBRI_ROLE_DENSE_MLP: return make_mlp(random, e->dtype, e->rows, e->k, dst);
    case COLIBRI_ROLE_TOKENIZER: memcpy(dst, s->tokenizer, s->tokenizer_size); return true;
    case COLIBRI_ROLE_CHAT_TEMPLATE: memcpy(dst, make_template, sizeof make_template - 1); return true;
    case COLIBRI_ROLE_METADATA: memcpy(dst, make_metadata, sizeof make_metadata - 1); return true;
    default: make_fill_vector(s, random, e, (float *)dst); return true;
    }
}

/* ---- The whole ------------------------------------------------------------------------------------------------------ */

/* Store the right checksum of header and directory; for tests that change them. Safe on any bytes of at least 64. */
static inline void make_checksum(uint8_t *file, size_t size) {
    colibri_file_header h;
    memcpy(&h, file, sizeof h);
    h.checksum = 0;
    h.checksum = make_crc32(0, (const uint8_t *)&h, sizeof h);
    if (h.directory_offset <= size && h.directory_size <= size - h.directory_offset) {
        h.checksum = make_crc32(h.checksum, file + h.directory_offset, (size_t)h.directory_size);
    }
    memcpy(file, &h, sizeof h);
}

/* The bytes of the file, from malloc (so aligned to 16 only: write it to disk and open it for use by kernels). */
static inline uint8_t *make_model_file(const make_spec_t *spec, size_t *size) {
    make_list_t *list = (make_list_t *)calloc(1, sizeof *list), *counted = (make_list_t *)calloc(1, sizeof *counted);
    if (list == NULL || counted == NULL) return free(list), free(counted), NULL;
    make_directory(spec, counted); /* once to count, once to place */
    uint64_t directory =
        sizeof(colibri_file_params) + spec->layers * sizeof(colibri_file_layer) + counted->n * sizeof(colibri_file_entry);
    free(counted);
    list->end = sizeof(colibri_file_header) + directory;
    make_directory(spec, list);

    uint8_t *memory = (uint8_t *)calloc((size_t)list->end + 64, 1), *file = memory; /* not aligned_alloc: Windows lacks it */
    if (memory != NULL) file += (64 - (uintptr_t)memory % 64) % 64; /* tiles are packed in place; moved in the end */
    uint64_t random = spec->seed;
    bool ok = file != NULL && list->n < MAKE_MAX_ENTRIES;
    for (uint32_t i = 0; ok && i < list->n; i++) {
        colibri_file_entry *e = &list->entries[i];
        ok = make_fill(spec, &random, e, file + e->offset);
        e->checksum = make_crc32(0, file + e->offset, (size_t)e->size);
    }
    if (!ok) return free(memory), free(list), NULL;

    colibri_file_params params = make_params(spec);
    colibri_file_header h = {.version = COLIBRI_FILE_VERSION_FULL, .dtype = (uint16_t)spec->dtype};
    memcpy(h.magic, COLIBRI_FILE_MAGIC, 4);
    h.num_layers = (uint16_t)params.num_layers, h.num_experts = (uint16_t)params.num_experts, h.top_k = (uint16_t)params.top_k;
    h.hidden_size = (uint16_t)params.hidden_size, h.intermediate_size = (uint16_t)params.moe_intermediate;
    h.file_size = list->end, h.directory_offset = sizeof h, h.directory_size = directory, h.num_entries = list->n;
    memcpy(file, &h, sizeof h);
    memcpy(file + sizeof h, &params, sizeof params);
    colibri_file_layer *layers = (colibri_file_layer *)(file + sizeof h + sizeof params);
    for (uint32_t i = 0; i < spec->layers; i++) {
        layers[i].kind = i < spec->dense_layers ? COLIBRI_LAYER_DENSE : COLIBRI_LAYER_MOE;
        layers[i].window = i % 2 ? spec->window : 0;
    }
    memcpy(layers + spec->layers, list->entries, list->n * sizeof(colibri_file_entry));
    *size = (size_t)list->end;
    free(list);
    make_checksum(file, *size);
    return (uint8_t *)memmove(memory, file, *size);
}

static inline bool write_model_file(const char *path, const uint8_t *file, size_t size) {
    FILE *f = fopen(path, "wb");
    if (f == NULL) return false;
    bool ok = fwrite(file, 1, size, f) == size;
    return fclose(f) == 0 && ok;
}

#endif
