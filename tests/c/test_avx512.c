/* test_avx512.c: lib/kernels/avx512.c, all of its tables, on any x86-64. Vectors are split by the compiler, and the few
 * AVX-512 instructions that the file names are emulated: by SIMDe with -DCOLI_SIMDE, else by the definitions below. Every
 * entry must give the reference's bits. A test of our code: where there is AVX-512, test_kernels runs the library's best table,
 * and the products of all of them run here as they are. */
#include "../kernels/compare.h"
#include "base/cpu.h"
#include "kernels/tables.h"

#if defined(__x86_64__)

#  include <immintrin.h>

#  ifndef COLI_SIMDE

static void compare_real_products(void) {
    uint32_t have = coli_cpu_features(), vnni = COLI_CPU_AVX512 | COLI_CPU_AVX512_VNNI, vbmi = vnni | COLI_CPU_AVX512_VBMI;
    const coli_kernels_t *ref = coli_kernels_ref();
    if (have & COLI_CPU_AVX512) compare_products(ref, coli_kernels_avx512());
    if ((have & vnni) == vnni) compare_products(ref, coli_kernels_avx512_vnni());
    if ((have & vbmi) == vbmi) compare_products(ref, coli_kernels_avx512_vbmi());
}

#  endif

#  ifdef COLI_SIMDE
#    include <simde/x86/avx512.h>
#    define emulated_dpbusd(acc, a, b) simde_mm512_dpbusd_epi32((simde__m512i)(acc), (simde__m512i)(a), (simde__m512i)(b))
#    define emulated_shuffle(a, b) simde_mm512_shuffle_epi8((simde__m512i)(a), (simde__m512i)(b))
#    define emulated_permute(a, i, b) simde_mm512_permutex2var_epi8((simde__m512i)(a), (simde__m512i)(i), (simde__m512i)(b))
#  else

typedef int32_t emulated_t __attribute__((vector_size(64)));

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

/* Byte i: byte c % 16 of a's quarter i / 16, c = control[i]; 0 if c's top bit is set. */
static inline __attribute__((always_inline)) emulated_t emulated_shuffle(__m512i a, __m512i control) {
    uint8_t from[64], c[64], to[64];
    emulated_t result;
    memcpy(from, &a, 64);
    memcpy(c, &control, 64);
    for (int i = 0; i < 64; i++) to[i] = c[i] & 128 ? 0 : from[i / 16 * 16 + c[i] % 16];
    memcpy(&result, to, 64);
    return result;
}

/* Byte i: byte index[i] % 128 of a and b, one after the other. */
static inline __attribute__((always_inline)) emulated_t emulated_permute(__m512i a, __m512i index, __m512i b) {
    uint8_t from[128], c[64], to[64];
    emulated_t result;
    memcpy(from, &a, 64);
    memcpy(from + 64, &b, 64);
    memcpy(c, &index, 64);
    for (int i = 0; i < 64; i++) to[i] = from[c[i] % 128];
    memcpy(&result, to, 64);
    return result;
}

#  endif

#  undef _mm512_dpbusd_epi32
#  undef _mm512_shuffle_epi8
#  undef _mm512_permutex2var_epi8
#  define _mm512_dpbusd_epi32(acc, a, b) ((__m512i)emulated_dpbusd(acc, a, b))
#  define _mm512_shuffle_epi8(a, control) ((__m512i)emulated_shuffle(a, control))
#  define _mm512_permutex2var_epi8(a, index, b) ((__m512i)emulated_permute(a, index, b))
#  define TARGET_VNNI
#  define TARGET_VBMI
#  define coli_kernels_avx512 emulated_avx512 /* the library has the real ones */
#  define coli_kernels_avx512_vnni emulated_avx512_vnni
#  define coli_kernels_avx512_vbmi emulated_avx512_vbmi
#  define coli_kernels_amx emulated_amx /* not used: test_amx.c has the products of that table */
#  define coli_amx_matmul_q8 NULL
#  define coli_amx_matmul_q4 NULL
#  include "kernels/avx512.c"

int main(void) {
    const coli_kernels_t *ref = coli_kernels_ref();
    if (coli_cpu_features() & COLI_CPU_AVX2) compare_tables(ref, emulated_avx512()); /* whose integers are real AVX2's */
    compare_tables(ref, emulated_avx512_vnni());
    compare_products(ref, emulated_avx512_vbmi());
#  ifndef COLI_SIMDE
    compare_real_products();
#  endif
    return check_report();
}

#else

int main(void) { /* nothing to emulate for this processor; the comparison still runs */
    compare_tables(coli_kernels_ref(), coli_kernels_ref());
    return check_report();
}

#endif
