/* model.c: the model object and its public functions: opening (file -> format -> weights -> tokenizer), references, what the
 * file says about itself, and text. A model is immutable after opening, so nothing here locks; only the count of references
 * changes, atomically. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/structs.h"
#include "model/tokenizer.h"
#include "model/weights.h"

/* ---- Opening and closing -------------------------------------------------------------------------------------------- */

/* Everything that can fail after the model's bytes are at hand. On failure the caller frees what the model holds by then. */
static colibri_status_t fill(colibri_model_t *model, const char *path) {
    size_t length = strlen(path) + 1;
    model->path = malloc(length);
    if (model->path == NULL) return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the path of the model");
    memcpy(model->path, path, length);

    const coli_file_t *source = model->file.handle < 0 ? NULL : &model->file; /* none: the bytes are memory */
    colibri_status_t status = coli_format_open(model->map.data, model->map.size, source, path, &model->directory);
    if (status != COLIBRI_OK) return status;
    coli_weights_totals(&model->directory, &model->num_parameters, &model->active_bytes);

    uint32_t num_layers = model->directory.params->num_layers;
    coli_layer_t *layers = calloc(num_layers, sizeof *layers);
    if (layers == NULL) {
        return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the %u layers of the model", (unsigned)num_layers);
    }
    coli_weights_view(&model->directory, NULL, NULL, layers, &model->weights);

    size_t size;
    const uint8_t *payload = coli_format_bytes(&model->directory, COLIBRI_ROLE_TOKENIZER, &size);
    if (payload == NULL) return COLIBRI_OK;
    coli_tokenizer_t *tokenizer = NULL;
    status = coli_tokenizer_open(payload, size, model->directory.params->vocab_size, &tokenizer);
    model->tokenizer = tokenizer;
    if (status == COLIBRI_OK) return status;
    char reason[320]; /* the sentence's own buffer is about to be written */
    snprintf(reason, sizeof reason, "%s", colibri_last_error());
    return coli_fail_file(status, path, "the tokenizer cannot be read: %s", reason);
}

static void destroy(colibri_model_t *model) {
    if (model->tokenizer != NULL) coli_tokenizer_close((coli_tokenizer_t *)model->tokenizer);
    free(model->weights.layers);
    free(model->path);
    coli_format_close(&model->directory);
    if (model->file.handle >= 0) {
        coli_os_unguard(model->map.data); /* if a session asked for it */
        coli_os_unmap(&model->map);
    } else if (model->memory_locked) coli_os_unlock(model->map.data, model->map.size);
    coli_os_close(&model->file);
    free(model);
}

static colibri_model_t *new_model(void) {
    colibri_model_t *m = calloc(1, sizeof *m);
    if (m == NULL) coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the model object");
    else m->file.handle = -1;
    return m;
}

static colibri_status_t finish(colibri_model_t *m, colibri_status_t status, const char *path, colibri_model_t **model) {
    if (status == COLIBRI_OK) status = fill(m, path);
    if (status != COLIBRI_OK) {
        destroy(m);
        return status;
    }
    atomic_init(&m->references, 1);
    *model = m;
    return COLIBRI_OK;
}

colibri_status_t coli_model_open(const char *path, colibri_model_t **model) {
    colibri_model_t *m = new_model();
    if (m == NULL) return COLIBRI_ERR_OUT_OF_MEMORY;
    colibri_status_t status = coli_os_open(path, &m->file);
    if (status == COLIBRI_OK) status = coli_os_map(&m->file, path, &m->map);
    return finish(m, status, path, model);
}

colibri_status_t coli_model_open_memory(const void *data, size_t size, colibri_model_t **model) {
    if ((uintptr_t)data % COLI_ALIGN != 0)
        return coli_fail(COLIBRI_ERR_ALIGNMENT, "the model's memory is not 64-byte aligned (its address modulo 64 is %d)",
                         (int)((uintptr_t)data % COLI_ALIGN));
    colibri_model_t *m = new_model();
    if (m == NULL) return COLIBRI_ERR_OUT_OF_MEMORY;
    m->map = (coli_file_map_t){data, size};
    return finish(m, COLIBRI_OK, "the model in memory", model);
}

void coli_model_retain(colibri_model_t *model) { atomic_fetch_add_explicit(&model->references, 1, memory_order_relaxed); }

/* Whoever drops the last reference must see all that the others did: release on the way down, acquire at the end. */
void coli_model_release(colibri_model_t *model) {
    if (atomic_fetch_sub_explicit(&model->references, 1, memory_order_acq_rel) == 1) destroy(model);
}

colibri_status_t colibri_model_open(const char *path, colibri_model_t **model) {
    if (model == NULL)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "model is NULL; it must point to where the model shall go");
    *model = NULL;
    if (path == NULL) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "path is NULL; it must name a .colibri file");
    return coli_model_open(path, model);
}

colibri_status_t colibri_model_open_memory(const void *data, size_t size, colibri_model_t **model) {
    if (model == NULL)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "model is NULL; it must point to where the model shall go");
    *model = NULL;
    if (data == NULL)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "data is NULL; it must point to the bytes of a .colibri file");
    return coli_model_open_memory(data, size, model);
}

void colibri_model_close(colibri_model_t *model) {
    if (model != NULL) coli_model_release(model);
}

/* ---- What the file says --------------------------------------------------------------------------------------------- */

static colibri_status_t null_model(void) {
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "model is NULL; open one with colibri_model_open");
}

colibri_status_t colibri_model_info(const colibri_model_t *model, colibri_model_info_t *info) {
    if (model == NULL) return null_model();
    const colibri_file_params *p = model->directory.params;
    colibri_model_info_t i = {.struct_size = sizeof i};
    i.vocab_size = (int32_t)p->vocab_size;
    i.hidden_size = (int32_t)p->hidden_size;
    i.num_layers = (int32_t)p->num_layers;
    i.num_heads = (int32_t)p->num_heads;
    i.num_kv_heads = (int32_t)p->num_kv_heads;
    i.head_dim = (int32_t)p->head_dim;
    i.num_experts = (int32_t)p->num_experts;
    i.top_k = (int32_t)p->top_k;
    i.moe_intermediate_size = (int32_t)p->moe_intermediate;
    i.shared_intermediate_size = (int32_t)p->shared_intermediate;
    i.dense_intermediate_size = (int32_t)p->dense_intermediate;
    i.max_position = (int32_t)p->max_position;
    i.dtype = model->directory.header->dtype + 1; /* the API's codes are the file's plus one */
    i.bos_token = p->bos_token;
    i.num_eos = (int32_t)p->num_eos;
    for (uint32_t j = 0; j < COLIBRI_MAX_EOS; j++) i.eos_token[j] = j < p->num_eos ? p->eos_token[j] : -1;
    i.has_tokenizer = model->tokenizer != NULL;
    size_t bytes;
    i.has_chat_template = coli_format_bytes(&model->directory, COLIBRI_ROLE_CHAT_TEMPLATE, &bytes) != NULL;
    i.file_size = model->directory.file_size;
    i.num_parameters = model->num_parameters;
    i.active_bytes = model->active_bytes;
    memcpy(i.model_type, p->model_type, strlen((const char *)p->model_type)); /* zero-terminated within 32: checked */
    return coli_struct_out(info, sizeof i, sizeof i, "info", &i);
}

colibri_status_t colibri_model_verify(const colibri_model_t *model) {
    if (model == NULL) return null_model();
    colibri_status_t status = coli_format_verify(&model->directory, model->path);
    if (!atomic_load(&model->lost)) return status; /* else zeros were summed */
    return coli_fail_file(COLIBRI_ERR_IO, model->path,
                          "the file was truncated or could not be read while it was mapped: close it and open a whole file");
}

static colibri_status_t text_of(const colibri_model_t *model, uint32_t role, const char **text, size_t *bytes) {
    if (model == NULL) return null_model();
    if (text == NULL || bytes == NULL) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "%s is NULL; text and bytes must point to where the %s shall go",
                         text == NULL ? "text" : "bytes", coli_role_name(role));
    }
    *text = (const char *)coli_format_bytes(&model->directory, role, bytes);
    return COLIBRI_OK;
}

colibri_status_t colibri_model_chat_template(const colibri_model_t *model, const char **text, size_t *bytes) {
    return text_of(model, COLIBRI_ROLE_CHAT_TEMPLATE, text, bytes);
}

colibri_status_t colibri_model_metadata(const colibri_model_t *model, const char **json, size_t *bytes) {
    return text_of(model, COLIBRI_ROLE_METADATA, json, bytes);
}

colibri_status_t colibri_model_tensor(const colibri_model_t *model, size_t index, colibri_tensor_info_t *info) {
    if (model == NULL) return null_model();
    if (index >= model->directory.num_entries) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "tensor %llu of %u does not exist", (unsigned long long)index,
                         (unsigned)model->directory.num_entries);
    }
    const colibri_file_entry *e = &model->directory.entries[index];
    const char *name = coli_role_name(e->role);
    bool of_layer = e->role >= COLIBRI_ROLE_ATTN_NORM && e->role <= COLIBRI_ROLE_DENSE_MLP;
    colibri_tensor_info_t i = {.struct_size = sizeof i};
    i.layer = of_layer ? (int32_t)e->layer : -1;
    i.rows = (int32_t)e->rows;
    i.k = (int32_t)e->k;
    i.count = (int32_t)e->count;
    i.dtype = e->dtype == COLIBRI_FILE_BYTES ? -1 : e->dtype + 1;
    i.offset = e->offset;
    i.size = e->size;
    memcpy(i.role, name, COLI_MIN(strlen(name), sizeof i.role - 1));
    return coli_struct_out(info, sizeof i, sizeof i, "info", &i);
}

uint32_t colibri_crc32(uint32_t crc, const void *data, size_t bytes) {
    return data == NULL ? crc : coli_crc32(crc, data, bytes);
}

/* ---- Text ----------------------------------------------------------------------------------------------------------- */

/* What all text functions ask for: a model with a tokenizer, known flags, a place for the size, a buffer if it has room. */
static colibri_status_t check_text(const colibri_model_t *model, uint32_t flags, uint32_t known, const void *out,
                                   size_t capacity, const size_t *size) {
    if (model == NULL) return null_model();
    if (size == NULL) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "the pointer to the size of the result is NULL");
    if (out == NULL && capacity > 0) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "the output buffer is NULL, but its capacity is %llu; it must be 0 then",
                         (unsigned long long)capacity);
    }
    if ((flags & ~known) != 0) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "flags 0x%x holds bits that are no flags of this function (0x%x)",
                         (unsigned)flags, (unsigned)known);
    }
    if (model->tokenizer == NULL) {
        return coli_fail_file(COLIBRI_ERR_NO_TOKENIZER, model->path,
                              "the file holds no tokenizer: pass token ids, or convert the model again from a folder with "
                              "tokenizer.json");
    }
    return COLIBRI_OK;
}

colibri_status_t colibri_tokenize(const colibri_model_t *model, const char *text, size_t bytes, uint32_t flags, int32_t *tokens,
                                  size_t capacity, size_t *count) {
    const uint32_t known = COLIBRI_TOKENIZE_ADD_SPECIAL | COLIBRI_TOKENIZE_PARSE_SPECIAL;
    colibri_status_t status = check_text(model, flags, known, tokens, capacity, count);
    if (status != COLIBRI_OK) return status;
    if (text == NULL && bytes > 0) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "text is NULL, but has %llu bytes", (unsigned long long)bytes);
    }
    return coli_tokenizer_encode(model->tokenizer, text == NULL ? "" : text, bytes, flags, tokens, capacity, count);
}

colibri_status_t colibri_detokenize(const colibri_model_t *model, const int32_t *tokens, size_t n, uint32_t flags, char *text,
                                    size_t capacity, size_t *bytes) {
    colibri_status_t status = check_text(model, flags, COLIBRI_DETOKENIZE_SPECIAL, text, capacity, bytes);
    if (status != COLIBRI_OK) return status;
    if (tokens == NULL && n > 0) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "tokens is NULL, but has %llu ids", (unsigned long long)n);
    }
    return coli_tokenizer_decode(model->tokenizer, tokens, n, flags, text, capacity, bytes);
}

colibri_status_t colibri_stream_token(const colibri_model_t *model, colibri_stream_t *stream, int32_t token, char *text,
                                      size_t capacity, size_t *bytes) {
    colibri_status_t status = coli_struct_in(stream, sizeof *stream, sizeof *stream, "stream", NULL);
    if (status == COLIBRI_OK) status = check_text(model, stream->flags, COLIBRI_DETOKENIZE_SPECIAL, text, capacity, bytes);
    if (status != COLIBRI_OK) return status;
    if (stream->num_pending > sizeof stream->pending || stream->started > 3) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "the stream's state is damaged (started %u, num_pending %u); begin with "
                         "COLIBRI_STREAM_INIT",
                         (unsigned)stream->started, (unsigned)stream->num_pending);
    }
    return coli_tokenizer_stream(model->tokenizer, stream, token, text, capacity, bytes);
}
