/* os_threads.c: threads and waiting on Linux, macOS and other POSIX systems, and what a build without threads has instead; see
 * os.h. Windows: os_windows.c. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include "base/os.h"

#if !defined(_WIN32) && COLI_THREADS
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define STACK_BYTES ((size_t)1 << 20)

static void *thread_main(void *thread_object) {
    coli_os_thread_t *thread = thread_object;
    thread->run(thread->argument);
    return NULL;
}

/* What must not be kept from a thread: signals about what it does itself. Blocked, the kernel would end the process without
 * asking the handlers that a host's crash reporter, a sanitizer or our own guard of mappings has installed. */
static const int own_signals[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP, SIGABRT};

bool coli_os_thread_start(coli_os_thread_t *thread, void (*run)(void *), void *argument) {
    pthread_attr_t attributes;
    pthread_t handle;
    sigset_t all, before;
    thread->run = run;
    thread->argument = argument;
    if (pthread_attr_init(&attributes) != 0) return false;
    bool started = pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0;
    sigfillset(&all); /* the host's signal handlers do not run on our stacks */
    for (size_t i = 0; i < sizeof own_signals / sizeof *own_signals; i++) sigdelset(&all, own_signals[i]);
    started = started && pthread_sigmask(SIG_SETMASK, &all, &before) == 0;
    if (started) {
        started = pthread_create(&handle, &attributes, thread_main, thread) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&attributes);
    if (started) thread->handle = (uint64_t)(uintptr_t)handle;
    return started;
}

void coli_os_thread_join(coli_os_thread_t *thread) { pthread_join((pthread_t)(uintptr_t)thread->handle, NULL); }

#if defined(__linux__)
void coli_os_wait(_Atomic uint32_t *word, uint32_t expected) {
    int before = errno;
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
    errno = before;
}

void coli_os_wake(_Atomic uint32_t *word, bool all) {
    int before = errno;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, all ? INT32_MAX : 1, NULL, NULL, 0);
    errno = before;
}
#else
/* No futex: one condition for all sleepers of the process. Waking is rare, and each sleeper looks at its own word again. */
static pthread_mutex_t wait_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wait_condition = PTHREAD_COND_INITIALIZER;

void coli_os_wait(_Atomic uint32_t *word, uint32_t expected) {
    pthread_mutex_lock(&wait_mutex);
    if (atomic_load(word) == expected) pthread_cond_wait(&wait_condition, &wait_mutex);
    pthread_mutex_unlock(&wait_mutex);
}

void coli_os_wake(_Atomic uint32_t *word, bool all) {
    (void)word, (void)all;
    pthread_mutex_lock(&wait_mutex);
    pthread_cond_broadcast(&wait_condition);
    pthread_mutex_unlock(&wait_mutex);
}
#endif

void coli_os_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ volatile("yield");
#endif
}

#elif !defined(_WIN32)
bool coli_os_thread_start(coli_os_thread_t *thread, void (*run)(void *), void *argument) {
    (void)thread, (void)run, (void)argument;
    return false;
}

void coli_os_thread_join(coli_os_thread_t *thread) { (void)thread; }

/* Nobody could change the word: it is waited for only against a contract (a parallel_for that returned too early). */
void coli_os_wait(_Atomic uint32_t *word, uint32_t expected) { (void)word, (void)expected; }

void coli_os_wake(_Atomic uint32_t *word, bool all) { (void)word, (void)all; }

void coli_os_relax(void) {}
#endif
