/* os_bare.c: what a system without pages to be mapped has to offer: WebAssembly (with WASI's files), and builds without files
 * (-Dfile_io=false: firmware, plugins). Memory is malloc's, a file's mapping is a copy, nothing is locked or advised, and there
 * is one core; with threads, a host says how many it wants. See os.h. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include "base/os.h"

#if defined(COLI_NO_PAGES)
#include <stdlib.h>
#include <time.h>

#include "base/status.h"

/* ---- Files ----------------------------------------------------------------------------------------------------------- */

#if defined(COLI_NO_FILES)
const char *coli_os_reason(int error) {
    (void)error;
    return "this library was built without files";
}

colibri_status_t coli_os_open(const char *path, coli_file_t *file) {
    (void)file;
    return coli_fail(COLIBRI_ERR_UNSUPPORTED,
                     "'%.300s' cannot be opened: this library was built without files; hand the bytes over in memory "
                     "(config.model_data)", path);
}

int64_t coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    (void)file, (void)to, (void)bytes, (void)offset;
    return -1;
}

void coli_os_close(coli_file_t *file) { file->handle = -1; }
#else
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

const char *coli_os_reason(int error) {
    switch (error) {
        case EACCES: return "permission denied";
        case ENOTCAPABLE: return "the folder was not opened for this program";
        case EIO: return "input/output error";
        case ENOMEM: return "out of memory";
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
    int descriptor = open(path, O_RDONLY);
    if (descriptor < 0 && (errno == ENOENT || errno == ENOTDIR))
        return coli_fail(COLIBRI_ERR_NOT_FOUND, "there is no file '%.300s'", path);
    if (descriptor < 0)
        return coli_fail(COLIBRI_ERR_IO, "cannot open '%.300s': %s (errno %d)", path, coli_os_reason(errno), errno);
    colibri_status_t status = examine(descriptor, path, file);
    if (status) close(descriptor);
    return status;
}

int64_t coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    uint64_t done = 0;
    while (done < bytes) {
        size_t piece = (size_t)COLI_MIN(bytes - done, (uint64_t)1 << 30);
        ssize_t got = pread((int)file->handle, (uint8_t *)to + done, piece, (off_t)(offset + done));
        if (got < 0) return -(int64_t)errno;
        if (got == 0) break; /* the end of the file */
        done += (uint64_t)got;
    }
    return (int64_t)done;
}

void coli_os_close(coli_file_t *file) {
    if (file->handle >= 0) close((int)file->handle);
    file->handle = -1;
}
#endif

bool coli_os_open_direct(const coli_file_t *file, void *scratch, coli_file_t *direct) {
    (void)file, (void)scratch, (void)direct;
    return false;
}

colibri_status_t coli_os_map(const coli_file_t *file, const char *path, coli_file_map_t *map) {
    uint8_t *copy = coli_os_alloc(file->size);
    if (!copy)
        return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the %llu bytes of '%.300s', which cannot be mapped here",
                         (unsigned long long)file->size, path);
    int64_t got = coli_os_read(file, copy, file->size, 0);
    if (got == (int64_t)file->size) {
        *map = (coli_file_map_t){copy, file->size};
        return COLIBRI_OK;
    }
    coli_os_free(copy, file->size);
    return coli_fail(COLIBRI_ERR_IO, "cannot read '%.300s': %s", path,
                     got < 0 ? coli_os_reason((int)-got) : "it became shorter meanwhile");
}

void coli_os_unmap(coli_file_map_t *map) {
    coli_os_free((void *)(uintptr_t)map->data, map->size);
    *map = (coli_file_map_t){NULL, 0};
}

/* ---- Memory ---------------------------------------------------------------------------------------------------------- */

/* The address that malloc gave stands right before the aligned one. */
void *coli_os_alloc(uint64_t size) {
    if (size == 0 || size > SIZE_MAX / 2) return NULL;
    uint8_t *memory = malloc((size_t)size + COLI_ALIGN + sizeof(void *));
    if (!memory) return NULL;
    uint8_t *aligned = memory + sizeof(void *);
    aligned += (0 - (uintptr_t)aligned) % COLI_ALIGN;
    memcpy(aligned - sizeof(void *), &memory, sizeof memory);
    return memset(aligned, 0, (size_t)size);
}

void coli_os_free(void *memory, uint64_t size) {
    void *start;
    (void)size;
    if (!memory) return;
    memcpy(&start, (uint8_t *)memory - sizeof start, sizeof start);
    free(start);
}

void *coli_os_alloc_pool(uint64_t size, uint64_t page) {
    (void)size, (void)page;
    return NULL;
}

void coli_os_will_need(const void *data, uint64_t bytes) { (void)data, (void)bytes; }
void coli_os_want_huge(void *memory, uint64_t size) { (void)memory, (void)size; }
void coli_os_collapse(void *memory, uint64_t size) { (void)memory, (void)size; }

uint64_t coli_os_huge_bytes(const void *memory, uint64_t size) {
    (void)memory, (void)size;
    return 0;
}

bool coli_os_lock(const void *memory, uint64_t size) {
    (void)memory, (void)size;
    return false;
}

void coli_os_unlock(const void *memory, uint64_t size) { (void)memory, (void)size; }

uint64_t coli_os_memory_limit(void) { return UINT64_MAX; }

/* ---- Time, forks, cores ---------------------------------------------------------------------------------------------- */

/* Without a clock all durations are 0. */
uint64_t coli_os_now_ns(void) {
#if defined(CLOCK_MONOTONIC)
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) == 0) return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
    return 0;
}

void *coli_os_fork_guard_new(void) { return NULL; }

bool coli_os_forked(const void *guard) {
    (void)guard;
    return false;
}

void coli_os_fork_guard_free(void *guard) { (void)guard; }

int coli_os_cpus(bool one_per_core, int32_t *cpus, int most) {
    (void)one_per_core, (void)cpus, (void)most;
    return 0;
}

bool coli_os_pin(int32_t cpu) {
    (void)cpu;
    return false;
}

bool coli_os_allow_amx(void) { return false; }

int coli_os_num_cores(void) { return 1; }

#else
typedef int coli_os_has_pages; /* ISO C wants a declaration in every file */
#endif
