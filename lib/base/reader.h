/* reader.h: reads of a file in the background, by a few threads of its own. One thread submits; any thread may wait. Everything
 * lives in memory handed over at the start; nothing allocates. (base: knows nothing of experts) */
#ifndef COLI_READER_H
#define COLI_READER_H

#include "base/os.h"

/* What a read is doing. Zeroed memory is IDLE; from submission to DONE or FAILED the reader moves it on. */
enum {
    COLI_READ_IDLE = 0,
    COLI_READ_WAITING = 1, /* queued */
    COLI_READ_RUNNING = 2,
    COLI_READ_DONE = 3,
    COLI_READ_FAILED = 4,
};

/* One read; lives with the owner, zeroed at first, in place until DONE or FAILED (or cancelled). Offset, bytes and `to` are
 * multiples of the file's alignment. */
typedef struct coli_read {
    _Atomic uint32_t state;   /* COLI_READ_*; what was read is visible to whoever sees DONE (acquire) */
    int32_t error;            /* FAILED: errno, or 0: the file ended before `needed` bytes */
    uint8_t *to;              /* [bytes] */
    uint64_t offset, bytes;
    uint64_t needed;          /* <= bytes: the file may end after them */
    uint64_t submitted_ns, done_ns; /* by coli_os_now_ns */
    struct coli_read *before, *after; /* the reader's own, like the next */
    bool urgent;
} coli_read_t;

typedef struct coli_reader coli_reader_t;

/* Fewer leave reads below a megabyte slower than the disk; with more an urgent read shares it with more of those that run. */
#define COLI_READER_THREADS 4
#define COLI_READER_OTHERS 2 /* reads that are not urgent, running at once at most; none begins beside an urgent one */

/* Bytes of memory (64-byte aligned) for at most `depth` reads that are WAITING at once. */
uint64_t coli_reader_size(uint32_t depth);
/* Start the threads. `file` is copied, its handle stays the caller's and open until stop. On failure NULL and the sentence of
 * COLIBRI_ERR_THREAD. */
coli_reader_t *coli_reader_start(void *memory, uint32_t depth, const coli_file_t *file);
/* Finishes reads that are RUNNING, drops WAITING ones (they are IDLE then), joins the threads. Nobody else may be in a function
 * of this reader, or enter one. NULL is ignored. In a forked child there are no threads to join: do not call it there. */
void coli_reader_stop(coli_reader_t *reader);

/* Queue a read that is IDLE, DONE or FAILED. Urgent ones come before all others, each kind in order of submission; others do
 * not begin while an urgent one runs. Never blocks for longer than a short critical section. */
void coli_reader_submit(coli_reader_t *reader, coli_read_t *read, bool urgent);
/* A WAITING read that was not urgent becomes so; others stay as they are. */
void coli_reader_hurry(coli_reader_t *reader, coli_read_t *read);
/* Take back a WAITING read: true, and it is IDLE. False: too late (RUNNING, DONE, FAILED), or it was IDLE. */
bool coli_reader_cancel(coli_reader_t *reader, coli_read_t *read);
/* Wait until the read is DONE or FAILED: true if DONE. A brief spin, then sleep. From any thread. An IDLE read, or
 * one that another thread cancels meanwhile: false. */
bool coli_reader_wait(coli_reader_t *reader, coli_read_t *read);

#endif
