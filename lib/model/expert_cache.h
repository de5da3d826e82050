/* expert_cache.h: STREAM residency: the routed experts that are in memory, out of all that lie in the file. Slots of equal
 * size, read in the background, given up when they are worth least. residency_use.c decides what is fetched and held, and
 * what an expert is worth; nothing here knows of layers.
 *
 * One thread (the session's) changes the cache; workers only wait for data, between those changes. */
#ifndef COLI_EXPERT_CACHE_H
#define COLI_EXPERT_CACHE_H

#include "base/arena.h"
#include "base/reader.h"

#define COLI_NO_KEY UINT32_MAX

/* An expert's number among all: layer * num_experts + expert. */
typedef struct coli_cached {
    coli_read_t read;      /* of the file into the slot */
    uint32_t key;          /* COLI_NO_KEY: empty */
    bool held;             /* about to be computed, or being computed: must stay */
    bool ahead;            /* asked for by look-ahead, its layer still to come: stays too */
    bool was_ahead;        /* read by look-ahead: for the statistics */
    bool uncounted;        /* its read is not in the statistics yet */
} coli_cached_t;

typedef struct coli_expert_cache {
    coli_cached_t *slots;  /* [num_slots] */
    uint32_t *slot_of;     /* [num_keys] slot + 1; 0: not here */
    uint8_t *data;         /* [num_slots][slot_bytes] */
    uint64_t slot_bytes;
    uint32_t num_slots, num_keys;
    void *reader_memory;
    coli_reader_t *reader;
    coli_file_t file;      /* with handle -1: not started */
    float (*worth)(const void *context, uint32_t key); /* of keeping an expert, beside others */
    void (*count)(void *context, uint32_t key, const coli_read_t *read, bool ahead); /* a read that is DONE, once */
    void *context;
} coli_expert_cache_t;

uint64_t coli_cache_data_bytes(uint32_t num_slots, uint64_t slot_bytes); /* of the plan's last piece; UINT64_MAX: too many */
/* Take (or count) the memory. slot_bytes: of the largest expert, a multiple of 4096. */
void coli_cache_plan(coli_arena_t *arena, uint32_t num_slots, uint64_t slot_bytes, uint32_t num_keys,
                     coli_expert_cache_t *cache);
/* Open the file again (past the page cache where that works) and start the reader; worth, count and context are set. */
colibri_status_t coli_cache_start(coli_expert_cache_t *cache, const coli_file_t *file);
void coli_cache_stop(coli_expert_cache_t *cache, bool forked); /* forked: without the threads, which are the parent's */

coli_cached_t *coli_cache_find(const coli_expert_cache_t *cache, uint32_t key); /* here, or on its way; else NULL */
/* Begin to read an expert that is not here into an empty slot, or that of the expert worth least of those that may go. Returns
 * the slot, its read WAITING; NULL if none may go. */
coli_cached_t *coli_cache_fetch(coli_expert_cache_t *cache, uint32_t key, uint64_t offset, uint64_t bytes, bool urgent);
/* It is needed now: it stays until release, and its read is hurried on. */
void coli_cache_hold(coli_expert_cache_t *cache, coli_cached_t *slot);
void coli_cache_release(coli_expert_cache_t *cache, coli_cached_t *slot);
/* Look-ahead was wrong: it may go, and is not read if that has not begun. */
void coli_cache_disown(coli_expert_cache_t *cache, coli_cached_t *slot);
/* Wait for a slot's data, from any thread. False: the read failed; the slot must be dropped by the session's thread. */
bool coli_cache_wait(coli_expert_cache_t *cache, coli_cached_t *slot);
void coli_cache_drop(coli_expert_cache_t *cache, coli_cached_t *slot);
const uint8_t *coli_cache_data(const coli_expert_cache_t *cache, const coli_cached_t *slot);

#endif
