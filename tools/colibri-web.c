/* colibri-web.c: colibri.wasm, the library as a page in a browser (or any host of WebAssembly) calls it: numbers and bytes in
 * linear memory, no structs. One model and one sequence, kept here. python/colibri/web/worker.js is its caller.
 *
 * Flow: web_model (memory to fill with a file) -> web_open -> for each text: web_prompt (memory to fill) -> web_start ->
 * web_step until it returns 0; web_experts at any time. A negative result is a failure, and web_error its sentence.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "colibri.h"

#define EXPORT(name) __attribute__((export_name(#name)))
#define MAX_PIECE 1024 /* bytes of text that one token may give */

static struct {
    void *memory;   /* malloc's, of which `data` is the first aligned byte */
    uint8_t *data;  /* [size]: the model's file */
    size_t size;
    colibri_model_info_t info;
    colibri_t *session;
    char *prompt;   /* [prompt_size], UTF-8 */
    size_t prompt_size;
    colibri_sampling_t sampling;
    colibri_stream_t stream;
    char piece[MAX_PIECE]; /* text of the latest step: its first piece_size bytes */
    size_t piece_size;
    int ended;
    colibri_expert_stats_t *rows; /* [num_experts] */
    uint32_t *tokens;             /* [num_layers][num_experts] */
} web;

/* Memory for the file of a model, 64-byte aligned; NULL: none. */
EXPORT(web_model) uint8_t *web_model(size_t size) {
    if (web.memory || size > SIZE_MAX - 64) return NULL;
    web.memory = malloc(size + 64);
    if (!web.memory) return NULL;
    web.data = (uint8_t *)(((uintptr_t)web.memory + 63) / 64 * 64);
    web.size = size;
    return web.data;
}

/* Begin with the model in that memory. 0, or minus a status. */
EXPORT(web_open) int web_open(void) {
    colibri_config_t config = COLIBRI_CONFIG_INIT;
    config.model_data = web.data;
    config.model_size = web.size;
    config.num_threads = 1;
    web.session = colibri_init(&config);
    if (!web.session) return -(int)colibri_last_status();
    web.info = (colibri_model_info_t)COLIBRI_MODEL_INFO_INIT;
    colibri_model_info(colibri_model(web.session), &web.info);
    web.rows = calloc((size_t)web.info.num_experts + 1, sizeof *web.rows);
    web.tokens = calloc((size_t)web.info.num_experts * (size_t)web.info.num_layers + 1, sizeof *web.tokens);
    return web.rows && web.tokens ? 0 : -COLIBRI_ERR_OUT_OF_MEMORY;
}

EXPORT(web_layers) int web_layers(void) { return web.info.num_layers; }
EXPORT(web_experts_per_layer) int web_experts_per_layer(void) { return web.info.num_experts; }
EXPORT(web_top_k) int web_top_k(void) { return web.info.top_k; }
/* Tokens that prompt and text may have together. */
EXPORT(web_context) int web_context(void) {
    return web.info.max_position > 0 && web.info.max_position < 4096 ? web.info.max_position : 4096;
}
EXPORT(web_error) const char *web_error(void) { return colibri_last_error(); }

/* Memory for a prompt's UTF-8; NULL: none. */
EXPORT(web_prompt) char *web_prompt(size_t size) {
    char *prompt = realloc(web.prompt, size + 1);
    if (!prompt) return NULL;
    web.prompt = prompt;
    web.prompt_size = size;
    return prompt;
}

/* Run the prompt, as a text of its own. The number of its tokens, or minus a status. */
EXPORT(web_start) int web_start(float temperature, float top_p, uint32_t seed) {
    const uint32_t flags = COLIBRI_TOKENIZE_ADD_SPECIAL | COLIBRI_TOKENIZE_PARSE_SPECIAL;
    const colibri_model_t *model = colibri_model(web.session);
    size_t capacity = web.prompt_size + 16, count = 0;
    if (capacity > SIZE_MAX / sizeof(int32_t)) return -COLIBRI_ERR_OUT_OF_MEMORY;
    int32_t *ids = malloc(capacity * sizeof *ids);
    if (!ids) return -COLIBRI_ERR_OUT_OF_MEMORY;
    web.sampling = (colibri_sampling_t){sizeof web.sampling, temperature, 0, top_p, 0, 0, seed};
    web.stream = (colibri_stream_t)COLIBRI_STREAM_INIT;
    web.ended = 0;
    colibri_reset(web.session);
    colibri_status_t status = colibri_tokenize(model, web.prompt, web.prompt_size, flags, ids, capacity, &count);
    int32_t length = (int32_t)count;
    if (!status) status = colibri_set_input(web.session, ids, &length, 1);
    if (!status) status = colibri_infer(web.session);
    free(ids);
    return status ? -(int)status : length;
}

static int is_end(int32_t token) {
    for (int i = 0; i < web.info.num_eos; i++)
        if (web.info.eos_token[i] == token) return 1;
    return 0;
}

/* Append the text of a token to the piece. */
static colibri_status_t put(int32_t token) {
    size_t bytes = 0;
    const colibri_model_t *model = colibri_model(web.session);
    colibri_status_t status =
        colibri_stream_token(model, &web.stream, token, web.piece + web.piece_size, MAX_PIECE - web.piece_size, &bytes);
    if (!status) web.piece_size += bytes;
    return status;
}

/* The next token. `last` says that none will follow: it is not run, and characters that wait come out. 1: there is a new token,
 * 0: the text has ended, or minus a status; the text is in web_piece, web_piece_size bytes. */
EXPORT(web_step) int web_step(int last) {
    int32_t token, one = 1;
    web.piece_size = 0;
    if (web.ended) return 0;
    colibri_status_t status = colibri_sample(web.session, 0, &web.sampling, &token);
    if (status) return -(int)status;
    int end = is_end(token);
    web.ended = end || last;
    if (!end) status = put(token);
    if (!status && web.ended) status = put(-1);
    if (!status && !web.ended) status = colibri_set_input(web.session, &token, &one, 1);
    if (!status && !web.ended) status = colibri_infer(web.session);
    return status ? -(int)status : end ? 0 : 1;
}

EXPORT(web_piece) const char *web_piece(void) { return web.piece; }
EXPORT(web_piece_size) size_t web_piece_size(void) { return web.piece_size; }

/* Tokens that each expert got so far: uint32 [layers][experts]; zeros for layers without experts. */
EXPORT(web_experts) const uint32_t *web_experts(void) {
    size_t experts = (size_t)web.info.num_experts;
    for (int32_t layer = 0; layer < web.info.num_layers; layer++) {
        if (colibri_expert_stats(web.session, layer, web.rows, experts) != COLIBRI_OK) continue;
        for (size_t i = 0; i < experts; i++) web.tokens[(size_t)layer * experts + i] = (uint32_t)web.rows[i].tokens;
    }
    return web.tokens;
}
