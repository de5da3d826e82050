/* residency_use.c: from the router's choice to reads: which experts a layer needs, in what order they come, what is fetched
 * ahead, and what is kept in the cache; see residency.h. */
#include "model/residency_use.h"

#include <stdatomic.h>

#include "base/histogram.h"
#include "base/status.h"

#define WINDOW 256.0f      /* tokens over which use is averaged */
#define PINNED_RATIO 4.0f  /* used so many times more than the average: it will be among the last to go */
#define LARGE_STEP 1e18f   /* before heat overflows */
#define LEAST_AHEAD_SLOTS 3 /* slots for each expert of a token, from which on look-ahead reads */

/* ---- use ----
 *
 * What an expert is worth in the cache is how often it was chosen, older choices counting less. On the demo's routing of 1,500
 * tokens of two texts that found 28 and 39 % with a cache of a quarter of the experts, 56 and 69 % with half, 80 and 87 % with
 * three quarters; going by the latest use 29 and 34, 48 and 57, 75 and 81 %; keeping those chosen three times running changed
 * neither by 1 % for the better. */

static uint32_t num_experts(const coli_residency_t *r) { return r->model->directory.params->num_experts; }

float coli_usage_rate(const coli_residency_t *r, uint32_t key) {
    float rate = r->usage[key].heat / (r->layer_usage[key / num_experts(r)].step * WINDOW);
    return COLI_MIN(rate, 1.0f);
}

void coli_usage_set_rate(coli_residency_t *r, uint32_t key, float rate) {
    r->usage[key].heat = rate * WINDOW * r->layer_usage[key / num_experts(r)].step;
}

bool coli_usage_pinned(const coli_residency_t *r, uint32_t key) {
    float mean = (float)r->options.top_k / (float)num_experts(r);
    return coli_usage_rate(r, key) >= COLI_MIN(PINNED_RATIO * mean, (1 + mean) / 2);
}

/* n tokens more: what one use adds grows, so that older ones count less. */
static void age(coli_residency_t *r, uint32_t layer, uint32_t n) {
    coli_layer_usage_t *l = &r->layer_usage[layer];
    float growth = 1 + 1 / (WINDOW - 1);
    for (uint32_t i = 0; i < n && l->step < LARGE_STEP; i++) l->step *= growth;
    l->runs++;
    if (l->step < LARGE_STEP) return;
    for (uint32_t e = 0; e < num_experts(r); e++) r->usage[layer * num_experts(r) + e].heat /= l->step;
    l->step = 1;
}

static void use(coli_residency_t *r, uint32_t layer, uint32_t expert, uint32_t tokens, uint32_t n_tokens) {
    coli_usage_t *u = &r->usage[layer * num_experts(r) + expert];
    u->last = r->layer_usage[layer].runs;
    u->heat += r->layer_usage[layer].step * (float)tokens * COLI_MIN(1.0f, WINDOW / (float)n_tokens);
}

static float worth(const void *context, uint32_t key) { return coli_usage_rate(context, key); }

static void count(void *context, uint32_t key, const coli_read_t *read, bool ahead) {
    coli_residency_t *r = context;
    uint64_t ns = read->done_ns - read->submitted_ns;
    r->rows[key].bytes_read += read->bytes;
    r->rows[key].load_ns += ns;
    r->totals->read_bytes += read->bytes;
    if (ahead) r->totals->read_bytes_ahead += read->bytes;
    coli_histogram_add(r->totals->read_histogram, ns);
}

void coli_usage_start(coli_residency_t *r) {
    uint32_t layers = r->model->directory.params->num_layers;
    memset(r->usage, 0, (uint64_t)layers * num_experts(r) * sizeof *r->usage);
    for (uint32_t l = 0; l < layers; l++) r->layer_usage[l] = (coli_layer_usage_t){.step = 1};
    r->cache.worth = worth;
    r->cache.count = count;
    r->cache.context = r;
}

/* ---- fetching ---- */

static coli_cached_t *find(const coli_residency_t *r, uint32_t layer, uint32_t expert) {
    return coli_cache_find(&r->cache, layer * num_experts(r) + expert);
}

static coli_cached_t *fetch(coli_residency_t *r, uint32_t layer, uint32_t expert, bool urgent) {
    const coli_layer_t *l = &r->weights->layers[layer];
    const colibri_file_params *p = r->weights->params;
    return coli_cache_fetch(&r->cache, layer * p->num_experts + expert, l->experts_offset + expert * l->expert_stride,
                            coli_mlp_bytes(l->expert_dtype, p->moe_intermediate, p->hidden_size), urgent);
}

/* Ask for up to `most` more experts of the layer. False: not even one, for want of room. */
static bool issue(coli_residency_t *r, uint32_t most) {
    uint32_t end = r->now.n - r->now.issued > most ? r->now.issued + most : r->now.n, begin = r->now.issued;
    for (; r->now.issued < end; r->now.issued++) {
        coli_cached_t *slot = fetch(r, r->now.layer, r->now.active[r->now.issued], true);
        if (!slot) break;
        coli_cache_hold(&r->cache, slot);
    }
    return r->now.issued > begin;
}

/* Look-ahead beside the simplest guess, that a token chooses as the one before: both counted where both can be. */
static void count_expectations(coli_residency_t *r, uint32_t layer, const uint32_t *begin) {
    r->totals->ahead_predicted += r->n_expected;
    for (uint32_t i = 0; i < r->n_expected; i++) r->totals->ahead_correct += begin[r->expected[i] + 1] > begin[r->expected[i]];
    for (uint32_t e = 0; e < num_experts(r); e++)
        r->totals->repeat_correct +=
            begin[e + 1] > begin[e] && r->usage[layer * num_experts(r) + e].last == r->layer_usage[layer].runs;
}

/* What look-ahead fetched and is not used (begin: nor needed now) may go, and is not read if that has not begun. */
static void drop_expectations(coli_residency_t *r, const uint32_t *begin) {
    for (uint32_t i = 0; i < r->n_expected && r->mode == COLIBRI_RESIDENCY_STREAM; i++) {
        uint32_t e = r->expected[i];
        coli_cached_t *slot = begin && begin[e + 1] > begin[e] ? NULL : find(r, r->expected_layer, e);
        if (slot && slot->ahead) coli_cache_disown(&r->cache, slot);
    }
    r->n_expected = 0;
}

static void settle_expectations(coli_residency_t *r, uint32_t layer, const uint32_t *begin, bool single) {
    coli_layer_usage_t *l = &r->layer_usage[layer];
    if (r->expected_layer == layer && r->n_expected) {
        if (single && l->single && r->expected_single) count_expectations(r, layer, begin);
        drop_expectations(r, begin);
    }
    l->single = single;
}

static void tell_system(const coli_residency_t *r, uint32_t layer, uint32_t expert) {
    coli_mlp_t mlp = coli_residency_expert(r, layer, expert);
    coli_os_will_need(mlp.gate_up.tiles, mlp.bytes);
}

/* An expert that is here, or on its way. One that look-ahead could not read for an earlier call is not: it is tried again. */
static coli_cached_t *present(coli_residency_t *r, uint32_t layer, uint32_t expert) {
    coli_cached_t *slot = find(r, layer, expert);
    if (!slot || slot->held || atomic_load(&slot->read.state) != COLI_READ_FAILED) return slot;
    coli_cache_drop(&r->cache, slot);
    return NULL;
}

/* Those that are here, or on their way, to the front and held. */
static void hold_present(coli_residency_t *r, uint32_t *active, uint32_t n) {
    uint32_t found = 0;
    r->now.present_ahead = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t e = active[i];
        coli_cached_t *slot = present(r, r->now.layer, e);
        if (!slot) continue;
        r->now.present_ahead += slot->ahead; /* the first time it is of use */
        coli_cache_hold(&r->cache, slot);
        active[i] = active[found];
        active[found++] = e;
    }
    r->now.issued = r->now.present = found;
}

/* The layer succeeded: what it found, and what it waited for. */
static void count_found(coli_residency_t *r) {
    for (uint32_t i = 0; i < r->now.n; i++) {
        colibri_expert_stats_t *row = &r->rows[r->now.layer * num_experts(r) + r->now.active[i]];
        row->hits += i < r->now.present;
        row->misses += i >= r->now.present;
    }
    r->totals->cache_hits += r->now.present;
    r->totals->cache_misses += r->now.n - r->now.present;
    r->totals->cache_hits_ahead += r->now.present_ahead;
}

void coli_residency_begin(coli_residency_t *r, uint32_t layer, uint32_t *active, uint32_t n, const uint32_t *begin,
                          uint32_t n_tokens) {
    r->now.layer = layer;
    r->now.active = active;
    r->now.n = r->now.issued = n;
    r->now.released = 0;
    r->now.failed = false;
    settle_expectations(r, layer, begin, n_tokens == 1);
    age(r, layer, n_tokens);
    for (uint32_t i = 0; i < n; i++) use(r, layer, active[i], begin[active[i] + 1] - begin[active[i]], n_tokens);
    if (r->mode == COLIBRI_RESIDENCY_STREAM) {
        hold_present(r, active, n);
        if (n <= r->cache.num_slots) issue(r, n);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        r->rows[layer * num_experts(r) + active[i]].hits++;
        if (r->short_of_memory) tell_system(r, layer, active[i]);
    }
}

/* ---- waves ---- */

static void fail_expert(coli_residency_t *r, uint32_t key, coli_cached_t *slot) {
    if (!r->now.failed) r->now.failed_key = key, r->now.error = slot->read.error;
    r->now.failed = true;
    coli_cache_drop(&r->cache, slot);
}

static colibri_status_t result(const coli_residency_t *r) {
    if (!r->now.failed) return COLIBRI_OK;
    uint32_t layer = r->now.failed_key / num_experts(r), expert = r->now.failed_key % num_experts(r);
    if (!r->now.error)
        return coli_fail_file(COLIBRI_ERR_IO, r->model->path,
                              "expert %u of layer %u cannot be read: the file has become shorter", (unsigned)expert,
                              (unsigned)layer);
    return coli_fail_file(COLIBRI_ERR_IO, r->model->path, "expert %u of layer %u cannot be read: %s (errno %d)",
                          (unsigned)expert, (unsigned)layer, coli_os_reason(r->now.error), (int)r->now.error);
}

/* Done with active[released ... end - 1]. */
static void release(coli_residency_t *r, uint32_t end) {
    for (; r->now.released < end; r->now.released++) {
        uint32_t e = r->now.active[r->now.released];
        coli_cached_t *slot = find(r, r->now.layer, e);
        if (atomic_load(&slot->read.state) != COLI_READ_FAILED) {
            coli_cache_release(&r->cache, slot);
            continue;
        }
        fail_expert(r, r->now.layer * num_experts(r) + e, slot);
    }
}

/* Look-ahead fills the cache: something of it must go, at once or when its read has ended. */
static void make_room(coli_residency_t *r) {
    for (uint32_t i = 0; i < r->cache.num_slots; i++) {
        coli_cached_t *slot = &r->cache.slots[i];
        if (slot->held || slot->key == COLI_NO_KEY) continue;
        coli_cache_disown(&r->cache, slot);
        if (slot->key != COLI_NO_KEY) coli_cache_wait(&r->cache, slot);
        return;
    }
}

uint32_t coli_residency_wave(coli_residency_t *r, uint32_t first) {
    if (r->mode != COLIBRI_RESIDENCY_STREAM) return r->now.n - first;
    release(r, first);
    if (first == r->now.n || r->now.failed) return 0;
    /* One half of the cache is computed while the other is read. */
    uint32_t half = r->cache.num_slots / 2;
    while (r->now.issued == first && !issue(r, half)) make_room(r);
    uint32_t ready = r->now.issued - first;
    issue(r, half);
    return ready;
}

bool coli_residency_wait(coli_residency_t *r, uint32_t layer, uint32_t expert) {
    if (r->mode != COLIBRI_RESIDENCY_STREAM) return true;
    coli_cached_t *slot = find(r, layer, expert);
    if (atomic_load_explicit(&slot->read.state, memory_order_acquire) == COLI_READ_DONE) return true;
    uint64_t since = coli_os_now_ns();
    bool there = coli_cache_wait(&r->cache, slot);
    atomic_fetch_add_explicit(&r->wait_ns, coli_os_now_ns() - since, memory_order_relaxed);
    return there;
}

colibri_status_t coli_residency_end(coli_residency_t *r) {
    if (r->mode != COLIBRI_RESIDENCY_STREAM) return COLIBRI_OK;
    for (uint32_t i = r->now.released; i < r->now.issued; i++) /* after a failure: reads that nobody waited for */
        coli_cache_wait(&r->cache, find(r, r->now.layer, r->now.active[i]));
    release(r, r->now.issued);
    r->totals->read_wait_ns += atomic_exchange(&r->wait_ns, 0);
    if (!r->now.failed) count_found(r);
    return result(r);
}

/* ---- ahead of time ---- */

bool coli_residency_wants_expectations(const coli_residency_t *r) {
    return r->mode == COLIBRI_RESIDENCY_STREAM || r->short_of_memory;
}

void coli_residency_expect(coli_residency_t *r, uint32_t layer, const int32_t *experts, uint32_t n, bool single) {
    bool room = r->cache.num_slots >= LEAST_AHEAD_SLOTS * r->options.top_k;
    drop_expectations(r, NULL); /* of a call that was cancelled */
    r->expected_layer = layer;
    r->expected_single = single;
    r->n_expected = n;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t e = r->expected[i] = (uint32_t)experts[i];
        if (r->short_of_memory) tell_system(r, layer, e);
        else if (room && !present(r, layer, e)) fetch(r, layer, e, false);
    }
}

bool coli_residency_fetch_ahead(coli_residency_t *r, uint32_t key) {
    return find(r, key / num_experts(r), key % num_experts(r)) || fetch(r, key / num_experts(r), key % num_experts(r), false);
}

colibri_status_t coli_residency_settle(coli_residency_t *r) {
    r->now.failed = false;
    for (uint32_t i = 0; i < r->cache.num_slots; i++) {
        coli_cached_t *slot = &r->cache.slots[i];
        if (slot->key == COLI_NO_KEY) continue;
        uint32_t key = slot->key;
        slot->was_ahead = false; /* a start, not a guess */
        if (coli_cache_wait(&r->cache, slot)) {
            coli_cache_release(&r->cache, slot);
            continue;
        }
        fail_expert(r, key, slot);
    }
    return result(r);
}
