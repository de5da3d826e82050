/* test_guard.c: mappings whose file is cut off while they are used. With a guard they become zeros and say so, one by one, from
 * many threads at once, and when a model is verified; without one, and after it, the process dies of SIGBUS as ever; faults of
 * others go to the handler that was there before, whatever its kind, and that one is back when the last guard is gone. */
#include "check.h"

#include "model/weights.h"

#if !defined(_WIN32)
#define MAKE_FILE_F32_ONLY
#include "make_file.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 64

static size_t page;

typedef struct mapped {
    int descriptor;
    volatile uint8_t *data; /* [PAGES][page], all bytes 7 */
    _Atomic uint32_t lost;
} mapped_t;

static mapped_t *map_file(void) {
    char path[] = "/tmp/colibri-guard-XXXXXX";
    mapped_t *m = calloc(1, sizeof *m);
    m->descriptor = mkstemp(path);
    unlink(path);
    uint8_t *bytes = malloc(PAGES * page);
    memset(bytes, 7, PAGES * page);
    CHECK(write(m->descriptor, bytes, PAGES * page) == (ssize_t)(PAGES * page));
    free(bytes);
    m->data = mmap(NULL, PAGES * page, PROT_READ, MAP_SHARED, m->descriptor, 0);
    CHECK(m->data != MAP_FAILED);
    return m;
}

static void unmap_file(mapped_t *m) {
    munmap((void *)(uintptr_t)m->data, PAGES * page);
    close(m->descriptor);
    free(m);
}

static bool guard(mapped_t *m) { return coli_os_guard((const void *)m->data, PAGES * page - 5, &m->lost); }
static void unguard(mapped_t *m) { coli_os_unguard((const void *)m->data); }
static void cut(const mapped_t *m, size_t pages) { CHECK_EQ(ftruncate(m->descriptor, (off_t)(pages * page)), 0); }
static bool sum_is(const mapped_t *m, size_t first, size_t last, unsigned each) {
    for (size_t i = first * page; i < last * page; i += 61)
        if (m->data[i] != each) return false;
    return true;
}

/* How a child process that runs this ends: its exit status, or minus the signal. */
static int outcome(void (*run)(void)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        run();
        _exit(check_failures ? 99 : 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static struct sigaction current(void) {
    struct sigaction now;
    CHECK_EQ(sigaction(SIGBUS, NULL, &now), 0);
    return now;
}

/* ---- Death as ever -------------------------------------------------------------------------------------------------- */

static void touch_unguarded(void) {
    mapped_t *m = map_file();
    cut(m, 3);
    (void)m->data[5 * page];
}

static void touch_foreign(void) { /* another mapping is guarded */
    mapped_t *m = map_file();
    CHECK(guard(m));
    touch_unguarded();
}

static void touch_after_unguard(void) {
    mapped_t *m = map_file();
    CHECK(guard(m));
    unguard(m);
    cut(m, 3);
    (void)m->data[5 * page];
}

static void touch_foreign_ignored(void) {
    signal(SIGBUS, SIG_IGN);
    touch_foreign();
}

static void sent_foreign(void) {
    mapped_t *m = map_file();
    CHECK(guard(m));
    raise(SIGBUS);
}

static void sent_ignored(void) {
    signal(SIGBUS, SIG_IGN);
    sent_foreign();
}

/* Is the handler told where the access was, and does it run under its own mask? Not under some emulators. */
static const volatile uint8_t *expected_address;
static void see_fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    _exit(info->si_addr == (const void *)expected_address && sigismember(&blocked, SIGUSR1) ? 42 : 1);
}

static void probe(void) {
    mapped_t *m = map_file();
    struct sigaction probing = {.sa_sigaction = see_fault, .sa_flags = SA_SIGINFO};
    sigemptyset(&probing.sa_mask);
    sigaddset(&probing.sa_mask, SIGUSR1);
    CHECK_EQ(sigaction(SIGBUS, &probing, NULL), 0);
    cut(m, 3);
    expected_address = m->data + 5 * page;
    (void)*expected_address;
}

/* ---- Survival ------------------------------------------------------------------------------------------------------- */

static void survive(void) {
    mapped_t *m = map_file(), *whole = map_file();
    CHECK(guard(m) && guard(whole));
    CHECK(guard(m)); /* again: nothing new */
    cut(m, 3);
    CHECK(sum_is(m, 0, 3, 7));
    CHECK_EQ(m->lost, 0);
    errno = 1234;
    CHECK_EQ(m->data[5 * page], 0);
    CHECK_EQ(errno, 1234);
    CHECK_EQ(m->lost, 1);
    CHECK(sum_is(m, 0, PAGES, 0));
    CHECK(m->data[PAGES * page - 1] == 0);
    CHECK(whole->lost == 0 && sum_is(whole, 0, PAGES, 7));
    cut(whole, 0);
    CHECK(whole->data[PAGES * page - 1] == 0); /* the end of the last page, beyond the bytes that were named */
    CHECK_EQ(whole->lost, 1);
    unguard(m);
    CHECK(current().sa_handler != SIG_DFL);
    unguard(whole);
    CHECK(current().sa_handler == SIG_DFL);
    unguard(whole);
    unmap_file(m), unmap_file(whole);
}

/* ---- The handler before --------------------------------------------------------------------------------------------- */

static volatile int calls, wrong;
static mapped_t *repaired;

static void repair(int number) { /* a host that knows what to do about its own mapping */
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    calls++;
    wrong += number != SIGBUS || !sigismember(&blocked, SIGUSR1) || !sigismember(&blocked, SIGBUS);
    if (ftruncate(repaired->descriptor, (off_t)(PAGES * page))) wrong++;
    errno = 77;
}

static void repair_by_address(int number, siginfo_t *info, void *context) {
    wrong += info->si_addr != (const void *)(repaired->data + 9 * page) || context == NULL;
    repair(number);
}

static void host_handler(bool by_address) {
    mapped_t *m = map_file();
    struct sigaction host = {.sa_handler = repair};
    if (by_address) host.sa_sigaction = repair_by_address, host.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&host.sa_mask);
    sigaddset(&host.sa_mask, SIGUSR1);
    CHECK_EQ(sigaction(SIGBUS, &host, NULL), 0);
    repaired = map_file();
    CHECK(guard(m));
    cut(m, 3), cut(repaired, 3);
    errno = 55;
    CHECK_EQ(repaired->data[9 * page], 0);
    CHECK_EQ(errno, 55);
    CHECK_EQ(calls, 1);
    CHECK_EQ(m->data[9 * page], 0);
    CHECK_EQ(m->lost, 1);
    CHECK_EQ(calls, 1);
    unguard(m);
    struct sigaction now = current();
    CHECK(by_address ? now.sa_sigaction == repair_by_address : now.sa_handler == repair);
    CHECK_EQ(now.sa_flags & SA_SIGINFO, by_address ? SA_SIGINFO : 0);
    CHECK(sigismember(&now.sa_mask, SIGUSR1));
    CHECK_EQ(wrong, 0);
}

static void host_plain(void) { host_handler(false); }
static void host_by_address(void) { host_handler(true); }

static void host_once(void) { /* SA_RESETHAND: the first fault is its, the second ends the process */
    mapped_t *m = map_file();
    struct sigaction host = {.sa_handler = repair, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&host.sa_mask);
    sigaddset(&host.sa_mask, SIGUSR1);
    CHECK_EQ(sigaction(SIGBUS, &host, NULL), 0);
    repaired = map_file();
    CHECK(guard(m));
    cut(repaired, 3);
    CHECK_EQ(repaired->data[9 * page], 0);
    if (calls != 1 || wrong || check_failures) _exit(98);
    cut(repaired, 3);
    (void)repaired->data[9 * page];
}

/* A host whose own handler comes later and hands on to ours; then one that displaces it. */
static struct sigaction before_host;
static void pass_on(int number, siginfo_t *info, void *context) {
    calls++;
    before_host.sa_sigaction(number, info, context);
}

static void displaced(void) {
    mapped_t *m = map_file(), *other = map_file();
    struct sigaction host = {.sa_sigaction = pass_on, .sa_flags = SA_SIGINFO};
    sigemptyset(&host.sa_mask);
    CHECK(guard(m));
    CHECK_EQ(sigaction(SIGBUS, &host, &before_host), 0);
    CHECK(!guard(other));
    cut(m, 3);
    CHECK_EQ(m->data[9 * page], 0);
    CHECK(m->lost == 1 && calls == 1);
    unguard(m);
    CHECK(current().sa_sigaction == pass_on);
    CHECK_EQ(sigaction(SIGBUS, &before_host, NULL), 0); /* ours again, as it was */
    CHECK(guard(other));
    unguard(other);
    CHECK(current().sa_handler == SIG_DFL);
}

/* ---- Many ----------------------------------------------------------------------------------------------------------- */

#define THREADS 8
#define MOST 64

static mapped_t *many[MOST];
static _Atomic uint32_t start;

static void touch_all(void *seed) {
    while (!start) coli_os_relax();
    for (size_t i = 0; i < MOST; i++) {
        mapped_t *m = many[(i * 37 + (uintptr_t)seed) % MOST];
        CHECK_EQ(m->data[(4 + (i + (uintptr_t)seed) % 60) * page], 0);
        CHECK_EQ(m->lost, 1);
    }
}

static void change_others(void *unused) { /* the table changes while handlers read it */
    (void)unused;
    mapped_t *m = map_file();
    for (int i = 0; i < 3000; i++) {
        CHECK(guard(m));
        unguard(m);
    }
    unmap_file(m);
}

static void from_threads(void) {
    coli_os_thread_t threads[THREADS];
    for (int i = 0; i < MOST; i++) {
        many[i] = map_file();
        if (i > 0) CHECK(guard(many[i]));
    }
    mapped_t *last = many[0];
    many[0] = many[1]; /* one place in the table is left for change_others */
    for (int i = 1; i < MOST; i++) cut(many[i], 3);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(coli_os_thread_start(&threads[i], i ? touch_all : change_others, (void *)(i * 11)));
    start = 1;
    for (int i = 0; i < THREADS; i++) coli_os_thread_join(&threads[i]);
    mapped_t *one_more = map_file();
    CHECK(guard(last));
    CHECK(!guard(one_more)); /* the table is full */
    unguard(many[5]);
    CHECK(guard(one_more));
    unguard(one_more);
    for (int i = 1; i < MOST; i++) unguard(many[i]);
    CHECK(current().sa_handler != SIG_DFL);
    unguard(last);
    CHECK(current().sa_handler == SIG_DFL);
}

static void refuses(void) {
    mapped_t *m = map_file();
    _Atomic uint32_t other = 0;
    CHECK(!coli_os_guard(NULL, page, &m->lost));
    CHECK(!coli_os_guard((const void *)(m->data + 1), page, &m->lost));
    CHECK(!coli_os_guard((const void *)m->data, 0, &m->lost));
    CHECK(!coli_os_guard((const void *)m->data, UINT64_MAX, &m->lost));
    CHECK(guard(m));
    CHECK(!coli_os_guard((const void *)m->data, PAGES * page, &other));
    unguard(m);
    coli_os_unguard(NULL);
}

/* Verifying a model that a session had guarded: an error that names the file; closing it takes the guard away. */
static void of_a_model(void) {
    char path[] = "/tmp/colibri-guard-XXXXXX";
    make_spec_t spec = MAKE_SPEC_TINY;
    size_t size = 0;
    uint8_t *file = make_model_file(&spec, &size);
    close(mkstemp(path));
    CHECK(file && write_model_file(path, file, size));
    colibri_model_t *model = NULL;
    CHECK_EQ(colibri_model_open(path, &model), COLIBRI_OK);
    CHECK(coli_os_guard(model->map.data, model->map.size, &model->lost));
    CHECK_EQ(colibri_model_verify(model), COLIBRI_OK);
    CHECK_EQ(truncate(path, (off_t)(size / 2)), 0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(colibri_model_verify(model), COLIBRI_ERR_IO);
        CHECK(strncmp(colibri_last_error(), path, strlen(path)) == 0 && strstr(colibri_last_error(), "truncated"));
    }
    CHECK(current().sa_handler != SIG_DFL);
    colibri_model_close(model);
    CHECK(current().sa_handler == SIG_DFL);
    unlink(path);
    free(file);
}

int main(void) {
    struct rlimit no_core = {0, 0};
    page = (size_t)sysconf(_SC_PAGESIZE);
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGBUS, SIG_DFL); /* a sanitizer has its own */
    if (outcome(touch_unguarded) != -SIGBUS || outcome(probe) != 42) {
        fprintf(stderr, "skipped: here a lost page of a mapping does not raise SIGBUS as it should (an emulator?)\n");
        return check_report();
    }
    CHECK_EQ(outcome(touch_foreign), -SIGBUS);
    CHECK_EQ(outcome(touch_after_unguard), -SIGBUS);
    CHECK_EQ(outcome(touch_foreign_ignored), -SIGBUS);
    CHECK_EQ(outcome(sent_foreign), -SIGBUS);
    CHECK_EQ(outcome(sent_ignored), 0);
    CHECK_EQ(outcome(survive), 0);
    CHECK_EQ(outcome(host_plain), 0);
    CHECK_EQ(outcome(host_by_address), 0);
    CHECK_EQ(outcome(host_once), -SIGBUS);
    CHECK_EQ(outcome(displaced), 0);
    CHECK_EQ(outcome(from_threads), 0);
    CHECK_EQ(outcome(refuses), 0);
    CHECK_EQ(outcome(of_a_model), 0);
    return check_report();
}

#else
int main(void) {
    _Atomic uint32_t lost = 0;
    CHECK(!coli_os_guard(&lost, 4, &lost));
    coli_os_unguard(&lost);
    fprintf(stderr, "skipped: Windows has no SIGBUS, and does not shorten a mapped file\n");
    return check_report();
}
#endif
