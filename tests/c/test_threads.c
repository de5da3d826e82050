/* test_threads.c: every item is worked on exactly once, whatever the number of threads, the grain, the shares and the
 * neighbours; sleeping workers wake; an idle pool uses no CPU; threads stay where they are tied. Also run with -Dtsan=true. */
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/numa.h"
#include "base/status.h"
#include "check.h"

#define MAX_ITEMS 5000

typedef struct region {
    uint32_t count[MAX_ITEMS]; /* times each item was worked on: plain memory, so that a race shows in the sanitizer */
    _Atomic uint32_t by_thread[COLI_MAX_THREADS];
    uint32_t items, grain, num_threads;
    _Atomic uint32_t faults;
    uint32_t pause_ns; /* an item takes this long */
} region_t;

static void wait_ns(uint64_t nanoseconds) {
    uint64_t start = coli_os_now_ns();
    while (coli_os_now_ns() - start < nanoseconds) coli_os_relax();
}

static void count_items(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    region_t *region = argument;
    if (begin >= end || end > region->items || thread >= region->num_threads) atomic_fetch_add(&region->faults, 1);
    if (end - begin > region->grain && region->num_threads > 1) atomic_fetch_add(&region->faults, 1);
    for (uint32_t i = begin; i < end; i++) region->count[i]++;
    if (region->pause_ns) wait_ns(region->pause_ns);
    atomic_fetch_add_explicit(&region->by_thread[thread], 1, memory_order_relaxed);
}

static void run_region(coli_pool_t *pool, region_t *region, uint32_t items, uint32_t grain) {
    memset(region->count, 0, sizeof region->count);
    region->items = items;
    region->grain = grain;
    region->num_threads = coli_pool_num_threads(pool);
    coli_pool_run(pool, count_items, region, items, grain);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < MAX_ITEMS; i++) wrong += region->count[i] != (i < items);
    CHECK_EQ(wrong, 0);
}

/* Every thread begins with a share; some have none, one has all, shares lie in any order. Whoever is done helps. */
static void test_shares(uint32_t num_threads, int repeats) {
    static region_t region;
    coli_share_t shares[COLI_MAX_THREADS];
    void *memory = aligned_alloc(COLI_ALIGN, coli_pool_size(num_threads));
    coli_pool_t *pool = coli_pool_start(memory, num_threads, NULL);
    uint32_t state = 1;
    for (int repeat = 0; repeat < repeats; repeat++) {
        uint32_t items = 1 + (uint32_t)repeat * 37 % MAX_ITEMS, grain = 1 + (uint32_t)repeat % 5, begin = 0;
        uint32_t chunks = items / grain + (items % grain != 0), first = (uint32_t)repeat % num_threads;
        for (uint32_t i = 0; i < num_threads; i++) {
            state = state * 1664525u + 1013904223u;
            uint32_t size = i + 1 == num_threads || repeat % 4 == 0 ? chunks - begin : (state >> 8) % (chunks - begin + 1);
            shares[(i + first) % num_threads] = (coli_share_t){begin, begin + size};
            begin += size;
        }
        memset(region.count, 0, sizeof region.count);
        region.items = items;
        region.grain = grain;
        region.num_threads = num_threads;
        coli_pool_run_shares(pool, count_items, &region, items, grain, shares);
        uint32_t wrong = 0;
        for (uint32_t i = 0; i < MAX_ITEMS; i++) wrong += region.count[i] != (i < items);
        CHECK_EQ(wrong, 0);
    }
    CHECK_EQ(region.faults, 0);
    coli_pool_stop(pool);
    free(memory);
}

/* A thread that all pieces are given to does not do them alone, and its share is what it begins with. */
static void test_help(void) {
    static region_t region;
    coli_share_t shares[2] = {{0, 0}, {0, 40}};
    void *memory = aligned_alloc(COLI_ALIGN, coli_pool_size(2));
    coli_pool_t *pool = coli_pool_start(memory, 2, NULL);
    region.items = 40, region.grain = 1, region.num_threads = 2;
    region.pause_ns = 200000;
    for (int i = 0; i < 1000 && (i == 0 || region.by_thread[0] == 0 || region.by_thread[1] == 0); i++)
        coli_pool_run_shares(pool, count_items, &region, 40, 1, shares);
    CHECK(region.by_thread[0] > 0 && region.by_thread[1] > 0);
    coli_pool_stop(pool);
    free(memory);
}

/* Workers on CPUs, or on those of a node; a place that is not there is an error that names the thread. */
static void test_ties(void) {
    static coli_topology_t topology;
    static const uint8_t nodes[3] = {0, 0, 0};
    static const int32_t nowhere[3] = {0, COLI_MAX_CPUS - 1, COLI_MAX_CPUS - 1};
    void *memory = aligned_alloc(COLI_ALIGN, coli_pool_size(3));
    coli_os_topology(&topology);
    coli_ties_t ties = {NULL, &topology, nodes};
    coli_pool_t *pool = coli_pool_start(memory, 3, &ties);
    CHECK(pool != NULL);
    if (pool) coli_pool_stop(pool);
    ties.cpus = nowhere;
    CHECK(coli_pool_start(memory, 3, &ties) == NULL);
    CHECK(colibri_last_status() == COLIBRI_ERR_THREAD && strstr(colibri_last_error(), "on CPU 8191 (cpu_affinity)"));
    ties.cpus = NULL;
    memset(topology.cpu_node, 0xFF, sizeof topology.cpu_node); /* a node without a CPU */
    topology.id[0] = 0;
    CHECK(coli_pool_start(memory, 3, &ties) == NULL);
    CHECK(colibri_last_status() == COLIBRI_ERR_THREAD && strstr(colibri_last_error(), "the CPUs of node 0 (numa_policy)"));
    free(memory);
}

static coli_pool_t *start(uint32_t num_threads, void **memory) {
    *memory = aligned_alloc(COLI_ALIGN, coli_pool_size(num_threads));
    coli_pool_t *pool = coli_pool_start(*memory, num_threads, NULL);
    CHECK(pool != NULL);
    CHECK_EQ(coli_pool_num_threads(pool), num_threads);
    return pool;
}

static void stop(coli_pool_t *pool, void *memory) {
    coli_pool_stop(pool);
    free(memory);
}

static void test_counts(uint32_t num_threads, int repeats) {
    static region_t region;
    void *memory;
    coli_pool_t *pool = start(num_threads, &memory);
    static const uint32_t items[] = {0, 1, 2, 7, 64, 1000, MAX_ITEMS}, grains[] = {1, 3, 64, MAX_ITEMS};
    for (int repeat = 0; repeat < repeats; repeat++)
        for (size_t i = 0; i < sizeof items / sizeof *items; i++)
            for (size_t g = 0; g < sizeof grains / sizeof *grains; g++) run_region(pool, &region, items[i], grains[g]);
    CHECK_EQ(region.faults, 0);
    stop(pool, memory);
}

/* Regions after pauses of every length around the spin: workers are found spinning, falling asleep and sleeping. */
static void test_pauses(void) {
    static region_t region;
    void *memory;
    coli_pool_t *pool = start(2, &memory);
    for (uint32_t i = 0; i < 300; i++) {
        wait_ns(i * 400);
        run_region(pool, &region, 40, 1);
    }
    /* Items that outlast the spin: the caller sleeps until the last one reports. With 2 ms items both threads get some,
     * sooner or later on a busy machine. */
    memset((void *)region.by_thread, 0, sizeof region.by_thread);
    region.pause_ns = 2000000;
    for (int i = 0; i < 10 || (region.by_thread[1] == 0 && i < 1000); i++) run_region(pool, &region, 3, 1);
    CHECK_EQ(region.faults, 0);
    CHECK(region.by_thread[0] > 0 && region.by_thread[1] > 0);
    stop(pool, memory);
}

static double cpu_seconds(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

static void test_idle(void) {
    static region_t region;
    void *memory;
    coli_pool_t *pool = start(8, &memory);
    run_region(pool, &region, 1000, 1);
    usleep(50000);
    double before = cpu_seconds();
    usleep(200000);
    CHECK(cpu_seconds() - before < 0.1); /* one spinning thread alone would use 0.2 */
    stop(pool, memory);
}

/* A forked child has the pool's memory but not its workers: the caller takes every piece, so regions still finish. */
static void test_fork(void) {
    static region_t region;
    void *memory;
    coli_pool_t *pool = start(3, &memory);
    run_region(pool, &region, 100, 1);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        run_region(pool, &region, 100, 1);
        _exit(check_failures != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    stop(pool, memory);
}

int main(void) {
    test_counts(1, 1);
    test_counts(2, 20);
    test_counts(3, 5);
    test_counts(8, 5);
    test_counts(32, 1);
    test_shares(1, 20);
    test_shares(2, 200);
    test_shares(5, 100);
    test_help();
    test_ties();
    test_pauses();
    test_idle();
    test_fork();
    return check_report();
}
