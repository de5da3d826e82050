/* threads.h: the pool: num_threads - 1 workers beside the caller. A region's items are shared out as ranges, one a thread,
 * taken piece by piece from atomic counters; who is done helps the others. Outputs of items are disjoint, so who computes what
 * never changes a bit. Workers spin briefly, then sleep. Or there are none, and a host's own threads do the ranges. */
#ifndef COLI_THREADS_H
#define COLI_THREADS_H

#include "base/base.h"

#define COLI_MAX_THREADS 256

typedef struct coli_pool coli_pool_t;
struct coli_topology; /* numa.h */

/* Pieces begin ... end - 1 of a region. */
typedef struct coli_share {
    uint32_t begin, end;
} coli_share_t;

/* Work on items begin ... end - 1 as thread number `thread` (0 = the caller, < num_threads). */
typedef void (*coli_work_fn)(void *argument, uint32_t begin, uint32_t end, uint32_t thread);

uint64_t coli_pool_size(uint32_t num_threads); /* bytes of memory coli_pool_start needs, 64-byte aligned */
/* Where threads are kept; all NULL: wherever the system likes. The caller's thread (0) is the caller's own and left alone. Used
 * by coli_pool_start only. */
typedef struct coli_ties {
    const int32_t *cpus;                  /* [num_threads]: each on this CPU (cpu_affinity) */
    const struct coli_topology *topology; /* else on the CPUs of a node (numa_policy): */
    const uint8_t *nodes;                 /* [num_threads] */
} coli_ties_t;

/* Start the workers in `memory` (owned by the caller, kept until coli_pool_stop). ties: NULL, or where they are kept. NULL and
 * COLIBRI_ERR_THREAD on failure. */
coli_pool_t *coli_pool_start(void *memory, uint32_t num_threads, const coli_ties_t *ties);
/* A pool without workers: regions run on the host's threads, by `run` (config.parallel_for). Never fails. Thread i of
 * the work functions is task i of a parallel_for. */
coli_pool_t *coli_pool_start_hosted(void *memory, uint32_t num_threads, colibri_parallel_for_fn run, void *user_data);
void coli_pool_stop(coli_pool_t *pool); /* joins all workers */
uint32_t coli_pool_num_threads(const coli_pool_t *pool);

/* Run work over 0 ... items - 1, handed out `grain` at a time (>= 1); returns when all are done. With one thread, or not more
 * than `grain` items, it runs on the caller without waking anyone. No allocation; only futex system calls. */
void coli_pool_run(coli_pool_t *pool, coli_work_fn work, void *argument, uint32_t items, uint32_t grain);
/* The same, thread i beginning with the pieces of `grain` items that shares[i] names ([num_threads], in any order, every piece
 * in exactly one; coli_numa_shares). Who is done helps the others. */
void coli_pool_run_shares(coli_pool_t *pool, coli_work_fn work, void *argument, uint32_t items, uint32_t grain,
                          const coli_share_t *shares);

#endif
