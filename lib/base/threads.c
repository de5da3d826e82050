/* threads.c: the pool of workers that every parallel region of the forward pass runs on; see threads.h.
 *
 * A region is pieces of `grain` items. Every thread has a range of consecutive pieces, so that it reads the weights as one
 * stream (and, with numa_policy, those of its node); who has finished his own helps the next one. Two kinds of words carry it:
 *
 *     left[t]      pieces of thread t's range not yet taken. Whoever lowers it from n to n - 1 owns the n-th piece from the
 *                  range's end. The region's description is written before any left[t] is raised and stays until the owner
 *                  reports its piece, so it is read only after a piece was taken. A worker that comes late finds zero, or a
 *                  piece of the next region: both are right. Hence nobody waits for workers that never woke up, which is what
 *                  keeps eight threads on two cores, or a busy neighbour, from stopping everybody.
 *     unfinished   pieces taken or not, but not reported; the top bit says that the caller sleeps on this word.
 *
 * Between regions workers watch `epoch` for a moment and then sleep on it. */
#include "base/threads.h"

#include <stdatomic.h>

#include "base/fpenv.h"
#include "base/numa.h"
#include "base/status.h"

#define CALLER_SLEEPS 0x80000000u
#define SPIN_NS 30000        /* about what two futex calls and a wake-up cost */
#define SPIN_CROWDED_NS 1000 /* more threads than cores: whoever spins keeps another from working */
#define STACK_IN_USE (64 << 10) /* bytes; kernels for integers take about 30 KB */

typedef struct worker {
    coli_os_thread_t thread;
    coli_pool_t *pool;
    uint32_t number; /* 1 ... num_threads - 1 */
} worker_t;

/* A thread's share of a region, on a cache line of its own. */
typedef struct range {
    _Alignas(COLI_ALIGN) _Atomic uint32_t left;
    uint32_t end; /* one past its last piece; part of the region's description */
} range_t;

struct coli_pool {
    /* The region's description, written by the caller while every left is zero. */
    coli_work_fn work;
    void *argument;
    uint32_t items, grain;
    uint32_t num_threads;
    uint32_t num_started; /* workers to join */
    uint32_t spin_ns;
    worker_t *workers; /* [num_threads - 1] */
    range_t *ranges;   /* [num_threads] */
    coli_ties_t ties;  /* until coli_pool_start returns */
    colibri_parallel_for_fn parallel_for; /* NULL: workers of our own */
    void *user_data;

    _Alignas(COLI_ALIGN) _Atomic uint32_t unfinished;
    _Alignas(COLI_ALIGN) _Atomic uint32_t epoch; /* raised for every region and for stopping */
    _Atomic uint32_t sleepers;                   /* workers that sleep on epoch or are about to */
    _Atomic uint32_t stopping;
    _Atomic uint32_t arrived;                    /* workers that run */
    _Atomic uint32_t untied;                     /* number of one that the system would not keep on its CPUs; 0: none */
};

uint64_t coli_pool_size(uint32_t num_threads) {
    return coli_pad(sizeof(coli_pool_t), COLI_ALIGN) + coli_pad((size_t)num_threads * sizeof(worker_t), COLI_ALIGN) +
           num_threads * sizeof(range_t);
}

uint32_t coli_pool_num_threads(const coli_pool_t *pool) { return pool->num_threads; }

/* Watch *word until it equals `value` (until_equal) or differs from it, for at most spin_ns. True if that came. The clock is
 * asked only now and then. */
static bool spin(const coli_pool_t *pool, _Atomic uint32_t *word, uint32_t value, bool until_equal) {
    uint64_t start = coli_os_now_ns();
    do {
        for (int i = 0; i < 32; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) == until_equal) return true;
            coli_os_relax();
        }
    } while (coli_os_now_ns() - start < pool->spin_ns);
    return false;
}

/* Take pieces of one range and work on them until none is left. Returns how many were done: not yet reported. */
static uint32_t work_on_range(coli_pool_t *pool, uint32_t owner, uint32_t thread) {
    range_t *range = &pool->ranges[owner];
    _Atomic uint32_t *word = &range->left;
    uint32_t done = 0, left = atomic_load_explicit(word, memory_order_relaxed);
    while (left != 0) {
        if (!atomic_compare_exchange_weak_explicit(word, &left, left - 1, memory_order_acquire, memory_order_relaxed)) continue;
        uint32_t begin = (range->end - left) * pool->grain;
        uint32_t end = pool->items - begin > pool->grain ? begin + pool->grain : pool->items;
        pool->work(pool->argument, begin, end, thread);
        done++;
        left = atomic_load_explicit(word, memory_order_relaxed);
    }
    return done;
}

static uint32_t work_on_chunks(coli_pool_t *pool, uint32_t thread) {
    uint32_t done = work_on_range(pool, thread, thread);
    for (uint32_t owner = thread + 1; owner < pool->num_threads; owner++) done += work_on_range(pool, owner, thread);
    for (uint32_t owner = 0; owner < thread; owner++) done += work_on_range(pool, owner, thread);
    return done;
}

/* As thread `thread` that is not the caller: what there is to do, reported. */
static void work_and_report(coli_pool_t *pool, uint32_t thread) {
    uint32_t done = work_on_chunks(pool, thread);
    if (done == 0) return;
    uint32_t before = atomic_fetch_sub_explicit(&pool->unfinished, done, memory_order_acq_rel);
    if (before - done == CALLER_SLEEPS) coli_os_wake(&pool->unfinished, false);
}

static bool tie(const coli_ties_t *ties, uint32_t number) {
    if (ties->cpus) return coli_os_pin(ties->cpus[number]);
    return !ties->nodes || coli_os_pin_node(ties->topology, ties->nodes[number]);
}

/* A new stack has no pages yet. Those that the library's work reaches are had now, not during some later token. */
__attribute__((noinline)) static void touch_stack(void) {
    volatile uint8_t room[STACK_IN_USE];
    for (size_t i = 0; i < sizeof room; i += 1024) room[i] = 0;
}

static void worker_main(void *argument) {
    worker_t *worker = argument;
    coli_pool_t *pool = worker->pool;
    coli_fp_set(COLI_FP_DEFAULT); /* not what the starting thread had */
    touch_stack();
    if (!tie(&pool->ties, worker->number)) atomic_store(&pool->untied, worker->number);
    atomic_fetch_add(&pool->arrived, 1);
    coli_os_wake(&pool->arrived, false);
    for (;;) {
        uint32_t seen = atomic_load_explicit(&pool->epoch, memory_order_acquire);
        if (atomic_load_explicit(&pool->stopping, memory_order_relaxed)) return;
        work_and_report(pool, worker->number);
        if (spin(pool, &pool->epoch, seen, false)) continue;
        /* Sequentially consistent against the caller's raise of epoch and look at sleepers: one of us sees the other. */
        atomic_fetch_add(&pool->sleepers, 1);
        while (atomic_load(&pool->epoch) == seen) coli_os_wait(&pool->epoch, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
}

/* Raise epoch and wake as many sleepers as there is work for. */
static void call_workers(coli_pool_t *pool, uint32_t wanted) {
    atomic_fetch_add(&pool->epoch, 1);
    uint32_t asleep = atomic_load(&pool->sleepers);
    if (asleep == 0) return;
    if (wanted >= asleep) {
        coli_os_wake(&pool->epoch, true);
    } else {
        for (uint32_t i = 0; i < wanted; i++) coli_os_wake(&pool->epoch, false);
    }
}

/* Report the caller's own pieces and wait for the others'. */
static void wait_for_workers(coli_pool_t *pool, uint32_t done) {
    uint32_t left = atomic_fetch_sub_explicit(&pool->unfinished, done, memory_order_acq_rel) - done;
    if (left == 0 || spin(pool, &pool->unfinished, 0, true)) return;
    left = atomic_fetch_or_explicit(&pool->unfinished, CALLER_SLEEPS, memory_order_acq_rel) | CALLER_SLEEPS;
    while (left != CALLER_SLEEPS) {
        coli_os_wait(&pool->unfinished, left);
        left = atomic_load_explicit(&pool->unfinished, memory_order_acquire);
    }
}

/* Write the region's description but for the ranges. Returns how many pieces it has, 0 if there was nothing to share: all is
 * done then. */
static uint32_t begin_region(coli_pool_t *pool, coli_work_fn work, void *argument, uint32_t items, uint32_t grain) {
    COLI_ASSERT(grain >= 1 && items < CALLER_SLEEPS);
    if (items == 0) return 0;
    if (pool->num_threads == 1 || items <= grain) {
        work(argument, 0, items, 0);
        return 0;
    }
    pool->work = work;
    pool->argument = argument;
    pool->items = items;
    pool->grain = grain;
    uint32_t chunks = items / grain + (items % grain != 0);
    atomic_store_explicit(&pool->unfinished, chunks, memory_order_relaxed);
    return chunks;
}

static void give_range(coli_pool_t *pool, uint32_t owner, uint32_t begin, uint32_t end) {
    pool->ranges[owner].end = end;
    atomic_store_explicit(&pool->ranges[owner].left, end - begin, memory_order_release);
}

/* On a thread of the host, whose floating-point environment is its own. */
static void host_task(void *argument, int32_t i) {
    uint64_t host = coli_fp_enter();
    work_and_report(argument, (uint32_t)i);
    coli_fp_leave(host);
}

/* With a host, all is done when it returns; what it left out, against its contract, the caller does. */
static void finish_region(coli_pool_t *pool, uint32_t chunks) {
    uint32_t threads = COLI_MIN(chunks, pool->num_threads);
    if (pool->parallel_for) pool->parallel_for(host_task, pool, (int32_t)threads, pool->user_data);
    else call_workers(pool, threads - 1);
    wait_for_workers(pool, work_on_chunks(pool, 0));
}

void coli_pool_run(coli_pool_t *pool, coli_work_fn work, void *argument, uint32_t items, uint32_t grain) {
    uint32_t chunks = begin_region(pool, work, argument, items, grain);
    if (chunks == 0) return;
    uint32_t each = chunks / pool->num_threads, one_more = chunks % pool->num_threads;
    for (uint32_t t = 0, begin = 0; t < pool->num_threads; t++) {
        uint32_t end = begin + each + (t < one_more);
        give_range(pool, t, begin, end);
        begin = end;
    }
    finish_region(pool, chunks);
}

void coli_pool_run_shares(coli_pool_t *pool, coli_work_fn work, void *argument, uint32_t items, uint32_t grain,
                          const coli_share_t *shares) {
    uint32_t chunks = begin_region(pool, work, argument, items, grain);
    if (chunks == 0) return;
    for (uint32_t t = 0; t < pool->num_threads; t++) give_range(pool, t, shares[t].begin, shares[t].end);
    finish_region(pool, chunks);
}

/* What the C library does when a thread begins (memory and system calls of its own) is over when init returns. */
static void wait_for_arrival(coli_pool_t *pool) {
    uint32_t arrived;
    while ((arrived = atomic_load(&pool->arrived)) != pool->num_started) coli_os_wait(&pool->arrived, arrived);
}

/* Some thread was refused its CPUs: stop, and say which. */
static coli_pool_t *fail_untied(coli_pool_t *pool, uint32_t number) {
    const coli_ties_t *ties = &pool->ties;
    coli_pool_stop(pool);
    if (ties->cpus)
        coli_fail(COLIBRI_ERR_THREAD, "the system refused to keep thread %u on CPU %d (cpu_affinity)", number,
                  (int)ties->cpus[number]);
    else
        coli_fail(COLIBRI_ERR_THREAD, "the system refused to keep thread %u on the CPUs of node %u (numa_policy)", number,
                  (unsigned)ties->nodes[number]);
    return NULL;
}

static coli_pool_t *lay_out(void *memory, uint32_t num_threads) {
    COLI_ASSERT(num_threads >= 1 && num_threads <= COLI_MAX_THREADS && (uintptr_t)memory % COLI_ALIGN == 0);
    memset(memory, 0, coli_pool_size(num_threads));
    coli_pool_t *pool = memory;
    pool->num_threads = num_threads;
    pool->workers = (worker_t *)((uint8_t *)memory + coli_pad(sizeof(coli_pool_t), COLI_ALIGN));
    pool->ranges = (range_t *)((uint8_t *)pool->workers + coli_pad((size_t)num_threads * sizeof(worker_t), COLI_ALIGN));
    return pool;
}

coli_pool_t *coli_pool_start_hosted(void *memory, uint32_t num_threads, colibri_parallel_for_fn parallel_for, void *user_data) {
    coli_pool_t *pool = lay_out(memory, num_threads);
    pool->parallel_for = parallel_for;
    pool->user_data = user_data;
    return pool;
}

coli_pool_t *coli_pool_start(void *memory, uint32_t num_threads, const coli_ties_t *ties) {
    coli_pool_t *pool = lay_out(memory, num_threads);
    if (ties) pool->ties = *ties;
    if (num_threads > 1) pool->spin_ns = num_threads <= (uint32_t)coli_os_num_cores() ? SPIN_NS : SPIN_CROWDED_NS;
    for (uint32_t i = 0; i + 1 < num_threads; i++) {
        worker_t *worker = &pool->workers[i];
        worker->pool = pool;
        worker->number = i + 1;
        if (!coli_os_thread_start(&worker->thread, worker_main, worker)) {
            coli_pool_stop(pool);
            coli_fail(COLIBRI_ERR_THREAD, "the system refused to start thread %u of %u; ask for fewer (num_threads)", i + 2,
                      num_threads);
            return NULL;
        }
        pool->num_started++;
    }
    wait_for_arrival(pool);
    uint32_t untied = atomic_load(&pool->untied);
    if (untied != 0) return fail_untied(pool, untied);
    memset(&pool->ties, 0, sizeof pool->ties); /* what it points to may go away now */
    return pool;
}

void coli_pool_stop(coli_pool_t *pool) {
    if (pool->num_started == 0) return;
    atomic_store_explicit(&pool->stopping, 1, memory_order_relaxed);
    call_workers(pool, pool->num_threads);
    for (uint32_t i = 0; i < pool->num_started; i++) coli_os_thread_join(&pool->workers[i].thread);
    pool->num_started = 0;
}
