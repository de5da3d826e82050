/* os_guard.c: mappings that survive the loss of their file: the handler of SIGBUS; see os.h. Windows has no such signal,
 * and refuses to shorten a mapped file.
 *
 * A page of a mapping is lost when the file is cut off before it, or when the disk cannot read it; touching it raises SIGBUS.
 * On a fault in a guarded mapping the handler says so in *lost, then puts zeros in place of ALL of the mapping, in one call.
 * All of it, because the model behind it is finished either way, and because a cut file has lost a long tail: one fault a
 * page would take long and, pages being touched in no order, leave more pieces than the kernel lets a process have. *lost is
 * set first: whoever has read zeros that are none of the file's finds it set afterwards.
 *
 * Other faults go on to the handler that was there before, which runs as it would have without ours. When the last guarded
 * mapping goes, that handler is put back, so that the library may be unloaded. A host that installs a handler of its own in
 * between has displaced ours: mappings are guarded then only if its handler calls ours, no further ones are accepted, and the
 * library must stay loaded. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE /* MAP_ANONYMOUS */
#endif

#include "base/os.h"

#if !defined(_WIN32) && !defined(COLI_NO_PAGES) && COLI_THREADS
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_RANGES 64
#define MAX_FAULTS 4096 /* of one range: one a thread is as should be; more: zeros do not help, and this must end */

/* Atomic throughout, and without locks, so that the handler may read what another thread is changing. */
typedef struct range {
    _Atomic uint32_t version;               /* odd while it is being changed */
    _Atomic uintptr_t begin, end;           /* whole pages; both 0: free */
    _Atomic(_Atomic uint32_t *) lost;
    _Atomic uint32_t faults;
} range_t;
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_POINTER_LOCK_FREE == 2, "a signal handler may not wait");

static range_t ranges[MAX_RANGES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what follows and all changes of ranges */
static int num_guarded;
static bool installed;                      /* ours has been put in place and not been taken away by us */
static struct sigaction previous;           /* what was there before; changes only while ours is not installed */
static _Atomic bool spent;                  /* `previous` was for one signal only (SA_RESETHAND), which it has had */

/* ---- In the handler: only what is safe there ------------------------------------------------------------------------- */

/* A range that changes meanwhile is not the one that was touched: that one is guarded as long as it is used. */
static bool make_zero(range_t *range, uintptr_t address) {
    uint32_t version = atomic_load(&range->version);
    uintptr_t begin = atomic_load(&range->begin), end = atomic_load(&range->end);
    _Atomic uint32_t *lost = atomic_load(&range->lost);
    if (version % 2 || atomic_load(&range->version) != version || address < begin || address >= end) return false;
    atomic_store(lost, 1);
    if (atomic_fetch_add(&range->faults, 1) >= MAX_FAULTS) return false;
    return mmap((void *)begin, end - begin, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

/* Did an instruction of this thread raise it, so that it will again? Otherwise somebody has sent it. */
static bool is_fault(const siginfo_t *info) {
#if defined(BUS_MCEERR_AO)
    if (info->si_code == BUS_MCEERR_AO) return false; /* memory found broken, not touched yet */
#endif
    return info->si_code > 0 && info->si_code != SI_USER;
}

static bool is_function(const struct sigaction *action) {
    return action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN; /* the same memory as sa_sigaction */
}

static void hand_on(int signal_number, siginfo_t *info, void *context) {
    bool gone = (previous.sa_flags & (int)SA_RESETHAND) && atomic_exchange(&spent, true), fault = is_fault(info);
    if (gone || !is_function(&previous)) {
        if (!gone && !fault && previous.sa_handler == SIG_IGN) return; /* faults are not ignored: the kernel ends the process */
        struct sigaction end = {.sa_handler = SIG_DFL};
        sigemptyset(&end.sa_mask);
        sigaction(signal_number, &end, NULL);
        if (!fault) raise(signal_number); /* it waits until this handler returns; a fault comes again by itself */
    } else if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal_number, info, context);
    } else {
        previous.sa_handler(signal_number);
    }
}

static void on_bus(int signal_number, siginfo_t *info, void *context) {
    int before = errno;
    bool done = false;
    if (is_fault(info) && info->si_code != BUS_ADRALN) /* a misaligned access is no loss, and would come again */
        for (int i = 0; i < MAX_RANGES && !done; i++) done = make_zero(&ranges[i], (uintptr_t)info->si_addr);
    if (!done) hand_on(signal_number, info, context);
    errno = before;
}

/* ---- Guarding, under the mutex --------------------------------------------------------------------------------------- */

static bool is_ours(const struct sigaction *action) { return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_bus; }

/* With the mask and the flags of the handler before it, so that it finds what it asked for. */
static bool install(void) {
    struct sigaction now, ours = {.sa_sigaction = on_bus};
    if (sigaction(SIGBUS, NULL, &now) != 0) return false;
    if (installed) return is_ours(&now);
    previous = now;
    atomic_store(&spent, false);
    sigemptyset(&ours.sa_mask);
    if (is_function(&now)) ours.sa_mask = now.sa_mask;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (is_function(&now) ? now.sa_flags & (int)(SA_NODEFER | SA_RESTART) : SA_RESTART);
    return installed = sigaction(SIGBUS, &ours, NULL) == 0;
}

static void uninstall(void) {
    struct sigaction now;
    if (!installed || sigaction(SIGBUS, NULL, &now) != 0 || !is_ours(&now)) return; /* displaced: it may still be called */
    struct sigaction end = {.sa_handler = SIG_DFL};
    sigemptyset(&end.sa_mask);
    installed = sigaction(SIGBUS, atomic_load(&spent) ? &end : &previous, NULL) != 0;
}

static range_t *find(uintptr_t begin) {
    for (int i = 0; i < MAX_RANGES; i++)
        if (atomic_load(&ranges[i].begin) == begin) return &ranges[i];
    return NULL;
}

static void change(range_t *range, uintptr_t begin, uintptr_t end, _Atomic uint32_t *lost) {
    atomic_fetch_add(&range->version, 1);
    atomic_store(&range->begin, begin);
    atomic_store(&range->end, end);
    atomic_store(&range->lost, lost);
    atomic_store(&range->faults, 0);
    atomic_fetch_add(&range->version, 1);
}

bool coli_os_guard(const void *data, uint64_t bytes, _Atomic uint32_t *lost) {
    uintptr_t begin = (uintptr_t)data, page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (!begin || begin % page || !bytes || bytes > UINTPTR_MAX - begin - page) return false;
    uintptr_t end = (begin + (uintptr_t)bytes + page - 1) & ~(page - 1);
    pthread_mutex_lock(&mutex);
    range_t *range = find(begin), *guarded = range;
    if (!range) range = find(0);
    bool ok = range && install() && (!guarded || (atomic_load(&range->end) == end && atomic_load(&range->lost) == lost));
    if (ok && !guarded) {
        change(range, begin, end, lost);
        num_guarded++;
    }
    pthread_mutex_unlock(&mutex);
    return ok;
}

void coli_os_unguard(const void *data) {
    if (!data) return;
    pthread_mutex_lock(&mutex);
    range_t *range = find((uintptr_t)data);
    if (range) {
        change(range, 0, 0, NULL);
        if (--num_guarded == 0) uninstall();
    }
    pthread_mutex_unlock(&mutex);
}

#else
bool coli_os_guard(const void *data, uint64_t bytes, _Atomic uint32_t *lost) {
    (void)data, (void)bytes, (void)lost;
    return false;
}

void coli_os_unguard(const void *data) { (void)data; }
#endif
