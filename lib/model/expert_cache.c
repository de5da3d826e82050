/* expert_cache.c: slots, what is in them, and what goes when room is needed; see expert_cache.h. */
#include "model/expert_cache.h"

#include <stdatomic.h>

#include "base/status.h"

uint64_t coli_cache_data_bytes(uint32_t num_slots, uint64_t slot_bytes) {
    uint64_t bytes;
    bool fits = coli_mul64(num_slots, slot_bytes, &bytes) && bytes < UINT64_MAX / 2;
    return fits ? bytes + COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT : UINT64_MAX;
}

void coli_cache_plan(coli_arena_t *arena, uint32_t num_slots, uint64_t slot_bytes, uint32_t num_keys,
                     coli_expert_cache_t *cache) {
    cache->num_slots = num_slots;
    cache->slot_bytes = slot_bytes;
    cache->num_keys = num_keys;
    cache->file.handle = -1;
    cache->slots = coli_arena_take(arena, num_slots, sizeof(coli_cached_t));
    cache->slot_of = coli_arena_take(arena, num_keys, sizeof(uint32_t));
    cache->reader_memory = coli_arena_take(arena, coli_reader_size(num_slots), 1);
    uint8_t *data = coli_arena_take(arena, coli_cache_data_bytes(num_slots, slot_bytes), 1);
    if (data) /* slots begin at pages, wherever the arena does */
        cache->data = data + (-(uintptr_t)data & (COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT - 1));
}

/* ---- life ---- */

colibri_status_t coli_cache_start(coli_expert_cache_t *cache, const coli_file_t *file) {
    memset(cache->slot_of, 0, (uint64_t)cache->num_keys * sizeof(uint32_t));
    for (uint32_t i = 0; i < cache->num_slots; i++)
        cache->slots[i] = (coli_cached_t){.read = {.to = cache->data + i * cache->slot_bytes}, .key = COLI_NO_KEY};
    coli_file_t direct; /* slot 0 is room for the trial */
    bool bypass = coli_os_open_direct(file, cache->data, &direct);
    if (bypass && direct.alignment > COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT) {
        coli_os_close(&direct);
        bypass = false;
    }
    cache->file = bypass ? direct : *file;
    cache->reader = coli_reader_start(cache->reader_memory, cache->num_slots, &cache->file);
    if (cache->reader) return COLIBRI_OK;
    if (bypass) coli_os_close(&cache->file);
    cache->file.handle = -1;
    return colibri_last_status();
}

void coli_cache_stop(coli_expert_cache_t *cache, bool forked) {
    if (cache->file.handle < 0) return;
    if (!forked) coli_reader_stop(cache->reader);
    if (cache->file.alignment > 1) coli_os_close(&cache->file); /* else it is the model's own */
    cache->file.handle = -1;
}

/* ---- slots ---- */

coli_cached_t *coli_cache_find(const coli_expert_cache_t *cache, uint32_t key) {
    uint32_t slot = cache->slot_of[key];
    return slot ? &cache->slots[slot - 1] : NULL;
}

const uint8_t *coli_cache_data(const coli_expert_cache_t *cache, const coli_cached_t *slot) {
    return cache->data + (uint64_t)(slot - cache->slots) * cache->slot_bytes;
}

static uint32_t state_of(const coli_cached_t *slot) { return atomic_load_explicit(&slot->read.state, memory_order_acquire); }

static void count_read(coli_expert_cache_t *cache, coli_cached_t *slot) {
    if (!slot->uncounted || state_of(slot) != COLI_READ_DONE) return;
    slot->uncounted = false;
    cache->count(cache->context, slot->key, &slot->read, slot->was_ahead);
}

/* Its data goes; nobody may be reading into it any more. */
static void empty(coli_expert_cache_t *cache, coli_cached_t *slot) {
    count_read(cache, slot);
    cache->slot_of[slot->key] = 0;
    slot->key = COLI_NO_KEY;
    slot->held = slot->ahead = slot->was_ahead = slot->uncounted = false;
}

void coli_cache_drop(coli_expert_cache_t *cache, coli_cached_t *slot) {
    if (!coli_reader_cancel(cache->reader, &slot->read) && state_of(slot) == COLI_READ_RUNNING)
        coli_reader_wait(cache->reader, &slot->read);
    empty(cache, slot);
}

/* An empty slot, or the one worth least of those that nobody needs or reads into. */
static coli_cached_t *find_room(coli_expert_cache_t *cache) {
    coli_cached_t *least = NULL;
    float least_worth = 0;
    for (uint32_t i = 0; i < cache->num_slots; i++) {
        coli_cached_t *slot = &cache->slots[i];
        if (slot->key == COLI_NO_KEY) return slot;
        uint32_t state = slot->held || slot->ahead ? COLI_READ_RUNNING : state_of(slot);
        if (state != COLI_READ_DONE && state != COLI_READ_FAILED) continue;
        float worth = cache->worth(cache->context, slot->key);
        if (!least || worth < least_worth) least = slot, least_worth = worth;
    }
    return least;
}

coli_cached_t *coli_cache_fetch(coli_expert_cache_t *cache, uint32_t key, uint64_t offset, uint64_t bytes, bool urgent) {
    coli_cached_t *slot = find_room(cache);
    if (!slot) return NULL;
    if (slot->key != COLI_NO_KEY) empty(cache, slot);
    slot->key = key;
    slot->ahead = slot->was_ahead = !urgent;
    slot->uncounted = true;
    cache->slot_of[key] = (uint32_t)(slot - cache->slots) + 1;
    uint64_t mask = cache->file.alignment - 1;
    slot->read.offset = offset;
    slot->read.needed = bytes;
    slot->read.bytes = (bytes + mask) & ~mask;
    coli_reader_submit(cache->reader, &slot->read, urgent);
    return slot;
}

void coli_cache_hold(coli_expert_cache_t *cache, coli_cached_t *slot) {
    slot->held = true;
    slot->ahead = false;
    coli_reader_hurry(cache->reader, &slot->read);
}

void coli_cache_release(coli_expert_cache_t *cache, coli_cached_t *slot) {
    slot->held = slot->ahead = false;
    count_read(cache, slot);
}

void coli_cache_disown(coli_expert_cache_t *cache, coli_cached_t *slot) {
    slot->ahead = false;
    if (coli_reader_cancel(cache->reader, &slot->read)) empty(cache, slot);
}

bool coli_cache_wait(coli_expert_cache_t *cache, coli_cached_t *slot) {
    uint32_t state = state_of(slot);
    return state == COLI_READ_DONE || (state != COLI_READ_FAILED && coli_reader_wait(cache->reader, &slot->read));
}
