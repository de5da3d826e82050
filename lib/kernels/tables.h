/* tables.h: the getters of the kernel tables, for select.c and the files that define them. */
#ifndef COLI_TABLES_H
#define COLI_TABLES_H

#include "kernels/kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#  define COLI_HAVE_X86_KERNELS 1 /* avx2.c, avx512.c and amx.c are part of the library */
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#  define COLI_HAVE_NEON_KERNELS 1 /* neon.c, neon_dotprod.c and neon_i8mm.c are */
#endif

/* Rows whose largest |x| is below 2^-100 are quantised as zeros: 127 / max would come near overflow. */
#define COLI_QUANTIZE_FLOOR 0x1p-100f

const coli_kernels_t *coli_kernels_ref(void);
const coli_kernels_t *coli_kernels_avx2(void);
const coli_kernels_t *coli_kernels_avx2_vnni(void);
const coli_kernels_t *coli_kernels_avx512(void); /* without VNNI: integers are AVX2's */
const coli_kernels_t *coli_kernels_avx512_vnni(void);
const coli_kernels_t *coli_kernels_avx512_vbmi(void); /* VNNI and VBMI */
const coli_kernels_t *coli_kernels_amx(void); /* in avx512.c: its kernels, but the integer products of amx.c */
const coli_kernels_t *coli_kernels_neon(void); /* any 64-bit ARM */
const coli_kernels_t *coli_kernels_neon_dotprod(void);
const coli_kernels_t *coli_kernels_neon_i8mm(void); /* needs both features */

/* Parts of one table that another one takes. */
void coli_avx2_matmul_q8(const coli_matmul_t *m);
void coli_avx2_matmul_q4(const coli_matmul_t *m);
void coli_avx2_attention_q8(const coli_attention_t *a);
void coli_amx_matmul_q8(const coli_matmul_t *m);
void coli_amx_matmul_q4(const coli_matmul_t *m);

#endif
