/* test_hosts.c: config.parallel_for: regions on a host's own threads, on one thread one task after another, and on a host that
 * leaves tasks out: the same bits in every residency, no threads of the library's, the host's floating-point environment
 * untouched. */
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#ifndef _WIN32
#include <sys/wait.h>
#endif

#include "base/os.h"
#include "run_model.h"

#define HOST_THREADS 4

/* What every host below counts. */
typedef struct counts {
    _Atomic uint32_t calls, tasks, faults;
    uint32_t limit; /* n must not exceed it */
} counts_t;

static void note_call(counts_t *counts, int32_t n) {
    atomic_fetch_add(&counts->calls, 1);
    atomic_fetch_add(&counts->tasks, (uint32_t)n);
    if (n < 1 || (uint32_t)n > counts->limit) atomic_fetch_add(&counts->faults, 1);
}

/* ---- hosts ---- */

static void forwards(colibri_task_fn task, void *argument, int32_t n, void *user_data) {
    note_call(user_data, n);
    for (int32_t i = 0; i < n; i++) task(argument, i);
}

static void backwards(colibri_task_fn task, void *argument, int32_t n, void *user_data) {
    note_call(user_data, n);
    for (int32_t i = n - 1; i >= 0; i--) task(argument, i);
}

/* Against the contract: the last task only, or none. */
static void lazily(colibri_task_fn task, void *argument, int32_t n, void *user_data) {
    counts_t *counts = user_data;
    note_call(counts, n);
    if (counts->calls % 2) task(argument, n - 1);
}

/* Threads that wait for a call, take its tasks one by one, and report; the caller only waits: it is no thread of the pool. One
 * call at a time. */
typedef struct host_pool {
    counts_t counts;
    pthread_mutex_t calls, lock;
    pthread_cond_t begun, ended;
    pthread_t threads[HOST_THREADS];
    colibri_task_fn task;
    void *argument;
    int32_t n, taken, done;
    bool stopping;
    uint32_t by_thread[HOST_THREADS]; /* tasks */
} host_pool_t;

typedef struct host_thread {
    host_pool_t *pool;
    int number;
} host_thread_t;

static void take_task(host_pool_t *pool, int number) {
    int32_t i = pool->taken++;
    pool->by_thread[number]++;
    pthread_mutex_unlock(&pool->lock);
    pool->task(pool->argument, i);
    pthread_mutex_lock(&pool->lock);
    if (++pool->done == pool->n) pthread_cond_broadcast(&pool->ended);
}

static void *host_main(void *argument) {
    host_thread_t *self = argument;
    host_pool_t *pool = self->pool;
    fesetround(FE_UPWARD); /* must neither change results nor be changed */
    pthread_mutex_lock(&pool->lock);
    while (!pool->stopping) {
        if (pool->taken < pool->n) take_task(pool, self->number);
        else pthread_cond_wait(&pool->begun, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    if (fegetround() != FE_UPWARD) atomic_fetch_add(&pool->counts.faults, 1);
    return NULL;
}

static void on_threads(colibri_task_fn task, void *argument, int32_t n, void *user_data) {
    host_pool_t *pool = user_data;
    note_call(&pool->counts, n);
    pthread_mutex_lock(&pool->calls);
    pthread_mutex_lock(&pool->lock);
    pool->task = task, pool->argument = argument, pool->n = n, pool->taken = pool->done = 0;
    pthread_cond_broadcast(&pool->begun);
    while (pool->done < pool->n) pthread_cond_wait(&pool->ended, &pool->lock);
    pool->n = pool->taken = 0;
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->calls);
}

static void start_host(host_pool_t *pool, host_thread_t threads[HOST_THREADS]) {
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->calls, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->begun, NULL);
    pthread_cond_init(&pool->ended, NULL);
    for (int i = 0; i < HOST_THREADS; i++) {
        threads[i] = (host_thread_t){pool, i};
        CHECK_EQ(pthread_create(&pool->threads[i], NULL, host_main, &threads[i]), 0);
    }
}

static void stop_host(host_pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->begun);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < HOST_THREADS; i++) pthread_join(pool->threads[i], NULL);
}

/* ---- sessions ---- */

static const way_t WAYS[] = {{"map", COLIBRI_RESIDENCY_MAP, 0},
                             {"lock", COLIBRI_RESIDENCY_LOCK, 0},
                             {"huge", COLIBRI_RESIDENCY_HUGE, 0},
                             {"stream", COLIBRI_RESIDENCY_STREAM, 12},
                             {"stream, hardly any cache", COLIBRI_RESIDENCY_STREAM, 2}};

static colibri_config_t hosted_config(const way_t *way, int32_t threads, colibri_parallel_for_fn host, counts_t *counts) {
    colibri_config_t c = config_of(way);
    c.num_threads = threads;
    c.parallel_for = host;
    c.parallel_for_user_data = counts;
    counts->limit = (uint32_t)threads;
    atomic_store(&counts->calls, 0);
    return c;
}

static void test_host(const char *name, colibri_parallel_for_fn host, counts_t *counts, float *logits) {
    for (size_t w = 0; w < sizeof WAYS / sizeof *WAYS; w++)
        for (int32_t threads = 1; threads <= 8; threads += 1 + threads / 2 * 2) { /* 1, 2, 5 */
            colibri_config_t c = hosted_config(&WAYS[w], threads, host, counts);
            colibri_t *s = start(&c);
            bool right = runs_right(s, c.outputs, SLOTS, 5, logits) && runs_right(s, c.outputs, SLOTS, TOKENS, logits) &&
                         runs_right(s, c.outputs, 1, 1, logits);
            if (!right) fprintf(stderr, "host \"%s\", %s, %d threads\n", name, WAYS[w].name, threads);
            CHECK(right);
            CHECK((counts->calls > 0) == (threads > 1));
            CHECK_EQ(stats_of(s).num_threads, threads);
            colibri_free(s);
        }
    CHECK_EQ(counts->faults, 0);
}

static int num_tasks(void) { /* threads of this process; -1: this system does not say */
    char line[128];
    int found = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file)) sscanf(line, "Threads: %d", &found);
    if (file) fclose(file);
    return found;
}

static void test_starts_no_threads(void) {
    counts_t counts = {0};
    colibri_config_t c = hosted_config(&WAYS[0], 6, forwards, &counts);
    int before = num_tasks();
    colibri_t *s = start(&c);
    CHECK_EQ(num_tasks(), before);
    colibri_free(s);
    c.parallel_for = NULL; /* the count can tell */
    s = start(&c);
    if (before > 0) CHECK_EQ(num_tasks(), before + 5);
    colibri_free(s);
}

static void test_affinity_is_the_hosts(void) {
    counts_t counts = {0};
    colibri_config_t c = hosted_config(&WAYS[0], 1, forwards, &counts);
    c.cpu_affinity = "none";
    colibri_free(start(&c));
    c.cpu_affinity = "0";
    colibri_status_t own;
    c.parallel_for = NULL;
    colibri_t *s = colibri_init(&c);
    own = s ? COLIBRI_OK : colibri_last_status();
    colibri_free(s);
    c.parallel_for = forwards;
    CHECK(colibri_init(&c) == NULL);
    if (own == COLIBRI_OK) {
        CHECK_EQ(colibri_last_status(), COLIBRI_ERR_INVALID_ARGUMENT);
        CHECK(strstr(colibri_last_error(), "parallel_for") != NULL);
    }
}

#ifndef _WIN32
/* With the caller's thread alone, a session has no threads that a forked child could miss; those of STREAM it does miss. */
static void test_fork(float *logits) {
    counts_t counts = {0};
    colibri_config_t c = hosted_config(&WAYS[0], 3, backwards, &counts);
    colibri_config_t streamed = hosted_config(&WAYS[3], 3, backwards, &counts);
    colibri_t *s = start(&c), *t = start(&streamed);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        CHECK(runs_right(s, c.outputs, SLOTS, 5, logits));
        colibri_free(s);
        CHECK_EQ(colibri_set_input(t, (int32_t[]){1}, (int32_t[]){1}, 1), COLIBRI_OK);
        CHECK_EQ(colibri_infer(t), COLIBRI_ERR_THREAD);
        colibri_free(t);
        _exit(check_failures != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(runs_right(s, c.outputs, SLOTS, 5, logits));
    colibri_free(s);
    colibri_free(t);
}
#endif

/* Two sessions at once on one host. */
typedef struct user {
    host_pool_t *pool;
    float *logits;
    const way_t *way;
} user_t;

static void *use_host(void *argument) {
    user_t *user = argument;
    colibri_config_t c = config_of(user->way);
    c.num_threads = HOST_THREADS;
    c.parallel_for = on_threads;
    c.parallel_for_user_data = user->pool;
    colibri_t *s = start(&c);
    for (int i = 0; i < 3; i++) CHECK(runs_right(s, c.outputs, SLOTS, 3 + i, user->logits));
    colibri_free(s);
    return NULL;
}

static void test_two_sessions(host_pool_t *pool, float *logits) {
    user_t users[2] = {{pool, logits, &WAYS[0]}, {pool, logits, &WAYS[3]}};
    pthread_t threads[2];
    pool->counts.limit = HOST_THREADS;
    for (int i = 0; i < 2; i++) CHECK_EQ(pthread_create(&threads[i], NULL, use_host, &users[i]), 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CHECK_EQ(pool->counts.faults, 0);
}

static void test_dtype(uint32_t dtype) {
    static counts_t counts;
    static host_pool_t pool;
    host_thread_t threads[HOST_THREADS];
    make_spec_t spec = rich_spec(dtype);
    size_t size;
    free(write_spec(&spec, &size));
    float *logits = right_logits();
    test_host("forwards", forwards, &counts, logits);
    test_host("backwards", backwards, &counts, logits);
    test_host("lazily", lazily, &counts, logits);
#ifndef _WIN32
    test_fork(logits);
#endif
    start_host(&pool, threads);
    test_host("on threads", on_threads, &pool.counts, logits);
    test_two_sessions(&pool, logits);
    stop_host(&pool);
    CHECK_EQ(pool.counts.faults, 0); /* now the threads have looked at their rounding mode */
    uint32_t busy = 0;
    for (int i = 0; i < HOST_THREADS; i++) busy += pool.by_thread[i] > 0;
    CHECK(busy >= 2);
    free(logits);
}

int main(void) {
    snprintf(path, sizeof path, "hosts-%d.colibri", (int)getpid());
    test_dtype(COLIBRI_FILE_F32);
    test_dtype(COLIBRI_FILE_Q8);
    test_starts_no_threads();
    test_affinity_is_the_hosts();
    unlink(path);
    return check_report();
}
