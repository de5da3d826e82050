/* cpu.c: which instruction sets this processor has and its operating system saves; see cpu.h. Runs once, then a load. */
#include "base/cpu.h"

#include <stdatomic.h>

#include "base/os.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* XCR0: the register states the operating system saves. Only valid where cpuid says OSXSAVE. */
static uint64_t saved_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

#define BIT(word, n) ((word) >> (n) & 1u)
#define STATE_YMM 0x6u      /* xmm, ymm */
#define STATE_ZMM 0xE6u     /* and opmask, both zmm halves */
#define STATE_TILES 0x60000u /* tile configuration and data */

static uint32_t detect(void) {
    uint32_t a, b, c, d, b7, c7, d7, leaves, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !BIT(c, 27)) return 0; /* OSXSAVE */
    uint32_t c1 = c;
    uint64_t states = saved_states();
    if (!__get_cpuid_count(7, 0, &leaves, &b7, &c7, &d7)) return 0;
    bool fma = BIT(c1, 12), f16c = BIT(c1, 29), bmi = BIT(b7, 3) && BIT(b7, 8);
    if ((states & STATE_YMM) == STATE_YMM && BIT(c1, 28) && fma && f16c && bmi && BIT(b7, 5)) found |= COLI_CPU_AVX2;
    bool vnni = leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && BIT(a, 4);
    if ((found & COLI_CPU_AVX2) && vnni) found |= COLI_CPU_AVX_VNNI;
    bool avx512 = BIT(b7, 16) && BIT(b7, 17) && BIT(b7, 30) && BIT(b7, 31); /* F, DQ, BW, VL */
    if ((found & COLI_CPU_AVX2) && (states & STATE_ZMM) == STATE_ZMM && avx512) {
        found |= COLI_CPU_AVX512;
        if (BIT(c7, 11)) found |= COLI_CPU_AVX512_VNNI;
        if (BIT(c7, 1)) found |= COLI_CPU_AVX512_VBMI;
        if ((states & STATE_TILES) == STATE_TILES && BIT(d7, 24) && BIT(d7, 25)) found |= COLI_CPU_AMX_INT8;
    }
    return found;
}

static const char *text_of(uint32_t found) {
    static const char *const with_avx512[8] = {
        "avx2 fma f16c avx512",
        "avx2 fma f16c avx512 avx512_vnni",
        "avx2 fma f16c avx512 avx512_vbmi",
        "avx2 fma f16c avx512 avx512_vnni avx512_vbmi",
        "avx2 fma f16c avx512 amx_int8",
        "avx2 fma f16c avx512 avx512_vnni amx_int8",
        "avx2 fma f16c avx512 avx512_vbmi amx_int8",
        "avx2 fma f16c avx512 avx512_vnni avx512_vbmi amx_int8",
    };
    unsigned index = (found & COLI_CPU_AVX512_VNNI ? 1u : 0) | (found & COLI_CPU_AVX512_VBMI ? 2u : 0) |
                     (found & COLI_CPU_AMX_INT8 ? 4u : 0);
    if (found & COLI_CPU_AVX512) return with_avx512[index];
    if (found & COLI_CPU_AVX_VNNI) return "avx2 fma f16c avx_vnni";
    return found & COLI_CPU_AVX2 ? "avx2 fma f16c" : "baseline x86-64";
}

#elif defined(__aarch64__)

/* Dot products came with ARMv8.2 and int8 matrix products with ARMv8.6; user programs cannot read the registers that say so. */
#if defined(__linux__)
#include <sys/auxv.h>

static uint32_t detect(void) {
    uint32_t found = 0;
    if (getauxval(AT_HWCAP) >> 20 & 1) found |= COLI_CPU_NEON_DOTPROD; /* HWCAP_ASIMDDP */
    if (getauxval(AT_HWCAP2) >> 13 & 1) found |= COLI_CPU_NEON_I8MM;   /* HWCAP2_I8MM */
    return found;
}

#elif defined(__APPLE__)
#include <sys/sysctl.h>

static bool system_has(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}

static uint32_t detect(void) {
    uint32_t found = 0;
    if (system_has("hw.optional.arm.FEAT_DotProd")) found |= COLI_CPU_NEON_DOTPROD;
    if (system_has("hw.optional.arm.FEAT_I8MM")) found |= COLI_CPU_NEON_I8MM;
    return found;
}

#elif defined(_WIN32)
#include <windows.h>

static uint32_t detect(void) { /* Windows does not tell of I8MM under a number that all its headers know */
    return IsProcessorFeaturePresent(43) ? COLI_CPU_NEON_DOTPROD : 0; /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */
}

#else
static uint32_t detect(void) { return 0; }
#endif

static const char *text_of(uint32_t found) {
    if (!(found & COLI_CPU_NEON_DOTPROD)) return "neon";
    return found & COLI_CPU_NEON_I8MM ? "neon dotprod i8mm" : "neon dotprod";
}

#else
static uint32_t detect(void) { return 0; }

static const char *text_of(uint32_t found) {
    (void)found;
    return "baseline";
}
#endif

/* Detection gives the same answer in every thread, so whoever comes first may write it. */
uint32_t coli_cpu_features(void) {
    static _Atomic uint32_t cached; /* with the top bit set once known */
    uint32_t found = atomic_load_explicit(&cached, memory_order_relaxed);
    if (found == 0) {
        found = detect() | 1u << 31;
        atomic_store_explicit(&cached, found, memory_order_relaxed);
    }
    return found & ~(1u << 31);
}

bool coli_cpu_allow_amx(void) {
    static _Atomic uint32_t cached; /* 0: not asked yet, 1: granted, 2: not */
    uint32_t answer = atomic_load_explicit(&cached, memory_order_relaxed);
    if (answer == 0) {
        answer = coli_cpu_features() & COLI_CPU_AMX_INT8 && coli_os_allow_amx() ? 1 : 2;
        atomic_store_explicit(&cached, answer, memory_order_relaxed);
    }
    return answer == 1;
}

const char *coli_cpu_text(void) { return text_of(coli_cpu_features()); }
