/* neon_dotprod.c: the kernels for ARM with the dot product instructions of ARMv8.2 (Cortex-A55, A76, Neoverse N1). Compiled
 * with that feature and called only where the CPU has it (select.c); nothing but the getter leaves this file. */
#include "kernels/neon_dot.h"

static void unpack(const uint8_t *w, uint32_t k, int8_t *panel) { unpack_q4(w, k, panel, emit_steps); }

static const method_t by_unpacking = { unpack, q8_dots, 5, 1, COLIBRI_Q4_PIECE };

static void matmul_q8(const coli_matmul_t *m) { integer_product(m, &by_q8); }
static void matmul_q4(const coli_matmul_t *m) { integer_product(m, vectors_of(m) <= 3 ? &by_q4 : &by_unpacking); }

const coli_kernels_t *coli_kernels_neon_dotprod(void) {
    static const coli_kernels_t table = NEON_TABLE("neon dotprod", 10);
    return &table;
}
