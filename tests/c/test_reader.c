/* test_reader.c: background reads bring what the file holds, to any number of waiters; urgent ones come first; reads taken
 * back, hurried, failing and dropped; nothing is left behind. reader.c is included with its read, its wake-up and its thread
 * start replaced by ones that this test can hold, count and refuse, so that no order depends on luck. Also run with
 * -Dtsan=true. */
#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/os.h"
#include "base/status.h"
#include "check.h"

/* ---- What reader.c calls instead ---------------------------------------------------------------------------------------- */

#define MAX_ENTERED 64
#define MAX_OFFSETS 256

static _Atomic uint32_t gated;   /* 1: a read is recorded, then waits for a ticket */
static _Atomic uint32_t tickets[MAX_OFFSETS]; /* reads that may go on, by their offset % MAX_OFFSETS */
static _Atomic uint32_t entered; /* reads recorded */
static _Atomic uint64_t order[MAX_ENTERED]; /* their offsets */
static _Atomic uint32_t wakes;
static uint32_t starts_left = UINT32_MAX; /* then they are refused */

static int64_t gated_read(const coli_file_t *file, void *to, uint64_t bytes, uint64_t offset) {
    if (gated) {
        order[entered % MAX_ENTERED] = offset; /* where the order matters only one thread is on its way */
        entered++;
        _Atomic uint32_t *ticket = &tickets[offset % MAX_OFFSETS];
        while (*ticket == 0) coli_os_wait(ticket, 0);
        --*ticket;
    }
    return coli_os_read(file, to, bytes, offset);
}

static void counted_wake(_Atomic uint32_t *word, bool all) {
    wakes++;
    coli_os_wake(word, all);
}

static bool limited_start(coli_os_thread_t *thread, void (*run)(void *), void *argument) {
    return starts_left-- != 0 && coli_os_thread_start(thread, run, argument);
}

#define coli_os_read gated_read
#define coli_os_wake counted_wake
#define coli_os_thread_start limited_start
#include "base/reader.c"
#undef coli_os_read
#undef coli_os_wake
#undef coli_os_thread_start

/* ---- Helpers ------------------------------------------------------------------------------------------------------------ */

#define T COLI_READER_THREADS
#define CONTENT 1000777u /* no multiple of anything */
#define LARGEST 20000u
#define DEPTH 64

static char path[] = "/tmp/colibri-reader-XXXXXX";
static uint8_t content[CONTENT];
static uint8_t room[DEPTH][LARGEST]; /* where reads go */
static coli_file_t file;

static uint32_t random_below(uint32_t limit) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)((state >> 32) % limit);
}

static void make_content(void) {
    for (uint32_t i = 0; i < CONTENT; i++) content[i] = (uint8_t)random_below(256);
    int descriptor = mkstemp(path);
    CHECK(descriptor >= 0 && write(descriptor, content, CONTENT) == (ssize_t)CONTENT);
    close(descriptor);
    CHECK_EQ(coli_os_open(path, &file), COLIBRI_OK);
}

static coli_reader_t *start(void **memory) {
    *memory = aligned_alloc(COLI_ALIGN, coli_reader_size(DEPTH));
    memset(*memory, 0xAA, coli_reader_size(DEPTH)); /* whatever was there before */
    coli_reader_t *reader = coli_reader_start(*memory, DEPTH, &file);
    CHECK(reader != NULL);
    return reader;
}

static void stop(coli_reader_t *reader, void *memory) {
    coli_reader_stop(reader);
    free(memory);
}

static void let_go(uint64_t offset) {
    tickets[offset % MAX_OFFSETS]++;
    coli_os_wake(&tickets[offset % MAX_OFFSETS], true);
}

static void let_threads_go(void) {
    for (uint32_t i = 0; i < T; i++) let_go(i);
}

static void until_asleep(coli_reader_t *reader, uint32_t threads) {
    for (uint32_t asleep = UINT32_MAX; (uint32_t)__builtin_popcount(asleep) != threads; usleep(50)) {
        lock(reader);
        asleep = reader->asleep;
        unlock(reader);
    }
}

static void until(_Atomic uint32_t *word, uint32_t value) {
    while (*word != value) usleep(50);
}

static coli_read_t read_of(uint32_t slot, uint64_t offset, uint64_t bytes) {
    return (coli_read_t){.to = room[slot], .offset = offset, .bytes = bytes, .needed = bytes};
}

static bool is_content(const coli_read_t *read) { return memcmp(read->to, content + read->offset, read->needed) == 0; }

/* From now on every thread is held in one of these reads [T], at offsets 0, 1, ...; rooms 0 ... T - 1. */
static void hold_threads(coli_reader_t *reader, coli_read_t *blockers) {
    entered = 0;
    gated = 1;
    for (uint32_t i = 0; i < T; i++) {
        blockers[i] = read_of(i, i, 10);
        coli_reader_submit(reader, &blockers[i], true); /* of the others not so many would run */
    }
    until(&entered, T);
}

/* ---- Order -------------------------------------------------------------------------------------------------------------- */

static void submit_mixture(coli_reader_t *reader, coli_read_t *reads) {
    enum { A, B, C, D, E, U, V };
    uint32_t wakes_before = wakes;
    for (uint32_t i = 0; i < 7; i++) {
        reads[i] = read_of(T + i, 100 + i, 10);
        CHECK(!coli_reader_cancel(reader, &reads[i])); /* IDLE */
        coli_reader_submit(reader, &reads[i], i >= U);
        CHECK_EQ(reads[i].state, COLI_READ_WAITING);
    }
    CHECK_EQ(wakes, wakes_before); /* nobody sleeps: no system call */
    coli_reader_hurry(reader, &reads[D]);
    coli_reader_hurry(reader, &reads[D]); /* urgent already: keeps its place */
    coli_reader_hurry(reader, &reads[U]);
    CHECK(coli_reader_cancel(reader, &reads[A])); /* first of its list */
    CHECK(coli_reader_cancel(reader, &reads[V])); /* in the middle */
    CHECK(coli_reader_cancel(reader, &reads[E])); /* last */
    CHECK(!coli_reader_cancel(reader, &reads[A]));
    coli_reader_hurry(reader, &reads[A]); /* IDLE: stays so */
    CHECK_EQ(reads[A].state, COLI_READ_IDLE);
    CHECK(!coli_reader_wait(reader, &reads[A]));
    coli_reader_submit(reader, &reads[V], true);
    coli_reader_submit(reader, &reads[A], false);
}

static void test_order(void) {
    static const uint64_t expected[] = {105, 103, 106}; /* U D V; then B C A */
    static coli_read_t blockers[T], reads[7];
    void *memory;
    coli_reader_t *reader = start(&memory);
    hold_threads(reader, blockers);
    submit_mixture(reader, reads);
    for (uint32_t i = 0; i < T; i++) {
        CHECK_EQ(blockers[i].state, COLI_READ_RUNNING);
        CHECK(!coli_reader_cancel(reader, &blockers[i]));
        coli_reader_hurry(reader, &blockers[i]);
    }
    for (uint32_t i = 0; i < 3; i++) { /* one thread goes on, takes the next read and is held again */
        let_go(i == 0 ? 0 : expected[i - 1]);
        until(&entered, T + 1 + i);
        CHECK_EQ(order[T + i], expected[i]);
    }
    for (uint32_t i = 1; i < T; i++) let_go(i); /* the other threads find no read that may begin beside V */
    until_asleep(reader, T - 1);
    CHECK(reads[1].state == COLI_READ_WAITING && reads[2].state == COLI_READ_WAITING && entered == T + 3);
    let_go(106); /* V: then all threads go on that have something to do */
    until(&entered, T + 3 + COLI_MIN(T, COLI_READER_OTHERS));
    if (T > COLI_READER_OTHERS) until_asleep(reader, T - COLI_READER_OTHERS);
    CHECK_EQ(reads[0].state, COLI_READ_WAITING); /* A, the last to be submitted */
    for (uint32_t i = 0; i < 3; i++) let_go(100 + i);
    for (uint32_t i = 0; i < T; i++) CHECK(coli_reader_wait(reader, &blockers[i]) && is_content(&blockers[i]));
    for (uint32_t i = 0; i < 7; i++) {
        if (i == 4) continue; /* E was taken back */
        CHECK(coli_reader_wait(reader, &reads[i]) && is_content(&reads[i]));
        CHECK(!coli_reader_cancel(reader, &reads[i])); /* DONE */
        CHECK(reads[i].submitted_ns != 0 && reads[i].submitted_ns <= reads[i].done_ns);
    }
    CHECK_EQ(reads[4].state, COLI_READ_IDLE);
    gated = 0;
    stop(reader, memory);
}

/* Beside an urgent read only what is hurried begins; the rest when it is over. */
static void test_beside_urgent(void) {
    static coli_read_t reads[3];
    void *memory;
    coli_reader_t *reader = start(&memory);
    until_asleep(reader, T);
    gated = 1;
    entered = 0;
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t wakes_before = wakes;
        reads[i] = read_of(i, 200 + i, 10);
        coli_reader_submit(reader, &reads[i], i == 0);
        CHECK_EQ(wakes, wakes_before + (i == 0)); /* nobody is called in vain */
        until(&entered, 1);
    }
    if (T > 1) {
        coli_reader_hurry(reader, &reads[2]);
        until(&entered, 2);
        CHECK(order[1] == 202 && reads[1].state == COLI_READ_WAITING);
        let_go(202);
        CHECK(coli_reader_wait(reader, &reads[2]));
        until_asleep(reader, T - 1);
        CHECK_EQ(reads[1].state, COLI_READ_WAITING);
    } else let_go(202);
    let_go(200);
    let_go(201);
    for (uint32_t i = 0; i < 3; i++) CHECK(coli_reader_wait(reader, &reads[i]) && is_content(&reads[i]));
    gated = 0;
    stop(reader, memory);
}

/* ---- Waiting ------------------------------------------------------------------------------------------------------------ */

typedef struct waiter {
    coli_reader_t *reader;
    coli_read_t *read;
    bool came;
} waiter_t;

static void wait_for_one(void *argument) {
    waiter_t *waiter = argument;
    waiter->came = coli_reader_wait(waiter->reader, waiter->read);
}

/* Two sleep on one read until it comes, and again until it is taken back. Before that all reading threads sleep. */
static void test_sleepers(void) {
    static coli_read_t blockers[T], read;
    void *memory;
    coli_reader_t *reader = start(&memory);
    until_asleep(reader, T);
    hold_threads(reader, blockers);
    read = read_of(T, 500, 100);
    for (int taken_back = 0; taken_back < 2; taken_back++) {
        waiter_t waiters[2] = {{reader, &read, taken_back}, {reader, &read, taken_back}};
        coli_os_thread_t threads[2];
        coli_reader_submit(reader, &read, true);
        for (int i = 0; i < 2; i++) CHECK(coli_os_thread_start(&threads[i], wait_for_one, &waiters[i]));
        until(&reader->waiters, 2);
        if (taken_back) CHECK(coli_reader_cancel(reader, &read));
        else let_go(500), let_threads_go();
        for (int i = 0; i < 2; i++) coli_os_thread_join(&threads[i]);
        CHECK(waiters[0].came == !taken_back && waiters[1].came == !taken_back);
        for (uint32_t i = 0; i < T; i++) CHECK(taken_back || coli_reader_wait(reader, &blockers[i]));
        if (!taken_back) hold_threads(reader, blockers);
    }
    let_threads_go();
    for (uint32_t i = 0; i < T; i++) CHECK(coli_reader_wait(reader, &blockers[i]));
    gated = 0;
    stop(reader, memory);
}

#define WAITERS 3

typedef struct crowd {
    coli_reader_t *reader;
    coli_read_t reads[DEPTH];
    _Atomic uint32_t round;    /* raised by main when reads are submitted; UINT32_MAX: end */
    _Atomic uint32_t finished; /* waiters through with the round */
    _Atomic uint32_t good, wrong, taken_back;
} crowd_t;

static bool may_be_taken_back(uint32_t slot) { return slot % 8 == 7; }

/* All waiters wait for all reads, from different ones on. */
static void crowd_main(void *argument) {
    crowd_t *crowd = argument;
    for (uint32_t round = 0; crowd->round != UINT32_MAX; round++) {
        uint32_t seen;
        while ((seen = crowd->round) == round) coli_os_wait(&crowd->round, round);
        if (seen == UINT32_MAX) return;
        for (uint32_t i = 0, from = round * 7; i < DEPTH; i++) {
            uint32_t slot = (from + i) % DEPTH;
            coli_read_t *read = &crowd->reads[slot];
            if (coli_reader_wait(crowd->reader, read)) atomic_fetch_add(is_content(read) ? &crowd->good : &crowd->wrong, 1);
            else if (read->state == COLI_READ_IDLE && may_be_taken_back(slot)) atomic_fetch_add(&crowd->taken_back, 1);
            else atomic_fetch_add(&crowd->wrong, 1);
        }
        atomic_fetch_add(&crowd->finished, 1);
        coli_os_wake(&crowd->finished, true);
    }
}

static void run_round(crowd_t *crowd) {
    for (uint32_t slot = 0; slot < DEPTH; slot++) {
        uint32_t bytes = 1 + random_below(LARGEST);
        crowd->reads[slot] = read_of(slot, random_below(CONTENT - bytes), bytes);
        coli_reader_submit(crowd->reader, &crowd->reads[slot], random_below(4) == 0);
        coli_read_t *other = &crowd->reads[random_below(slot + 1)];
        if (coli_reader_cancel(crowd->reader, other)) coli_reader_submit(crowd->reader, other, false);
    }
    crowd->finished = 0;
    crowd->round++;
    coli_os_wake(&crowd->round, true);
    for (uint32_t i = 0; i < DEPTH; i++) {
        uint32_t slot = random_below(DEPTH);
        coli_reader_hurry(crowd->reader, &crowd->reads[slot]);
        if (may_be_taken_back(slot)) coli_reader_cancel(crowd->reader, &crowd->reads[slot]);
    }
    for (uint32_t finished; (finished = crowd->finished) != WAITERS;) coli_os_wait(&crowd->finished, finished);
}

static void test_crowd(void) {
    enum { ROUNDS = 60 };
    static crowd_t crowd;
    void *memory;
    coli_os_thread_t threads[WAITERS];
    crowd.reader = start(&memory);
    for (int i = 0; i < WAITERS; i++) CHECK(coli_os_thread_start(&threads[i], crowd_main, &crowd));
    for (int round = 0; round < ROUNDS; round++) run_round(&crowd);
    crowd.round = UINT32_MAX;
    coli_os_wake(&crowd.round, true);
    for (int i = 0; i < WAITERS; i++) coli_os_thread_join(&threads[i]);
    CHECK_EQ(crowd.wrong, 0);
    CHECK_EQ(crowd.good + crowd.taken_back, ROUNDS * WAITERS * DEPTH);
    CHECK(crowd.good >= ROUNDS * WAITERS * DEPTH / 8 * 7);
    stop(crowd.reader, memory);
}

/* ---- Failing ------------------------------------------------------------------------------------------------------------ */

static void test_end_of_file(void) {
    static coli_read_t read;
    void *memory;
    coli_reader_t *reader = start(&memory);
    read = read_of(0, CONTENT - 100, 4096);
    for (int missing = 0; missing < 2; missing++) {
        read.needed = 100 + (uint64_t)missing;
        read.error = 77;
        coli_reader_submit(reader, &read, false);
        CHECK_EQ(coli_reader_wait(reader, &read), !missing);
        CHECK_EQ(read.state, missing ? COLI_READ_FAILED : COLI_READ_DONE);
        CHECK_EQ(read.error, 0);
    }
    /* Truncated while the read is on its way; the same read may be tried again afterwards. */
    gated = 1;
    entered = 0;
    read = read_of(0, CONTENT - 100, 100);
    coli_reader_submit(reader, &read, true);
    until(&entered, 1);
    CHECK_EQ(truncate(path, CONTENT - 50), 0);
    let_go(read.offset);
    CHECK(!coli_reader_wait(reader, &read));
    CHECK(read.state == COLI_READ_FAILED && read.error == 0);
    gated = 0;
    read.offset -= 50;
    coli_reader_submit(reader, &read, true);
    CHECK(coli_reader_wait(reader, &read) && is_content(&read));
    CHECK_EQ(truncate(path, CONTENT), 0); /* zeros at the end; no later test reads them */
    stop(reader, memory);
}

static void test_closed(void) {
    static coli_read_t reads[20];
    void *memory;
    coli_file_t kept = file;
    CHECK_EQ(coli_os_open(path, &file), COLIBRI_OK);
    coli_reader_t *reader = start(&memory);
    coli_os_close(&file);
    file = kept;
    for (uint32_t i = 0; i < 20; i++) {
        reads[i] = read_of(i, i, 10);
        coli_reader_submit(reader, &reads[i], i % 2);
    }
    for (uint32_t i = 0; i < 20; i++) {
        CHECK(!coli_reader_wait(reader, &reads[i]));
        CHECK(reads[i].state == COLI_READ_FAILED && reads[i].error == EBADF && reads[i].done_ns != 0);
    }
    stop(reader, memory);
}

/* ---- Starting and stopping ---------------------------------------------------------------------------------------------- */

static void let_go_when_dropped(void *argument) {
    coli_read_t *last_dropped = argument;
    until(&last_dropped->state, COLI_READ_IDLE);
    let_threads_go();
}

static void test_stop_drops(void) {
    static coli_read_t blockers[T], reads[10];
    void *memory;
    coli_reader_t *reader = start(&memory);
    hold_threads(reader, blockers);
    for (uint32_t i = 0; i < 10; i++) {
        reads[i] = read_of(T + i, 100 + i, 10);
        coli_reader_submit(reader, &reads[i], i % 3 == 0);
    }
    coli_os_thread_t helper;
    CHECK(coli_os_thread_start(&helper, let_go_when_dropped, &reads[8])); /* the last that was not urgent */
    stop(reader, memory);
    coli_os_thread_join(&helper);
    for (uint32_t i = 0; i < T; i++) CHECK(blockers[i].state == COLI_READ_DONE && is_content(&blockers[i]));
    for (uint32_t i = 0; i < 10; i++) CHECK_EQ(reads[i].state, COLI_READ_IDLE);
    CHECK_EQ(entered, T);
    gated = 0;
    coli_reader_stop(NULL);
}

/* Entries of a directory of /proc/self; -1: there is none. */
static int count_entries(const char *name) {
    DIR *directory = opendir(name);
    if (!directory) return -1;
    int count = 0;
    while (readdir(directory)) count++;
    closedir(directory);
    return count;
}

static void refuse_threads(void) {
    void *memory = aligned_alloc(COLI_ALIGN, coli_reader_size(DEPTH));
    for (uint32_t allowed = 0; allowed < T; allowed++) {
        char expected[64];
        snprintf(expected, sizeof expected, "thread %u of the %d that read", allowed + 1, T);
        starts_left = allowed;
        CHECK(coli_reader_start(memory, DEPTH, &file) == NULL);
        CHECK(strstr(colibri_last_error(), expected) != NULL);
    }
    starts_left = UINT32_MAX;
    free(memory);
}

static void test_leaves_nothing(void) {
    static coli_read_t reads[T + 1];
    int descriptors = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
    refuse_threads();
    for (int i = 0; i < 200; i++) {
        void *memory;
        coli_reader_t *reader = start(&memory);
        for (uint32_t r = 0; r < (uint32_t)i % (T + 2); r++) {
            reads[r] = read_of(r, random_below(CONTENT / 2), LARGEST);
            coli_reader_submit(reader, &reads[r], false);
        }
        if (i % 2 == 0)
            for (uint32_t r = 0; r < (uint32_t)i % (T + 2); r++) CHECK(coli_reader_wait(reader, &reads[r]));
        stop(reader, memory);
    }
    if (threads < 0) {
        fprintf(stderr, "threads and descriptors not counted: this system has no /proc/self\n");
        return;
    }
    /* A joined thread leaves the system's list a moment later. */
    for (int i = 0; i < 10000 && count_entries("/proc/self/task") > threads; i++) usleep(1000);
    CHECK_EQ(count_entries("/proc/self/task"), threads);
    CHECK_EQ(count_entries("/proc/self/fd"), descriptors);
}

int main(void) {
    make_content();
    test_order();
    test_beside_urgent();
    test_sleepers();
    test_crowd();
    test_closed();
    test_stop_drops();
    test_leaves_nothing();
    test_end_of_file();
    coli_os_close(&file);
    unlink(path);
    return check_report();
}
