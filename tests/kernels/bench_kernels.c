/* bench_kernels.c: a rough measure of the hot kernels on one thread, for developers: `zig cc` it with lib/kernels,
 * lib/base/math.c and lib/base/cpu.c, run with the name of an instruction set. Weights of 64 MiB, so that one token reads them
 * from memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/kernels.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* not wall time: other work on the machine does not count */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *aligned(size_t bytes) {
    uint8_t *p = malloc(bytes + 64);
    if (p == NULL) abort();
    p += (64 - (uintptr_t)p % 64) % 64;
    memset(p, 0x3c, bytes); /* about 0.01 as f32 and bf16, 1 as f16: nothing subnormal, which would be slow */
    return p;
}

static void bench_product(const coli_kernels_t *table, uint32_t type, uint32_t bits, uint32_t n_tokens, uint64_t bytes) {
    static const uint32_t piece[] = { 8192, 4096, 4096, 2048, COLIBRI_Q4_PIECE }; /* bytes of 16 rows x 128 k */
    static const char *const names[] = { "f32", "f16", "bf16", "q8", "q4" };
    uint32_t k = 2048;
    uint64_t block_bytes = k / 128 * piece[type];
    uint32_t blocks = (uint32_t)(bytes / block_bytes) / 8 * 8;
    bytes = blocks * block_bytes;
    coli_act_t x = { k,
                     bits,
                     aligned((size_t)n_tokens * k * 4),
                     aligned((size_t)n_tokens * k),
                     aligned((size_t)n_tokens * k),
                     aligned(n_tokens * 4),
                     aligned(n_tokens * 4),
                     aligned(n_tokens * 4) };
    coli_matmul_t m = { .w = aligned(bytes),
                        .w_scale = aligned(blocks * 64),
                        .block_bytes = block_bytes,
                        .n_blocks = 8,
                        .k = k,
                        .x = &x,
                        .n_tokens = n_tokens,
                        .y_stride = 128,
                        .y = aligned(n_tokens * 512),
                        .scratch = aligned(COLI_KERNEL_SCRATCH) };
    const uint8_t *first = m.w;
    double best = 1e9;
    for (int round = 0; round < 15; round++) { /* the minimum: other work on the machine only adds */
        double start = now();
        for (uint32_t b = 0; b + 8 <= blocks; b += 8) {
            m.w = first + b * block_bytes;
            table->matmul[type](&m);
        }
        double seconds = now() - start;
        if (seconds < best) best = seconds;
    }
    printf("%-5s %s x %2u token%s %2u bits: %7.2f GB/s of weights, %7.1f Gop/s\n", table->name, names[type], n_tokens,
           n_tokens > 1 ? "s" : " ", bits, (double)bytes / best * 1e-9,
           2.0 * 16 * 128 * (double)bytes / piece[type] * n_tokens / best * 1e-9);
}

int main(int argc, char **argv) {
    static const char *const names[] = { "auto", "ref", "avx2", "avx512" };
    colibri_isa_t isa = COLIBRI_ISA_AUTO;
    for (int i = 0; argc > 1 && i < 4; i++)
        if (!strcmp(argv[1], names[i])) isa = (colibri_isa_t)i;
    const coli_kernels_t *table = coli_kernels_select(isa);
    if (table == NULL) return printf("not on this machine\n"), 1;
    for (uint32_t type = 0; type < COLI_NUM_DTYPES; type++)
        for (uint32_t n_tokens = 1; n_tokens <= 64; n_tokens *= 4)
            bench_product(table, type, type >= COLIBRI_FILE_Q8 ? 8 : 0, n_tokens, n_tokens == 1 ? 64 << 20 : 4 << 20);
    for (uint32_t type = COLIBRI_FILE_Q8; type <= COLIBRI_FILE_Q4; type++) {
        bench_product(table, type, 16, 1, 64 << 20);
        bench_product(table, type, 16, 64, 4 << 20);
        bench_product(table, type, 8, 1, 1 << 20); /* from cache */
    }
    return 0;
}
