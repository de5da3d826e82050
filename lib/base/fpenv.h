/* fpenv.h: the floating-point environment. Results must not depend on how a host has set rounding or the flushing of subnormals
 * (a program linked with -ffast-math sets it at start), so every computing entry of the library works in the default one and puts
 * the host's back. */
#ifndef COLI_FPENV_H
#define COLI_FPENV_H

#include "base/base.h"

#if defined(__x86_64__) || defined(__SSE__)
#include <xmmintrin.h>
#define COLI_FP_DEFAULT 0x1F80u /* MXCSR: nearest even, subnormals kept, exceptions masked */
COLI_INLINE uint64_t coli_fp_get(void) { return _mm_getcsr(); }
COLI_INLINE void coli_fp_set(uint64_t state) { _mm_setcsr((unsigned)state); }
#elif defined(__aarch64__)
#define COLI_FP_DEFAULT 0u /* FPCR */
COLI_INLINE uint64_t coli_fp_get(void) {
    uint64_t state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state));
    return state;
}
COLI_INLINE void coli_fp_set(uint64_t state) { __asm__ volatile("msr fpcr, %0" : : "r"(state) : "memory"); }
#else
#define COLI_FP_DEFAULT 0u
COLI_INLINE uint64_t coli_fp_get(void) { return 0; }
COLI_INLINE void coli_fp_set(uint64_t state) { (void)state; }
#endif

/* `uint64_t host = coli_fp_enter(); ... coli_fp_leave(host);` around calls of real functions, so that no arithmetic moves out. */
COLI_INLINE uint64_t coli_fp_enter(void) {
    uint64_t host = coli_fp_get();
    coli_fp_set(COLI_FP_DEFAULT);
    return host;
}
COLI_INLINE void coli_fp_leave(uint64_t host) { coli_fp_set(host); }

#endif
