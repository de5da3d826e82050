/* os_windows.c: files, memory, time, cores and threads on Windows; see os.h. Everything else: os.c. */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include "base/os.h"

#include <stdatomic.h>
#include <windows.h>

#include "base/status.h"

#define STACK_BYTES ((SIZE_T)1 << 20)
#define MAX_PATH_UNITS 4096
#define SHARING (FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE)
#define DIRECT_ALIGNMENT 4096u          /* no disk has larger sectors; one that has refuses the trial */
#define MOST_AT_ONCE ((uint64_t)1 << 30) /* bytes of one call: it counts with 32 bits */

/* ---- Files ----------------------------------------------------------------------------------------------------------- */

/* Instead of FormatMessage, whose text depends on the language of the system. */
const char *coli_os_reason(int error) {
    switch (error) {
        case ERROR_ACCESS_DENIED: return "permission denied";
        case ERROR_SHARING_VIOLATION: return "another program has the file for itself";
        case ERROR_LOCK_VIOLATION: return "another program has locked part of the file";
        case ERROR_TOO_MANY_OPEN_FILES: return "this process has too many open files";
        case ERROR_NOT_ENOUGH_MEMORY:
        case ERROR_COMMITMENT_LIMIT: return "out of memory or address space";
        case ERROR_CRC:
        case ERROR_READ_FAULT:
        case ERROR_IO_DEVICE: return "input/output error";
        default: return "the system refused";
    }
}

static HANDLE handle_of(const coli_file_t *file) { return (HANDLE)(intptr_t)file->handle; }

static colibri_status_t examine(HANDLE handle, const char *path, coli_file_t *file) {
    LARGE_INTEGER size;
    if (GetFileType(handle) != FILE_TYPE_DISK) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is not a regular file", path);
    if (!GetFileSizeEx(handle, &size)) {
        int error = (int)GetLastError();
        return coli_fail(COLIBRI_ERR_IO, "cannot examine '%.300s': %s (error %d)", path, coli_os_reason(error), error);
    }
    if (size.QuadPart <= 0) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is empty", path);
    *file = (coli_file_t){(intptr_t)handle, (uint64_t)size.QuadPart, 1};
    return COLIBRI_OK;
}

colibri_status_t coli_os_open(const char *path, coli_file_t *file) {
    WCHAR wide[MAX_PATH_UNITS];
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, MAX_PATH_UNITS))
        return coli_fail(COLIBRI_ERR_IO, "the path '%.300s' is too long or not UTF-8", path);
    DWORD kind = GetFileAttributesW(wide);
    if (kind != INVALID_FILE_ATTRIBUTES && (kind & FILE_ATTRIBUTE_DIRECTORY))
        return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is a directory, not a file", path);
    HANDLE handle = CreateFileW(wide, GENERIC_READ, SHARING, NULL, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (handle == INVALID_HANDLE_VALUE) {
        int error = (int)GetLastError();
        if (error == ERROR_FILE_NOT_FOUND || error == ERROR_PATH_NOT_FOUND || error == ERROR_INVALID_NAME)
            return coli_fail(COLIBRI_ERR_NOT_FOUND, "there is no file '%.300s'", path);
        return coli_fail(COLIBRI_ERR_IO, "cannot open '%.300s': %s (error %d)", path, coli_os_reason(error), error);
    }
    colibri_status_t status = examine(handle, path, file);
    if (status) CloseHandle(handle);
    return status;
}

bool coli_os_open_direct(const coli_file_t *file, void *scratch, coli_file_t *direct) {
    HANDLE handle = ReOpenFile(handle_of(file), GENERIC_READ, SHARING, FILE_FLAG_NO_BUFFERING);
    if (handle == INVALID_HANDLE_VALUE) return false;
    *direct = (coli_file_t){(intptr_t)handle, file->size, DIRECT_ALIGNMENT};
    void *to = (void *)(((uintptr_t)scratch + DIRECT_ALIGNMENT - 1) & ~(uintptr_t)(DIRECT_ALIGNMENT - 1));
    uint64_t last = (file->size - 1) & ~(uint64_t)(DIRECT_ALIGNMENT - 1);
    if (coli_os_read(direct, to, DIRECT_ALIGNMENT, last) == (int64_t)(file->size - last)) return true;
    coli_os_close(direct);
    return false;
}

int64_t coli_os_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    uint64_t done = 0;
    while (done < bytes) {
        OVERLAPPED at = {.Offset = (DWORD)(offset + done), .OffsetHigh = (DWORD)((offset + done) >> 32)};
        DWORD got = 0, piece = (DWORD)COLI_MIN(bytes - done, MOST_AT_ONCE);
        if (!ReadFile(handle_of(file), (uint8_t *)to + done, piece, &got, &at)) {
            int error = (int)GetLastError();
            if (error == ERROR_HANDLE_EOF) break;
            return -(int64_t)COLI_MAX(error, 1);
        }
        done += got;
        if (got == 0 || (offset + done) % file->alignment) break; /* no read can go on there: it is the end of the file */
    }
    return (int64_t)done;
}

void coli_os_close(coli_file_t *file) {
    if (file->handle != -1) CloseHandle(handle_of(file));
    file->handle = -1;
}

static colibri_status_t cannot_map(const char *path) {
    int error = (int)GetLastError();
    return coli_fail(COLIBRI_ERR_IO, "cannot map '%.300s': %s (error %d)", path, coli_os_reason(error), error);
}

colibri_status_t coli_os_map(const coli_file_t *file, const char *path, coli_file_map_t *map) {
    if (file->size > SIZE_MAX / 2)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "'%.300s' is larger than this machine's address space", path);
    DWORD high = (DWORD)(file->size >> 32), low = (DWORD)file->size; /* not 0, 0: the file may have changed since */
    HANDLE mapping = CreateFileMappingW(handle_of(file), NULL, PAGE_READONLY, high, low, NULL);
    if (!mapping) return cannot_map(path);
    void *data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, (SIZE_T)file->size);
    colibri_status_t status = data ? COLIBRI_OK : cannot_map(path);
    CloseHandle(mapping); /* the view keeps it */
    if (data) *map = (coli_file_map_t){data, file->size};
    return status;
}

void coli_os_unmap(coli_file_map_t *map) {
    if (map->data) UnmapViewOfFile(map->data);
    map->data = NULL;
    map->size = 0;
}

void coli_os_will_need(const void *data, uint64_t bytes) {
    WIN32_MEMORY_RANGE_ENTRY range = {(void *)(uintptr_t)data, (SIZE_T)bytes};
    if (bytes > 0 && bytes <= SIZE_MAX) (void)PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

void *coli_os_alloc(uint64_t size) {
    if (size == 0 || size > SIZE_MAX) return NULL;
    return VirtualAlloc(NULL, (SIZE_T)size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); /* zeroed */
}

void coli_os_free(void *memory, uint64_t size) {
    (void)size;
    if (memory) VirtualFree(memory, 0, MEM_RELEASE);
}

/* No pool here, but large pages for who has the right to lock memory: never paged out, there before the call returns. */
void *coli_os_alloc_pool(uint64_t size, uint64_t page) {
    if (size == 0 || size > SIZE_MAX - page || page == 0 || page != GetLargePageMinimum()) return NULL;
    SIZE_T whole = (SIZE_T)((size + page - 1) & ~(page - 1));
    return VirtualAlloc(NULL, whole, MEM_RESERVE | MEM_COMMIT | MEM_LARGE_PAGES, PAGE_READWRITE);
}

void coli_os_want_huge(void *memory, uint64_t size) { (void)memory, (void)size; }

void coli_os_collapse(void *memory, uint64_t size) { (void)memory, (void)size; }

uint64_t coli_os_huge_bytes(const void *memory, uint64_t size) {
    (void)memory, (void)size;
    return 0;
}

/* As much as the smallest working set holds may be locked: where that is too little, ask for more. */
bool coli_os_lock(const void *memory, uint64_t size) {
    void *start = (void *)(uintptr_t)memory;
    SIZE_T least, most;
    HANDLE process = GetCurrentProcess();
    if (size == 0) return true;
    if (size > SIZE_MAX / 4) return false;
    if (VirtualLock(start, (SIZE_T)size)) return true;
    if (GetLastError() != ERROR_WORKING_SET_QUOTA || !GetProcessWorkingSetSize(process, &least, &most)) return false;
    SIZE_T more = (SIZE_T)size + ((SIZE_T)1 << 20); /* and what the bookkeeping takes */
    return SetProcessWorkingSetSize(process, least + more, most + more) && VirtualLock(start, (SIZE_T)size);
}

void coli_os_unlock(const void *memory, uint64_t size) {
    if (size > 0 && size <= SIZE_MAX) (void)VirtualUnlock((void *)(uintptr_t)memory, (SIZE_T)size);
}

/* Containers are jobs here. */
uint64_t coli_os_memory_limit(void) {
    MEMORYSTATUSEX machine = {.dwLength = sizeof machine};
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION job;
    uint64_t limit = GlobalMemoryStatusEx(&machine) ? machine.ullTotalPhys : UINT64_MAX;
    if (!QueryInformationJobObject(NULL, JobObjectExtendedLimitInformation, &job, sizeof job, NULL)) return limit;
    DWORD set = job.BasicLimitInformation.LimitFlags;
    if (set & JOB_OBJECT_LIMIT_JOB_MEMORY) limit = COLI_MIN(limit, (uint64_t)job.JobMemoryLimit);
    if (set & JOB_OBJECT_LIMIT_PROCESS_MEMORY) limit = COLI_MIN(limit, (uint64_t)job.ProcessMemoryLimit);
    return limit;
}

/* ---- Time, forks, cores -------------------------------------------------------------------------------------------------- */

uint64_t coli_os_now_ns(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceFrequency(&frequency);
    QueryPerformanceCounter(&ticks);
    uint64_t t = (uint64_t)ticks.QuadPart, f = (uint64_t)frequency.QuadPart;
    return t / f * 1000000000u + t % f * 1000000000u / f;
}

/* Processes are not forked here. */
void *coli_os_fork_guard_new(void) { return NULL; }

bool coli_os_forked(const void *guard) {
    (void)guard;
    return false;
}

void coli_os_fork_guard_free(void *guard) { (void)guard; }

/* CPUs of this process's processor group that are in its affinity; of a core the first one. */
int coli_os_cpus(bool one_per_core, int32_t *cpus, int most) {
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION cores[256];
    DWORD bytes = sizeof cores;
    DWORD_PTR allowed, all, chosen = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &allowed, &all) || !GetLogicalProcessorInformation(cores, &bytes))
        return 0;
    for (DWORD i = 0; i < bytes / sizeof *cores; i++) {
        DWORD_PTR mask = cores[i].Relationship == RelationProcessorCore ? cores[i].ProcessorMask & allowed : 0;
        chosen |= one_per_core ? mask & (~mask + 1) : mask; /* the lowest bit alone */
    }
    int count = 0;
    for (int cpu = 0; cpu < (int)(8 * sizeof chosen); cpu++) {
        if (!(chosen >> cpu & 1)) continue;
        if (count < most) cpus[count] = cpu;
        count++;
    }
    return count;
}

bool coli_os_pin(int32_t cpu) {
    if (cpu < 0 || cpu >= (int32_t)(8 * sizeof(DWORD_PTR))) return false;
    return SetThreadAffinityMask(GetCurrentThread(), (DWORD_PTR)1 << cpu) != 0;
}

bool coli_os_allow_amx(void) { return false; } /* Windows would have to be asked too, by a call that older ones lack */

int coli_os_num_cores(void) { return COLI_MAX(coli_os_cpus(true, NULL, 0), 1); }

/* ---- Threads ----------------------------------------------------------------------------------------------------------- */

static DWORD WINAPI thread_main(void *thread_object) {
    coli_os_thread_t *thread = thread_object;
    thread->run(thread->argument);
    return 0;
}

bool coli_os_thread_start(coli_os_thread_t *thread, void (*run)(void *), void *argument) {
    thread->run = run;
    thread->argument = argument;
    HANDLE handle = CreateThread(NULL, STACK_BYTES, thread_main, thread, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    thread->handle = (uint64_t)(uintptr_t)handle;
    return handle != NULL;
}

void coli_os_thread_join(coli_os_thread_t *thread) {
    WaitForSingleObject((HANDLE)(uintptr_t)thread->handle, INFINITE);
    CloseHandle((HANDLE)(uintptr_t)thread->handle);
}

void coli_os_wait(_Atomic uint32_t *word, uint32_t expected) {
    WaitOnAddress((volatile void *)word, &expected, sizeof expected, INFINITE);
}

void coli_os_wake(_Atomic uint32_t *word, bool all) {
    if (all) WakeByAddressAll((void *)word);
    else WakeByAddressSingle((void *)word);
}

void coli_os_relax(void) { YieldProcessor(); }

#else
typedef int coli_os_not_windows; /* ISO C wants a declaration in every file */
#endif
