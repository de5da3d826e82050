/* affinity.h: from the text of config.cpu_affinity to a CPU for every thread. */
#ifndef COLI_AFFINITY_H
#define COLI_AFFINITY_H

#include "base/threads.h"

/* text: NULL or "none" (no thread is tied to a CPU: *pinned false), "auto" (one physical core each, in the system's order), or
 * a list such as "0,2,4-7" (thread i stays on its i-th CPU). *num_threads 0 becomes as many as there are CPUs in a list or
 * cores for "auto". Errors: COLIBRI_ERR_INVALID_ARGUMENT (not such a text, a CPU twice, a CPU this process may not use, fewer
 * than *num_threads), COLIBRI_ERR_UNSUPPORTED (the system cannot do it). */
colibri_status_t coli_affinity(const char *text, uint32_t *num_threads, bool *pinned, int32_t cpus[COLI_MAX_THREADS]);

#endif
