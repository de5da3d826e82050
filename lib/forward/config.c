/* config.c: from what a caller asks for to options without defaults: checked against ranges, the machine, and the model. */
#include "forward/config.h"

#include "base/affinity.h"
#include "base/os.h"
#include "base/status.h"
#include "base/structs.h"

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
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.hugepage_size is %llu, allowed are 0, 2097152 and 1073741824 bytes",
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
                           "config.numa_policy needs residency LOCK, HUGE or STREAM: the page cache lies where the system put "
                           "it");
    if (!status) coli_numa_threads(numa, &topology, o->threads, o->pinned ? o->cpus : NULL);
    return status;
}

static colibri_status_t resolve_residency(const colibri_config_t *c, const colibri_model_t *model, coli_options_t *o) {
    o->residency.guard = c->guard_mapping != 0;
    o->residency.top_k = o->top_k;
    colibri_status_t status = resolve_mode(c, &o->residency);
    bool stream = o->residency.mode == COLIBRI_RESIDENCY_STREAM;
    if (!status && model->file.handle < 0 && (stream || o->residency.guard))
        status = coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.%s needs a model in a file, and this one is in memory: %s",
                           stream ? "residency STREAM" : "guard_mapping",
                           stream ? "use MAP, LOCK or HUGE" : "set 0, memory cannot be truncated");
    if (!status && stream && !COLI_THREADS)
        status = coli_fail(COLIBRI_ERR_UNSUPPORTED,
                           "residency STREAM needs threads that read, and this library was built without threads");
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
    if (c->parallel_for && o->pinned)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.cpu_affinity cannot tie threads that are the host's (parallel_for): set NULL");
    o->parallel_for = c->parallel_for;
    o->parallel_for_user_data = c->parallel_for_user_data;
    if (!COLI_THREADS && o->threads > 1 && !c->parallel_for)
        return coli_fail(COLIBRI_ERR_THREAD,
                         "config.num_threads is %u, but this library was built without threads: set 0 or 1, or a parallel_for",
                         (unsigned)o->threads);
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

/* *model receives a reference. */
static colibri_status_t take_model(const colibri_config_t *c, colibri_model_t **model) {
    if ((c->model != NULL) + (c->model_path != NULL) + (c->model_data != NULL) != 1)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "exactly one of config.model_path, config.model and config.model_data must be set");
    if (c->model_size != 0 && !c->model_data)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.model_size belongs to model_data, and that is NULL: set 0");
    if (c->model_path) return coli_model_open(c->model_path, model);
    if (c->model_data) return coli_model_open_memory(c->model_data, c->model_size, model);
    *model = c->model;
    coli_model_retain(c->model);
    return COLIBRI_OK;
}

colibri_status_t coli_config_resolve(const colibri_config_t *given, colibri_config_t *c, colibri_model_t **model,
                                     coli_options_t *o) {
    memset(o, 0, sizeof *o);
    colibri_status_t status = coli_struct_in(given, sizeof(colibri_config_t), sizeof *c, "colibri_config_t", c);
    if (!status) status = check_fixed(c);
    if (!status) status = check_ranges(c);
    if (status) return status;
    status = take_model(c, model);
    if (status) return status;
    status = resolve(c, *model, o);
    if (status) coli_model_release(*model);
    return status;
}
