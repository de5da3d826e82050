/* test_avx2.c: both tables of lib/kernels/avx2.c on any x86-64 with AVX2, whatever select.c would choose there: the one
 * instruction of AVX-VNNI that the file names is emulated below. Every entry must give the reference's bits. */
#include "../kernels/compare.h"
#include "kernels/tables.h"

#if defined(__x86_64__)

#  include <immintrin.h>

#  include "base/cpu.h"
#  pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)

/* Lane i: acc[i] + the sum of four products of unsigned bytes of a with signed bytes of b, modulo 2^32. */
static inline __attribute__((always_inline)) __m256i emulated_dpbusd(__m256i acc, __m256i a, __m256i b) {
    __m256i low = _mm256_set1_epi16(255), ones = _mm256_set1_epi16(1), sum = _mm256_setzero_si256();
    __m256i even = _mm256_mullo_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    sum = _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
    return _mm256_add_epi32(acc, sum);
}

#  undef _mm256_dpbusd_avx_epi32
#  define _mm256_dpbusd_avx_epi32(acc, a, b) emulated_dpbusd(acc, a, b)
#  define TARGET_AVX_VNNI
#  define coli_avx2_matmul_q8 emulated_avx2_matmul_q8
#  define coli_avx2_matmul_q4 emulated_avx2_matmul_q4
#  define coli_avx2_attention_q8 emulated_avx2_attention_q8
#  define coli_kernels_avx2 emulated_avx2 /* the library has the real ones */
#  define coli_kernels_avx2_vnni emulated_avx2_vnni
#  include "kernels/avx2.c"
#  pragma clang attribute pop
#  undef coli_kernels_avx2

int main(void) {
    const coli_kernels_t *ref = coli_kernels_ref();
    if (coli_cpu_features() & COLI_CPU_AVX2) {
        compare_products(ref, emulated_avx2_vnni());
        compare_tables(ref, coli_kernels_avx2());
    } else {
        compare_tables(ref, ref); /* nothing that could run here; the comparison still does */
    }
    return check_report();
}

#else

int main(void) {
    compare_tables(coli_kernels_ref(), coli_kernels_ref());
    return check_report();
}

#endif
