/* os.h: everything that differs between operating systems, and all #ifdefs about it. */
#ifndef COLI_OS_H
#define COLI_OS_H

#include "base/base.h"

/* What a build does without: -Dthreads=false and -Dfile_io=false say so, and WebAssembly has neither threads nor mappings.
 * Without pages memory comes from malloc, and a file's is a copy (os_bare.c). Only COLI_THREADS is for all files. */
#if defined(__wasm__) && !defined(COLI_NO_THREADS)
#define COLI_NO_THREADS 1
#endif
#if defined(__wasm__) || defined(COLI_NO_FILES)
#define COLI_NO_PAGES 1
#endif
#if defined(COLI_NO_THREADS)
#define COLI_THREADS 0
#define COLI_THREAD_LOCAL /* one thread: what is its own is everyone's */
#else
#define COLI_THREADS 1
#define COLI_THREAD_LOCAL _Thread_local
#endif

typedef struct coli_file_map {
    const uint8_t *data; /* page-aligned (without pages: 64-byte aligned), read-only */
    uint64_t size;
} coli_file_map_t;

#define COLI_HUGE_PAGE ((uint64_t)2 << 20) /* bytes of a transparent huge page, where there are any */
#define COLI_GIANT_PAGE ((uint64_t)1 << 30)

/* An open regular file, for reads at offsets by any number of threads at once. */
typedef struct coli_file {
    int64_t handle;         /* descriptor or HANDLE; -1: none */
    uint64_t size;          /* when it was opened */
    uint32_t alignment;     /* of offset, bytes and address in coli_os_read: 1, or a power of two where reads bypass the page cache */
} coli_file_t;

/* Open a regular file (UTF-8 path) for reading. COLIBRI_ERR_NOT_FOUND, _IO (sentence has path and reason), or _FORMAT for an
 * empty file, a directory or a device. */
colibri_status_t coli_os_open(const char *path, coli_file_t *file);
/* The same file again (not what may lie at its path by now), bypassing the page cache. False where the system, file system or
 * emulator has no such thing; a read has been tried, `scratch` ([8192], any alignment) is room for it. */
bool coli_os_open_direct(const coli_file_t *file, void *scratch, coli_file_t *direct);
/* Read up to `bytes` at `offset`: less only at the end of the file. Returns how many, or -errno (a small positive number on
 * Windows, negated). Interrupted and short reads are continued. */
int64_t coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset);
const char *coli_os_reason(int error); /* "input/output error": a few words, without locale */
void coli_os_close(coli_file_t *file); /* handle -1 is ignored */
/* Map all of it read-only and shared; COLIBRI_ERR_IO or _UNSUPPORTED (path for the sentence). Outlives the coli_file_t. */
colibri_status_t coli_os_map(const coli_file_t *file, const char *path, coli_file_map_t *map);
void coli_os_unmap(coli_file_map_t *map);
/* Ask the system to read ahead these bytes of a mapping. Advice: no failure. */
void coli_os_will_need(const void *data, uint64_t bytes);
/* Write a whole file beside `path`, sync and rename it: on failure what was there stays. COLIBRI_ERR_IO, _OUT_OF_MEMORY. Temporary
 * memory: malloc. (os_write.c) */
colibri_status_t coli_os_write_file(const char *path, const void *data, size_t bytes);

/* Survive lost pages of a mapping (truncated file, input error): *lost becomes 1, then all of the mapping zeros. Installs the
 * process's handler of SIGBUS at the first call; false where there is no such thing, too many mappings are guarded already
 * (64), or the host has put a handler of its own in its place. Thread-safe. The same call again changes nothing. Unguard before
 * unmap: the last one puts back the handler that was there before; a mapping that is not guarded is ignored. (os_guard.c) */
bool coli_os_guard(const void *data, uint64_t bytes, _Atomic uint32_t *lost);
void coli_os_unguard(const void *data);

/* Zeroed, 64-byte aligned (page-aligned) memory straight from the system, on huge pages where it offers them; NULL if refused. */
void *coli_os_alloc(uint64_t size);
void coli_os_free(void *memory, uint64_t size);
/* The same on pages of `page` bytes (2 MiB or 1 GiB) of a reserved pool (hugetlbfs), all of them there before it returns; NULL if
 * the pool has too few, or there is none. To be freed by coli_os_free with `size` rounded up to whole pages. */
void *coli_os_alloc_pool(uint64_t size, uint64_t page);
/* Ask for transparent huge pages in [memory, memory + size), which need not be aligned. Advice. */
void coli_os_want_huge(void *memory, uint64_t size);
/* Turn pages there that are already touched into huge ones where the system can (MADV_COLLAPSE, Linux 6.1). Advice; may take long. */
void coli_os_collapse(void *memory, uint64_t size);
/* How many bytes of it lie on transparent huge pages. Reads a file of the system; 0 where it does not say. */
uint64_t coli_os_huge_bytes(const void *memory, uint64_t size);
/* Keep it in memory, all pages there before it returns; false: refused (limit, right), nothing is locked then. Not counted: one
 * unlock undoes any number of locks. */
bool coli_os_lock(const void *memory, uint64_t size);
void coli_os_unlock(const void *memory, uint64_t size);
/* Bytes of memory this process may use: the machine's, or less in a container (cgroup v1 and v2, all levels). Reads files.
 * UINT64_MAX: the system does not say. */
uint64_t coli_os_memory_limit(void);

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
 * joined: the new thread reads `run` and `argument` from it. Signals are left to the caller's threads, but for those about what
 * the thread itself does (SIGSEGV, SIGBUS, ...). */
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
