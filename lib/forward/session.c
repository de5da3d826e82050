/* session.c: from a config to a running session: defaults resolved and checked, memory planned and taken, threads started. */
#include "forward/session.h"

#include <stdatomic.h>
#include <stdio.h>

#include "base/affinity.h"
#include "base/cpu.h"
#include "base/os.h"
#include "base/status.h"
#include "base/structs.h"
#include "forward/life.h"
#include "forward/plan.h"

#define DEFAULT_CHUNK 512
#define DEFAULT_MAX_SEQ 4096
#define MAX_BATCH 4096
#define MAX_SEQ (1 << 24)
#define MAX_CHUNK 65536

static colibri_status_t in_range(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.%s is %lld, allowed are %lld to %lld", name, (long long)value,
                     (long long)least, (long long)most);
}

/* Fields that later versions will use: a setting that is not honoured is an error, not a silence. */
static colibri_status_t check_unsupported(const colibri_config_t *c) {
    if (c->device_id != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.device_id is %d, but this library runs on the CPU: set 0",
                         c->device_id);
    if (c->expert_cache_size != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED,
                         "config.expert_cache_size is not supported in this version: experts are mapped, set 0");
    if (c->hugepage_size != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.hugepage_size is not supported in this version: set 0");
    if (c->numa_policy && strcmp(c->numa_policy, "none") != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.numa_policy \"%.*s\" is not supported in this version: use \"none\"",
                         coli_fitting(c->numa_policy, 64), c->numa_policy);
    if (c->load_balancing_strategy != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.load_balancing_strategy %d is not supported in this version: set 0",
                         c->load_balancing_strategy);
    if (c->residency != 0 || c->capacity_factor != 0 || c->expert_profile || c->guard_mapping != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.residency, capacity_factor, expert_profile and guard_mapping are not there yet");
    if (c->reserved1 != 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.reserved1 is %d, it must be 0", c->reserved1);
    if (c->reserved0 != 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.reserved0 is %d, it must be 0", c->reserved0);
    return COLIBRI_OK;
}

static colibri_status_t check_ranges(const colibri_config_t *c) {
    const struct { const char *name; int64_t value, least, most; } rules[] = {
        {"max_batch_size", c->max_batch_size, 0, MAX_BATCH}, {"max_seq_len", c->max_seq_len, 0, MAX_SEQ},
        {"num_threads", c->num_threads, 0, COLI_MAX_THREADS}, {"isa", c->isa, 0, COLIBRI_ISA_COUNT_ - 1},
        {"outputs", c->outputs, 0, COLIBRI_OUTPUT_HIDDEN}, {"dtype", c->dtype, 0, COLIBRI_DTYPE_Q4},
        {"max_chunk_tokens", c->max_chunk_tokens, 0, MAX_CHUNK}, {"top_k", c->top_k, 0, UINT16_MAX}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        colibri_status_t status = in_range(rules[i].name, rules[i].value, rules[i].least, rules[i].most);
        if (status) return status;
    }
    if (c->kv_dtype != 0 && c->kv_dtype != COLIBRI_DTYPE_F32 && c->kv_dtype != COLIBRI_DTYPE_F16 &&
        c->kv_dtype != COLIBRI_DTYPE_Q8)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.kv_dtype is %d, allowed are 0, COLIBRI_DTYPE_F32, COLIBRI_DTYPE_F16 and COLIBRI_DTYPE_Q8",
                         c->kv_dtype);
    if (c->activation_bits != 0 && c->activation_bits != 8 && c->activation_bits != 16)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.activation_bits is %d, allowed are 0, 8 and 16",
                         c->activation_bits);
    return COLIBRI_OK;
}

static colibri_status_t resolve(const colibri_config_t *c, const colibri_model_t *model, coli_options_t *o) {
    static const char *const dtypes[COLIBRI_DTYPE_Q4 + 1] = {"any", "f32", "f16", "bf16", "q8", "q4"};
    const colibri_file_params *p = model->weights.params;
    uint32_t file_dtype = model->directory.header->dtype;
    if (c->dtype != 0 && (uint32_t)c->dtype != file_dtype + 1)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED,
                         "config.dtype is %d (%s) but %s holds %s: convert the model to the type you want, or set 0", c->dtype,
                         dtypes[c->dtype], model->path, dtypes[file_dtype + 1]);
    if ((uint32_t)c->top_k > p->num_experts)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.top_k is %d but the model has %u experts a layer (top_k is experts per token)", c->top_k,
                         p->num_experts);
    o->batch = c->max_batch_size ? (uint32_t)c->max_batch_size : 1;
    o->seq = c->max_seq_len ? (uint32_t)c->max_seq_len : COLI_MIN(p->max_position, DEFAULT_MAX_SEQ);
    o->threads = (uint32_t)c->num_threads;
    colibri_status_t status = coli_affinity(c->cpu_affinity, &o->threads, &o->pinned, o->cpus);
    if (status) return status;
    if (o->threads == 0) o->threads = (uint32_t)COLI_MIN(coli_os_num_cores(), COLI_MAX_THREADS);
    o->top_k = c->top_k ? (uint32_t)c->top_k : p->top_k;
    o->chunk =
        (uint32_t)COLI_MIN(c->max_chunk_tokens ? (uint64_t)c->max_chunk_tokens : DEFAULT_CHUNK, (uint64_t)o->batch * o->seq);
    o->outputs = (uint32_t)c->outputs;
    o->kv_type = c->kv_dtype == COLIBRI_DTYPE_Q8    ? 2
                 : c->kv_dtype == COLIBRI_DTYPE_F16 ? 1
                 : c->kv_dtype == COLIBRI_DTYPE_F32 ? 0
                                                    : file_dtype != COLIBRI_FILE_F32;
    o->expert_bits = c->activation_bits ? (uint32_t)c->activation_bits : 8;
    o->other_bits = c->activation_bits ? (uint32_t)c->activation_bits : 16;
    o->isa = (colibri_isa_t)c->isa;
    return COLIBRI_OK;
}

/* Everything of a config that can be checked and decided: the model is opened or retained. */
static colibri_status_t prepare(const colibri_config_t *given, colibri_config_t *c, colibri_model_t **model,
                                coli_options_t *o) {
    colibri_status_t status = coli_struct_in(given, sizeof(colibri_config_t), sizeof *c, "colibri_config_t", c);
    if (!status) status = check_unsupported(c);
    if (!status) status = check_ranges(c);
    if (status) return status;
    if (!c->model == !c->model_path)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "exactly one of config.model_path and config.model must be set");
    *model = c->model;
    if (c->model) coli_model_retain(c->model);
    else if ((status = coli_model_open(c->model_path, model)) != COLIBRI_OK) return status;
    status = resolve(c, *model, o);
    if (status) coli_model_release(*model);
    return status;
}

/* Arena bytes: the session object itself, then the plan. */
static colibri_t *lay_out(coli_arena_t *arena, const coli_weights_t *weights, const coli_options_t *o, colibri_t *counting) {
    colibri_t *s = coli_arena_take(arena, 1, sizeof(colibri_t));
    if (s) memset(s, 0, sizeof *s);
    coli_plan(arena, weights, o, s ? s : counting);
    return s;
}

static colibri_status_t needed_bytes(const coli_weights_t *weights, const coli_options_t *o, uint64_t *bytes) {
    colibri_t counting;
    coli_arena_t arena = {0};
    memset(&counting, 0, sizeof counting);
    lay_out(&arena, weights, o, &counting);
    *bytes = arena.used;
    if (arena.overflow || arena.used > SIZE_MAX / 2)
        return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY,
                         "max_batch_size %u and max_seq_len %u need more memory than can be addressed", o->batch, o->seq);
    return COLIBRI_OK;
}

colibri_status_t coli_session_bytes(const colibri_config_t *config, size_t *bytes) {
    colibri_config_t c;
    colibri_model_t *model;
    coli_options_t o;
    uint64_t need = 0;
    colibri_status_t status = prepare(config, &c, &model, &o);
    if (status) return status;
    status = needed_bytes(&model->weights, &o, &need);
    coli_model_release(model);
    if (!status) *bytes = (size_t)need;
    return status;
}

/* The caller's workspace, cleared, or zeroed memory of our own (then *own is set). */
static colibri_status_t take_memory(const colibri_config_t *c, uint64_t need, uint8_t **memory, void **own) {
    *own = NULL;
    *memory = c->workspace;
    if (!c->workspace && c->workspace_size)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.workspace_size is %zu but config.workspace is NULL",
                         c->workspace_size);
    if (!c->workspace) {
        *own = *memory = coli_os_alloc(need);
        if (!*memory)
            return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "the system refused %llu bytes for the workspace",
                             (unsigned long long)need);
        return COLIBRI_OK;
    }
    if ((uintptr_t)c->workspace % COLI_ALIGN)
        return coli_fail(COLIBRI_ERR_ALIGNMENT, "config.workspace is not aligned to %d bytes", COLI_ALIGN);
    if (c->workspace_size && c->workspace_size < need)
        return coli_fail(COLIBRI_ERR_WORKSPACE, "config.workspace_size is %zu bytes, this config needs %llu", c->workspace_size,
                         (unsigned long long)need);
    memset(c->workspace, 0, need);
    return COLIBRI_OK;
}

static colibri_status_t start(colibri_t *s, const coli_kernels_t *kernels, colibri_model_t *model, const coli_options_t *o) {
    s->model = model;
    s->weights = &model->weights;
    s->kernels = kernels;
    s->options = *o;
    atomic_init(&s->cancel, 0);
    s->fork_guard = o->threads > 1 ? coli_os_fork_guard_new() : NULL;
    coli_ties_t ties = {o->pinned ? s->options.cpus : NULL, NULL, NULL};
    s->pool = coli_pool_start(s->pool_memory, o->threads, &ties);
    if (s->pool) return COLIBRI_OK;
    coli_os_fork_guard_free(s->fork_guard);
    return colibri_last_status();
}

static void log_session(const colibri_config_t *c, const colibri_t *s) {
    char line[256];
    if (!c->log) return;
    snprintf(line, sizeof line, "%s: %s kernels, %u threads, %u slots of %u tokens, workspace %.1f MB (KV cache %.1f MB)",
             s->model->path, s->kernels->name, s->options.threads, s->options.batch, s->options.seq,
             (double)s->memory_bytes / 1e6, (double)coli_kvcache_bytes(&s->kv, s->weights->params->num_layers) / 1e6);
    c->log(COLIBRI_LOG_INFO, line, c->log_user_data);
    if (s->options.seq > s->weights->params->max_position) {
        snprintf(line, sizeof line, "max_seq_len %u exceeds the %u positions this model was made for", s->options.seq,
                         s->weights->params->max_position);
        c->log(COLIBRI_LOG_WARNING, line, c->log_user_data);
    }
}

static colibri_status_t create(const colibri_config_t *c, colibri_model_t *model, const coli_options_t *o,
                               colibri_t **session) {
    const coli_kernels_t *kernels = coli_kernels_select(o->isa);
    bool refused = o->isa == COLIBRI_ISA_AMX && coli_cpu_features() & COLI_CPU_AMX_INT8;
    if (!kernels)
        return coli_fail(COLIBRI_ERR_ISA, "the instruction set \"%s\" is not usable here (found: %s%s)", coli_isa_name(o->isa),
                         coli_cpu_text(), refused ? "; the system refuses AMX to this process" : "");
    uint64_t need;
    uint8_t *memory;
    void *own;
    colibri_status_t status = needed_bytes(&model->weights, o, &need);
    if (!status) status = take_memory(c, need, &memory, &own);
    if (status) return status;
    coli_arena_t arena = {.base = memory};
    colibri_t *s = lay_out(&arena, &model->weights, o, NULL);
    COLI_ASSERT(arena.used == need);
    s->own_memory = own;
    s->memory_bytes = need;
    status = start(s, kernels, model, o);
    if (status) {
        if (own) coli_os_free(own, need);
        return status;
    }
    log_session(c, s);
    *session = s;
    return COLIBRI_OK;
}

colibri_t *coli_session_create(const colibri_config_t *config) {
    colibri_config_t c;
    colibri_model_t *model;
    coli_options_t o;
    colibri_t *session = NULL;
    if (prepare(config, &c, &model, &o)) return NULL;
    if (create(&c, model, &o, &session)) coli_model_release(model);
    return session;
}

void coli_session_destroy(colibri_t *s) {
    if (!coli_os_forked(s->fork_guard)) coli_pool_stop(s->pool); /* a forked child has no workers to join */
    coli_os_fork_guard_free(s->fork_guard);
    coli_model_release(s->model);
    if (s->own_memory) coli_os_free(s->own_memory, s->memory_bytes);
}
