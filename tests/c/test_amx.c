/* test_amx.c: lib/kernels/amx.c on any x86-64, with its tile registers in software (tests/kernels/tile_machine.h): the
 * reference's bits for every shape, nothing touched outside, the tiles given back. It is compiled twice: here for the baseline
 * machine, its one named AVX-512 instruction emulated too, and in tests/kernels/amx_avx512.c with the real one. The real tiles
 * are compared by test_kernels where there are some. */
#include "../kernels/compare.h"

#include "base/cpu.h"
#include "base/os.h"
#include "kernels/tables.h"

#if defined(__x86_64__)

#  include "../kernels/tile_machine.h"

#  if defined(__linux__)
#    include <errno.h>
#    include <linux/filter.h>
#    include <linux/seccomp.h>
#    include <stddef.h>
#    include <sys/prctl.h>
#    include <sys/syscall.h>
#    include <sys/wait.h>
#  endif

/* Byte i: byte index[i] % 128 of a, then b. */
static inline __attribute__((always_inline)) __m512i emulated_permute(__m512i a, __m512i index, __m512i b) {
    uint8_t table[128], at[64];
    __m512i result;
    memcpy(table, &a, 64);
    memcpy(table + 64, &b, 64);
    memcpy(at, &index, 64);
    for (int i = 0; i < 64; i++) at[i] = table[at[i] % 128];
    memcpy(&result, at, 64);
    return result;
}

#  define _mm512_permutex2var_epi8(a, index, b) emulated_permute(a, index, b)
#  define coli_amx_matmul_q8 emulated_q8
#  define coli_amx_matmul_q4 emulated_q4
#  define coli_kernels_avx512_vbmi coli_kernels_ref /* for few tokens */
void emulated_q8(const coli_matmul_t *m);
void emulated_q4(const coli_matmul_t *m);
#  include "kernels/amx.c"

void real_vectors_q8(const coli_matmul_t *m);
void real_vectors_q4(const coli_matmul_t *m);
int real_vectors_configured(void);

/* Products and tile loads are as many as the head of amx.c counts; k is 2048, there are 16 blocks. */
static void check_counts(uint32_t n_tokens, uint32_t bits, uint64_t products, uint64_t loads) {
    coli_act_t x;
    guarded_t parts[6], w = make_weights(COLIBRI_FILE_Q8, 2048, 16, PLAIN), scale = guarded_floats(256, PLAIN);
    guarded_t y = guarded_new((size_t)n_tokens * 256 * 4), scratch = guarded_new(COLI_KERNEL_SCRATCH);
    uint32_t rows[128];
    make_activations(&x, parts, 2048, bits, PLAIN);
    for (uint32_t i = 0; i < 128; i++) rows[i] = i % NUM_ROWS;
    coli_matmul_t m = { .w = w.data,
                        .w_scale = floats(&scale),
                        .block_bytes = 32768,
                        .n_blocks = 16,
                        .k = 2048,
                        .x = &x,
                        .rows = rows,
                        .n_tokens = n_tokens,
                        .y = floats(&y),
                        .y_stride = 256,
                        .scratch = scratch.data };
    tile_machine.products = tile_machine.loads = tile_machine.configurations = tile_machine.releases = 0;
    emulated_q8(&m);
    CHECK_EQ(tile_machine.products, products);
    CHECK_EQ(tile_machine.loads, loads);
    CHECK_EQ(tile_machine.releases, products != 0);
    CHECK_EQ(tile_machine.configurations, (n_tokens * bits / 8 + 63) / 64 * (products != 0));
    CHECK_EQ(tile_machine.configured, 0);
    guarded_t *all[] = { &w, &scale, &y, &scratch };
    for (int i = 0; i < 6; i++) guarded_free(&parts[i]);
    for (int i = 0; i < 4; i++) guarded_free(all[i]);
}

/* A system that refuses AMX is as good as a processor without it. */
static void test_refusal(void) {
#  if defined(__linux__)
    struct sock_filter rules[] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                                   BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 1),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
    struct sock_fprog program = { sizeof rules / sizeof *rules, rules };
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(0);
        errno = 0;
        bool none = !coli_os_allow_amx() && errno == 0 && !coli_cpu_allow_amx() && !coli_kernels_select(COLIBRI_ISA_AMX);
        _exit(!(none && coli_kernels_select(COLIBRI_ISA_AUTO)->isa != COLIBRI_ISA_AMX));
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
#  endif
}

int main(void) {
    test_refusal(); /* first: a process asks once */
    CHECK_EQ(coli_kernels_select(COLIBRI_ISA_AMX) != NULL, coli_cpu_allow_amx());
    coli_kernels_t amx = *coli_kernels_ref();
    amx.name = "amx, emulated";
    amx.matmul[COLIBRI_FILE_Q8] = emulated_q8;
    amx.matmul[COLIBRI_FILE_Q4] = emulated_q4;
    compare_many_tokens(coli_kernels_ref(), &amx);
    CHECK_EQ(tile_machine.configured, 0);
    check_counts(7, 8, 0, 0);
    check_counts(8, 8, 8 * 32 * 4, 8 * 32 * 4); /* 8 pairs, 32 steps, 4 products and loads; sums stay in their tiles */
    check_counts(64, 8, 8 * 32 * 8, 8 * 32 * 8 + 8 * 3 * 8); /* two strips; sums come back for three of the four panels */
    check_counts(32, 16, 8 * 32 * 8, 8 * 32 * 8 + 8 * 3 * 8);
    check_counts(128, 8, 2 * 8 * 32 * 8, 2 * (8 * 32 * 8 + 8 * 3 * 8));
    if (coli_cpu_features() & COLI_CPU_AVX512_VBMI) {
        amx.name = "amx, emulated tiles";
        amx.matmul[COLIBRI_FILE_Q8] = real_vectors_q8;
        amx.matmul[COLIBRI_FILE_Q4] = real_vectors_q4;
        compare_many_tokens(coli_kernels_ref(), &amx);
        CHECK_EQ(real_vectors_configured(), 0);
    }
    return check_report();
}

#else

int main(void) { /* nothing to emulate for this processor; the comparison still runs */
    compare_matmul(coli_kernels_ref(), coli_kernels_ref(), COLIBRI_FILE_Q8, 8, 128, 1, 9, PLAIN);
    return check_report();
}

#endif
