/* session.c: from a config to a running session: defaults resolved and checked, memory planned and taken, threads started. */
#include "forward/session.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/affinity.h"
#include "base/cpu.h"
#include "base/os.h"
#include "base/status.h"
#include "base/structs.h"
#include "forward/life.h"
#include "forward/plan.h"
#include "forward/stats.h"
#include "model/profile.h"

#define DEFAULT_CHUNK 512
#define DEFAULT_MAX_SEQ 4096
#define MAX_BATCH 4096
#define MAX_SEQ (1 << 24)
#define MAX_CHUNK 65536
#define DEFAULT_CAPACITY_FACTOR 1.25f
#define CACHE_IN_BYTES ((uint64_t)1 << 20) /* expert_cache_size counts experts below, bytes from here on */

static colibri_status_t in_range(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.%s is %lld, allowed are %lld to %lld", name, (long long)value,
                     (long long)least, (long long)most);
}

static colibri_status_t check_fixed(const colibri_config_t *c) {
    if (c->device_id != 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.device_id is %d, but this library runs on the CPU: set 0",
                         c->device_id);
    if (c->reserved0 != 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.reserved0 is %d, it must be 0", c->reserved0);
    if (c->reserved1 != 0) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.reserved1 is %d, it must be 0", c->reserved1);
    return COLIBRI_OK;
}

static colibri_status_t check_ranges(const colibri_config_t *c) {
    const struct { const char *name; int64_t value, least, most; } rules[] = {
        {"max_batch_size", c->max_batch_size, 0, MAX_BATCH}, {"max_seq_len", c->max_seq_len, 0, MAX_SEQ},
        {"num_threads", c->num_threads, 0, COLI_MAX_THREADS}, {"isa", c->isa, 0, COLIBRI_ISA_COUNT_ - 1},
        {"outputs", c->outputs, 0, COLIBRI_OUTPUT_HIDDEN}, {"dtype", c->dtype, 0, COLIBRI_DTYPE_Q4},
        {"max_chunk_tokens", c->max_chunk_tokens, 0, MAX_CHUNK}, {"top_k", c->top_k, 0, UINT16_MAX},
        {"residency", c->residency, 0, COLIBRI_RESIDENCY_COUNT_ - 1}, {"guard_mapping", c->guard_mapping, 0, 1},
        {"load_balancing_strategy", c->load_balancing_strategy, 0, COLIBRI_BALANCE_HARD_CAPACITY}};
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

/* ---- residency ---- */

/* A field that belongs to one mode is an error in the others. */
static colibri_status_t resolve_mode(const colibri_config_t *c, coli_residency_options_t *o) {
    static const char *const names[COLIBRI_RESIDENCY_COUNT_] = {"default", "MAP", "LOCK", "HUGE", "STREAM"};
    o->mode = c->residency           ? (uint32_t)c->residency
              : c->expert_cache_size ? COLIBRI_RESIDENCY_STREAM
              : c->hugepage_size     ? COLIBRI_RESIDENCY_HUGE
                                     : COLIBRI_RESIDENCY_MAP;
    if (c->expert_cache_size && o->mode != COLIBRI_RESIDENCY_STREAM)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.expert_cache_size belongs to residency STREAM, not %s: set 0",
                         names[o->mode]);
    if (c->hugepage_size && o->mode != COLIBRI_RESIDENCY_HUGE)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.hugepage_size belongs to residency HUGE, not %s: set 0",
                         names[o->mode]);
    if (c->hugepage_size && c->hugepage_size != COLI_HUGE_PAGE && c->hugepage_size != COLI_GIANT_PAGE)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.hugepage_size is %llu, allowed are 0, 2097152 and 1073741824 bytes",
                         (unsigned long long)c->hugepage_size);
    o->page = c->hugepage_size ? c->hugepage_size : COLI_HUGE_PAGE;
    return COLIBRI_OK;
}

static colibri_status_t resolve_cache(const colibri_config_t *c, const colibri_model_t *model, coli_residency_options_t *o) {
    uint64_t expert, all = coli_residency_experts(model, &expert), asked = c->expert_cache_size;
    if (o->mode != COLIBRI_RESIDENCY_STREAM) return COLIBRI_OK;
    if (all == 0)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "%s has no experts that could be streamed: use another residency",
                         model->path);
    uint64_t slots = asked == 0 ? COLI_MAX(2, (all + 3) / 4) : asked < CACHE_IN_BYTES ? asked : asked / expert;
    if (slots < 2)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.expert_cache_size %llu has room for %llu expert(s) of %llu bytes, at least 2 are needed",
                         (unsigned long long)asked, (unsigned long long)slots, (unsigned long long)expert);
    o->cache_slots = (uint32_t)COLI_MAX(2, COLI_MIN(slots, all));
    return COLIBRI_OK;
}

static colibri_status_t resolve_nodes(const colibri_config_t *c, const colibri_file_params *p, coli_options_t *o) {
    coli_topology_t topology;
    coli_numa_t *numa = &o->residency.numa;
    coli_os_topology(&topology);
    colibri_status_t status = coli_numa_parse(c->numa_policy, p->num_layers, &topology, numa);
    if (!status && numa->num_nodes > 1 && o->residency.mode == COLIBRI_RESIDENCY_MAP)
        status = coli_fail(COLIBRI_ERR_UNSUPPORTED,
                           "config.numa_policy needs residency LOCK, HUGE or STREAM: the page cache lies where the system put it");
    if (!status) coli_numa_threads(numa, &topology, o->threads, o->pinned ? o->cpus : NULL);
    return status;
}

static colibri_status_t resolve_residency(const colibri_config_t *c, const colibri_model_t *model, coli_options_t *o) {
    o->residency.guard = c->guard_mapping != 0;
    o->residency.top_k = o->top_k;
    colibri_status_t status = resolve_mode(c, &o->residency);
    if (!status) status = resolve_cache(c, model, &o->residency);
    return status ? status : resolve_nodes(c, model->weights.params, o);
}

static colibri_status_t resolve_balance(const colibri_config_t *c, coli_options_t *o) {
    o->balance = (uint32_t)c->load_balancing_strategy;
    o->capacity_factor = c->capacity_factor != 0 ? c->capacity_factor : DEFAULT_CAPACITY_FACTOR;
    if (!(o->capacity_factor > 0 && o->capacity_factor <= 1024))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.capacity_factor is %g, it must be above 0 and at most 1024",
                         (double)c->capacity_factor);
    if (c->capacity_factor != 0 && o->balance == COLIBRI_BALANCE_NONE)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.capacity_factor belongs to a load_balancing_strategy, and there is none: set 0");
    return COLIBRI_OK;
}

/* ---- the rest ---- */

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
    status = resolve_balance(c, o);
    return status ? status : resolve_residency(c, model, o);
}

/* Everything of a config that can be checked and decided: the model is opened or retained. */
static colibri_status_t prepare(const colibri_config_t *given, colibri_config_t *c, colibri_model_t **model,
                                coli_options_t *o) {
    colibri_status_t status = coli_struct_in(given, sizeof(colibri_config_t), sizeof *c, "colibri_config_t", c);
    if (!status) status = check_fixed(c);
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

/* Arena bytes: copied weights in front, where the memory is best aligned, then the session object itself, then the plan. */
static colibri_t *lay_out(coli_arena_t *arena, const colibri_model_t *model, const coli_options_t *o, colibri_t *counting) {
    uint8_t *copy = coli_arena_take(arena, coli_residency_copy_bytes(model, &o->residency), 1);
    colibri_t *s = coli_arena_take(arena, 1, sizeof(colibri_t));
    if (s) memset(s, 0, sizeof *s);
    if (s) s->residency.copy = copy;
    coli_plan(arena, model, o, s ? s : counting);
    return s;
}

static colibri_status_t needed_bytes(const colibri_model_t *model, const coli_options_t *o, uint64_t *bytes) {
    colibri_t counting;
    coli_arena_t arena = {0};
    memset(&counting, 0, sizeof counting);
    lay_out(&arena, model, o, &counting);
    *bytes = arena.used;
    if (arena.overflow || arena.used > SIZE_MAX / 2)
        return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY,
                         "max_batch_size %u and max_seq_len %u (and weights or experts in the workspace) need more memory than "
                         "can be addressed",
                         o->batch, o->seq);
    return COLIBRI_OK;
}

colibri_status_t coli_session_bytes(const colibri_config_t *config, size_t *bytes) {
    colibri_config_t c;
    colibri_model_t *model;
    coli_options_t o = {0};
    uint64_t need = 0;
    colibri_status_t status = prepare(config, &c, &model, &o);
    if (status) return status;
    status = needed_bytes(model, &o, &need);
    coli_model_release(model);
    if (!status) *bytes = (size_t)need;
    return status;
}

/* What a session lives in. */
typedef struct memory {
    uint8_t *data;
    void *own;     /* NULL: the caller's */
    uint64_t need, own_bytes;
    bool in_pool;  /* on reserved huge pages */
} memory_t;

static colibri_status_t take_own(const coli_residency_options_t *o, memory_t *m) {
    m->own_bytes = m->need;
    if (o->mode == COLIBRI_RESIDENCY_HUGE) {
        m->own = coli_os_alloc_pool(m->need, o->page);
        m->in_pool = m->own != NULL;
        if (m->in_pool) m->own_bytes = (m->need + o->page - 1) & ~(o->page - 1);
    }
    if (!m->own) m->own = coli_os_alloc(m->need);
    m->data = m->own;
    if (m->own) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "the system refused %llu bytes for the workspace", (unsigned long long)m->need);
}

/* The caller's workspace, or zeroed memory of our own. */
static colibri_status_t take_memory(const colibri_config_t *c, const coli_options_t *o, uint64_t need, memory_t *m) {
    *m = (memory_t){.data = c->workspace, .need = need};
    if (!c->workspace && c->workspace_size)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.workspace_size is %zu but config.workspace is NULL",
                         c->workspace_size);
    if (!c->workspace) return take_own(&o->residency, m);
    if ((uintptr_t)c->workspace % COLI_ALIGN)
        return coli_fail(COLIBRI_ERR_ALIGNMENT, "config.workspace is not aligned to %d bytes", COLI_ALIGN);
    if (c->workspace_size && c->workspace_size < need)
        return coli_fail(COLIBRI_ERR_WORKSPACE, "config.workspace_size is %zu bytes, this config needs %llu", c->workspace_size,
                         (unsigned long long)need);
    return COLIBRI_OK;
}

/* Everything behind the copied weights and before the expert cache, both of which are read from the file: cleared, and with
 * that there, so that no page of it is missing later. */
static void clear(const coli_options_t *o, const colibri_model_t *model, const memory_t *m) {
    uint64_t copied = coli_residency_copy_bytes(model, &o->residency), end = m->need - coli_residency_cache_bytes(model, &o->residency);
    if (!m->own || o->residency.mode == COLIBRI_RESIDENCY_HUGE) memset(m->data + copied, 0, end - copied);
}

static colibri_status_t start(colibri_t *s, const coli_kernels_t *kernels, colibri_model_t *model, const coli_options_t *o) {
    coli_topology_t topology;
    s->model = model;
    s->kernels = kernels;
    s->options = *o;
    atomic_init(&s->cancel, 0);
    bool threads = o->threads > 1 || o->residency.mode == COLIBRI_RESIDENCY_STREAM;
    s->fork_guard = threads ? coli_os_fork_guard_new() : NULL;
    coli_ties_t ties = {.cpus = o->pinned ? s->options.cpus : NULL};
    if (!o->pinned && o->residency.numa.num_nodes > 1) {
        coli_os_topology(&topology);
        ties.topology = &topology;
        ties.nodes = s->options.residency.numa.thread_node;
    }
    s->pool = coli_pool_start(s->pool_memory, o->threads, &ties);
    colibri_status_t status = s->pool ? coli_residency_start(&s->residency, model, s->pool, s->own_memory, s->own_bytes)
                                      : colibri_last_status();
    if (status) {
        if (s->pool) coli_pool_stop(s->pool);
        coli_os_fork_guard_free(s->fork_guard);
    }
    s->weights = s->residency.weights;
    return status;
}

__attribute__((format(printf, 3, 4))) static void say(const colibri_config_t *c, int level, const char *format, ...) {
    char line[400];
    if (!c->log) return;
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    c->log(level, line, c->log_user_data);
}

static void log_residency(const colibri_config_t *c, const colibri_t *s) {
    const coli_residency_t *r = &s->residency;
    double copied = (double)r->copy_bytes / 1e6;
    if (r->lock_refused)
        say(c, COLIBRI_LOG_WARNING,
            "residency LOCK: the system refuses to lock the model's %.1f MB (raise RLIMIT_MEMLOCK, \"ulimit -l\"): using MAP",
            (double)s->model->map.size / 1e6);
    if (r->short_of_memory)
        say(c, COLIBRI_LOG_WARNING,
            "the model's %.1f MB are more than the memory this process may use: experts will come from disk (residency STREAM "
            "keeps the most used ones)",
            (double)s->model->map.size / 1e6);
    if (r->mode == COLIBRI_RESIDENCY_HUGE && r->huge_bytes == 0)
        say(c, COLIBRI_LOG_WARNING, "residency HUGE: the system gave no huge pages: %.1f MB of weights on ordinary ones", copied);
    else if (r->mode == COLIBRI_RESIDENCY_HUGE)
        say(c, COLIBRI_LOG_INFO, "residency HUGE: %.1f of %.1f MB of weights on %s pages of %u MB", (double)r->huge_bytes / 1e6,
            copied, r->in_pool ? "reserved" : "transparent",
            (unsigned)((r->in_pool ? r->options.page : COLI_HUGE_PAGE) >> 20));
    if (r->mode == COLIBRI_RESIDENCY_STREAM)
        say(c, COLIBRI_LOG_INFO, "residency STREAM: %.1f MB of weights and %u experts of %.1f MB in memory, reads %s the page cache",
            copied, (unsigned)r->cache.num_slots, (double)r->cache.slot_bytes / 1e6,
            r->cache.file.alignment > 1 ? "bypass" : "go through");
    if (r->numa_refused) say(c, COLIBRI_LOG_WARNING, "numa_policy: the system refuses to place memory on nodes: it lies anywhere");
    else if (r->options.numa.num_nodes)
        say(c, COLIBRI_LOG_INFO, "numa_policy: weights on %u memory node(s)", (unsigned)r->options.numa.num_used);
}

static void log_session(const colibri_config_t *c, const colibri_t *s) {
    say(c, COLIBRI_LOG_INFO, "%.200s: %s kernels, %u threads, %u slots of %u tokens, workspace %.1f MB (KV cache %.1f MB)",
        s->model->path, s->kernels->name, s->options.threads, s->options.batch, s->options.seq, (double)s->memory_bytes / 1e6,
        (double)coli_kvcache_bytes(&s->kv, s->weights->params->num_layers) / 1e6);
    log_residency(c, s);
    if (s->options.seq > s->weights->params->max_position)
        say(c, COLIBRI_LOG_WARNING, "max_seq_len %u exceeds the %u positions this model was made for", s->options.seq,
            s->weights->params->max_position);
}

static const coli_kernels_t *choose_kernels(colibri_isa_t isa) {
    const coli_kernels_t *kernels = coli_kernels_select(isa);
    bool refused = isa == COLIBRI_ISA_AMX && coli_cpu_features() & COLI_CPU_AMX_INT8;
    if (!kernels)
        coli_fail(COLIBRI_ERR_ISA, "the instruction set \"%s\" is not usable here (found: %s%s)", coli_isa_name(isa),
                  coli_cpu_text(), refused ? "; the system refuses AMX to this process" : "");
    return kernels;
}

static colibri_status_t create(const colibri_config_t *c, colibri_model_t *model, const coli_options_t *o,
                               colibri_t **session) {
    const coli_kernels_t *kernels = choose_kernels(o->isa);
    if (!kernels) return COLIBRI_ERR_ISA;
    uint64_t need;
    memory_t memory;
    colibri_status_t status = needed_bytes(model, o, &need);
    if (!status) status = take_memory(c, o, need, &memory);
    if (status) return status;
    clear(o, model, &memory);
    coli_arena_t arena = {.base = memory.data};
    colibri_t *s = lay_out(&arena, model, o, NULL);
    COLI_ASSERT(arena.used == need);
    s->own_memory = memory.own;
    s->own_bytes = memory.own_bytes;
    s->memory_bytes = need;
    s->residency.in_pool = memory.in_pool;
    s->residency.rows = s->counters.experts;
    s->residency.totals = &s->counters.totals;
    status = start(s, kernels, model, o);
    if (status) {
        if (memory.own) coli_os_free(memory.own, memory.own_bytes);
        return status;
    }
    *session = s;
    return COLIBRI_OK;
}

colibri_t *coli_session_create(const colibri_config_t *config) {
    colibri_config_t c;
    colibri_model_t *model;
    coli_options_t o = {0};
    colibri_t *session = NULL;
    if (prepare(config, &c, &model, &o)) return NULL;
    if (create(&c, model, &o, &session)) {
        coli_model_release(model);
        return NULL;
    }
    if (c.expert_profile && coli_profile_load(&session->residency, c.expert_profile)) {
        coli_session_destroy(session);
        return NULL;
    }
    coli_stats_reset(session); /* init's own reads are not the caller's */
    log_session(&c, session);
    return session;
}

void coli_session_destroy(colibri_t *s) {
    void *own = s->own_memory;
    uint64_t own_bytes = s->own_bytes;
    bool forked = coli_os_forked(s->fork_guard); /* a child has no threads to join */
    if (!forked) coli_pool_stop(s->pool);
    coli_residency_stop(&s->residency, own, own_bytes, forked);
    coli_os_fork_guard_free(s->fork_guard);
    coli_model_release(s->model);
    if (own) coli_os_free(own, own_bytes);
}
