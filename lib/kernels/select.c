/* select.c: from an instruction set to its kernel table, by what the library was built with and the machine offers. */
#include "base/cpu.h"
#include "kernels/tables.h"

#ifdef COLI_HAVE_X86_KERNELS

static const coli_kernels_t *select_avx2(void) {
    uint32_t have = coli_cpu_features();
    if (!(have & COLI_CPU_AVX2)) return NULL;
    return have & COLI_CPU_AVX_VNNI ? coli_kernels_avx2_vnni() : coli_kernels_avx2();
}

static const coli_kernels_t *select_avx512(void) {
    uint32_t need = COLI_CPU_AVX2 | COLI_CPU_AVX512, have = coli_cpu_features();
    if ((have & need) != need) return NULL;
    if (!(have & COLI_CPU_AVX512_VNNI)) return coli_kernels_avx512();
    return have & COLI_CPU_AVX512_VBMI ? coli_kernels_avx512_vbmi() : coli_kernels_avx512_vnni();
}

static const coli_kernels_t *select_amx(void) {
    uint32_t need = COLI_CPU_AVX2 | COLI_CPU_AVX512 | COLI_CPU_AVX512_VNNI | COLI_CPU_AVX512_VBMI | COLI_CPU_AMX_INT8;
    if ((coli_cpu_features() & need) != need) return NULL;
    return coli_cpu_allow_amx() ? coli_kernels_amx() : NULL; /* the system is asked only where AMX would be used */
}

#else

static const coli_kernels_t *select_avx2(void) { return NULL; }
static const coli_kernels_t *select_avx512(void) { return NULL; }
static const coli_kernels_t *select_amx(void) { return NULL; }

#endif

#ifdef COLI_HAVE_NEON_KERNELS

static const coli_kernels_t *select_neon(void) {
    uint32_t have = coli_cpu_features();
    if (!(have & COLI_CPU_NEON_DOTPROD)) return coli_kernels_neon();
    return have & COLI_CPU_NEON_I8MM ? coli_kernels_neon_i8mm() : coli_kernels_neon_dotprod();
}

#else

static const coli_kernels_t *select_neon(void) { return NULL; }

#endif

const coli_kernels_t *coli_kernels_select(colibri_isa_t isa) {
    const coli_kernels_t *best;
    switch (isa) {
    case COLIBRI_ISA_REF: return coli_kernels_ref();
    case COLIBRI_ISA_AVX2: return select_avx2();
    case COLIBRI_ISA_AVX512: return select_avx512();
    case COLIBRI_ISA_AMX: return select_amx();
    case COLIBRI_ISA_NEON: return select_neon();
    case COLIBRI_ISA_AUTO:
        if ((best = select_amx()) != NULL || (best = select_avx512()) != NULL) return best;
        if ((best = select_avx2()) != NULL || (best = select_neon()) != NULL) return best;
        return coli_kernels_ref();
    default: return NULL; /* not in this version, or not a colibri_isa_t */
    }
}

const char *coli_isa_name(colibri_isa_t isa) {
    static const char *const names[COLIBRI_ISA_COUNT_] = {"auto", "ref", "avx2", "avx512", "amx", "neon"};
    return (unsigned)isa < COLIBRI_ISA_COUNT_ ? names[isa] : NULL;
}
