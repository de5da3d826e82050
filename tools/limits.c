/* limits.c: colibri-bench --limits, the machine's own read bandwidth and multiply-add rates; see limits.h.
 *
 * A measurement runs on a gang: threads that start together, each with a share of the work; its time is from the first
 * start to the last end, and the best of several rounds counts, since other processes can only make it longer. The loops
 * themselves are in limits_units.c.
 */
#define _GNU_SOURCE
#include "limits.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "limits_units.h"

#ifdef _WIN32
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#else
#    include <pthread.h>
#    include <sched.h>
#    include <sys/mman.h>
#    include <unistd.h>
#endif

enum { MAX_THREADS = 256, MAX_POINTS = 16, MAX_UNITS = 8, DEFAULT_ROUNDS = 7 };
#define CHUNK_BYTES ((size_t)4 << 20) /* what a thread takes at a time: long streams, and a slow core delays no other */
#define MIB ((size_t)1 << 20)

/* ---- Gangs ---------------------------------------------------------------------------------------------------------- */

typedef struct gang_t gang_t;

typedef struct member_t {
    gang_t *gang;
    int index;
    double begin, end; /* seconds */
#ifdef _WIN32
    HANDLE thread;
#else
    pthread_t thread;
#endif
} member_t;

struct gang_t {
    void (*work)(gang_t *gang, int index);
    int threads;
    atomic_int waiting;         /* members that have not come to the start yet */
    const limits_unit_t *unit;  /* of a rate: run `rounds` of it */
    uint64_t rounds;
    const uint8_t *buffer;      /* of a bandwidth: read all `bytes` of it, chunk by chunk */
    size_t bytes;
    atomic_size_t next;         /* the first byte that nobody took */
    _Atomic uint64_t sink;      /* where what was read goes */
    member_t members[MAX_THREADS];
};

static void give_way(void) {
#ifdef _WIN32
    SwitchToThread();
#else
    sched_yield();
#endif
}

static void member_run(member_t *member) {
    gang_t *gang = member->gang;
    atomic_fetch_sub(&gang->waiting, 1);
    while (atomic_load(&gang->waiting) > 0) give_way();
    member->begin = cli_seconds();
    gang->work(gang, member->index);
    member->end = cli_seconds();
}

#ifdef _WIN32
static DWORD WINAPI member_main(void *member) {
    member_run(member);
    return 0;
}

static int member_start(member_t *member) {
    member->thread = CreateThread(NULL, 0, member_main, member, 0, NULL);
    return member->thread != NULL;
}

static void member_join(member_t *member) {
    WaitForSingleObject(member->thread, INFINITE);
    CloseHandle(member->thread);
}
#else
static void *member_main(void *member) {
    member_run(member);
    return NULL;
}

static int member_start(member_t *member) { return pthread_create(&member->thread, NULL, member_main, member) == 0; }
static void member_join(member_t *member) { pthread_join(member->thread, NULL); }
#endif

/* Run the gang's work on all its threads, the caller being one of them. Its seconds, or -1 if a thread could not start. */
static double gang_run(gang_t *gang) {
    int started = 1;
    atomic_store(&gang->waiting, gang->threads);
    atomic_store(&gang->next, 0);
    for (int i = 0; i < gang->threads; i++) gang->members[i] = (member_t){.gang = gang, .index = i};
    while (started < gang->threads && member_start(&gang->members[started])) started++;
    atomic_fetch_sub(&gang->waiting, gang->threads - started);
    member_run(&gang->members[0]);
    double begin = gang->members[0].begin, end = gang->members[0].end;
    for (int i = 1; i < started; i++) {
        member_join(&gang->members[i]);
        if (gang->members[i].begin < begin) begin = gang->members[i].begin;
        if (gang->members[i].end > end) end = gang->members[i].end;
    }
    return started == gang->threads ? end - begin : -1;
}

/* The shortest of `repeat` rounds, or -1. */
static double gang_best(gang_t *gang, int64_t repeat) {
    double best = gang_run(gang);
    for (int64_t i = 1; i < repeat && best >= 0; i++) {
        double seconds = gang_run(gang);
        if (seconds < best) best = seconds;
    }
    return best;
}

/* ---- Rates ---------------------------------------------------------------------------------------------------------- */

typedef struct rate_t {
    const limits_unit_t *unit;
    double one, all; /* operations per second with one thread, and with all of them together */
} rate_t;

static void work_rate(gang_t *gang, int index) {
    (void)index;
    gang->unit->run(gang->rounds);
}

/* Rounds that take one thread about 20 ms. */
static uint64_t enough_rounds(const limits_unit_t *unit) {
    uint64_t rounds = 1024;
    for (;;) {
        double begin = cli_seconds();
        unit->run(rounds);
        if (cli_seconds() - begin > 0.01) return 2 * rounds;
        rounds *= 2;
    }
}

static int measure_rate(gang_t *gang, int threads, int64_t repeat, rate_t *rate) {
    double *results[2] = {&rate->one, &rate->all};
    gang->work = work_rate;
    gang->unit = rate->unit;
    gang->rounds = enough_rounds(rate->unit);
    for (int i = 0; i < 2; i++) {
        gang->threads = i == 0 ? 1 : threads;
        double seconds = i == 1 && threads == 1 ? 0 : gang_best(gang, repeat);
        if (seconds < 0) return cli_fail(CLI_BENCH, "cannot start %d threads", gang->threads);
        *results[i] = cli_rate(rate->unit->ops * (double)gang->rounds * gang->threads, seconds);
    }
    if (threads == 1) rate->all = rate->one;
    return CLI_OK;
}

/* ---- Bandwidth ------------------------------------------------------------------------------------------------------ */

typedef struct bandwidth_t {
    const char *pages;      /* "huge", "4k" as asked for; "default" where the system takes no wishes */
    size_t huge_bytes;      /* of the buffer, in huge pages as the system says; 0 if it does not say */
    double rates[MAX_POINTS]; /* bytes per second with points[i] threads */
} bandwidth_t;

static void work_read(gang_t *gang, int index) {
    uint64_t sum = 0;
    (void)index;
    for (;;) {
        size_t first = atomic_fetch_add(&gang->next, CHUNK_BYTES);
        if (first >= gang->bytes) break;
        size_t rest = gang->bytes - first;
        sum ^= limits_read(gang->buffer + first, rest < CHUNK_BYTES ? rest : CHUNK_BYTES);
    }
    atomic_fetch_xor(&gang->sink, sum);
}

static int read_rates(gang_t *gang, const uint8_t *buffer, size_t bytes, const int *points, int64_t repeat, double *rates) {
    gang->work = work_read;
    gang->buffer = buffer;
    gang->bytes = bytes;
    for (int i = 0; points[i] != 0; i++) {
        gang->threads = points[i];
        double seconds = gang_best(gang, repeat);
        if (seconds < 0) return cli_fail(CLI_BENCH, "cannot start %d threads", points[i]);
        rates[i] = cli_rate((double)bytes, seconds);
    }
    return CLI_OK;
}

#ifdef __linux__
/* A number of kB behind `word` in a file of /proc, in bytes; 0 if it is not there. */
static size_t proc_bytes(const char *path, const char *word) {
    char line[256];
    unsigned long long kilobytes = 0;
    size_t length = strlen(word);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    while (kilobytes == 0 && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, word, length) == 0) kilobytes = strtoull(line + length, NULL, 10);
    fclose(file);
    return (size_t)(kilobytes * 1024);
}
#endif

/* A buffer of written memory with huge pages asked for (1), forbidden (0) or neither (-1); NULL if there is none. */
static uint8_t *buffer_make(size_t bytes, int huge) {
#ifdef _WIN32
    (void)huge;
    uint8_t *buffer = VirtualAlloc(NULL, bytes, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
#else
    uint8_t *buffer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) buffer = NULL;
#    ifdef __linux__ /* a wish: what became of it is in the report */
    if (buffer != NULL && huge >= 0) (void)madvise(buffer, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#    endif
#endif
    if (buffer != NULL) memset(buffer, 1, bytes);
    return buffer;
}

static void buffer_free(uint8_t *buffer, size_t bytes) {
#ifdef _WIN32
    (void)bytes;
    VirtualFree(buffer, 0, MEM_RELEASE);
#else
    munmap(buffer, bytes);
#endif
}

static int measure_bandwidth(gang_t *gang, size_t bytes, int huge, const int *points, int64_t repeat, bandwidth_t *result) {
    result->pages = huge < 0 ? "default" : huge ? "huge" : "4k";
#ifdef __linux__
    size_t before = proc_bytes("/proc/self/smaps_rollup", "AnonHugePages:");
#endif
    uint8_t *buffer = buffer_make(bytes, huge);
    if (buffer == NULL) return cli_fail(CLI_BENCH, "no memory for a buffer of %zu MB; see --buffer-mb", bytes / MIB);
#ifdef __linux__
    size_t after = proc_bytes("/proc/self/smaps_rollup", "AnonHugePages:");
    if (after > before) result->huge_bytes = after - before;
#endif
    int status = read_rates(gang, buffer, bytes, points, repeat, result->rates);
    buffer_free(buffer, bytes);
    return status;
}

/* ---- The machine ---------------------------------------------------------------------------------------------------- */

/* Processors that this process may use. */
static int count_processors(void) {
#if defined(_WIN32)
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    long count = (long)info.dwNumberOfProcessors;
#elif defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    long count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN);
#else
    long count = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : (int)count;
}

/* Bytes of memory that can be had without driving anything out; 0 if the system does not say. */
static size_t memory_available(void) {
#ifdef __linux__
    return proc_bytes("/proc/meminfo", "MemAvailable:");
#else
    return 0;
#endif
}

/* What was asked for; else far more than any cache holds, but no more than a quarter of the memory that is free. */
static int choose_buffer(const cli_args_t *args, size_t *bytes) {
    size_t available = memory_available(), quarter = available / 4 / MIB * MIB;
    *bytes = (args->buffer_mb > 0 ? (size_t)args->buffer_mb : 1024) * MIB;
    if (args->buffer_mb == 0 && quarter >= MIB && quarter < *bytes) *bytes = quarter;
    if (available == 0 || *bytes <= available) return CLI_OK;
    return cli_fail(CLI_BENCH, "a buffer of %zu MB is more than the %zu MB of free memory", *bytes / MIB, available / MIB);
}

/* 1, 2, 3, 4, then doubling, then all: the numbers of threads that bandwidth is measured with, ended by 0. */
static void choose_points(int threads, int *points) {
    int n = 0;
    for (int t = 1; t < threads; t = t < 4 ? t + 1 : 2 * t) points[n++] = t;
    points[n++] = threads;
    points[n] = 0;
}

/* ---- Report --------------------------------------------------------------------------------------------------------- */

typedef struct limits_t {
    int threads;
    int64_t repeat;
    size_t bytes;
    int points[MAX_POINTS + 1];
    bandwidth_t bandwidths[2];
    rate_t int8[MAX_UNITS], f32[MAX_UNITS];
    int num_bandwidths, num_int8, num_f32;
} limits_t;

static void print_json_rates(const char *name, const rate_t *rates, int count) {
    printf("\"%s\": [", name);
    for (int i = 0; i < count; i++)
        printf("%s{\"isa\": \"%s\", \"one_thread\": %.5g, \"all_threads\": %.5g}", i ? ", " : "", rates[i].unit->name,
               1e-12 * rates[i].one, 1e-12 * rates[i].all);
    printf("]");
}

static void print_json(const limits_t *limits) {
    printf("{\"cpu\": \"%s\", \"num_threads\": %d, \"rounds\": %lld, \"buffer_bytes\": %zu, \"read\": [", colibri_cpu_info(),
           limits->threads, (long long)limits->repeat, limits->bytes);
    for (int i = 0; i < limits->num_bandwidths; i++) {
        const bandwidth_t *b = &limits->bandwidths[i];
        printf("%s{\"pages\": \"%s\", \"huge_bytes\": %zu, \"gb_per_s\": {", i ? ", " : "", b->pages, b->huge_bytes);
        for (int p = 0; limits->points[p] != 0; p++)
            printf("%s\"%d\": %.4g", p ? ", " : "", limits->points[p], 1e-9 * b->rates[p]);
        printf("}}");
    }
    printf("], ");
    print_json_rates("int8_tops", limits->int8, limits->num_int8);
    printf(", ");
    print_json_rates("f32_tflops", limits->f32, limits->num_f32);
    printf("}\n");
}

static void print_text_rates(const char *title, const rate_t *rates, int count) {
    for (int i = 0; i < count; i++)
        printf("%-26s%-14s %9.4g %9.4g\n", i ? "" : title, rates[i].unit->name, 1e-12 * rates[i].one, 1e-12 * rates[i].all);
}

static void print_text(const limits_t *limits) {
    printf("cpu: %s; %d threads; best of %lld rounds; buffer of %zu MB\n\n%-40s", colibri_cpu_info(), limits->threads,
           (long long)limits->repeat, limits->bytes / MIB, "threads");
    for (int p = 0; limits->points[p] != 0; p++) printf(" %9d", limits->points[p]);
    for (int i = 0; i < limits->num_bandwidths; i++) {
        const bandwidth_t *b = &limits->bandwidths[i];
        const char *refused = strcmp(b->pages, "huge") == 0 && b->huge_bytes < limits->bytes / 2 ? " (not given)" : "";
        char pages[32];
        snprintf(pages, sizeof pages, "%s%s", b->pages, refused);
        printf("\n%-26s%-14s", i ? "" : "read, GB/s; pages:", pages);
        for (int p = 0; limits->points[p] != 0; p++) printf(" %9.2f", 1e-9 * b->rates[p]);
    }
    printf("\n\n%-40s %9d %9d\n", "threads", 1, limits->threads);
    print_text_rates("int8 multiply-add, T op/s", limits->int8, limits->num_int8);
    print_text_rates("f32 FMA, T op/s", limits->f32, limits->num_f32);
}

/* ---- All of it ------------------------------------------------------------------------------------------------------ */

static int choose_units(const limits_unit_t *units, rate_t *rates) {
    int count = 0;
    for (; units->name != NULL; units++)
        if (limits_allowed(units)) rates[count++].unit = units;
    return count;
}

static int measure_all(limits_t *limits, gang_t *gang) {
#ifdef __linux__
    limits->num_bandwidths = 2;
#else
    limits->num_bandwidths = 1;
#endif
    int status = CLI_OK;
    for (int i = 0; i < limits->num_bandwidths && status == CLI_OK; i++) {
        int huge = limits->num_bandwidths == 1 ? -1 : i == 0;
        status = measure_bandwidth(gang, limits->bytes, huge, limits->points, limits->repeat, &limits->bandwidths[i]);
    }
    for (int i = 0; i < limits->num_int8 && status == CLI_OK; i++)
        status = measure_rate(gang, limits->threads, limits->repeat, &limits->int8[i]);
    for (int i = 0; i < limits->num_f32 && status == CLI_OK; i++)
        status = measure_rate(gang, limits->threads, limits->repeat, &limits->f32[i]);
    return status;
}

int limits_run(const cli_args_t *args) {
    limits_t limits = {.repeat = args->repeat > 0 ? args->repeat : DEFAULT_ROUNDS};
    if (choose_buffer(args, &limits.bytes) != CLI_OK) return CLI_FAILED;
    gang_t *gang = calloc(1, sizeof *gang);
    if (gang == NULL) return cli_fail(CLI_BENCH, "no memory for %zu bytes", sizeof *gang);
    limits.threads = args->threads > 0 ? (int)args->threads : count_processors();
    choose_points(limits.threads, limits.points);
    limits.num_int8 = choose_units(limits_int8, limits.int8); /* asks for AMX, while there is one thread */
    limits.num_f32 = choose_units(limits_f32, limits.f32);
    int status = measure_all(&limits, gang);
    free(gang);
    if (status != CLI_OK) return status;
    if (args->json) {
        print_json(&limits);
    } else {
        print_text(&limits);
    }
    return cli_flush(CLI_BENCH);
}
