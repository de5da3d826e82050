/* session.c: from options (config.c) to a running session: memory planned and taken, threads started, weights where they shall
 * be, and the log's lines about it. */
#include "forward/session.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/cpu.h"
#include "base/os.h"
#include "base/status.h"
#include "forward/config.h"
#include "forward/life.h"
#include "forward/plan.h"
#include "forward/stats.h"
#include "model/profile.h"

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
    coli_options_t o;
    uint64_t need = 0;
    colibri_status_t status = coli_config_resolve(config, &c, &model, &o);
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
    uint64_t copied = coli_residency_copy_bytes(model, &o->residency);
    uint64_t end = m->need - coli_residency_cache_bytes(model, &o->residency);
    if (!m->own || o->residency.mode == COLIBRI_RESIDENCY_HUGE) memset(m->data + copied, 0, end - copied);
}

static coli_pool_t *start_pool(colibri_t *s) {
    const coli_options_t *o = &s->options;
    coli_topology_t topology;
    coli_ties_t ties = {.cpus = o->pinned ? o->cpus : NULL};
    if (o->parallel_for) return coli_pool_start_hosted(s->pool_memory, o->threads, o->parallel_for, o->parallel_for_user_data);
    if (!o->pinned && o->residency.numa.num_nodes > 1) {
        coli_os_topology(&topology);
        ties.topology = &topology;
        ties.nodes = o->residency.numa.thread_node;
    }
    return coli_pool_start(s->pool_memory, o->threads, &ties);
}

static colibri_status_t start(colibri_t *s, const coli_kernels_t *kernels, colibri_model_t *model, const coli_options_t *o) {
    s->model = model;
    s->kernels = kernels;
    s->options = *o;
    atomic_init(&s->cancel, 0);
    bool threads = (o->threads > 1 && !o->parallel_for) || o->residency.mode == COLIBRI_RESIDENCY_STREAM;
    s->fork_guard = threads ? coli_os_fork_guard_new() : NULL;
    s->pool = start_pool(s);
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
            "residency LOCK: the system refuses to lock the model's %.1f MB (%s): using MAP", (double)s->model->map.size / 1e6,
            r->short_of_memory ? "it has not that much memory" : "raise RLIMIT_MEMLOCK, \"ulimit -l\"");
    if (r->short_of_memory)
        say(c, COLIBRI_LOG_WARNING,
            "the model's %.1f MB are more than the memory this process may use: experts will come from disk (residency STREAM "
            "keeps the most used ones)",
            (double)s->model->map.size / 1e6);
    if (r->mode == COLIBRI_RESIDENCY_HUGE && r->huge_bytes == 0)
        say(c, COLIBRI_LOG_WARNING, "residency HUGE: the system gave no huge pages: %.1f MB of weights on ordinary ones",
            copied);
    else if (r->mode == COLIBRI_RESIDENCY_HUGE)
        say(c, r->in_pool || r->options.page == COLI_HUGE_PAGE ? COLIBRI_LOG_INFO : COLIBRI_LOG_WARNING,
            "residency HUGE: %.1f of %.1f MB of weights on %s pages of %u MB", (double)r->huge_bytes / 1e6, copied,
            r->in_pool ? "reserved" : "transparent", (unsigned)((r->in_pool ? r->options.page : COLI_HUGE_PAGE) >> 20));
    if (r->mode == COLIBRI_RESIDENCY_STREAM)
        say(c, COLIBRI_LOG_INFO,
            "residency STREAM: %.1f MB of weights and %u experts of %.1f MB in memory, reads %s the page cache",
            copied, (unsigned)r->cache.num_slots, (double)r->cache.slot_bytes / 1e6,
            r->cache.file.alignment > 1 ? "bypass" : "go through");
    if (r->numa_refused)
        say(c, COLIBRI_LOG_WARNING, "numa_policy: the system refuses to place memory on nodes: it lies anywhere");
    else if (r->options.numa.num_nodes)
        say(c, COLIBRI_LOG_INFO, "numa_policy: weights on %u memory node(s)", (unsigned)r->options.numa.num_used);
}

static void log_session(const colibri_config_t *c, const colibri_t *s) {
    say(c, COLIBRI_LOG_INFO, "%.200s: %s kernels, %u threads%s, %u slots of %u tokens, workspace %.1f MB (KV cache %.1f MB)",
        s->model->path, s->kernels->name, s->options.threads, s->options.parallel_for ? " of the host" : "",
        s->options.batch, s->options.seq, (double)s->memory_bytes / 1e6,
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
    coli_options_t o;
    colibri_t *session = NULL;
    if (coli_config_resolve(config, &c, &model, &o)) return NULL;
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
