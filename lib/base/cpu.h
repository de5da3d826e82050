/* cpu.h: what this processor and operating system offer (cpuid and XCR0 on x86-64; the system's word on ARM). Detected once. */
#ifndef COLI_CPU_H
#define COLI_CPU_H

#include "base/base.h"

enum {
    COLI_CPU_AVX2 = 1 << 0,       /* AVX2, FMA, F16C, BMI and OS-saved ymm */
    COLI_CPU_AVX512 = 1 << 1,     /* F, BW, VL, DQ and OS-saved zmm */
    COLI_CPU_AVX512_VNNI = 1 << 2,
    COLI_CPU_AVX512_VBMI = 1 << 3,
    COLI_CPU_AMX_INT8 = 1 << 4,   /* the silicon has it; permission not asked: coli_cpu_allow_amx */
    COLI_CPU_AVX_VNNI = 1 << 5,   /* with 256-bit vectors, of processors that may have no AVX-512 */
    COLI_CPU_NEON_DOTPROD = 1 << 8, /* NEON itself every 64-bit ARM has */
    COLI_CPU_NEON_I8MM = 1 << 9
};
uint32_t coli_cpu_features(void);
/* Asks the system, once, to let this process use AMX tiles, in threads that exist and in those to come. False if the processor
 * has none or the system refuses. */
bool coli_cpu_allow_amx(void);
const char *coli_cpu_text(void); /* "avx2 fma f16c avx512 ..." for colibri_cpu_info */

#endif
