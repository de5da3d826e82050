/* os.c: files, time and cores on Linux, macOS and other POSIX systems; see os.h. Memory: os_memory.c. Threads: os_threads.c.
 * Windows: os_windows.c. Builds without files or pages: os_bare.c. */
#define _FILE_OFFSET_BITS 64
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include "base/os.h"

#if !defined(_WIN32) && !defined(COLI_NO_PAGES)
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#if defined(__linux__)
#include "base/os_text.h"
#endif
#include "base/status.h"

#define DIRECT_ALIGNMENT 4096u           /* no disk has larger blocks; one that has refuses the trial */
#define MOST_AT_ONCE ((uint64_t)1 << 30) /* bytes of one call: none takes more than 2 GiB */

/* ---- Files ----------------------------------------------------------------------------------------------------------- */

/* Instead of strerror, whose text depends on the locale and whose buffer is shared between threads. */
const char *coli_os_reason(int error) {
    switch (error) {
        case ENOENT: return "there is no such file or folder";
        case EISDIR: return "it is a directory";
        case ENOSPC: return "no space is left there";
        case EROFS: return "the file system is read-only";
        case EACCES: return "permission denied";
        case EPERM: return "operation not permitted";
        case EMFILE: return "this process has too many open files";
        case ENFILE: return "the system has too many open files";
        case ENOMEM: return "out of memory or address space";
        case ENAMETOOLONG: return "the name is too long";
        case ELOOP: return "too many symbolic links";
        case EIO: return "input/output error";
        case ENODEV: return "the file system cannot map files";
        case EAGAIN: return "the file or too much memory is locked";
        case EOVERFLOW: return "the file is too large for this process";
        default: return "the system refused";
    }
}

static colibri_status_t examine(int descriptor, const char *path, coli_file_t *file) {
    struct stat about;
    if (fstat(descriptor, &about) != 0)
        return coli_fail(COLIBRI_ERR_IO, "cannot examine '%.300s': %s (errno %d)", path, coli_os_reason(errno), errno);
    if (S_ISDIR(about.st_mode)) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is a directory, not a file", path);
    if (!S_ISREG(about.st_mode)) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is not a regular file", path);
    if (about.st_size <= 0) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is empty", path);
    *file = (coli_file_t){descriptor, (uint64_t)about.st_size, 1};
    return COLIBRI_OK;
}

colibri_status_t coli_os_open(const char *path, coli_file_t *file) {
    int descriptor;
    /* O_NONBLOCK: a named pipe must give an error, not wait for a writer. It changes nothing for regular files. */
    do descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) {
        if (errno == ENOENT || errno == ENOTDIR) return coli_fail(COLIBRI_ERR_NOT_FOUND, "there is no file '%.300s'", path);
        return coli_fail(COLIBRI_ERR_IO, "cannot open '%.300s': %s (errno %d)", path, coli_os_reason(errno), errno);
    }
    colibri_status_t status = examine(descriptor, path, file);
    if (status) close(descriptor);
    return status;
}

/* Not by its name, which may be another file's by now. */
#if defined(__linux__) && defined(O_DIRECT)
static int open_uncached(int descriptor) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
}
#elif defined(__APPLE__)
static int open_uncached(int descriptor) {
    char path[MAXPATHLEN];
    int again = fcntl(descriptor, F_GETPATH, path) == 0 ? open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK) : -1;
    if (again < 0 || fcntl(again, F_NOCACHE, 1) == 0) return again;
    close(again);
    return -1;
}
#else
static int open_uncached(int descriptor) {
    (void)descriptor;
    return -1;
}
#endif

/* What can be opened so need not be readable so (some file systems, emulators): try the last block, a part of one at times. */
bool coli_os_open_direct(const coli_file_t *file, void *scratch, coli_file_t *direct) {
    struct stat cached, uncached;
    int descriptor = open_uncached((int)file->handle);
    if (descriptor < 0) return false;
    *direct = (coli_file_t){descriptor, file->size, DIRECT_ALIGNMENT};
    bool same = fstat((int)file->handle, &cached) == 0 && fstat(descriptor, &uncached) == 0 &&
                cached.st_dev == uncached.st_dev && cached.st_ino == uncached.st_ino;
    uint8_t *to = (uint8_t *)scratch + (0 - (uintptr_t)scratch) % DIRECT_ALIGNMENT;
    uint64_t last = (file->size - 1) / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT;
    if (same && coli_os_read(direct, to, DIRECT_ALIGNMENT, last) == (int64_t)(file->size - last)) return true;
    coli_os_close(direct);
    return false;
}

int64_t coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    uint64_t done = 0;
    while (done < bytes) {
        off_t at = (off_t)(offset + done);
        if (at < 0 || (uint64_t)at != offset + done) return -EOVERFLOW;
        ssize_t got = pread((int)file->handle, (uint8_t *)to + done, (size_t)COLI_MIN(bytes - done, MOST_AT_ONCE), at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -(int64_t)errno;
        done += (uint64_t)got;
        if (got == 0 || (offset + done) % file->alignment) break; /* no read can go on there: it is the end of the file */
    }
    return (int64_t)done;
}

void coli_os_close(coli_file_t *file) {
    if (file->handle >= 0) close((int)file->handle);
    file->handle = -1;
}

colibri_status_t coli_os_map(const coli_file_t *file, const char *path, coli_file_map_t *map) {
    if (file->size > SIZE_MAX / 2)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "'%.300s' is larger than this machine's address space", path);
    void *data = mmap(NULL, (size_t)file->size, PROT_READ, MAP_SHARED, (int)file->handle, 0);
    if (data == MAP_FAILED)
        return coli_fail(COLIBRI_ERR_IO, "cannot map '%.300s': %s (errno %d)", path, coli_os_reason(errno), errno);
    map->data = data;
    map->size = file->size;
    return COLIBRI_OK;
}

void coli_os_unmap(coli_file_map_t *map) {
    if (map->data) munmap((void *)(uintptr_t)map->data, (size_t)map->size);
    map->data = NULL;
    map->size = 0;
}

/* ---- AMX --------------------------------------------------------------------------------------------------------------- */

/* Linux (since 5.16) hands out the tile registers, state component 18, on request: signal frames grow by them. */
bool coli_os_allow_amx(void) {
#if defined(__linux__) && defined(__x86_64__)
    enum { ARCH_PRCTL = 158, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    int before = errno;
    bool granted = syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0;
    errno = before;
    return granted;
#else
    return false;
#endif
}

/* ---- Time, forks, cores ------------------------------------------------------------------------------------------------ */

uint64_t coli_os_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#if defined(__linux__) && !defined(MADV_WIPEONFORK)
#define MADV_WIPEONFORK 18 /* Linux 4.14; older headers do not name it, older kernels refuse it */
#endif
#define NO_SUCH_ADVICE 9999

typedef struct fork_guard {
    volatile uint8_t alive; /* cleared in a child where the system does that */
    bool wiped;             /* it does; else the process id tells */
    pid_t owner;
} fork_guard_t;

/* Some emulators accept every advice and follow none: believe only a system that refuses nonsense. */
static bool wipe_on_fork(void *page, size_t size) {
#if defined(MADV_WIPEONFORK)
    return madvise(page, size, NO_SUCH_ADVICE) != 0 && madvise(page, size, MADV_WIPEONFORK) == 0;
#else
    (void)page, (void)size;
    return false;
#endif
}

void *coli_os_fork_guard_new(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    fork_guard_t *guard = coli_os_alloc(page);
    if (!guard) return NULL;
    guard->wiped = wipe_on_fork(guard, page);
    guard->owner = getpid();
    guard->alive = 1;
    return guard;
}

bool coli_os_forked(const void *memory) {
    const fork_guard_t *guard = memory;
    return guard && (!guard->alive || (!guard->wiped && guard->owner != getpid()));
}

void coli_os_fork_guard_free(void *guard) { coli_os_free(guard, (uint64_t)sysconf(_SC_PAGESIZE)); }

#if defined(__linux__)
#define MAX_CPUS 8192
#define CPU_WORDS (MAX_CPUS / 64)

/* The lowest-numbered hardware thread of the core that `cpu` belongs to: what siblings have in common. */
static int64_t core_of(int cpu) {
    char path[96], text[64];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    if (!read_small_file(path, text, sizeof text)) return cpu;
    const char *position = text;
    int64_t first = read_number(&position);
    return first >= 0 && first < MAX_CPUS ? first : cpu;
}

/* CPUs' worth of time that a container's quota allows, rounded up; INT_MAX without one. */
static int cpu_quota(void) {
    char text[64];
    if (!read_small_file("/sys/fs/cgroup/cpu.max", text, sizeof text)) return INT32_MAX; /* "200000 100000" or "max 100000" */
    const char *position = text;
    int64_t quota = read_number(&position);
    if (quota < 0 || *position != ' ') return INT32_MAX;
    position++;
    int64_t period = read_number(&position);
    if (period <= 0 || quota / period >= INT32_MAX) return INT32_MAX;
    return (int)COLI_MAX((quota + period - 1) / period, 1);
}

int coli_os_cpus(bool one_per_core, int32_t *cpus, int most) {
    unsigned long allowed[MAX_CPUS / (8 * sizeof(unsigned long))] = {0};
    uint64_t counted[CPU_WORDS] = {0}; /* by core_of */
    if (sched_getaffinity(0, sizeof allowed, (cpu_set_t *)allowed) != 0) return 0;
    int count = 0;
    for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
        size_t bits = 8 * sizeof(unsigned long);
        if (!(allowed[(size_t)cpu / bits] >> ((size_t)cpu % bits) & 1)) continue;
        uint64_t core = (uint64_t)(one_per_core ? core_of(cpu) : cpu), mask = (uint64_t)1 << core % 64;
        if (counted[core / 64] & mask) continue;
        counted[core / 64] |= mask;
        if (count < most) cpus[count] = cpu;
        count++;
    }
    return count;
}

bool coli_os_pin(int32_t cpu) {
    unsigned long mask[MAX_CPUS / (8 * sizeof(unsigned long))] = {0};
    size_t bits = 8 * sizeof(unsigned long);
    if (cpu < 0 || cpu >= MAX_CPUS) return false;
    mask[(size_t)cpu / bits] = 1ul << (size_t)cpu % bits;
    return sched_setaffinity(0, sizeof mask, (cpu_set_t *)mask) == 0; /* 0: this thread */
}

int coli_os_num_cores(void) {
    return COLI_THREADS ? COLI_MAX(COLI_MIN(coli_os_cpus(true, NULL, 0), cpu_quota()), 1) : 1;
}
#elif defined(__APPLE__)
int coli_os_num_cores(void) {
    int cores = 1;
    size_t size = sizeof cores;
    if (!COLI_THREADS || sysctlbyname("hw.physicalcpu", &cores, &size, NULL, 0) != 0) return 1;
    return COLI_MAX(cores, 1);
}
#else
int coli_os_num_cores(void) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return COLI_THREADS && cores > 0 && cores < INT32_MAX ? (int)cores : 1;
}
#endif

#if !defined(__linux__)
int coli_os_cpus(bool one_per_core, int32_t *cpus, int most) {
    (void)one_per_core, (void)cpus, (void)most;
    return 0;
}

bool coli_os_pin(int32_t cpu) {
    (void)cpu;
    return false;
}
#endif

#else
typedef int coli_os_not_posix; /* ISO C wants a declaration in every file */
#endif
