/* os_windows.c: files, memory, time, cores and threads on Windows; see os.h. Everything else: os.c. */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include "base/os.h"

#include <stdatomic.h>
#include <windows.h>

#include "base/status.h"

#define STACK_BYTES ((SIZE_T)1 << 20)
#define MAX_PATH_UNITS 4096

/* ---- Files ----------------------------------------------------------------------------------------------------------- */

static colibri_status_t map_handle(HANDLE file, const char *path, coli_file_map_t *map) {
    LARGE_INTEGER size;
    if (GetFileType(file) != FILE_TYPE_DISK) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is not a regular file", path);
    if (!GetFileSizeEx(file, &size))
        return coli_fail(COLIBRI_ERR_IO, "cannot examine '%.300s' (error %lu)", path, GetLastError());
    if (size.QuadPart <= 0) return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is empty; expected a .colibri file", path);
    if ((uint64_t)size.QuadPart > SIZE_MAX / 2)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "'%.300s' is larger than this machine's address space", path);
    HANDLE mapping = CreateFileMappingW(file, NULL, PAGE_READONLY, 0, 0, NULL);
    if (!mapping) return coli_fail(COLIBRI_ERR_IO, "cannot map '%.300s' (error %lu)", path, GetLastError());
    void *data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    DWORD error = GetLastError();
    CloseHandle(mapping); /* the view keeps it */
    if (!data) return coli_fail(COLIBRI_ERR_IO, "cannot map '%.300s' (error %lu)", path, error);
    map->data = data;
    map->size = (uint64_t)size.QuadPart;
    return COLIBRI_OK;
}

colibri_status_t coli_os_map(const char *path, coli_file_map_t *map) {
    WCHAR wide[MAX_PATH_UNITS];
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, MAX_PATH_UNITS))
        return coli_fail(COLIBRI_ERR_IO, "the path '%.300s' is too long or not UTF-8", path);
    DWORD kind = GetFileAttributesW(wide);
    if (kind != INVALID_FILE_ATTRIBUTES && (kind & FILE_ATTRIBUTE_DIRECTORY))
        return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is a directory; expected a .colibri file", path);
    DWORD sharing = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    HANDLE file = CreateFileW(wide, GENERIC_READ, sharing, NULL, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) {
        DWORD error = GetLastError();
        if (error == ERROR_FILE_NOT_FOUND || error == ERROR_PATH_NOT_FOUND || error == ERROR_INVALID_NAME)
            return coli_fail(COLIBRI_ERR_NOT_FOUND, "there is no file '%.300s'", path);
        return coli_fail(COLIBRI_ERR_IO, "cannot open '%.300s' (error %lu)", path, error);
    }
    colibri_status_t status = map_handle(file, path, map);
    CloseHandle(file);
    return status;
}

void coli_os_unmap(coli_file_map_t *map) {
    if (map->data) UnmapViewOfFile(map->data);
    map->data = NULL;
    map->size = 0;
}

/* ---- Memory, time, forks, cores ------------------------------------------------------------------------------------------ */

void *coli_os_alloc(uint64_t size) {
    if (size == 0 || size > SIZE_MAX) return NULL;
    return VirtualAlloc(NULL, (SIZE_T)size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); /* zeroed */
}

void coli_os_free(void *memory, uint64_t size) {
    (void)size;
    if (memory) VirtualFree(memory, 0, MEM_RELEASE);
}

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
