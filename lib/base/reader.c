/* reader.c: threads that read pieces of a file while others compute; see reader.h.
 *
 * Threads with blocking reads, not io_uring: for pieces of 0.4 to 13 MB both read what the disk gives (1.3 to 1.9 GB/s, at any
 * depth), and io_uring saves 1 to 3 % of one core. Threads work everywhere, also where containers forbid the other.
 *
 * Two lists of reads, linked through the reads themselves, wait behind one lock; a thread takes the first urgent one, or else
 * the first of the others. Every move out of WAITING is made under the lock, so whoever holds it and sees WAITING may take the
 * read back or move it. RUNNING to DONE or FAILED is the running thread's alone, and the last time it touches the read: the
 * owner may use or free it from then on. (A wake-up after that needs the address only, and sleepers look at their word again.)
 *
 * No read of the others begins while an urgent one runs: reads side by side share what the disk gives, and for an urgent one
 * somebody waits. Nor do more than two of the others run at once: what they bring may turn out not to be wanted, a read that
 * runs cannot be taken back, and two keep a disk busy. Whoever makes a beginning possible calls a thread, and a thread that
 * begins a read calls another one if more can begin.
 *
 * A thread that finds nothing to begin sets its bit in `asleep` under the lock and sleeps on a word of its own until someone
 * clears the bit and calls it: no system call while all threads are busy. */
#include "base/reader.h"

#include <stdatomic.h>

#include "base/status.h"

#define LOCK_SPINS 100
#define WAIT_SPIN_NS 20000 /* about what sleeping and waking up cost; a read from a disk takes longer */

enum { FREE = 0, HELD = 1, CONTENDED = 2 /* held, and someone sleeps or is about to */ };

typedef struct reader_thread {
    _Alignas(COLI_ALIGN) _Atomic uint32_t called; /* 1: look at the lists again */
    uint32_t number;
    bool running, urgent; /* it has a read, which is counted in num_running[urgent] */
    coli_reader_t *reader;
    coli_os_thread_t thread;
} reader_thread_t;

struct coli_reader {
    coli_file_t file;
    uint32_t depth;
    uint32_t num_started; /* threads to join */
    _Atomic uint32_t arrived;

    _Alignas(COLI_ALIGN) _Atomic uint32_t lock; /* of the following: */
    coli_read_t *first[2], *last[2]; /* [urgent] */
    uint32_t num_waiting;            /* in both */
    uint32_t num_running[2];         /* [urgent] until their threads come for the next */
    uint32_t asleep;                 /* bit t: thread t sleeps, or is about to, and was not called */
    bool stopping;

    _Alignas(COLI_ALIGN) _Atomic uint32_t waiters; /* threads that sleep on a read's state or are about to */
    reader_thread_t threads[COLI_READER_THREADS];
};

_Static_assert(COLI_READER_THREADS >= 1 && COLI_READER_THREADS <= 32, "asleep has a bit for each");

static void lock(coli_reader_t *reader) {
    for (int i = 0; i < LOCK_SPINS; i++) {
        uint32_t expected = FREE;
        if (atomic_compare_exchange_weak_explicit(&reader->lock, &expected, HELD, memory_order_acquire, memory_order_relaxed))
            return;
        coli_os_relax();
    }
    /* Its holder lost its CPU. */
    while (atomic_exchange_explicit(&reader->lock, CONTENDED, memory_order_acquire) != FREE)
        coli_os_wait(&reader->lock, CONTENDED);
}

static void unlock(coli_reader_t *reader) {
    if (atomic_exchange_explicit(&reader->lock, FREE, memory_order_release) == CONTENDED) coli_os_wake(&reader->lock, false);
}

/* ---- Lists, under the lock --------------------------------------------------------------------------------------------- */

static void append(coli_reader_t *reader, coli_read_t *read, bool urgent) {
    coli_read_t *last = reader->last[urgent];
    read->urgent = urgent;
    read->before = last;
    read->after = NULL;
    if (last) last->after = read;
    else reader->first[urgent] = read;
    reader->last[urgent] = read;
    reader->num_waiting++;
}

static void unlink_read(coli_reader_t *reader, coli_read_t *read) {
    if (read->before) read->before->after = read->after;
    else reader->first[read->urgent] = read->after;
    if (read->after) read->after->before = read->before;
    else reader->last[read->urgent] = read->before;
    reader->num_waiting--;
}

static bool is_waiting(coli_read_t *read) {
    return atomic_load_explicit(&read->state, memory_order_relaxed) == COLI_READ_WAITING;
}

/* The read that may begin now, left in its list; NULL: none. */
static coli_read_t *first_to_begin(const coli_reader_t *reader) {
    bool others = reader->num_running[1] == 0 && reader->num_running[0] < COLI_READER_OTHERS;
    return reader->first[1] || !others ? reader->first[1] : reader->first[0];
}

/* A thread to call, removed from the sleeping ones; COLI_READER_THREADS: none sleeps, or there is nothing for it. */
static uint32_t take_sleeper(coli_reader_t *reader) {
    if (reader->asleep == 0 || !first_to_begin(reader)) return COLI_READER_THREADS;
    uint32_t number = (uint32_t)__builtin_ctz(reader->asleep);
    reader->asleep &= reader->asleep - 1;
    return number;
}

/* ---- The threads ------------------------------------------------------------------------------------------------------- */

static void call(coli_reader_t *reader, uint32_t number) {
    if (number == COLI_READER_THREADS) return;
    atomic_store_explicit(&reader->threads[number].called, 1, memory_order_release);
    coli_os_wake(&reader->threads[number].called, false);
}

/* Leave a state that others may sleep on. Sequentially consistent, as is what a waiter does: either it sees the new state or
 * we see it. */
static void set_state(coli_reader_t *reader, coli_read_t *read, uint32_t state) {
    atomic_store(&read->state, state);
    if (atomic_load(&reader->waiters) != 0) coli_os_wake(&read->state, true);
}

/* The next read, which is RUNNING then; NULL: stop. */
static coli_read_t *next_read(reader_thread_t *self) {
    coli_reader_t *reader = self->reader;
    for (;;) {
        lock(reader);
        reader->num_running[self->urgent] -= self->running;
        coli_read_t *read = first_to_begin(reader);
        bool stopping = reader->stopping;
        self->running = read != NULL;
        self->urgent = read && read->urgent;
        reader->num_running[self->urgent] += self->running;
        if (read) {
            unlink_read(reader, read);
            atomic_store_explicit(&read->state, COLI_READ_RUNNING, memory_order_relaxed);
        } else if (!stopping) {
            atomic_store_explicit(&self->called, 0, memory_order_relaxed);
            reader->asleep |= (uint32_t)1 << self->number;
        }
        uint32_t sleeper = read ? take_sleeper(reader) : COLI_READER_THREADS;
        unlock(reader);
        call(reader, sleeper);
        if (read || stopping) return read;
        while (atomic_load_explicit(&self->called, memory_order_acquire) == 0) coli_os_wait(&self->called, 0);
    }
}

static void run_read(coli_reader_t *reader, coli_read_t *read) {
    int64_t got = coli_os_read(&reader->file, read->to, read->bytes, read->offset);
    bool enough = got >= 0 && (uint64_t)got >= read->needed;
    read->error = got < 0 ? (int32_t)-got : 0;
    read->done_ns = coli_os_now_ns();
    set_state(reader, read, enough ? COLI_READ_DONE : COLI_READ_FAILED);
}

static void thread_main(void *argument) {
    reader_thread_t *self = argument;
    atomic_fetch_add(&self->reader->arrived, 1);
    coli_os_wake(&self->reader->arrived, false);
    for (coli_read_t *read; (read = next_read(self)) != NULL;) run_read(self->reader, read);
}

/* ---- Start and stop ------------------------------------------------------------------------------------------------------ */

uint64_t coli_reader_size(uint32_t depth) {
    (void)depth; /* the reads carry the links of their lists */
    return sizeof(coli_reader_t);
}

/* What the C library does when a thread begins (memory and system calls of its own) is over when start returns. */
static void wait_for_arrival(coli_reader_t *reader) {
    uint32_t arrived;
    while ((arrived = atomic_load(&reader->arrived)) != reader->num_started) coli_os_wait(&reader->arrived, arrived);
}

coli_reader_t *coli_reader_start(void *memory, uint32_t depth, const coli_file_t *file) {
    COLI_ASSERT((uintptr_t)memory % COLI_ALIGN == 0);
    memset(memory, 0, sizeof(coli_reader_t));
    coli_reader_t *reader = memory;
    reader->file = *file;
    reader->depth = depth;
    for (uint32_t i = 0; i < COLI_READER_THREADS; i++) {
        reader_thread_t *self = &reader->threads[i];
        self->reader = reader;
        self->number = i;
        if (!coli_os_thread_start(&self->thread, thread_main, self)) {
            coli_reader_stop(reader);
            coli_fail(COLIBRI_ERR_THREAD, "the system refused to start thread %u of the %d that read from the file; let this "
                      "process have more threads", i + 1, COLI_READER_THREADS);
            return NULL;
        }
        reader->num_started++;
    }
    wait_for_arrival(reader);
    return reader;
}

void coli_reader_stop(coli_reader_t *reader) {
    if (!reader) return;
    lock(reader);
    reader->stopping = true;
    for (int urgent = 0; urgent < 2; urgent++) {
        for (coli_read_t *read; (read = reader->first[urgent]) != NULL;) {
            unlink_read(reader, read);
            set_state(reader, read, COLI_READ_IDLE);
        }
    }
    uint32_t asleep = reader->asleep;
    reader->asleep = 0;
    unlock(reader);
    for (uint32_t i = 0; i < reader->num_started; i++)
        if (asleep >> i & 1) call(reader, i);
    for (uint32_t i = 0; i < reader->num_started; i++) coli_os_thread_join(&reader->threads[i].thread);
    reader->num_started = 0;
}

/* ---- Reads --------------------------------------------------------------------------------------------------------------- */

void coli_reader_submit(coli_reader_t *reader, coli_read_t *read, bool urgent) {
    COLI_ASSERT(read->bytes % reader->file.alignment == 0 && read->offset % reader->file.alignment == 0);
    COLI_ASSERT((uintptr_t)read->to % reader->file.alignment == 0 && read->needed <= read->bytes);
    COLI_ASSERT(!is_waiting(read) && atomic_load(&read->state) != COLI_READ_RUNNING);
    read->submitted_ns = coli_os_now_ns();
    lock(reader);
    COLI_ASSERT(reader->num_waiting < reader->depth);
    atomic_store_explicit(&read->state, COLI_READ_WAITING, memory_order_relaxed);
    append(reader, read, urgent);
    uint32_t sleeper = take_sleeper(reader);
    unlock(reader);
    call(reader, sleeper);
}

void coli_reader_hurry(coli_reader_t *reader, coli_read_t *read) {
    if (!is_waiting(read)) return;
    lock(reader);
    if (is_waiting(read) && !read->urgent) {
        unlink_read(reader, read);
        append(reader, read, true);
    }
    uint32_t sleeper = take_sleeper(reader);
    unlock(reader);
    call(reader, sleeper);
}

bool coli_reader_cancel(coli_reader_t *reader, coli_read_t *read) {
    if (!is_waiting(read)) return false;
    lock(reader);
    bool taken = is_waiting(read);
    if (taken) {
        unlink_read(reader, read);
        set_state(reader, read, COLI_READ_IDLE);
    }
    unlock(reader);
    return taken;
}

static bool is_pending(uint32_t state) { return state == COLI_READ_WAITING || state == COLI_READ_RUNNING; }

bool coli_reader_wait(coli_reader_t *reader, coli_read_t *read) {
    uint32_t state = atomic_load_explicit(&read->state, memory_order_acquire);
    if (!is_pending(state)) return state == COLI_READ_DONE;
    uint64_t start = coli_os_now_ns();
    do {
        for (int i = 0; i < 32; i++) {
            state = atomic_load_explicit(&read->state, memory_order_acquire);
            if (!is_pending(state)) return state == COLI_READ_DONE;
            coli_os_relax();
        }
    } while (coli_os_now_ns() - start < WAIT_SPIN_NS);
    atomic_fetch_add(&reader->waiters, 1);
    while (is_pending(state = atomic_load(&read->state))) coli_os_wait(&read->state, state);
    atomic_fetch_sub(&reader->waiters, 1);
    return state == COLI_READ_DONE;
}
