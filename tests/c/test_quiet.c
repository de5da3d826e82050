/* test_quiet.c: after colibri_init, set_input, infer, get_output, sample, route_tokens and moe_forward allocate nothing and
 * make no system call but futex, in any residency but STREAM; in LOCK and HUGE nor do pages fault. The heap is our own and
 * counts; the kernel is told (seccomp) to kill the process at any other call, in every thread. Linux only. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__linux__) || !(defined(__x86_64__) || defined(__aarch64__))
#include <stdio.h>
int main(void) { fprintf(stderr, "skipped: needs Linux on x86-64 or ARM64\n"); return 0; }
#else

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- a heap that counts: takes the place of the C library's ---- */

static _Alignas(64) unsigned char heap[96 << 20];
static _Atomic size_t heap_used;
static _Atomic uint32_t heap_calls;

void *aligned_alloc(size_t alignment, size_t size) {
    size_t a = alignment < 64 ? 64 : alignment;
    size_t at = (atomic_fetch_add(&heap_used, (size + 2 * a + 63) & ~(size_t)63) + 64 + a - 1) & ~(a - 1);
    atomic_fetch_add(&heap_calls, 1);
    if (at + size > sizeof heap) return NULL;
    memcpy(heap + at - sizeof(size_t), &size, sizeof(size_t));
    return heap + at;
}
void *malloc(size_t size) { return aligned_alloc(64, size); }
void *calloc(size_t n, size_t size) { return aligned_alloc(64, n * size); } /* never reused, so zero already */
void free(void *p) { (void)p; atomic_fetch_add(&heap_calls, 1); }
void *realloc(void *p, size_t size) {
    void *q = malloc(size);
    size_t old = 0;
    if (p) memcpy(&old, (unsigned char *)p - sizeof(size_t), sizeof(size_t));
    if (p && q) memcpy(q, p, old < size ? old : size);
    return q;
}

#include "check.h"
#include "make_file.h"

/* ---- a kernel that forbids ---- */

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#else
#define ARCH AUDIT_ARCH_AARCH64
#endif
#define ALLOW(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static int forbid_system_calls(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_futex), ALLOW(SYS_exit_group), ALLOW(SYS_write),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)};
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) ? errno : 0;
}

#define TOKENS 24
static char path[64]; /* of this process: several may run in one folder */

/* Prompt, then decoding, in all of its calls. */
static void work(colibri_t *s, float *output, size_t bytes, const float *hidden) {
    int32_t tokens[2 * TOKENS], lengths[2] = {TOKENS, TOKENS - 3}, ids[4];
    float weights[4];
    colibri_sampling_t sampling = COLIBRI_SAMPLING_INIT;
    sampling.temperature = 1;
    sampling.top_p = 0.9f;
    sampling.repetition_penalty = 1.1f;
    for (int i = 0; i < 2 * TOKENS; i++) tokens[i] = i * 7 % 97;
    for (int step = 0; step < 30; step++) {
        CHECK_EQ(colibri_set_input(s, tokens, lengths, 2), COLIBRI_OK);
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
        CHECK_EQ(colibri_get_output(s, output, bytes), COLIBRI_OK);
        for (int slot = 0; slot < 2; slot++) CHECK_EQ(colibri_sample(s, slot, &sampling, &tokens[slot]), COLIBRI_OK);
        CHECK_EQ(colibri_route_tokens(s, 0, hidden, 2, ids, weights), COLIBRI_OK);
        lengths[0] = lengths[1] = 1;
    }
    CHECK_EQ(colibri_moe_forward(s, 1, hidden, 2, output), COLIBRI_OK);
    CHECK_EQ(colibri_truncate(s, 1, 5), COLIBRI_OK);
    CHECK_EQ(colibri_reset(s), COLIBRI_OK);
}

static long faults(void) {
    struct rusage usage;
    CHECK_EQ(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_minflt + usage.ru_majflt;
}

/* 20 times 30 tokens of two slots without a fault. What is not the library's, code and the caller's stack, may get its pages
 * in the first of them. */
static void check_faults(colibri_t *s, float *output, size_t bytes, const float *hidden, int32_t residency) {
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    CHECK_EQ(colibri_stats(s, &stats), COLIBRI_OK);
    if (stats.residency != residency || residency == COLIBRI_RESIDENCY_MAP) return; /* LOCK may have been refused */
    long fresh = 1;
    for (int attempt = 0; attempt < 6 && fresh > 0; attempt++) {
        long before = faults();
        for (int i = 0; i < 20; i++) work(s, output, bytes, hidden);
        fresh = faults() - before;
    }
    CHECK_EQ(fresh, 0);
}

static void quiet_child(uint32_t dtype, int32_t outputs, int32_t residency) {
    make_spec_t spec = MAKE_SPEC_TINY;
    size_t size;
    spec.dtype = dtype;
    uint8_t *file = make_model_file(&spec, &size);
    CHECK(file && write_model_file(path, file, size));
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model_path = path;
    c.max_batch_size = 2;
    c.max_seq_len = 64;
    c.num_threads = 2;
    c.outputs = outputs;
    c.residency = residency;
    colibri_t *s = colibri_init(&c);
    CHECK(s != NULL);
    size_t bytes = (size_t)2 * TOKENS * spec.vocab * sizeof(float);
    float *output = aligned_alloc(64, bytes), *hidden = aligned_alloc(64, 2 * spec.hidden * sizeof(float));
    memset(hidden, 0, 2 * spec.hidden * sizeof(float));
    check_faults(s, output, bytes, hidden, residency);
    int error = forbid_system_calls();
    if (error) {
        fprintf(stderr, "skipped: seccomp is not available here (errno %d)\n", error);
        _exit(check_failures != 0);
    }
    uint32_t calls = atomic_load(&heap_calls);
    work(s, output, bytes, hidden);
    CHECK_EQ(atomic_load(&heap_calls), calls);
    _exit(check_failures != 0);
}

static int child_status(void (*child)(uint32_t, int32_t, int32_t), uint32_t dtype, int32_t outputs, int32_t residency) {
    int status = -1;
    pid_t pid = fork();
    if (pid == 0) {
        check_failures = 0;
        child(dtype, outputs, residency);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return status;
}

/* The guard itself must bite, else the test proves nothing. */
static void noisy_child(uint32_t dtype, int32_t outputs, int32_t residency) {
    (void)dtype, (void)outputs, (void)residency;
    if (forbid_system_calls()) _exit(0);
    syscall(SYS_getpid);
    _exit(77);
}

int main(void) {
    snprintf(path, sizeof path, "test_quiet_%d.colibri", (int)getpid());
    int noisy = child_status(noisy_child, 0, 0, 0);
    CHECK(WIFSIGNALED(noisy) || noisy == 0);
    for (int32_t residency = COLIBRI_RESIDENCY_MAP; residency <= COLIBRI_RESIDENCY_HUGE; residency++) {
        CHECK_EQ(child_status(quiet_child, COLIBRI_FILE_F32, COLIBRI_OUTPUT_LAST, residency), 0);
        CHECK_EQ(child_status(quiet_child, COLIBRI_FILE_Q8, COLIBRI_OUTPUT_LAST, residency), 0);
        CHECK_EQ(child_status(quiet_child, COLIBRI_FILE_Q4, COLIBRI_OUTPUT_LAST, residency), 0);
        CHECK_EQ(child_status(quiet_child, COLIBRI_FILE_Q8, COLIBRI_OUTPUT_ALL, residency), 0);
    }
    remove(path);
    return check_report();
}
#endif
