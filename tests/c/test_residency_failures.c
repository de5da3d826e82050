/* test_residency_failures.c: files that are cut, replaced or cannot be read while sessions run on them; memory that may not be
 * locked; descriptors and threads that are refused; forks; starts that fail half-way: always a status, never a wrong bit, never
 * something left behind. Linux. The good days: test_residency.c. */
#define _GNU_SOURCE
#include <stdio.h>

#if !defined(__linux__)
int main(void) { fprintf(stderr, "skipped: needs Linux\n0 checks, 0 failed\n"); return 0; }
#else

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "run_model.h"

/* 14: with look-ahead. */
static const way_t map = {"map", MAP, 0}, lock = {"lock", LOCK, 0}, huge = {"huge", HUGE, 0},
                   stream_few = {"stream 2", STREAM, 2}, stream_some = {"stream 14", STREAM, 14},
                   stream_all = {"stream all", STREAM, 100};

static uint8_t *whole; /* [size] the file, as it should be */
static size_t size;
static float *right;

static void restore_file(void) { /* the same file: sessions have it open */
    int file = open(path, O_WRONLY);
    CHECK(file >= 0 && pwrite(file, whole, size, 0) == (ssize_t)size);
    close(file);
}
static void cut_file(size_t at) { CHECK_EQ(truncate(path, (off_t)at), 0); }

/* ---- what a process holds ---- */

static int entries(const char *folder) {
    DIR *d = opendir(folder);
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* The number behind a name in /proc/self/status, in KiB where it is memory. */
static long status_number(const char *name) {
    char line[256];
    long value = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, name, strlen(name)) == 0) value = atol(line + strlen(name) + 1);
    if (f) fclose(f);
    return value;
}

typedef struct held { int descriptors; long threads, kib; } held_t;
static held_t held(void) {
    for (int i = 0; i < 200 && status_number("Threads") > 1; i++) usleep(1000); /* a joined one may be on its way out */
    return (held_t){entries("/proc/self/fd"), status_number("Threads"), status_number("VmSize")};
}
/* Memory to a margin: what the C library keeps of its own. */
static void check_held(held_t before, long margin_kib) {
    held_t now = held();
    CHECK_EQ(now.descriptors, before.descriptors);
    CHECK_EQ(now.threads, before.threads);
    if (now.kib > before.kib + margin_kib) CHECK_EQ(now.kib, before.kib);
}

/* Run it in a process of its own, which may lose rights. */
static void in_child(void (*run)(void)) {
    int status = -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        alarm(60);
        run();
        _exit(check_failures ? 1 : 0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

/* Does mlock lock? Under the thread sanitizer it only says so. */
static bool locks(void) {
    static uint8_t byte;
    bool done = mlock(&byte, 1) == 0;
    bool counted = status_number("VmLck") > 0;
    munlock(&byte, 1);
    return !done || counted;
}

/* Somebody without rights whom limits concern. */
static bool become_nobody(int resource, rlim_t limit) {
    struct rlimit l = {limit, limit};
    bool done = setrlimit(resource, &l) == 0 && (geteuid() != 0 || setuid(65534) == 0);
    if (!done) SKIPPED("limits cannot be set here");
    return done;
}

/* ---- files ---- */

/* An infer that must fail, or, with everything it needs in memory, be right. */
static bool fails_or_is_right(colibri_t *s) {
    int32_t lengths[SLOTS], before = colibri_slot_length(s, 0);
    if (!hand_over(s, 1, 1, TOKENS, lengths)) return false;
    colibri_status_t status = colibri_infer(s);
    if (status == COLIBRI_OK) {
        CHECK(rows_are(s, COLIBRI_OUTPUT_ALL, 1, lengths, right, true));
        return false;
    }
    const char *sentence = colibri_last_error();
    unsigned expert, layer;
    const char *names = strstr(sentence, "expert ");
    CHECK_EQ(status, COLIBRI_ERR_IO);
    CHECK(strstr(sentence, path) && names && sscanf(names, "expert %u of layer %u", &expert, &layer) == 2);
    CHECK(names && expert < 12 && layer >= 1 && layer < 4);
    CHECK_EQ(colibri_slot_length(s, 0), before);
    return true;
}

static int check_cut(const way_t *way, size_t at) {
    static _Alignas(64) float hidden[2 * 72], output[2 * 72];
    colibri_config_t c = config_of(way);
    colibri_t *s = start(&c);
    CHECK(run_to(s, c.outputs, 1, 5, 5, right, true));
    cut_file(at);
    int failed = 0;
    while (!failed && colibri_slot_length(s, 0) < TOKENS - 4) failed += fails_or_is_right(s);
    if (failed) failed += fails_or_is_right(s);
    colibri_status_t host = colibri_moe_forward(s, 3, hidden, 2, output);
    CHECK(host == COLIBRI_OK || host == COLIBRI_ERR_IO);
    usleep(2000); /* reads that were begun for nobody end */
    restore_file();
    CHECK(run_to(s, c.outputs, 1, 1, TOKENS, right, true)); /* at once, and with nothing left of what was half read */
    CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
    colibri_free(s);
    return failed;
}

static void test_cut(void) {
    int failed = 0;
    for (size_t eighth = 1; eighth < 8; eighth++) {
        failed += check_cut(&stream_few, size / 8 * eighth);
        failed += check_cut(&stream_some, size / 8 * eighth + 77);
        if (eighth == 4) failed += check_cut(&stream_all, size / 2 & ~(size_t)4095);
    }
    CHECK(failed > 10);
}

/* HUGE needs the file no more; nor does STREAM, once everything is there. */
static void test_without_file(void) {
    const way_t *const free_of_it[] = {&huge, &stream_all};
    for (int i = 0; i < 2; i++) {
        colibri_config_t c = config_of(free_of_it[i]);
        colibri_t *s = start(&c);
        CHECK(runs_right(s, c.outputs, SLOTS, TOKENS, right));
        cut_file(0);
        CHECK(runs_right(s, c.outputs, SLOTS, 5, right));
        restore_file();
        colibri_free(s);
    }
}

/* A new file under the old name does not matter to those that have the old one. */
static void test_replaced(void) {
    const way_t *const all[] = {&map, &lock, &huge, &stream_few, &stream_some};
    char other[80];
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    size_t other_size;
    spec.seed = 99;
    uint8_t *bytes = make_model_file(&spec, &other_size);
    snprintf(other, sizeof other, "%s.other", path);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        colibri_config_t c = config_of(all[i]);
        colibri_t *s = start(&c);
        CHECK(run_to(s, c.outputs, SLOTS, 3, 9, right, true));
        CHECK(write_model_file(other, bytes, other_size / 2) && rename(other, path) == 0);
        CHECK(run_to(s, c.outputs, SLOTS, 1, TOKENS, right, true));
        colibri_free(s);
        CHECK(write_model_file(other, whole, size) && rename(other, path) == 0);
    }
    free(bytes);
}

#if defined(__x86_64__) || defined(__aarch64__)
/* From now on no thread of this process can read files at offsets. */
static bool break_reads(void) {
    struct sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pread64, 0, 1),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EIO),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

static void with_broken_disk(void) {
    colibri_config_t c = config_of(&stream_some);
    colibri_t *s = start(&c);
    CHECK(run_to(s, c.outputs, 1, 5, 5, right, true));
    held_t before = {entries("/proc/self/fd"), 0, 0};
    if (!break_reads()) {
        SKIPPED("seccomp is not available here");
        return;
    }
    int failed = 0;
    for (int i = 0; i < 10; i++) failed += fails_or_is_right(s) && strstr(colibri_last_error(), "(errno 5)");
    CHECK(failed > 0);
    for (int32_t mode = HUGE; mode <= STREAM; mode++) { /* nothing can begin */
        c = config_of(&(way_t){"", mode, 0});
        CHECK(colibri_init(&c) == NULL);
        CHECK_EQ(colibri_last_status(), COLIBRI_ERR_IO);
    }
    CHECK_EQ(entries("/proc/self/fd"), before.descriptors);
    colibri_free(s);
}
#else
static void with_broken_disk(void) { SKIPPED("no filter of system calls for this processor"); }
#endif

/* ---- a guarded mapping ---- */

static void on_bus(int signal_number) {
    (void)signal_number;
    _exit(0);
}

/* Does a lost page raise SIGBUS here at all? (Emulators.) */
static bool raises_sigbus(void) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        colibri_model_t *model;
        signal(SIGBUS, on_bus);
        if (colibri_model_open(path, &model)) _exit(1);
        cut_file(4096);
        _exit(colibri_model_verify(model) ? 2 : 3);
    }
    waitpid(child, &status, 0);
    restore_file();
    return status == 0;
}

static void check_dead(colibri_t *s) {
    static _Alignas(64) float hidden[72], output[72];
    int32_t lengths[SLOTS], ids[3], before = colibri_slot_length(s, 0);
    CHECK(hand_over(s, 1, 1, TOKENS, lengths));
    CHECK_EQ(colibri_infer(s), COLIBRI_ERR_IO);
    CHECK(strstr(colibri_last_error(), path) != NULL);
    CHECK_EQ(colibri_slot_length(s, 0), before);
    CHECK_EQ(colibri_moe_forward(s, 1, hidden, 1, output), COLIBRI_ERR_IO);
    float weights[3];
    CHECK_EQ(colibri_route_tokens(s, 1, hidden, 1, ids, weights), COLIBRI_ERR_IO);
}

static void with_guard(void) {
    static _Alignas(64) float out[5 * VOCAB];
    for (int i = 0; i < 6; i++) {
        colibri_config_t c = config_of(i % 2 ? &lock : &map);
        c.guard_mapping = 1;
        c.num_threads = i / 2 + 1;
        colibri_t *s = start(&c), *late;
        int32_t lengths[SLOTS];
        CHECK_EQ(stats_of(s).guarded, 1);
        CHECK(hand_over(s, 1, 5, TOKENS, lengths));
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
        CHECK(rows_are(s, c.outputs, 1, lengths, right, true));
        cut_file(4096);
        CHECK_EQ(colibri_get_output(s, out, sizeof out), COLIBRI_ERR_IO); /* the head of five tokens is computed there */
        check_dead(s);
        restore_file();
        check_dead(s); /* zeros lie where pages were lost: for good */
        colibri_config_t again = c;
        again.model_path = NULL;
        again.model = (colibri_model_t *)(uintptr_t)colibri_model(s);
        late = colibri_init(&again);
        if (late) check_dead(late);
        else CHECK_EQ(colibri_last_status(), COLIBRI_ERR_IO);
        colibri_free(late);
        colibri_free(s);
        s = start(&c); /* from the start it is fine */
        CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
        colibri_free(s);
    }
}

/* ---- limits ---- */

static char warning[512];
static void remember(int level, const char *message, void *user) {
    (void)user;
    if (level == COLIBRI_LOG_WARNING) snprintf(warning, sizeof warning, "%s", message);
}

static void with_lock_refused(void) {
    colibri_config_t c = config_of(&lock);
    colibri_model_t *model; /* before the folder can perhaps no longer be seen */
    CHECK_EQ(colibri_model_open(path, &model), COLIBRI_OK);
    c.model = model;
    c.model_path = NULL;
    c.log = remember;
    if (!become_nobody(RLIMIT_MEMLOCK, 0)) return;
    colibri_t *s = start(&c);
    CHECK_EQ(stats_of(s).residency, MAP);
    CHECK(strstr(warning, "LOCK") && strstr(warning, "RLIMIT_MEMLOCK"));
    CHECK_EQ(status_number("VmLck"), 0);
    CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
    colibri_free(s);
    colibri_model_close(model);
}

/* Enough for the session's own memory, not for the model's: then for neither. */
static void with_lock_half_refused(void) {
    colibri_config_t c = config_of(&lock);
    size_t bytes;
    CHECK_EQ(colibri_workspace_size(&c, &bytes), COLIBRI_OK);
    CHECK_EQ(colibri_model_open(path, &c.model), COLIBRI_OK);
    colibri_model_t *model = c.model;
    c.model_path = NULL;
    if (!become_nobody(RLIMIT_MEMLOCK, bytes + size / 2)) return;
    colibri_t *s = start(&c);
    CHECK_EQ(stats_of(s).residency, MAP);
    CHECK_EQ(status_number("VmLck"), 0);
    colibri_free(s);
    colibri_model_close(model);
}

static void with_lock(void) {
    colibri_config_t c = config_of(&lock);
    long before = status_number("VmLck");
    c.log = remember;
    colibri_t *s = start(&c);
    if (stats_of(s).residency == LOCK) {
        CHECK((size_t)(status_number("VmLck") - before) * 1024 >= size + stats_of(s).workspace_bytes);
        CHECK_EQ(warning[0], 0);
    } else SKIPPED("memory cannot be locked here");
    CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
    colibri_free(s);
    CHECK_EQ(status_number("VmLck"), before);
}

static void without_threads(void) {
    colibri_config_t c = config_of(&stream_some);
    CHECK_EQ(colibri_model_open(path, &c.model), COLIBRI_OK);
    c.model_path = NULL;
    held_t before = held();
    bool limited = become_nobody(RLIMIT_NPROC, 0);
    for (c.num_threads = 1; c.num_threads <= 2 && limited; c.num_threads++) {
        CHECK(colibri_init(&c) == NULL);
        CHECK_EQ(colibri_last_status(), COLIBRI_ERR_THREAD);
    }
    check_held(before, 1024);
    colibri_model_close(c.model);
}

/* The file cannot be opened again: reads go through the page cache. */
static void without_descriptors(void) {
    colibri_config_t c = config_of(&stream_some);
    CHECK_EQ(colibri_model_open(path, &c.model), COLIBRI_OK);
    c.model_path = NULL;
    int next = dup(0);
    struct rlimit limit = {(rlim_t)next, (rlim_t)next};
    close(next);
    if (setrlimit(RLIMIT_NOFILE, &limit) == 0) {
        colibri_t *s = start(&c);
        CHECK_EQ(stats_of(s).direct_io, 0);
        CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
        colibri_free(s);
    } else SKIPPED("this process may not limit its descriptors"); /* valgrind has some of its own */
    colibri_model_close(c.model);
}

/* ---- forks ---- */

static void test_fork(void) {
    const way_t *const all[] = {&stream_some, &stream_few, &map, &lock, &huge};
    static _Alignas(64) float hidden[72], output[72];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int32_t threads = 1 + (all[i]->residency != STREAM); threads <= 2; threads++) {
            colibri_config_t c = config_of(all[i]);
            c.num_threads = threads;
            colibri_t *s = start(&c);
            int32_t lengths[SLOTS], status = -1;
            CHECK(run_to(s, c.outputs, 1, 1, 5, right, true));
            CHECK(hand_over(s, 1, 1, TOKENS, lengths));
            pid_t child = fork(); /* maybe while look-ahead reads */
            if (child == 0) {
                alarm(30);
                bool ok = colibri_infer(s) == COLIBRI_ERR_THREAD && colibri_infer(s) == COLIBRI_ERR_THREAD;
                ok = ok && colibri_moe_forward(s, 1, hidden, 1, output) == COLIBRI_ERR_THREAD;
                colibri_free(s);
                _exit(ok ? 0 : 1);
            }
            CHECK_EQ(waitpid(child, &status, 0), child);
            CHECK_EQ(status, 0);
            CHECK(run_to(s, c.outputs, 1, 1, TOKENS, right, true));
            colibri_free(s);
        }
}

/* ---- nothing is left behind ---- */

static void test_descriptors(void) {
    const way_t *const all[] = {&map, &lock, &huge, &stream_some};
    held_t before = held();
    for (int i = 0; i < 4; i++) {
        colibri_config_t c = config_of(all[i]);
        colibri_t *s = start(&c);
        colibri_stats_t stats = stats_of(s);
        CHECK(runs_right(s, c.outputs, 1, 7, right));
        CHECK_EQ(entries("/proc/self/fd"), before.descriptors + 1 + stats.direct_io);
        CHECK(stats.direct_io == 0 || all[i]->residency == STREAM);
        colibri_free(s);
        check_held(before, 1 << 20);
    }
}

/* One start that fails, each time in another way. */
static void fail_to_start(int way, const char *profile) {
    static _Alignas(64) uint8_t page[64]; /* not touched */
    colibri_config_t c = config_of(way % 2 ? &stream_some : &huge);
    colibri_model_t *model = NULL;
    size_t bytes;
    colibri_status_t expected = COLIBRI_ERR_INVALID_ARGUMENT;
    if (way == 1) c.expert_profile = path; /* no profile at all */
    if (way == 1) expected = COLIBRI_ERR_FORMAT;
    if (way == 2 || way == 3) c.expert_profile = profile; /* another model's */
    if (way == 4 || way == 5) {
        CHECK_EQ(colibri_model_open(path, &model), COLIBRI_OK);
        c.model = model, c.model_path = NULL;
        cut_file(way == 4 ? size / 2 : 8192);
        expected = COLIBRI_ERR_IO;
    }
    if (way == 6) {
        CHECK_EQ(colibri_workspace_size(&c, &bytes), COLIBRI_OK);
        c.workspace = page;
        c.workspace_size = bytes - 64;
        expected = COLIBRI_ERR_WORKSPACE;
    }
    if (way == 7) c.cpu_affinity = "99999";
    if (way == 0) c.expert_profile = "no/such/profile", expected = COLIBRI_ERR_NOT_FOUND;
    CHECK(colibri_init(&c) == NULL);
    if (colibri_last_status() != expected) fprintf(stderr, "start %d: %s\n", way, colibri_last_error());
    CHECK_EQ(colibri_last_status(), expected);
    if (model) restore_file();
    colibri_model_close(model);
}

static void test_failed_starts(void) {
    char profile[80];
    colibri_config_t c = config_of(&map);
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    size_t other;
    snprintf(profile, sizeof profile, "%s.profile", path);
    spec.seed++;
    free(write_spec(&spec, &other));
    colibri_t *s = start(&c);
    CHECK_EQ(colibri_save_profile(s, profile), COLIBRI_OK);
    colibri_free(s);
    restore_file();
    held_t before = {0, 0, 0};
    for (int i = 0; i < 8 * 12; i++) {
        if (i == 16) before = held();
        fail_to_start(i % 8, profile);
    }
    check_held(before, 4096); /* 80 starts of 4 MB and more */
    remove(profile);
}

/* Freed while look-ahead reads: the reads end first, and everything is given back. */
static void test_free_while_reading(void) {
    held_t before = {0, 0, 0};
    for (int i = 0; i < 70; i++) {
        colibri_config_t c = config_of(i % 7 ? &stream_some : &stream_few);
        if (i == 10) before = held();
        colibri_t *s = start(&c);
        int32_t lengths[SLOTS];
        for (int token = 0; token <= i % 3; token++) {
            CHECK(hand_over(s, 1, 1, TOKENS, lengths));
            if (i % 5 == 4) colibri_cancel(s); /* before the first layer; its input is used up */
            CHECK_EQ(colibri_infer(s), i % 5 == 4 ? COLIBRI_ERR_CANCELLED : COLIBRI_OK);
        }
        colibri_free(s);
    }
    check_held(before, 4096);
}

int main(void) {
    snprintf(path, sizeof path, "test_residency_failures_%d.colibri", (int)getpid());
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    whole = write_spec(&spec, &size);
    right = right_logits();
    test_cut();
    test_without_file();
    test_replaced();
    in_child(with_broken_disk);
    if (raises_sigbus()) in_child(with_guard);
    else SKIPPED("here a lost page of a mapping does not raise SIGBUS");
    if (locks()) {
        in_child(with_lock);
        in_child(with_lock_refused);
        in_child(with_lock_half_refused);
    } else SKIPPED("mlock does nothing here");
    in_child(without_threads);
    in_child(without_descriptors);
    test_fork();
    test_descriptors();
    test_failed_starts();
    test_free_while_reading();
    free(right);
    free(whole);
    remove(path);
    return check_report();
}
#endif
