/* test_threads.c: every item is worked on exactly once, whatever the number of threads, the grain and the neighbours; sleeping
 * workers wake; an idle pool uses no CPU. Also run with -Dtsan=true. */
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/os.h"
#include "base/status.h"
#include "base/threads.h"
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
    test_pauses();
    test_idle();
    test_fork();
    return check_report();
}
