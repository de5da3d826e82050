/* test_avx512.c: lib/kernels/avx512.c, both of its tables, on any x86-64. Vectors are split by the compiler, and the two
 * AVX-512 instructions that the file names are emulated: by SIMDe with -DCOLI_SIMDE, else by the definitions below. Every entry
 * must give the reference's bits. A test of our code: where there is AVX-512, test_kernels runs the real thing. */
#include "../kernels/compare.h"
#include "kernels/tables.h"

#if defined(__x86_64__)

#  include <immintrin.h>

#  ifdef COLI_SIMDE
#    include <simde/x86/avx512.h>
#    define emulated_madd(a, b) simde_mm512_madd_epi16((simde__m512i)(a), (simde__m512i)(b))
#    define emulated_dpbusd(acc, a, b) simde_mm512_dpbusd_epi32((simde__m512i)(acc), (simde__m512i)(a), (simde__m512i)(b))
#  else

typedef int32_t emulated_t __attribute__((vector_size(64)));

/* Lane i: a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] of signed 16-bit numbers. */
static inline __attribute__((always_inline)) emulated_t emulated_madd(__m512i a, __m512i b) {
    typedef int16_t v32s __attribute__((vector_size(64)));
    emulated_t sum;
    for (int i = 0; i < 16; i++) sum[i] = ((v32s)a)[2 * i] * ((v32s)b)[2 * i] + ((v32s)a)[2 * i + 1] * ((v32s)b)[2 * i + 1];
    return sum;
}

/* Lane i: acc[i] + the sum of four products of unsigned bytes of a with signed bytes of b, modulo 2^32. */
static inline __attribute__((always_inline)) emulated_t emulated_dpbusd(__m512i acc, __m512i a, __m512i b) {
    uint8_t u[64];
    int8_t s[64];
    uint32_t sum[16];
    emulated_t result;
    memcpy(u, &a, 64);
    memcpy(s, &b, 64);
    memcpy(sum, &acc, 64);
    for (int i = 0; i < 64; i++) sum[i / 4] += (uint32_t)(u[i] * s[i]);
    memcpy(&result, sum, 64);
    return result;
}

#  endif

#  undef _mm512_madd_epi16
#  undef _mm512_dpbusd_epi32
#  define _mm512_madd_epi16(a, b) ((__m512i)emulated_madd(a, b))
#  define _mm512_dpbusd_epi32(acc, a, b) ((__m512i)emulated_dpbusd(acc, a, b))
#  define TARGET_VNNI
#  define coli_kernels_avx512 emulated_avx512 /* the library has the real ones */
#  define coli_kernels_avx512_vnni emulated_avx512_vnni
#  define coli_kernels_amx emulated_amx /* not used: test_amx.c has the products of that table */
#  define coli_amx_matmul_q8 NULL
#  define coli_amx_matmul_q4 NULL
#  include "kernels/avx512.c"

int main(void) {
    const coli_kernels_t *ref = coli_kernels_ref();
    compare_tables(ref, emulated_avx512());
    compare_tables(ref, emulated_avx512_vnni());
    return check_report();
}

#else

int main(void) { /* nothing to emulate for this processor; the comparison still runs */
    compare_tables(coli_kernels_ref(), coli_kernels_ref());
    return check_report();
}

#endif
