/* amx_avx512.c: lib/kernels/amx.c with its tiles in software and its AVX-512 instructions real, for tests/c/test_amx.c on
 * processors that have those. Compiled with AVX-512 VBMI. */
#include "tile_machine.h"

#define coli_amx_matmul_q8 real_vectors_q8
#define coli_amx_matmul_q4 real_vectors_q4
#define coli_kernels_avx512_vbmi coli_kernels_ref /* for few tokens */
#include "kernels/amx.c"

int real_vectors_configured(void); /* 1: a product has left its tiles configured */
int real_vectors_configured(void) { return tile_machine.configured; }
