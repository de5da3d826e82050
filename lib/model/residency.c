/* residency.c: the weights brought to where they shall live, and their addresses; see residency.h. How the experts are used and
 * which of them are fetched: residency_use.c. */
#include "model/residency.h"

#include <stdatomic.h>

#include "base/status.h"
#include "model/residency_use.h"

#define NOT_COPIED UINT64_MAX
#define PIECE ((uint64_t)4 << 20) /* bytes read by one thread at a time */

/* ---- where each payload goes ---- */

static bool is_copied(const colibri_file_entry *e, uint32_t mode) {
    if (e->dtype == COLIBRI_FILE_BYTES) return false;
    return mode == COLIBRI_RESIDENCY_HUGE || (mode == COLIBRI_RESIDENCY_STREAM && e->role != COLIBRI_ROLE_EXPERTS);
}

/* Lay the copied payloads one behind another, aligned as in the file. Returns the bytes of all; placed may be NULL. */
static uint64_t place_payloads(const coli_directory_t *directory, uint32_t mode, uint64_t *placed) {
    uint64_t end = 0; /* cannot overflow: payloads lie inside the file without overlap, and few are experts */
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        if (placed) placed[i] = NOT_COPIED;
        if (!is_copied(e, mode)) continue;
        uint64_t alignment = e->role != COLIBRI_ROLE_EXPERTS             ? COLIBRI_FILE_ALIGNMENT
                             : e->size >= COLIBRI_FILE_EXPERT_ALIGNMENT ? COLIBRI_FILE_EXPERT_ALIGNMENT
                                                                         : COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT;
        end = (end + alignment - 1) & ~(alignment - 1);
        if (placed) placed[i] = end;
        end += e->size;
    }
    return end;
}

uint64_t coli_residency_copy_bytes(const colibri_model_t *model, const coli_residency_options_t *options) {
    return place_payloads(&model->directory, options->mode, NULL);
}

uint64_t coli_residency_experts(const colibri_model_t *model, uint64_t *expert_bytes) {
    const coli_directory_t *directory = &model->directory;
    uint64_t all = 0;
    *expert_bytes = 0;
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        if (e->role != COLIBRI_ROLE_EXPERTS) continue;
        all += e->count;
        *expert_bytes = COLI_MAX(*expert_bytes, e->stride);
    }
    return all;
}

uint64_t coli_residency_cache_bytes(const colibri_model_t *model, const coli_residency_options_t *options) {
    uint64_t expert;
    coli_residency_experts(model, &expert);
    return options->mode == COLIBRI_RESIDENCY_STREAM ? coli_cache_data_bytes(options->cache_slots, expert) : 0;
}

void coli_residency_plan(coli_arena_t *arena, const colibri_model_t *model, const coli_residency_options_t *options,
                         coli_residency_t *r) {
    const colibri_file_params *p = model->directory.params;
    uint32_t keys = p->num_layers * p->num_experts;
    r->options = *options;
    r->usage = coli_arena_take(arena, keys, sizeof(coli_usage_t));
    r->layer_usage = coli_arena_take(arena, p->num_layers, sizeof(coli_layer_usage_t));
    r->expected = coli_arena_take(arena, p->num_experts, sizeof(uint32_t));
    if (options->mode != COLIBRI_RESIDENCY_HUGE && options->mode != COLIBRI_RESIDENCY_STREAM) return;
    r->placed = coli_arena_take(arena, model->directory.num_entries, sizeof(uint64_t));
    r->layers = coli_arena_take(arena, p->num_layers, sizeof(coli_layer_t));
    uint64_t expert;
    coli_residency_experts(model, &expert);
    if (options->mode == COLIBRI_RESIDENCY_STREAM) coli_cache_plan(arena, options->cache_slots, expert, keys, &r->cache);
}

/* ---- copying ---- */

typedef struct load_work {
    const colibri_model_t *model;
    uint8_t *to;
    uint64_t offset, bytes;     /* of one payload */
    _Atomic uint32_t *failure;  /* 0: none, else errno + 1; 1: the file ended */
} load_work_t;

static void load_pieces(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const load_work_t *work = argument;
    (void)thread;
    for (uint32_t i = begin; i < end; i++) {
        uint64_t at = i * PIECE, bytes = COLI_MIN(PIECE, work->bytes - at);
        int64_t got = (int64_t)bytes;
        if (work->model->file.handle < 0) memcpy(work->to + at, work->model->map.data + work->offset + at, (size_t)bytes);
        else got = coli_os_read(&work->model->file, work->to + at, bytes, work->offset + at);
        uint32_t none = 0;
        if (got != (int64_t)bytes)
            atomic_compare_exchange_strong(work->failure, &none, got < 0 ? (uint32_t)-got + 1 : 1);
    }
}

static colibri_status_t load_payloads(coli_residency_t *r, coli_pool_t *pool) {
    const coli_directory_t *directory = &r->model->directory;
    _Atomic uint32_t failure = 0;
    for (uint32_t i = 0; i < directory->num_entries && !failure; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        if (r->placed[i] == NOT_COPIED) continue;
        load_work_t work = {r->model, r->copy + r->placed[i], e->offset, e->size, &failure};
        coli_pool_run(pool, load_pieces, &work, (uint32_t)((e->size + PIECE - 1) / PIECE), 1);
    }
    if (failure == 0) return COLIBRI_OK;
    if (failure == 1) return coli_fail_file(COLIBRI_ERR_IO, r->model->path, "the file became shorter while it was read");
    return coli_fail_file(COLIBRI_ERR_IO, r->model->path, "the weights cannot be read: %s (errno %u)",
                          coli_os_reason((int)failure - 1), (unsigned)failure - 1);
}

static const uint8_t *copied_address(const void *context, uint32_t entry) {
    const coli_residency_t *r = context;
    return r->placed[entry] == NOT_COPIED ? NULL : r->copy + r->placed[entry];
}

/* ---- memory nodes ---- */

static bool place_experts(const coli_numa_t *numa, const colibri_file_entry *e, const uint8_t *data) {
    if (numa->kind == COLI_NUMA_LAYERS) return coli_os_place(numa, data, e->size, coli_numa_layer(numa, e->layer));
    bool done = true;
    for (uint32_t i = 0; i < e->count; i++)
        done &= coli_os_place(numa, data + i * e->stride, e->stride, coli_numa_expert(numa, e->layer, i));
    return done;
}

/* Payloads that belong to no layer lie page by page on all nodes. */
static bool place_on_nodes(coli_residency_t *r) {
    const coli_directory_t *directory = &r->model->directory;
    coli_numa_t *numa = &r->options.numa;
    bool done = true;
    if (r->in_pool) numa->page = r->options.page;
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        const uint8_t *data = r->placed ? copied_address(r, i) : directory->file + e->offset;
        if (!data || e->dtype == COLIBRI_FILE_BYTES) continue;
        bool of_layer = e->role >= COLIBRI_ROLE_ATTN_NORM && e->role <= COLIBRI_ROLE_DENSE_MLP;
        if (e->role == COLIBRI_ROLE_EXPERTS) done &= place_experts(numa, e, data);
        else done &= coli_os_place(numa, data, e->size, of_layer ? coli_numa_layer(numa, e->layer) : -1);
    }
    if (r->mode == COLIBRI_RESIDENCY_STREAM)
        done &= coli_os_place(numa, r->cache.data, r->cache.num_slots * r->cache.slot_bytes, -1);
    return done;
}

/* ---- the modes ---- */

static void start_mapped(coli_residency_t *r, void *own_memory, uint64_t own_bytes) {
    const coli_file_map_t *map = &r->model->map;
    r->weights = &r->model->weights;
    r->short_of_memory = r->model->file.handle >= 0 && map->size + own_bytes > coli_os_memory_limit();
    if (r->mode == COLIBRI_RESIDENCY_LOCK) { /* of more than there is the system would not refuse, but kill */
        bool locked = !r->short_of_memory && (!own_memory || coli_os_lock(own_memory, own_bytes));
        if (locked && coli_os_lock(map->data, map->size)) {
            atomic_store(&r->model->memory_locked, r->model->file.handle < 0);
            return;
        }
        if (locked && own_memory) coli_os_unlock(own_memory, own_bytes);
        r->lock_refused = true;
        r->mode = COLIBRI_RESIDENCY_MAP;
    }
    if (r->model->file.handle >= 0 && !r->short_of_memory) coli_os_will_need(map->data, map->size);
}

static void touch_pages(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const coli_residency_t *r = argument;
    uint64_t bytes = r->cache.num_slots * r->cache.slot_bytes;
    (void)thread;
    for (uint64_t at = begin * PIECE; at < COLI_MIN(end * PIECE, bytes); at += COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT)
        *(volatile uint8_t *)(r->cache.data + at) = 0;
}

/* All of the cache is there before its first read: memory that is short shows now, and reads past the page cache go into huge
 * pages at the disk's speed, into ordinary ones at about half of it. */
static colibri_status_t start_cache(coli_residency_t *r, coli_pool_t *pool) {
    uint64_t bytes = r->cache.num_slots * r->cache.slot_bytes;
    coli_os_want_huge(r->cache.data, bytes);
    coli_pool_run(pool, touch_pages, r, (uint32_t)((bytes + PIECE - 1) / PIECE), 1);
    r->huge_bytes = coli_os_huge_bytes(r->copy, r->copy_bytes) + coli_os_huge_bytes(r->cache.data, bytes);
    return coli_cache_start(&r->cache, &r->model->file);
}

static colibri_status_t start_copied(coli_residency_t *r, coli_pool_t *pool) {
    colibri_status_t status = load_payloads(r, pool);
    if (status) return status;
    coli_weights_view(&r->model->directory, copied_address, r, r->layers, &r->own);
    r->weights = &r->own;
    if (r->mode != COLIBRI_RESIDENCY_HUGE) return start_cache(r, pool);
    r->huge_bytes = r->in_pool ? r->copy_bytes : coli_os_huge_bytes(r->copy, r->copy_bytes);
    if (r->huge_bytes + PIECE < r->copy_bytes) {
        coli_os_collapse(r->copy, r->copy_bytes);
        r->huge_bytes = coli_os_huge_bytes(r->copy, r->copy_bytes);
    }
    return COLIBRI_OK;
}

/* Every session asks, also of a model that is guarded: it may no longer be. */
static colibri_status_t guard(const coli_residency_t *r) {
    const coli_file_map_t *map = &r->model->map;
    if (!r->options.guard) return COLIBRI_OK;
    bool guarded = coli_os_guard(map->data, map->size, &r->model->lost);
    atomic_store(&r->model->guarded, guarded);
    if (guarded) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_UNSUPPORTED,
                     "config.guard_mapping: this system has no SIGBUS to be handled, the process has replaced the library's "
                     "handler, or 64 models are guarded already");
}

colibri_status_t coli_residency_start(coli_residency_t *r, colibri_model_t *model, coli_pool_t *pool, void *own_memory,
                                      uint64_t own_bytes) {
    r->model = model;
    r->mode = r->options.mode;
    r->cache.file.handle = -1;
    coli_usage_start(r);
    colibri_status_t status = guard(r);
    if (status) return status;
    r->copy_bytes = place_payloads(&model->directory, r->mode, r->placed);
    bool copied = r->mode == COLIBRI_RESIDENCY_HUGE || r->mode == COLIBRI_RESIDENCY_STREAM;
    if (copied && !r->in_pool) coli_os_want_huge(r->copy, r->copy_bytes);
    if (copied && r->options.numa.num_nodes > 1) r->numa_refused = !place_on_nodes(r);
    if (copied) return start_copied(r, pool);
    start_mapped(r, own_memory, own_bytes);
    if (r->options.numa.num_nodes > 1) r->numa_refused = r->mode == COLIBRI_RESIDENCY_MAP || !place_on_nodes(r);
    return COLIBRI_OK;
}

void coli_residency_stop(coli_residency_t *r, void *own_memory, uint64_t own_bytes, bool forked) {
    coli_cache_stop(&r->cache, forked);
    if (!forked && r->mode == COLIBRI_RESIDENCY_LOCK && own_memory) coli_os_unlock(own_memory, own_bytes);
}

colibri_status_t coli_residency_intact(const coli_residency_t *r) {
    bool mapped = r->mode == COLIBRI_RESIDENCY_MAP || r->mode == COLIBRI_RESIDENCY_LOCK;
    if (!mapped || !atomic_load_explicit(&r->model->lost, memory_order_relaxed)) return COLIBRI_OK;
    return coli_fail_file(COLIBRI_ERR_IO, r->model->path,
                          "the file was truncated or could not be read while it was mapped: free the session, close the model, "
                          "and open a whole file");
}

/* ---- addresses and statistics ---- */

coli_mlp_t coli_residency_expert(const coli_residency_t *r, uint32_t layer, uint32_t expert) {
    const coli_layer_t *l = &r->weights->layers[layer];
    const colibri_file_params *p = r->weights->params;
    COLI_ASSERT(l->is_moe && expert < p->num_experts);
    const uint8_t *data = l->experts + expert * l->expert_stride;
    if (r->mode == COLIBRI_RESIDENCY_STREAM)
        data = coli_cache_data(&r->cache, coli_cache_find(&r->cache, layer * p->num_experts + expert));
    return coli_mlp_view(data, l->expert_dtype, p->moe_intermediate, p->hidden_size);
}

void coli_residency_stats(const coli_residency_t *r, colibri_stats_t *stats) {
    uint32_t keys = r->weights->params->num_layers * r->weights->params->num_experts;
    stats->residency = (int32_t)r->mode;
    stats->guarded = (int32_t)atomic_load(&r->model->guarded);
    stats->hugepage_bytes = r->huge_bytes;
    stats->hugepage_size = r->huge_bytes == 0 ? 0 : r->in_pool ? r->options.page : COLI_HUGE_PAGE;
    stats->hugepage_pool = r->in_pool;
    stats->direct_io = r->mode == COLIBRI_RESIDENCY_STREAM && r->cache.file.alignment > 1;
    stats->numa_nodes = r->numa_refused ? 0 : (int32_t)r->options.numa.num_used;
    stats->memory_short = r->short_of_memory;
    if (r->mode != COLIBRI_RESIDENCY_STREAM) return;
    stats->cache_experts = r->cache.num_slots;
    for (uint32_t key = 0; key < keys; key++)
        stats->cache_pinned += coli_cache_find(&r->cache, key) && coli_usage_pinned(r, key);
}

void coli_residency_row(const coli_residency_t *r, uint32_t layer, uint32_t expert, colibri_expert_stats_t *row) {
    uint32_t key = layer * r->weights->params->num_experts + expert;
    row->node = coli_numa_expert(&r->options.numa, layer, expert);
    switch (r->mode) {
    case COLIBRI_RESIDENCY_LOCK: row->place = COLIBRI_PLACE_LOCKED; break;
    case COLIBRI_RESIDENCY_HUGE: row->place = COLIBRI_PLACE_MEMORY; break;
    case COLIBRI_RESIDENCY_STREAM:
        row->node = -1; /* any slot of the cache, and those lie page by page on all nodes */
        row->place = !coli_cache_find(&r->cache, key) ? COLIBRI_PLACE_DISK
                     : coli_usage_pinned(r, key)        ? COLIBRI_PLACE_PINNED
                                                      : COLIBRI_PLACE_CACHED;
        break;
    default: row->place = COLIBRI_PLACE_MAPPED;
    }
}
