/* residency.h: where the weights live: the one place that decides it. A session has one. The forward pass works on
 * residency.weights, asks here for an expert's address and nowhere else, and says what comes next:
 *
 *     coli_residency_begin(r, layer, ...)               the experts a chunk needs: reads of missing ones are issued
 *     coli_residency_expect(r, next layer, ids, n)      likely ones of the next layer: read when nothing else is to be
 *     while ((n = coli_residency_wave(r, first)) > 0)   so many of them are in memory, or on their way
 *         ... coli_residency_wait(r, layer, e); coli_residency_expert(r, layer, e) ...
 *         first += n
 *     coli_residency_end(r)                             did every read succeed?
 *
 * All but wait and expert belong to the session's thread. In modes other than STREAM all experts are one wave. */
#ifndef COLI_RESIDENCY_H
#define COLI_RESIDENCY_H

#include "base/numa.h"
#include "model/expert_cache.h"
#include "model/weights.h"

/* The config's part, resolved: no defaults left. */
typedef struct coli_residency_options {
    uint32_t mode;        /* colibri_residency_t, not DEFAULT */
    uint32_t cache_slots; /* STREAM: experts */
    uint64_t page;        /* HUGE: bytes, 2 MiB or 1 GiB */
    uint32_t top_k;
    bool guard;
    coli_numa_t numa;
} coli_residency_options_t;

/* How an expert is used, in every mode. `heat` counts the tokens that chose it, older ones for less: the layer's `step`
 * grows by each token instead of all counts shrinking. */
typedef struct coli_usage {
    float heat;
    uint32_t last;   /* run of its layer (from 1) that used it last; 0: none */
} coli_usage_t;

typedef struct coli_layer_usage {
    float step;      /* what one use adds to heat now */
    uint32_t runs;   /* chunks that the layer has computed */
    bool single;     /* the latest was one token */
} coli_layer_usage_t;

typedef struct coli_residency {
    coli_residency_options_t options;
    uint32_t mode;                 /* in effect: MAP where LOCK was refused */
    const coli_weights_t *weights; /* of the forward pass: the model's, or `own` */
    colibri_model_t *model;
    coli_weights_t own;
    coli_layer_t *layers;          /* [num_layers] of own */
    uint64_t *placed;              /* HUGE, STREAM: [num_entries] offset in `copy` of each payload, or NOT_COPIED */
    uint8_t *copy;                 /* [copy_bytes] */
    uint64_t copy_bytes;
    bool in_pool;                  /* the workspace lies on reserved huge pages */
    bool short_of_memory;          /* MAP: the model does not fit */
    bool lock_refused, numa_refused; /* by the system: to be logged */
    uint64_t huge_bytes;
    coli_expert_cache_t cache;     /* STREAM */
    coli_usage_t *usage;           /* [num_layers][num_experts] */
    coli_layer_usage_t *layer_usage; /* [num_layers] */
    colibri_expert_stats_t *rows;  /* [num_layers][num_experts] the session's counters */
    colibri_stats_t *totals;
    _Atomic uint64_t wait_ns;
    struct {                       /* the layer being computed */
        uint32_t layer, n, issued, released; /* of `active`: experts asked for, experts done with */
        uint32_t present, present_ahead;     /* those that were there at the beginning, by look-ahead alone */
        const uint32_t *active;
        bool failed;               /* an expert could not be read: */
        uint32_t failed_key;
        int32_t error;
    } now;
    uint32_t *expected;            /* [num_experts] the first n_expected: look-ahead's experts for layer expected_layer */
    uint32_t n_expected, expected_layer;
    bool expected_single;
} coli_residency_t;

/* Sizes alone: bytes of weights to be copied into the workspace, 0 in MAP and LOCK. */
uint64_t coli_residency_copy_bytes(const colibri_model_t *model, const coli_residency_options_t *options);
/* And of the expert cache, which the plan takes last of all; 0 but in STREAM. */
uint64_t coli_residency_cache_bytes(const colibri_model_t *model, const coli_residency_options_t *options);
/* Routed experts of all layers, and what the largest one takes. */
uint64_t coli_residency_experts(const colibri_model_t *model, uint64_t *expert_bytes);
/* Take (or count) everything else, the expert cache last: the plan ends with it. */
void coli_residency_plan(coli_arena_t *arena, const colibri_model_t *model, const coli_residency_options_t *options,
                         coli_residency_t *r);
/* Make it so: read, lock, map ahead, start the cache. r->copy, rows, totals and in_pool are set; `own_memory` (NULL: a
 * caller's) is locked in LOCK. On failure nothing is left running. Log lines by the caller, from the fields. */
colibri_status_t coli_residency_start(coli_residency_t *r, colibri_model_t *model, coli_pool_t *pool, void *own_memory,
                                      uint64_t own_bytes);
/* forked: this is a child process, the threads are its parent's. */
void coli_residency_stop(coli_residency_t *r, void *own_memory, uint64_t own_bytes, bool forked);

/* A chunk of n_tokens needs the n experts `active` of a layer, expert e for begin[e + 1] - begin[e] of them. Reorders `active`:
 * what is in memory comes first. The array stays until end. */
void coli_residency_begin(coli_residency_t *r, uint32_t layer, uint32_t *active, uint32_t n, const uint32_t *begin,
                          uint32_t n_tokens);
/* The experts from active[first] on that may be computed now: how many; 0: none is left. Those before `first` are done with. */
uint32_t coli_residency_wave(coli_residency_t *r, uint32_t first);
/* In any thread: wait until an expert of the wave is there; false: it cannot be read. */
bool coli_residency_wait(coli_residency_t *r, uint32_t layer, uint32_t expert);
/* Its weights, valid until the wave is done with. */
coli_mlp_t coli_residency_expert(const coli_residency_t *r, uint32_t layer, uint32_t expert);
/* COLIBRI_ERR_IO if a read failed; experts that failed are forgotten, and read again when they are needed. */
colibri_status_t coli_residency_end(coli_residency_t *r);
/* Is it of use to tell what a later layer will need? */
bool coli_residency_wants_expectations(const coli_residency_t *r);
/* n experts (different ones) that a later layer will probably need; single: by a chunk of one token. */
void coli_residency_expect(coli_residency_t *r, uint32_t layer, const int32_t *experts, uint32_t n, bool single);
/* Have pages of a guarded mapping been lost? */
colibri_status_t coli_residency_intact(const coli_residency_t *r);

/* Fill the residency's and the cache's fields; of a row place and node. */
void coli_residency_stats(const coli_residency_t *r, colibri_stats_t *stats);
void coli_residency_row(const coli_residency_t *r, uint32_t layer, uint32_t expert, colibri_expert_stats_t *row);

#endif
