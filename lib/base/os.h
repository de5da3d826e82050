/* os.h: everything that differs between operating systems, and all #ifdefs about it. */
#ifndef COLI_OS_H
#define COLI_OS_H

#include "base/base.h"

typedef struct coli_file_map {
    const uint8_t *data; /* page-aligned, read-only */
    uint64_t size;
} coli_file_map_t;

/* Map a whole regular file (UTF-8 path) read-only and shared. COLIBRI_ERR_NOT_FOUND, _IO (sentence has path and reason),
 * or _FORMAT for an empty file, a directory or a device. No descriptor stays open. */
colibri_status_t coli_os_map(const char *path, coli_file_map_t *map);
void coli_os_unmap(coli_file_map_t *map);

/* Zeroed, 64-byte aligned (page-aligned) memory straight from the system, on huge pages where it offers them; NULL if refused. */
void *coli_os_alloc(uint64_t size);
void coli_os_free(void *memory, uint64_t size);

uint64_t coli_os_now_ns(void); /* monotonic; vDSO, no system call on Linux */
/* Notices that this process is a forked child of the one that made the guard. On Linux >= 4.14 by a page that a child sees zeroed
 * (MADV_WIPEONFORK), without a system call; elsewhere by getpid. new: NULL if memory is refused; forked(NULL) is false. */
void *coli_os_fork_guard_new(void);
bool coli_os_forked(const void *guard);
void coli_os_fork_guard_free(void *guard);
/* CPUs this process may run on, ascending; with one_per_core the first of every physical core. Writes at most `most` (cpus may
 * be NULL with 0) and returns how many there are; 0: this system does not say. Reads files. */
int coli_os_cpus(bool one_per_core, int32_t *cpus, int most);
bool coli_os_pin(int32_t cpu); /* the calling thread to one CPU; false: refused, or the system has no such thing */
bool coli_os_allow_amx(void);  /* ask for AMX tiles for this process; false where the system does not know the question */
int coli_os_num_cores(void);   /* physical cores this process may run on (affinity, siblings, CPU quota respected), >= 1. Reads files */

/* Threads and waiting. Stack size is set explicitly (musl's default is 128 KiB). The object stays in place until the thread is
 * joined: the new thread reads `run` and `argument` from it. Signals of the process are left to the caller's threads. */
typedef struct coli_os_thread {
    uint64_t handle;
    void (*run)(void *);
    void *argument;
} coli_os_thread_t;
bool coli_os_thread_start(coli_os_thread_t *thread, void (*run)(void *), void *argument);
void coli_os_thread_join(coli_os_thread_t *thread);
void coli_os_wait(_Atomic uint32_t *word, uint32_t expected); /* sleep while *word == expected; may wake spuriously (futex) */
void coli_os_wake(_Atomic uint32_t *word, bool all);
void coli_os_relax(void);      /* inside a spin loop */

#endif
