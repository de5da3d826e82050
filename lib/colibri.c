/* colibri.c: the public functions on sessions: check arguments, call down. (Those on models are in model/model.c.) */
#include "colibri.h"

#include <stdatomic.h>

#include "base/cpu.h"
#include "base/fpenv.h"
#include "base/os.h"
#include "base/status.h"
#include "base/structs.h"
#include "forward/experts.h"
#include "forward/forward.h"
#include "forward/life.h"
#include "forward/router.h"
#include "forward/sampler.h"
#include "forward/stats.h"
#include "model/profile.h"

/* ---- version and machine ---- */

#if defined(__x86_64__)
#  define BUILD_KERNELS "ref, avx2, avx512"
#elif defined(__aarch64__)
#  define BUILD_KERNELS "ref, neon"
#else
#  define BUILD_KERNELS "ref"
#endif

const char *colibri_version(void) { return COLIBRI_VERSION_STRING; }
const char *colibri_build_info(void) {
    return "libcolibri " COLIBRI_VERSION_STRING ", " __VERSION__ ", kernels: " BUILD_KERNELS;
}
const char *colibri_cpu_info(void) { return coli_cpu_text(); }

const char *colibri_isa_name(colibri_isa_t isa) { return coli_isa_name(isa); }

int colibri_isa_from_name(const char *name) {
    for (int i = 0; name && i < COLIBRI_ISA_COUNT_; i++)
        if (strcmp(name, coli_isa_name((colibri_isa_t)i)) == 0) return i;
    return -1;
}

int colibri_isa_supported(colibri_isa_t isa) { return (unsigned)isa < COLIBRI_ISA_COUNT_ && coli_kernels_select(isa) != NULL; }

/* ---- sessions ---- */

static colibri_status_t null_argument(const char *function, const char *name) {
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function, name);
}

#define REQUIRE(pointer) \
    if (!(pointer)) return null_argument(__func__, #pointer)

static colibri_status_t bad_slot(const colibri_t *ctx, int32_t slot) {
    if (slot >= 0 && (uint32_t)slot < ctx->options.batch) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "slot %d does not exist: this session has slots 0 to %u", slot,
                     ctx->options.batch - 1);
}

static colibri_status_t unaligned(const void *buffer, const char *name) {
    if ((uintptr_t)buffer % COLI_ALIGN == 0) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_ALIGNMENT, "%s is not aligned to %d bytes", name, COLI_ALIGN);
}

static colibri_status_t forked(const colibri_t *ctx) {
    if (!coli_os_forked(ctx->fork_guard)) return COLIBRI_OK;
    return coli_fail(
        COLIBRI_ERR_THREAD,
        "this session was created before fork() and its threads are in the parent: call colibri_init in the child");
}

colibri_status_t colibri_workspace_size(const colibri_config_t *config, size_t *bytes) {
    REQUIRE(bytes);
    return coli_session_bytes(config, bytes);
}

colibri_t *colibri_init(const colibri_config_t *config) { return coli_session_create(config); }

void colibri_free(colibri_t *ctx) {
    if (ctx) coli_session_destroy(ctx);
}

const colibri_model_t *colibri_model(const colibri_t *ctx) { return ctx ? ctx->model : NULL; }

/* ---- input ---- */

static colibri_status_t check_slot_input(const colibri_t *ctx, int32_t slot, const int32_t *tokens, int32_t length) {
    const coli_slot_t *state = &ctx->slots[slot];
    if (length < 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "lengths[%d] is %d, it must not be negative", slot, length);
    if ((uint64_t)state->length + (uint32_t)length > ctx->options.seq)
        return coli_fail(COLIBRI_ERR_SLOT_FULL, "slot %d holds %u tokens and cannot take %d more: max_seq_len is %u", slot,
                         state->length, length, ctx->options.seq);
    for (int32_t i = 0; i < length; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= ctx->weights->params->vocab_size)
            return coli_fail(COLIBRI_ERR_TOKEN, "token %d of slot %d is %d, the vocabulary is 0 to %u", i, slot, tokens[i],
                             ctx->weights->params->vocab_size - 1);
    return COLIBRI_OK;
}

static void drop_input(colibri_t *ctx) {
    for (uint32_t i = 0; i < ctx->options.batch; i++) ctx->slots[i].pending = 0;
    ctx->input_ready = false;
}

colibri_status_t colibri_set_input(colibri_t *ctx, const int32_t *tokens, const int32_t *lengths, int32_t batch) {
    REQUIRE(ctx);
    REQUIRE(tokens);
    REQUIRE(lengths);
    if (batch < 1 || (uint32_t)batch > ctx->options.batch)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "batch is %d, this session takes 1 to %u (max_batch_size)", batch,
                         ctx->options.batch);
    uint64_t total = 0;
    for (int32_t i = 0; i < batch; i++) {
        colibri_status_t status = check_slot_input(ctx, i, tokens + total, lengths[i]);
        if (status) return status;
        total += (uint32_t)lengths[i];
    }
    if (total == 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "every length is 0: there is nothing to run");
    drop_input(ctx);
    for (int32_t i = 0; i < batch; i++) {
        coli_slot_t *state = &ctx->slots[i];
        state->pending = (uint32_t)lengths[i];
        if (!state->pending) continue;
        memcpy(ctx->b.history + (uint64_t)i * ctx->options.seq + state->length, tokens, state->pending * sizeof(int32_t));
        tokens += state->pending;
    }
    ctx->input_ready = true;
    ctx->input_batch = (uint32_t)batch;
    return COLIBRI_OK;
}

/* ---- infer ---- */

/* Slots that ran well move on; the others stay as they were. Returns how many failed, and the first. */
static uint32_t commit(colibri_t *ctx, uint32_t *first_failed) {
    uint32_t failed = 0;
    ctx->output_rows = 0;
    for (uint32_t i = 0; i < ctx->options.batch; i++) {
        coli_slot_t *state = &ctx->slots[i];
        state->rows = state->pending;
        state->status = COLIBRI_OK;
        ctx->output_rows += state->rows;
        if (!state->pending) continue;
        if (ctx->b.slot_failed[i]) {
            state->status = COLIBRI_ERR_NOT_FINITE;
            if (!failed++) *first_failed = i;
        } else state->length += state->pending;
        state->has_logits = !ctx->b.slot_failed[i] && ctx->options.outputs != COLIBRI_OUTPUT_HIDDEN;
        if (!state->has_logits) memset(ctx->b.logits + (uint64_t)i * ctx->vocab_stride, 0, ctx->vocab_stride * sizeof(float));
        state->pending = 0;
    }
    return failed;
}

colibri_status_t colibri_infer(colibri_t *ctx) {
    REQUIRE(ctx);
    colibri_status_t status = forked(ctx);
    if (status) return status;
    if (!ctx->input_ready) return coli_fail(COLIBRI_ERR_STATE, "colibri_infer without new input: call colibri_set_input first");
    uint64_t start = coli_os_now_ns();
    ctx->output_ready = false;
    uint64_t host = coli_fp_enter();
    status = coli_forward(ctx);
    coli_fp_leave(host);
    if (status) {
        drop_input(ctx);
        return status;
    }
    coli_stats_count_infer(ctx, coli_os_now_ns() - start);
    uint32_t first = 0, failed = commit(ctx, &first);
    ctx->input_ready = false;
    ctx->output_ready = true;
    ctx->output_batch = ctx->input_batch;
    if (failed)
        return coli_fail(COLIBRI_ERR_NOT_FINITE,
                         "%u slot(s), first slot %u, became NaN or infinite: the weights are damaged or overflow", failed,
                         first);
    return COLIBRI_OK;
}

/* ---- output ---- */

static uint64_t output_width(const colibri_t *ctx) {
    return ctx->options.outputs == COLIBRI_OUTPUT_HIDDEN ? ctx->weights->params->hidden_size : ctx->weights->params->vocab_size;
}

static uint64_t output_bytes(const colibri_t *ctx) {
    uint64_t rows = ctx->options.outputs == COLIBRI_OUTPUT_LAST ? ctx->output_batch : ctx->output_rows;
    return rows * output_width(ctx) * sizeof(float);
}

colibri_status_t colibri_output_size(const colibri_t *ctx, size_t *bytes) {
    REQUIRE(ctx);
    REQUIRE(bytes);
    if (!ctx->output_ready)
        return coli_fail(COLIBRI_ERR_STATE, "there is no output: call colibri_set_input and colibri_infer first");
    uint64_t need = output_bytes(ctx);
    if (need > SIZE_MAX / 2)
        return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY,
                         "the output has %llu bytes, more than can be addressed here: run fewer tokens at once",
                         (unsigned long long)need);
    *bytes = (size_t)need;
    return COLIBRI_OK;
}

static void copy_rows(const float *from, uint64_t stride, float *to, uint64_t width, uint32_t rows) {
    for (uint32_t r = 0; r < rows; r++) memcpy(to + r * width, from + r * stride, width * sizeof(float));
}

/* Decoding: every row is the last one of its slot, and its logits are there already. False if some slot had a prompt. */
static bool copy_last_rows(const colibri_t *ctx, float *output, uint64_t width) {
    for (uint32_t i = 0; i < ctx->options.batch; i++)
        if (ctx->slots[i].rows > 1 || (ctx->slots[i].rows == 1 && !ctx->slots[i].has_logits)) return false;
    for (uint32_t i = 0; i < ctx->options.batch; i++)
        if (ctx->slots[i].rows) {
            memcpy(output, ctx->b.logits + (uint64_t)i * ctx->vocab_stride, width * sizeof(float));
            output += width;
        }
    return true;
}

static bool compute_rows(colibri_t *ctx, float *output) {
    uint64_t host = coli_fp_enter();
    bool done = coli_head_rows(ctx, 0, ctx->output_rows, output);
    coli_fp_leave(host);
    return done;
}

/* Rows of slots whose numbers failed are zero in every output. */
static void clear_failed_rows(const colibri_t *ctx, float *output, uint64_t width) {
    for (uint32_t i = 0; i < ctx->options.batch; i++) {
        if (ctx->slots[i].rows && ctx->slots[i].status) memset(output, 0, ctx->slots[i].rows * width * sizeof(float));
        output += ctx->slots[i].rows * width;
    }
}

colibri_status_t colibri_get_output(colibri_t *ctx, float *output, size_t bytes) {
    size_t need;
    REQUIRE(ctx);
    REQUIRE(output);
    colibri_status_t status = colibri_output_size(ctx, &need);
    if (!status) status = unaligned(output, "output");
    if (!status) status = forked(ctx);
    if (status) return status;
    if (bytes < need)
        return coli_fail(COLIBRI_ERR_BUFFER_TOO_SMALL, "the output buffer has %zu bytes, the latest infer needs %zu", bytes,
                         need);
    uint64_t width = output_width(ctx);
    if (ctx->options.outputs == COLIBRI_OUTPUT_LAST) {
        copy_rows(ctx->b.logits, ctx->vocab_stride, output, width, ctx->output_batch);
        return COLIBRI_OK;
    }
    if (ctx->options.outputs == COLIBRI_OUTPUT_HIDDEN)
        copy_rows(ctx->b.final_hidden, ctx->hidden_stride, output, width, ctx->output_rows);
    else if (!copy_last_rows(ctx, output, width) && !compute_rows(ctx, output))
        return coli_fail(COLIBRI_ERR_CANCELLED, "colibri_get_output was cancelled; the output can be fetched again");
    clear_failed_rows(ctx, output, width);
    return coli_residency_intact(&ctx->residency);
}

/* ---- slots ---- */

colibri_status_t colibri_slot_status(const colibri_t *ctx, int32_t slot) {
    REQUIRE(ctx);
    colibri_status_t status = bad_slot(ctx, slot);
    return status ? status : ctx->slots[slot].status;
}

int32_t colibri_slot_length(const colibri_t *ctx, int32_t slot) {
    if (!ctx || bad_slot(ctx, slot)) return -1;
    return (int32_t)ctx->slots[slot].length;
}

static void forget(colibri_t *ctx, uint32_t slot, uint32_t length) {
    ctx->slots[slot].length = length;
    ctx->slots[slot].has_logits = false;
    memset(ctx->b.logits + (uint64_t)slot * ctx->vocab_stride, 0, ctx->vocab_stride * sizeof(float));
}

colibri_status_t colibri_truncate(colibri_t *ctx, int32_t slot, int32_t length) {
    REQUIRE(ctx);
    colibri_status_t status = bad_slot(ctx, slot);
    if (status) return status;
    if (length < 0 || (uint32_t)length > ctx->slots[slot].length)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "slot %d cannot be truncated to %d tokens: it holds %u", slot, length,
                         ctx->slots[slot].length);
    drop_input(ctx);
    forget(ctx, (uint32_t)slot, (uint32_t)length);
    return COLIBRI_OK;
}

colibri_status_t colibri_reset(colibri_t *ctx) {
    REQUIRE(ctx);
    drop_input(ctx);
    ctx->output_ready = false;
    for (uint32_t i = 0; i < ctx->options.batch; i++) {
        forget(ctx, i, 0);
        ctx->slots[i].status = COLIBRI_OK;
    }
    return COLIBRI_OK;
}

void colibri_cancel(colibri_t *ctx) {
    if (ctx) atomic_store_explicit(&ctx->cancel, 1, memory_order_relaxed);
}

/* ---- sampling ---- */

static bool within(float x, float least, float most) { return x >= least && x <= most; } /* false for NaN */

static colibri_status_t check_sampling(const colibri_sampling_t *o) {
    const float huge = 3.4e38f;
    if (!within(o->temperature, 0, huge))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "temperature is %g, it must be between 0 and 3.4e38",
                         (double)o->temperature);
    if (o->top_k < 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "top_k is %d, it must be 0 (all) or more", o->top_k);
    if (!within(o->top_p, 0, 1))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "top_p is %g, it must be between 0 and 1", (double)o->top_p);
    if (!within(o->min_p, 0, 1))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "min_p is %g, it must be between 0 and 1", (double)o->min_p);
    if (!within(o->repetition_penalty, 0, huge))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "repetition_penalty is %g, it must be between 0 (none) and 3.4e38",
                         (double)o->repetition_penalty);
    return COLIBRI_OK;
}

colibri_status_t colibri_sample(colibri_t *ctx, int32_t slot, const colibri_sampling_t *sampling, int32_t *token) {
    REQUIRE(ctx);
    REQUIRE(token);
    colibri_sampling_t o = COLIBRI_SAMPLING_INIT;
    colibri_status_t status = bad_slot(ctx, slot);
    if (!status && sampling) status = coli_struct_in(sampling, sizeof o, sizeof o, "colibri_sampling_t", &o);
    if (!status) status = check_sampling(&o);
    if (status) return status;
    if (!ctx->slots[slot].has_logits)
        return coli_fail(COLIBRI_ERR_STATE,
                         "slot %d has no logits to sample from: run colibri_infer with logits as output first", slot);
    uint64_t host = coli_fp_enter();
    *token = coli_sample(ctx, (uint32_t)slot, &o);
    coli_fp_leave(host);
    return COLIBRI_OK;
}

/* ---- routing for hosts ---- */

static colibri_status_t check_layer(const colibri_t *ctx, int32_t layer) {
    uint32_t layers = ctx->weights->params->num_layers;
    if (layer >= 0 && (uint32_t)layer < layers) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "layer %d does not exist: the model has layers 0 to %u", layer, layers - 1);
}

colibri_status_t colibri_route_tokens(colibri_t *ctx, int32_t layer, const float *hidden, int32_t n, int32_t *expert_ids,
                                      float *weights) {
    REQUIRE(ctx);
    REQUIRE(hidden);
    REQUIRE(expert_ids);
    REQUIRE(weights);
    colibri_status_t status = check_layer(ctx, layer);
    if (status) return status;
    if (!ctx->weights->layers[layer].is_moe) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "layer %d has no experts", layer);
    if (n < 1) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "n is %d, at least one token is needed", n);
    status = unaligned(hidden, "hidden");
    if (!status) status = forked(ctx);
    if (status) return status;
    uint64_t host = coli_fp_enter();
    int32_t bad = coli_route_rows(ctx, (uint32_t)layer, hidden, (uint32_t)n, expert_ids, weights);
    coli_fp_leave(host);
    status = coli_residency_intact(&ctx->residency);
    if (!status && bad >= 0)
        status = coli_fail(COLIBRI_ERR_NOT_FINITE, "the router's logits of token %d are NaN or infinite", bad);
    return status;
}

colibri_status_t colibri_moe_forward(colibri_t *ctx, int32_t layer, const float *hidden, int32_t n, float *output) {
    REQUIRE(ctx);
    REQUIRE(hidden);
    REQUIRE(output);
    colibri_status_t status = check_layer(ctx, layer);
    if (!status && n < 1) status = coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "n is %d, at least one token is needed", n);
    if (!status) status = unaligned(hidden, "hidden");
    if (!status) status = unaligned(output, "output");
    if (!status) status = forked(ctx);
    if (status) return status;
    uint64_t host = coli_fp_enter();
    status = coli_mlp_rows(ctx, (uint32_t)layer, hidden, (uint32_t)n, output);
    coli_fp_leave(host);
    colibri_status_t intact = coli_residency_intact(&ctx->residency);
    return intact ? intact : status;
}

/* ---- statistics ---- */

colibri_status_t colibri_stats(const colibri_t *ctx, colibri_stats_t *stats) {
    REQUIRE(ctx);
    colibri_stats_t filled;
    coli_stats_read(ctx, &filled);
    return coli_struct_out(stats, sizeof filled, sizeof filled, "colibri_stats_t", &filled);
}

colibri_status_t colibri_expert_stats(const colibri_t *ctx, int32_t layer, colibri_expert_stats_t *rows, size_t capacity) {
    REQUIRE(ctx);
    REQUIRE(rows);
    const colibri_file_params *p = ctx->weights->params;
    if (layer < 0 || (uint32_t)layer >= p->num_layers || !ctx->weights->layers[layer].is_moe)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "layer %d does not exist or has no experts", layer);
    if (capacity < p->num_experts)
        return coli_fail(COLIBRI_ERR_BUFFER_TOO_SMALL, "room for %zu rows, the layer has %u experts", capacity, p->num_experts);
    for (uint32_t e = 0; e < p->num_experts; e++) coli_stats_expert(ctx, (uint32_t)layer, e, &rows[e]);
    return COLIBRI_OK;
}

void colibri_stats_reset(colibri_t *ctx) {
    if (ctx) coli_stats_reset(ctx);
}

colibri_status_t colibri_save_profile(const colibri_t *ctx, const char *path) {
    REQUIRE(ctx);
    REQUIRE(path);
    return coli_profile_save(&ctx->residency, path);
}
