/* format.c: the bytes of a file, all of them hostile, become a checked directory (DESIGN: file -> format -> weights).
 *
 * The order of the checks matters: header, then the directory's place, then its checksum, then parameters, then layers, then
 * entries. Each step relies only on what the steps before it have proven. The limits in colibri_format.h keep every product
 * of shapes far below 2^64; what the file itself states (offset, size, stride) is compared with them by arithmetic that
 * cannot overflow. Payloads of weights are not read here, except by coli_format_verify.
 *
 * Whoever may write to the file can do so while it is open. So what decisions are made by (header, directory, tokenizer, texts)
 * is copied before it is checked, each part when its size is known to lie inside the file. Weights are but numbers. */
#include "model/format.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"

#define MAX_ROLE COLIBRI_ROLE_METADATA
#define HEADER_BYTES sizeof(colibri_file_header)

/* ---- Roles ---------------------------------------------------------------------------------------------------------- */

/* How the payload of a role is laid out. */
typedef enum layout { BYTES, VECTOR, ROWS, F32_MATRIX, MATRIX, MLP, EXPERTS } layout_t;

/* Where a role occurs: once in the file, or once a layer. */
typedef enum scope { MODEL, LAYER } scope_t;

typedef struct role {
    uint16_t id;
    uint8_t layout, scope;
    const char *name;
} role_t;

static const role_t roles[] = {
    {COLIBRI_ROLE_EMBEDDING, ROWS, MODEL, "embedding"},
    {COLIBRI_ROLE_FINAL_NORM, VECTOR, MODEL, "final_norm"},
    {COLIBRI_ROLE_HEAD, MATRIX, MODEL, "head"},
    {COLIBRI_ROLE_ROPE_INV_FREQ, VECTOR, MODEL, "rope_inv_freq"},
    {COLIBRI_ROLE_ATTN_NORM, VECTOR, LAYER, "attn_norm"},
    {COLIBRI_ROLE_ATTN_QKV, MATRIX, LAYER, "attn_qkv"},
    {COLIBRI_ROLE_ATTN_QKV_BIAS, VECTOR, LAYER, "attn_qkv_bias"},
    {COLIBRI_ROLE_ATTN_Q_NORM, VECTOR, LAYER, "attn_q_norm"},
    {COLIBRI_ROLE_ATTN_K_NORM, VECTOR, LAYER, "attn_k_norm"},
    {COLIBRI_ROLE_ATTN_OUT, MATRIX, LAYER, "attn_out"},
    {COLIBRI_ROLE_ATTN_OUT_BIAS, VECTOR, LAYER, "attn_out_bias"},
    {COLIBRI_ROLE_MLP_NORM, VECTOR, LAYER, "mlp_norm"},
    {COLIBRI_ROLE_ROUTER, F32_MATRIX, LAYER, "router"},
    {COLIBRI_ROLE_EXPERTS, EXPERTS, LAYER, "experts"},
    {COLIBRI_ROLE_SHARED_EXPERT, MLP, LAYER, "shared_expert"},
    {COLIBRI_ROLE_SHARED_GATE, F32_MATRIX, LAYER, "shared_gate"},
    {COLIBRI_ROLE_DENSE_MLP, MLP, LAYER, "dense_mlp"},
    {COLIBRI_ROLE_TOKENIZER, BYTES, MODEL, "tokenizer"},
    {COLIBRI_ROLE_CHAT_TEMPLATE, BYTES, MODEL, "chat_template"},
    {COLIBRI_ROLE_METADATA, BYTES, MODEL, "metadata"},
};
#define NUM_ROLES (sizeof roles / sizeof roles[0])

static const role_t *find_role(uint32_t id) {
    for (size_t i = 0; i < NUM_ROLES; i++) {
        if (roles[i].id == id) return &roles[i];
    }
    return NULL;
}

const char *coli_role_name(uint32_t role) {
    const role_t *r = find_role(role);
    return r == NULL ? NULL : r->name;
}

static const char *dtype_name(uint32_t dtype) {
    static const char *const names[] = {"f32", "f16", "bf16", "q8", "q4"};
    return dtype < 5 ? names[dtype] : dtype == COLIBRI_FILE_BYTES ? "bytes" : "unknown";
}

/* Bytes of 16 rows x 128 k. */
static uint64_t piece_bytes(uint32_t dtype) {
    static const uint16_t bytes[] = {8192, 4096, 4096, 2048, COLIBRI_Q4_PIECE};
    COLI_ASSERT(dtype <= COLIBRI_FILE_Q4);
    return bytes[dtype];
}

uint64_t coli_matrix_bytes(uint32_t dtype, uint64_t rows, uint64_t k) {
    uint64_t blocks = (rows + COLIBRI_TILE_ROWS - 1) / COLIBRI_TILE_ROWS, pieces = (k + COLIBRI_TILE_K - 1) / COLIBRI_TILE_K;
    uint64_t scales = coli_is_quantised(dtype) ? COLIBRI_TILE_ROWS * sizeof(float) : 0;
    return blocks * (pieces * piece_bytes(dtype) + scales);
}

uint64_t coli_mlp_bytes(uint32_t dtype, uint32_t intermediate, uint32_t hidden) {
    return coli_matrix_bytes(dtype, 2 * (uint64_t)coli_pad_rows(intermediate), hidden) +
           coli_matrix_bytes(dtype, hidden, intermediate);
}

/* ---- Messages ------------------------------------------------------------------------------------------------------- */

/* What the checks below work on. */
typedef struct check {
    const char *path;
    const coli_file_t *source; /* NULL: all lies in memory at d.file, and nobody changes it */
    coli_directory_t d;
} check_t;

/* The end of a long path says more than its beginning: leave room for the sentence, never begin inside a character. */
static const char *short_path(const char *path) {
    size_t length = strlen(path);
    if (length <= 160) return path;
    const char *p = path + length - 157;
    while (((unsigned char)*p & 0xC0) == 0x80) p++;
    return p;
}

static colibri_status_t fail_with_path(colibri_status_t status, const char *path, const char *format, va_list arguments) {
    char text[352];
    vsnprintf(text, sizeof text, format, arguments);
    const char *end = short_path(path);
    return coli_fail(status, "%s%s: %s", end == path ? "" : "...", end, text);
}

colibri_status_t coli_fail_file(colibri_status_t status, const char *path, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail_with_path(status, path, format, arguments);
    va_end(arguments);
    return status;
}

/* Fail with "path: sentence". */
__attribute__((format(printf, 3, 4))) static colibri_status_t bad(const check_t *c, colibri_status_t status, const char *format,
                                                                  ...) {
    va_list arguments;
    va_start(arguments, format);
    fail_with_path(status, c->path, format, arguments);
    va_end(arguments);
    return status;
}

/* Fail with "path: experts of layer 3 sentence" (the layer only where the role has one). */
__attribute__((format(printf, 5, 6))) static colibri_status_t
bad_tensor(const check_t *c, colibri_status_t status, const role_t *role, uint32_t layer, const char *format, ...) {
    char text[288];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (role->scope == MODEL) return bad(c, status, "tensor %s %s", role->name, text);
    return bad(c, status, "tensor %s of layer %u %s", role->name, (unsigned)layer, text);
}

#define REMEDY_DAMAGED "the file is damaged: copy or convert it again"
#define REMEDY_WRITER "the program that wrote the file is at fault: convert the model again"
#define REMEDY_NEWER "it needs a newer library than " COLIBRI_VERSION_STRING

static bool all_zero(const void *data, size_t n) {
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0) return false;
    }
    return true;
}

/* ---- Reading -------------------------------------------------------------------------------------------------------- */

/* `bytes` at `offset`, which lie inside the file: where they are in memory, or read into `to`. */
static colibri_status_t obtain(const check_t *c, uint64_t offset, uint64_t bytes, void *to, const uint8_t **where) {
    *where = to;
    if (c->source == NULL) *where = c->d.file + offset;
    int64_t got = c->source == NULL ? (int64_t)bytes : coli_os_read(c->source, to, bytes, offset);
    if (got == (int64_t)bytes) return COLIBRI_OK;
    if (got < 0) {
        return bad(c, COLIBRI_ERR_IO, "cannot read %llu bytes at offset %llu: %s (error %d)", (unsigned long long)bytes,
                   (unsigned long long)offset, coli_os_reason((int)-got), (int)-got);
    }
    return bad(c, COLIBRI_ERR_IO, "the file was cut off while it was opened: of %llu bytes at offset %llu only %llu are left",
               (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)got);
}

static colibri_status_t room(const check_t *c, uint64_t bytes, const char *what, uint8_t **memory) {
    *memory = c->source == NULL ? NULL : malloc((size_t)bytes);
    if (c->source == NULL || *memory != NULL) return COLIBRI_OK;
    return bad(c, COLIBRI_ERR_OUT_OF_MEMORY, "no memory for its %s (%llu bytes)", what, (unsigned long long)bytes);
}

/* ---- Header --------------------------------------------------------------------------------------------------------- */

static colibri_status_t check_version(const check_t *c, uint32_t version) {
    if (version == COLIBRI_FILE_VERSION_FULL) return COLIBRI_OK;
    if (version == COLIBRI_FILE_VERSION_BARE) {
        return bad(
            c, COLIBRI_ERR_UNSUPPORTED,
            "this is a bare file (format version 0x0100, weights without a directory), which this version of the library "
            "does not read; convert the model with `colibri convert`");
    }
    if (version > COLIBRI_FILE_VERSION_FULL) {
        return bad(
            c, COLIBRI_ERR_VERSION,
            "format version 0x%04x is newer than 0x%04x, the newest this library (%s) reads; use a newer library or convert "
            "the model with this one",
            (unsigned)version, COLIBRI_FILE_VERSION_FULL, COLIBRI_VERSION_STRING);
    }
    return bad(c, COLIBRI_ERR_FORMAT, "format version 0x%04x does not exist; %s", (unsigned)version, REMEDY_DAMAGED);
}

/* As much of the header as there is, into `copy` or where it lies. */
static colibri_status_t check_start(check_t *c, colibri_file_header *copy) {
    const uint8_t *file;
    uint64_t size = c->d.file_size;
    colibri_status_t status = obtain(c, 0, COLI_MIN(size, HEADER_BYTES), copy, &file);
    if (status != COLIBRI_OK) return status;
    c->d.header = (const colibri_file_header *)file;
    if (size >= 4 && memcmp(file, COLIBRI_FILE_MAGIC, 4) != 0) {
        return bad(c, COLIBRI_ERR_FORMAT,
                   "not a .colibri file: it begins with the bytes %02x %02x %02x %02x instead of 43 4f 4c 49 (\"COLI\"); "
                   "make one with `colibri convert`",
                   file[0], file[1], file[2], file[3]);
    }
    if (size < HEADER_BYTES) {
        return bad(c, COLIBRI_ERR_FORMAT, "not a .colibri file, or truncated: it has %llu bytes, the header alone takes %u",
                   (unsigned long long)size, (unsigned)HEADER_BYTES);
    }
    return check_version(c, c->d.header->version);
}

/* The file's size and the directory's place. */
static colibri_status_t check_extent(const check_t *c) {
    const colibri_file_header *h = c->d.header;
    if (h->file_size != c->d.file_size) {
        return bad(c, COLIBRI_ERR_FORMAT, "the file %s: it has %llu bytes, its header says %llu; copy or convert it again",
                   h->file_size > c->d.file_size ? "is truncated" : "has trailing bytes", (unsigned long long)c->d.file_size,
                   (unsigned long long)h->file_size);
    }
    if (h->num_entries > 1u << 20) { /* more than 65535 layers can use */
        return bad(c, COLIBRI_ERR_FORMAT, "the header speaks of %u tensors, more than the 1048576 a file may have; %s",
                   (unsigned)h->num_entries, REMEDY_DAMAGED);
    }
    uint64_t expected = sizeof(colibri_file_params) + (uint64_t)h->num_layers * sizeof(colibri_file_layer) +
                        (uint64_t)h->num_entries * sizeof(colibri_file_entry);
    if (h->directory_size != expected) {
        return bad(c, COLIBRI_ERR_FORMAT,
                   "the directory has %llu bytes by the header, but %u layers and %u tensors take %llu; %s",
                   (unsigned long long)h->directory_size, (unsigned)h->num_layers, (unsigned)h->num_entries,
                   (unsigned long long)expected, REMEDY_DAMAGED);
    }
    if (h->directory_offset % COLIBRI_FILE_ALIGNMENT != 0 || h->directory_offset < HEADER_BYTES ||
        h->directory_offset > c->d.file_size || c->d.file_size - h->directory_offset < expected) {
        return bad(c, COLIBRI_ERR_FORMAT, "a directory of %llu bytes cannot lie at offset %llu of a file of %llu bytes; %s",
                   (unsigned long long)expected, (unsigned long long)h->directory_offset, (unsigned long long)c->d.file_size,
                   REMEDY_DAMAGED);
    }
    return COLIBRI_OK;
}

/* Its place and size are proven (at most some 65 MiB). From here on the header, too, is where it stays. */
static colibri_status_t get_directory(check_t *c) {
    const colibri_file_header *h = c->d.header;
    const uint8_t *start;
    uint64_t size = h->directory_size;
    colibri_status_t status = room(c, HEADER_BYTES + size, "directory", &c->d.head);
    if (status == COLIBRI_OK && c->d.head != NULL) c->d.header = memcpy(c->d.head, h, HEADER_BYTES);
    if (status == COLIBRI_OK) {
        status = obtain(c, h->directory_offset, size, c->d.head == NULL ? NULL : c->d.head + HEADER_BYTES, &start);
    }
    if (status != COLIBRI_OK) return status;
    c->d.params = (const colibri_file_params *)start;
    c->d.layers = (const colibri_file_layer *)(start + sizeof(colibri_file_params));
    c->d.entries = (const colibri_file_entry *)(c->d.layers + h->num_layers);
    c->d.num_entries = h->num_entries;
    return COLIBRI_OK;
}

static colibri_status_t check_checksum(const check_t *c) {
    colibri_file_header copy = *c->d.header;
    copy.checksum = 0;
    uint32_t sum = coli_crc32(coli_crc32(0, &copy, sizeof copy), c->d.params, (size_t)copy.directory_size);
    if (sum == c->d.header->checksum) return COLIBRI_OK;
    return bad(c, COLIBRI_ERR_CHECKSUM, "the checksum of header and directory is %08x, stored is %08x; %s", (unsigned)sum,
               (unsigned)c->d.header->checksum, REMEDY_DAMAGED);
}

static colibri_status_t check_header(const check_t *c) {
    const colibri_file_header *h = c->d.header;
    if (!all_zero(h->reserved0, sizeof h->reserved0) || h->reserved1 != 0) {
        return bad(c, COLIBRI_ERR_VERSION, "reserved bytes of the header are in use; %s", REMEDY_NEWER);
    }
    if (h->dtype > COLIBRI_FILE_Q4) {
        return bad(c, COLIBRI_ERR_FORMAT, "the header's dtype %u does not exist; %s", (unsigned)h->dtype, REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

/* ---- Parameters ----------------------------------------------------------------------------------------------------- */

#define FIELD(name) #name, offsetof(colibri_file_params, name)

static uint32_t get_u32(const colibri_file_params *p, size_t offset) {
    uint32_t value;
    memcpy(&value, (const uint8_t *)p + offset, sizeof value);
    return value;
}

/* Integers: [low, high]. `kind` ones are choices of which this library knows some: beyond high is unsupported, not damage. */
static const struct integer_rule {
    const char *name;
    size_t offset;
    uint32_t low, high;
    bool kind;
} integer_rules[] = {
    {FIELD(vocab_size), 1, 1u << 24, false},
    {FIELD(hidden_size), 1, 65535, false},
    {FIELD(num_layers), 1, 65535, false},
    {FIELD(num_heads), 1, 65535, false},
    {FIELD(num_kv_heads), 1, 65535, false},
    {FIELD(head_dim), 2, 1024, false},
    {FIELD(rotary_dim), 2, 1024, false},
    {FIELD(max_position), 1, 1u << 30, false},
    {FIELD(attention_kind), 0, 0, true},
    {FIELD(norm_kind), 0, 0, true},
    {FIELD(qk_norm), 0, COLIBRI_QK_NORM_WIDTH, true},
    {FIELD(rope_kind), 0, COLIBRI_ROPE_DYNAMIC, true},
    {FIELD(rope_original_max), 0, 1u << 30, false},
    {FIELD(router_kind), 0, COLIBRI_ROUTER_SOFTMAX, true},
    {FIELD(norm_topk), 0, 1, false},
    {FIELD(num_experts), 0, 65535, false},
    {FIELD(top_k), 0, 65535, false},
    {FIELD(moe_intermediate), 0, 65535, false},
    {FIELD(shared_intermediate), 0, 131072, false},
    {FIELD(shared_gate), 0, 1, false},
    {FIELD(dense_intermediate), 0, 131072, false},
    {FIELD(activation), 0, 0, true},
    {FIELD(tied_embeddings), 0, 1, false},
    {FIELD(num_eos), 0, COLIBRI_MAX_EOS, false},
};

static colibri_status_t check_integers(const check_t *c) {
    for (size_t i = 0; i < sizeof integer_rules / sizeof integer_rules[0]; i++) {
        const struct integer_rule *r = &integer_rules[i];
        uint32_t value = get_u32(c->d.params, r->offset);
        if (value >= r->low && value <= r->high) continue;
        if (r->kind) {
            return bad(c, COLIBRI_ERR_UNSUPPORTED,
                       "parameter %s is %u, which this library (%s) does not know; use a newer library", r->name,
                       (unsigned)value, COLIBRI_VERSION_STRING);
        }
        return bad(c, COLIBRI_ERR_FORMAT, "parameter %s is %u, outside %u ... %u; %s", r->name, (unsigned)value,
                   (unsigned)r->low, (unsigned)r->high, REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

static const struct float_rule {
    const char *name;
    size_t offset;
    bool zero; /* may be zero */
} float_rules[] = {
    {FIELD(rms_norm_eps), false},          {FIELD(rope_theta), true},       {FIELD(rope_factor), true},
    {FIELD(rope_attention_factor), false}, {FIELD(clip_qkv), true},         {FIELD(attention_scale), false},
    {FIELD(routed_scale), false},          {FIELD(embedding_scale), false}, {FIELD(residual_scale), false},
    {FIELD(logit_scale), false},
};

/* No parameter may be negative, infinite or NaN: as integers, good floats are 0 ... 7f7fffff. */
static colibri_status_t check_floats(const check_t *c) {
    for (size_t i = 0; i < sizeof float_rules / sizeof float_rules[0]; i++) {
        const struct float_rule *r = &float_rules[i];
        uint32_t bits = get_u32(c->d.params, r->offset);
        if (bits <= 0x7f7fffffu && (bits != 0 || r->zero)) continue;
        float value;
        memcpy(&value, &bits, sizeof value);
        return bad(c, COLIBRI_ERR_FORMAT, "parameter %s is %g, but must be finite and %s; %s", r->name, (double)value,
                   r->zero ? "not negative" : "greater than 0", REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

static colibri_status_t check_token(const check_t *c, const char *name, int32_t token, bool may_be_none) {
    if ((token == -1 && may_be_none) || (token >= 0 && (uint32_t)token < c->d.params->vocab_size)) return COLIBRI_OK;
    return bad(c, COLIBRI_ERR_FORMAT, "%s is %d, not a token of a vocabulary of %u%s; %s", name, (int)token,
               (unsigned)c->d.params->vocab_size, may_be_none ? " (or -1 for none)" : "", REMEDY_WRITER);
}

static colibri_status_t check_tokens(const check_t *c) {
    const colibri_file_params *p = c->d.params;
    colibri_status_t status = check_token(c, "bos_token", p->bos_token, true);
    if (status == COLIBRI_OK) status = check_token(c, "pad_token", p->pad_token, true);
    for (uint32_t i = 0; i < p->num_eos && status == COLIBRI_OK; i++)
        status = check_token(c, "an eos_token", p->eos_token[i], false);
    return status;
}

/* What the header repeats must be the same. */
static colibri_status_t check_agreement(const check_t *c) {
    const colibri_file_header *h = c->d.header;
    const colibri_file_params *p = c->d.params;
    const struct {
        const char *name;
        uint32_t header, params;
    } pairs[] = {
        {"num_layers", h->num_layers, p->num_layers},
        {"num_experts", h->num_experts, p->num_experts},
        {"top_k", h->top_k, p->top_k},
        {"hidden_size", h->hidden_size, p->hidden_size},
        {"intermediate_size", h->intermediate_size, p->moe_intermediate},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (pairs[i].header == pairs[i].params) continue;
        return bad(c, COLIBRI_ERR_FORMAT, "%s is %u in the header and %u in the parameters; %s", pairs[i].name,
                   (unsigned)pairs[i].header, (unsigned)pairs[i].params, REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

/* Shapes that depend on each other. Each is in its own range already. */
static colibri_status_t check_attention(const check_t *c) {
    const colibri_file_params *p = c->d.params;
    if (p->num_heads % p->num_kv_heads != 0) {
        return bad(c, COLIBRI_ERR_FORMAT, "%u attention heads cannot share %u key/value heads evenly; %s",
                   (unsigned)p->num_heads, (unsigned)p->num_kv_heads, REMEDY_WRITER);
    }
    if (p->head_dim % 2 != 0 || p->rotary_dim % 2 != 0 || p->rotary_dim > p->head_dim) {
        return bad(c, COLIBRI_ERR_FORMAT,
                   "head_dim %u and rotary_dim %u must be even, and rotary_dim no larger than head_dim; %s",
                   (unsigned)p->head_dim, (unsigned)p->rotary_dim, REMEDY_WRITER);
    }
    if (p->num_heads * coli_pad_rows(p->head_dim) > 131072) { /* at most 65535 * 1024 < 2^32 */
        return bad(c, COLIBRI_ERR_FORMAT, "%u heads of %u (padded to %u) are wider than 131072; %s", (unsigned)p->num_heads,
                   (unsigned)p->head_dim, (unsigned)coli_pad_rows(p->head_dim), REMEDY_WRITER);
    }
    if (p->rope_kind == COLIBRI_ROPE_DYNAMIC &&
        (p->rotary_dim <= 2 || p->rope_original_max == 0 || !(p->rope_factor > 0) || !(p->rope_theta > 0))) {
        return bad(c, COLIBRI_ERR_FORMAT,
                   "dynamic RoPE needs rotary_dim > 2 (is %u), rope_original_max > 0 (is %u), rope_factor > 0 (is %g), "
                   "rope_theta > 0 (is "
                   "%g); %s",
                   (unsigned)p->rotary_dim, (unsigned)p->rope_original_max, (double)p->rope_factor, (double)p->rope_theta,
                   REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

static colibri_status_t check_experts(const check_t *c) {
    const colibri_file_params *p = c->d.params;
    if (p->num_experts == 0) {
        if (p->top_k == 0 && p->moe_intermediate == 0 && p->shared_intermediate == 0 && p->shared_gate == 0) return COLIBRI_OK;
        return bad(c, COLIBRI_ERR_FORMAT,
                   "num_experts is 0, so top_k (%u), moe_intermediate (%u), shared_intermediate (%u), shared_gate (%u) "
                   "must be 0 too; %s",
                   (unsigned)p->top_k, (unsigned)p->moe_intermediate, (unsigned)p->shared_intermediate,
                   (unsigned)p->shared_gate, REMEDY_WRITER);
    }
    if (p->top_k < 1 || p->top_k > p->num_experts) {
        return bad(c, COLIBRI_ERR_FORMAT, "top_k is %u, but must be 1 ... num_experts (%u); %s", (unsigned)p->top_k,
                   (unsigned)p->num_experts, REMEDY_WRITER);
    }
    if (p->moe_intermediate == 0) {
        return bad(c, COLIBRI_ERR_FORMAT, "%u experts of moe_intermediate 0; %s", (unsigned)p->num_experts, REMEDY_WRITER);
    }
    if (p->shared_gate && p->shared_intermediate == 0) {
        return bad(c, COLIBRI_ERR_FORMAT, "shared_gate is 1, but there is no shared expert; %s", REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

static colibri_status_t check_model_type(const check_t *c) {
    const uint8_t *type = c->d.params->model_type;
    for (size_t i = 0; i < sizeof c->d.params->model_type; i++) {
        if (type[i] == 0) return COLIBRI_OK;
        if (type[i] < 0x20 || type[i] > 0x7e) break;
    }
    return bad(c, COLIBRI_ERR_FORMAT, "parameter model_type is not printable ASCII, zero-terminated in 32 bytes; %s",
               REMEDY_WRITER);
}

static colibri_status_t check_params(const check_t *c) {
    const colibri_file_params *p = c->d.params;
    if (p->params_version > COLIBRI_FILE_PARAMS_VERSION) {
        return bad(c, COLIBRI_ERR_VERSION, "the parameters have version %u, newer than %u; %s", (unsigned)p->params_version,
                   COLIBRI_FILE_PARAMS_VERSION, REMEDY_NEWER);
    }
    if (p->params_version != COLIBRI_FILE_PARAMS_VERSION || p->params_size != sizeof *p) {
        return bad(c, COLIBRI_ERR_FORMAT, "parameters of version %u and %u bytes do not exist; %s", (unsigned)p->params_version,
                   (unsigned)p->params_size, REMEDY_WRITER);
    }
    if (!all_zero(p->reserved, sizeof p->reserved)) {
        return bad(c, COLIBRI_ERR_VERSION, "reserved bytes of the parameters are in use; %s", REMEDY_NEWER);
    }
    static colibri_status_t (*const steps[])(const check_t *) = {
        check_integers, check_floats, check_tokens, check_agreement, check_attention, check_experts, check_model_type};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        colibri_status_t status = steps[i](c);
        if (status != COLIBRI_OK) return status;
    }
    return COLIBRI_OK;
}

/* ---- Layers --------------------------------------------------------------------------------------------------------- */

static colibri_status_t check_layers(const check_t *c) {
    const colibri_file_params *p = c->d.params;
    uint32_t number[2] = {0, 0}; /* of dense and MoE layers */
    for (uint32_t i = 0; i < p->num_layers; i++) {
        const colibri_file_layer *l = &c->d.layers[i];
        if (l->kind > COLIBRI_LAYER_MOE) {
            return bad(c, COLIBRI_ERR_UNSUPPORTED,
                       "layer %u is of kind %u, which this library (%s) does not know; use a newer library", (unsigned)i,
                       (unsigned)l->kind, COLIBRI_VERSION_STRING);
        }
        if (l->window > 1u << 30) {
            return bad(c, COLIBRI_ERR_FORMAT, "layer %u has a window of %u, more than 2^30; %s", (unsigned)i,
                       (unsigned)l->window, REMEDY_WRITER);
        }
        if (!all_zero(l->reserved, sizeof l->reserved)) {
            return bad(c, COLIBRI_ERR_VERSION, "reserved bytes of layer %u are in use; %s", (unsigned)i, REMEDY_NEWER);
        }
        number[l->kind]++;
    }
    if ((number[COLIBRI_LAYER_MOE] > 0) != (p->num_experts > 0)) {
        return bad(c, COLIBRI_ERR_FORMAT, "num_experts is %u, but %u of %u layers are MoE layers; %s", (unsigned)p->num_experts,
                   (unsigned)number[COLIBRI_LAYER_MOE], (unsigned)p->num_layers, REMEDY_WRITER);
    }
    if ((number[COLIBRI_LAYER_DENSE] > 0) != (p->dense_intermediate > 0)) {
        return bad(c, COLIBRI_ERR_FORMAT, "dense_intermediate is %u, but %u of %u layers are dense; %s",
                   (unsigned)p->dense_intermediate, (unsigned)number[COLIBRI_LAYER_DENSE], (unsigned)p->num_layers,
                   REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

/* ---- Entries -------------------------------------------------------------------------------------------------------- */

typedef enum need { NEVER, MAYBE, ALWAYS } need_t;

/* What the parameters demand of a tensor. */
typedef struct demand {
    need_t need;
    uint32_t rows, k, count;
} demand_t;

static demand_t demand_matrix(bool needed, uint32_t rows, uint32_t k) {
    return (demand_t){needed ? ALWAYS : NEVER, rows, k, 1};
}
static demand_t demand_vector(need_t need, uint32_t length) { return (demand_t){need, 1, length, 1}; }

/* Vector of `heads` heads' q/k norm: once a head or the whole width. */
static demand_t demand_qk_norm(const colibri_file_params *p, uint32_t heads) {
    uint32_t width = coli_pad_rows(p->head_dim);
    if (p->qk_norm == COLIBRI_QK_NORM_NONE) return demand_vector(NEVER, 0);
    return demand_vector(ALWAYS, p->qk_norm == COLIBRI_QK_NORM_WIDTH ? heads * width : width);
}

static demand_t demand(const colibri_file_params *p, uint32_t kind, uint32_t role) {
    uint32_t width = coli_pad_rows(p->head_dim), hidden = p->hidden_size;
    uint32_t qkv = (p->num_heads + 2 * p->num_kv_heads) * width; /* at most 3 * 131072 */
    bool moe = kind == COLIBRI_LAYER_MOE;
    switch (role) {
    case COLIBRI_ROLE_EMBEDDING: return demand_matrix(true, p->vocab_size, hidden);
    case COLIBRI_ROLE_FINAL_NORM: return demand_vector(ALWAYS, hidden);
    case COLIBRI_ROLE_HEAD: return demand_matrix(true, p->vocab_size, hidden);
    case COLIBRI_ROLE_ROPE_INV_FREQ:
        return demand_vector(p->rope_kind == COLIBRI_ROPE_TABLE ? ALWAYS : NEVER, p->rotary_dim / 2);
    case COLIBRI_ROLE_ATTN_NORM: return demand_vector(ALWAYS, hidden);
    case COLIBRI_ROLE_ATTN_QKV: return demand_matrix(true, qkv, hidden);
    case COLIBRI_ROLE_ATTN_QKV_BIAS: return demand_vector(MAYBE, qkv);
    case COLIBRI_ROLE_ATTN_Q_NORM: return demand_qk_norm(p, p->num_heads);
    case COLIBRI_ROLE_ATTN_K_NORM: return demand_qk_norm(p, p->num_kv_heads);
    case COLIBRI_ROLE_ATTN_OUT: return demand_matrix(true, hidden, p->num_heads * width);
    case COLIBRI_ROLE_ATTN_OUT_BIAS: return demand_vector(MAYBE, hidden);
    case COLIBRI_ROLE_MLP_NORM: return demand_vector(ALWAYS, hidden);
    case COLIBRI_ROLE_ROUTER: return demand_matrix(moe, p->num_experts, hidden);
    case COLIBRI_ROLE_EXPERTS: return (demand_t){moe ? ALWAYS : NEVER, p->moe_intermediate, hidden, p->num_experts};
    case COLIBRI_ROLE_SHARED_EXPERT: return demand_matrix(moe && p->shared_intermediate > 0, p->shared_intermediate, hidden);
    case COLIBRI_ROLE_SHARED_GATE: return demand_matrix(moe && p->shared_gate, 1, hidden);
    case COLIBRI_ROLE_DENSE_MLP: return demand_matrix(!moe, p->dense_intermediate, hidden);
    default: return demand_vector(MAYBE, 0); /* bytes */
    }
}

static colibri_status_t check_dtype(const check_t *c, const role_t *role, const colibri_file_entry *e) {
    bool known = e->dtype <= COLIBRI_FILE_Q4 || e->dtype == COLIBRI_FILE_BYTES;
    bool legal = false;
    switch ((layout_t)role->layout) {
    case BYTES: legal = e->dtype == COLIBRI_FILE_BYTES; break;
    case VECTOR:
    case F32_MATRIX: legal = e->dtype == COLIBRI_FILE_F32; break;
    case ROWS: legal = e->dtype <= COLIBRI_FILE_BF16; break;
    case MATRIX:
    case MLP: legal = e->dtype <= COLIBRI_FILE_Q4; break;
    case EXPERTS: legal = e->dtype == c->d.header->dtype; break;
    }
    if (legal) return COLIBRI_OK;
    return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer, "has dtype %u (%s), which %s; %s", (unsigned)e->dtype,
                      dtype_name(e->dtype),
                      !known                    ? "does not exist"
                      : role->layout == EXPERTS ? "is not the header's"
                                                : "it cannot have",
                      REMEDY_WRITER);
}

/* Size and stride as shape and dtype demand. Rows, k and count are proven; size and stride are not. */
static colibri_status_t check_bytes(const check_t *c, const role_t *role, const colibri_file_entry *e) {
    uint64_t size = 0, stride = 0;
    switch ((layout_t)role->layout) {
    case BYTES: size = e->size; break;
    case VECTOR: size = (uint64_t)coli_pad_k(e->k) * 4; break;
    case ROWS:
        stride = coli_pad((uint64_t)e->k * (e->dtype == COLIBRI_FILE_F32 ? 4 : 2), COLIBRI_FILE_ALIGNMENT); /* check_dtype */
        size = e->rows * stride;
        break;
    case F32_MATRIX:
    case MATRIX: size = coli_matrix_bytes(e->dtype, e->rows, e->k); break;
    case MLP: size = coli_mlp_bytes(e->dtype, e->rows, e->k); break;
    case EXPERTS: {
        uint64_t least = coli_mlp_bytes(e->dtype, e->rows, e->k);
        stride = e->stride;
        if (stride < least || stride % COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT != 0) {
            return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer,
                              "has stride %llu, but an expert takes %llu bytes and the stride is a "
                              "multiple of %u; %s",
                              (unsigned long long)stride, (unsigned long long)least, COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT,
                              REMEDY_WRITER);
        }
        if (!coli_mul64(stride, e->count, &size)) size = UINT64_MAX; /* cannot equal a size that fits the file */
        break;
    }
    }
    if (e->size != size || e->size == 0) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer, "has %llu bytes instead of %llu; %s",
                          (unsigned long long)e->size, (unsigned long long)(size == 0 ? 1 : size), REMEDY_WRITER);
    }
    if (e->stride != stride) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer, "has stride %llu instead of %llu; %s",
                          (unsigned long long)e->stride, (unsigned long long)stride, REMEDY_WRITER);
    }
    return COLIBRI_OK;
}

/* The payload lies after `end`, the end of the one before, and inside the file. */
static colibri_status_t check_place(const check_t *c, const role_t *role, const colibri_file_entry *e, uint64_t *end) {
    uint64_t alignment = COLIBRI_FILE_ALIGNMENT;
    if (role->layout == EXPERTS) {
        alignment =
            e->size >= COLIBRI_FILE_EXPERT_ALIGNMENT ? COLIBRI_FILE_EXPERT_ALIGNMENT : COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT;
    }
    if (e->offset % alignment != 0) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer, "lies at offset %llu, which is not a multiple of %llu; %s",
                          (unsigned long long)e->offset, (unsigned long long)alignment, REMEDY_WRITER);
    }
    if (e->offset < *end) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer, "lies at offset %llu, before %llu where the %s ends; %s",
                          (unsigned long long)e->offset, (unsigned long long)*end,
                          e == c->d.entries ? "directory" : "tensor before it", REMEDY_WRITER);
    }
    if (e->offset > c->d.file_size || e->size > c->d.file_size - e->offset) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer,
                          "has %llu bytes at offset %llu, past the end of the file at %llu; %s", (unsigned long long)e->size,
                          (unsigned long long)e->offset, (unsigned long long)c->d.file_size, REMEDY_WRITER);
    }
    *end = e->offset + e->size;
    return COLIBRI_OK;
}

/* One entry by itself: role, layer, shape, dtype, size, place. */
static colibri_status_t check_entry(const check_t *c, uint32_t index, uint64_t *end) {
    const colibri_file_entry *e = &c->d.entries[index];
    const role_t *role = find_role(e->role);
    if (role == NULL) {
        return bad(c, COLIBRI_ERR_UNSUPPORTED,
                   "tensor %u has role %u, which this library (%s) does not know; use a newer library", (unsigned)index,
                   (unsigned)e->role, COLIBRI_VERSION_STRING);
    }
    uint32_t num_layers = role->scope == MODEL ? 1 : c->d.params->num_layers;
    if (e->layer >= num_layers) {
        return bad(c, COLIBRI_ERR_FORMAT, "tensor %u (%s) belongs to layer %u, but must to one of 0 ... %u; %s",
                   (unsigned)index, role->name, (unsigned)e->layer, (unsigned)num_layers - 1, REMEDY_WRITER);
    }
    demand_t want = demand(c->d.params, c->d.layers[e->layer].kind, e->role);
    if (want.need == NEVER) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer, "is left over: the parameters have no use for it; %s",
                          REMEDY_WRITER);
    }
    if (e->rows != want.rows || e->k != want.k || e->count != want.count) {
        return bad_tensor(c, COLIBRI_ERR_FORMAT, role, e->layer,
                          "has rows %u, k %u, count %u, but the parameters demand %u, %u, %u; %s", (unsigned)e->rows,
                          (unsigned)e->k, (unsigned)e->count, (unsigned)want.rows, (unsigned)want.k, (unsigned)want.count,
                          REMEDY_WRITER);
    }
    if (e->reserved0 != 0 || e->reserved1 != 0 || e->reserved2 != 0) {
        return bad_tensor(c, COLIBRI_ERR_VERSION, role, e->layer, "uses reserved bytes; %s", REMEDY_NEWER);
    }
    colibri_status_t status = check_dtype(c, role, e);
    if (status == COLIBRI_OK) status = check_bytes(c, role, e);
    if (status == COLIBRI_OK) status = check_place(c, role, e, end);
    return status;
}

/* Which layer lacks a role? Entries of one role ascend by layer, so one pass answers. */
static colibri_status_t report_missing(const check_t *c, const role_t *role) {
    uint32_t next = 0; /* entry to look at */
    uint32_t num_layers = role->scope == MODEL ? 1 : c->d.params->num_layers;
    for (uint32_t layer = 0; layer < num_layers; layer++) {
        if (demand(c->d.params, c->d.layers[layer].kind, role->id).need != ALWAYS) continue;
        while (next < c->d.num_entries && (c->d.entries[next].role != role->id || c->d.entries[next].layer < layer)) next++;
        if (next == c->d.num_entries || c->d.entries[next].layer != layer) {
            return bad_tensor(c, COLIBRI_ERR_FORMAT, role, layer, "is missing; %s", REMEDY_WRITER);
        }
    }
    return COLIBRI_OK;
}

/* Entries of one role strictly ascend by layer, so no pair is there twice, and counting shows whether one is missing. */
static colibri_status_t check_entries(const check_t *c) {
    uint32_t next_layer[MAX_ROLE + 1] = {0}, found[MAX_ROLE + 1] = {0}, needed[MAX_ROLE + 1] = {0};
    uint64_t end = c->d.header->directory_offset + c->d.header->directory_size;
    for (uint32_t i = 0; i < c->d.num_entries; i++) {
        colibri_status_t status = check_entry(c, i, &end);
        if (status != COLIBRI_OK) return status;
        const colibri_file_entry *e = &c->d.entries[i];
        if (e->layer < next_layer[e->role]) {
            return bad_tensor(c, COLIBRI_ERR_FORMAT, find_role(e->role), e->layer,
                              "is there twice, or after that of a later layer; %s", REMEDY_WRITER);
        }
        next_layer[e->role] = e->layer + 1;
        found[e->role]++;
    }
    for (size_t r = 0; r < NUM_ROLES; r++) {
        uint32_t num_layers = roles[r].scope == MODEL ? 1 : c->d.params->num_layers, id = roles[r].id;
        for (uint32_t layer = 0; layer < num_layers; layer++) {
            needed[id] += demand(c->d.params, c->d.layers[layer].kind, id).need == ALWAYS;
        }
        if (found[id] < needed[id]) return report_missing(c, &roles[r]);
    }
    return COLIBRI_OK;
}

/* ---- Bytes ---------------------------------------------------------------------------------------------------------- */

/* Tokenizer and texts. The entries are proven: each role is there at most once. */
static colibri_status_t get_bytes(check_t *c) {
    const colibri_file_entry *found[COLI_BYTES_ROLES] = {NULL};
    uint64_t sum = 0, at = 0;
    for (uint32_t i = 0; i < c->d.num_entries; i++) {
        const colibri_file_entry *e = &c->d.entries[i];
        if (e->dtype != COLIBRI_FILE_BYTES) continue;
        if (e->size > COLIBRI_FILE_MAX_BYTES) {
            return bad_tensor(c, COLIBRI_ERR_FORMAT, find_role(e->role), e->layer, "has %llu bytes, more than %u; %s",
                              (unsigned long long)e->size, COLIBRI_FILE_MAX_BYTES, REMEDY_WRITER);
        }
        found[e->role - COLIBRI_ROLE_TOKENIZER] = e;
        sum += coli_pad((size_t)e->size, COLIBRI_FILE_ALIGNMENT);
    }
    colibri_status_t status = sum == 0 ? COLIBRI_OK : room(c, sum, "tokenizer and texts", &c->d.texts);
    for (int i = 0; i < COLI_BYTES_ROLES && status == COLIBRI_OK; i++) {
        if (found[i] == NULL) continue;
        uint8_t *to = c->d.texts == NULL ? NULL : c->d.texts + at;
        status = obtain(c, found[i]->offset, found[i]->size, to, &c->d.bytes[i]);
        c->d.bytes_size[i] = (size_t)found[i]->size;
        at += coli_pad((size_t)found[i]->size, COLIBRI_FILE_ALIGNMENT);
    }
    return status;
}

const uint8_t *coli_format_bytes(const coli_directory_t *directory, uint32_t role, size_t *size) {
    COLI_ASSERT(role >= COLIBRI_ROLE_TOKENIZER && role - COLIBRI_ROLE_TOKENIZER < COLI_BYTES_ROLES);
    *size = directory->bytes_size[role - COLIBRI_ROLE_TOKENIZER];
    return directory->bytes[role - COLIBRI_ROLE_TOKENIZER];
}

/* ---- The whole ------------------------------------------------------------------------------------------------------ */

colibri_status_t coli_format_open(const uint8_t *data, uint64_t size, const coli_file_t *source, const char *path,
                                  coli_directory_t *directory) {
    check_t c = {.path = path, .source = source, .d = {.file = data, .file_size = size}};
    colibri_file_header header;
    colibri_status_t status = check_start(&c, &header);
    if (status == COLIBRI_OK) status = check_extent(&c);
    if (status == COLIBRI_OK) status = get_directory(&c);
    if (status == COLIBRI_OK) status = check_checksum(&c);
    if (status == COLIBRI_OK) status = check_header(&c);
    if (status == COLIBRI_OK) status = check_params(&c);
    if (status == COLIBRI_OK) status = check_layers(&c);
    if (status == COLIBRI_OK) status = check_entries(&c);
    if (status == COLIBRI_OK) status = get_bytes(&c);
    if (status == COLIBRI_OK) *directory = c.d;
    else coli_format_close(&c.d);
    return status;
}

void coli_format_close(coli_directory_t *directory) {
    free(directory->head);
    free(directory->texts);
    *directory = (coli_directory_t){0};
}

colibri_status_t coli_format_verify(const coli_directory_t *directory, const char *path) {
    check_t c = {.path = path, .d = *directory};
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        uint32_t sum = coli_crc32(0, directory->file + e->offset, (size_t)e->size);
        if (sum != e->checksum) {
            return bad_tensor(&c, COLIBRI_ERR_CHECKSUM, find_role(e->role), e->layer, "has checksum %08x, stored is %08x; %s",
                              (unsigned)sum, (unsigned)e->checksum, REMEDY_DAMAGED);
        }
    }
    return COLIBRI_OK;
}

const colibri_file_entry *coli_format_find(const coli_directory_t *directory, uint32_t role, uint32_t layer) {
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        if (e->role == role && e->layer == layer) return e;
    }
    return NULL;
}
