/* limits_units.c: the loops behind limits_units.h.
 *
 * The tools are compiled for the baseline processor, so the loops of more than that are assembly: exactly the instructions
 * that are counted, on registers alone, with enough independent sums to hide their latency. The portable loops are what a
 * compiler makes of plain C for the baseline.
 */
#include "limits_units.h"

#include <string.h>

#include "colibri.h"

#if defined(__x86_64__) && defined(__linux__)
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

/* ---- Reading -------------------------------------------------------------------------------------------------------- */

uint64_t limits_read(const void *p, size_t n) {
    const uint64_t *word = p;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < n / 8; i += 8)
        for (int j = 0; j < 8; j++) sum[j] ^= word[i + (size_t)j];
    for (int j = 1; j < 8; j++) sum[0] ^= sum[j];
    return sum[0];
}

/* ---- Portable ------------------------------------------------------------------------------------------------------- */

enum { PORTABLE_BYTES = 1024, PORTABLE_LANES = 16, PORTABLE_STEPS = 64 };

/* Hide from the compiler what a pointer points at, so that no round is left out. */
#define OPAQUE(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

static void int8_portable(uint64_t rounds) {
    int8_t a[PORTABLE_BYTES], b[PORTABLE_BYTES];
    memset(a, 1, sizeof a);
    memset(b, 2, sizeof b);
    for (uint64_t i = 0; i < rounds; i++) {
        int32_t sum = 0;
        OPAQUE(a);
        OPAQUE(b);
        for (int j = 0; j < PORTABLE_BYTES; j++) sum += a[j] * b[j];
        OPAQUE(&sum);
    }
}

static void f32_portable(uint64_t rounds) {
    float sum[PORTABLE_LANES] = {0}, factor[PORTABLE_LANES];
    for (int j = 0; j < PORTABLE_LANES; j++) factor[j] = 0.5f;
    for (uint64_t i = 0; i < rounds; i++) {
        OPAQUE(factor);
        for (int step = 0; step < PORTABLE_STEPS; step++)
            for (int j = 0; j < PORTABLE_LANES; j++) sum[j] = sum[j] * factor[j] + factor[j];
        OPAQUE(sum);
    }
}

#define PORTABLE_INT8 {"portable", NULL, 2.0 * PORTABLE_BYTES, int8_portable}
#define PORTABLE_F32 {"portable", NULL, 2.0 * PORTABLE_LANES * PORTABLE_STEPS, f32_portable}

/* ---- x86-64 --------------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* The operands are registers 14 and 15, the sums are 0 to 11 (0 to 5 where a product needs registers 6 to 11 too). Bytes
 * of -1 are set by comparing a register with itself, floats of 0.5 come from memory: sums of them stay ordinary numbers. */
#define TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define SIX(OP) OP(0, 6) OP(1, 7) OP(2, 8) OP(3, 9) OP(4, 10) OP(5, 11)
#define XMM_REGISTERS                                                                                                          \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",        \
        "xmm14", "xmm15"
#define LOOP(before, body)                                                                                                     \
    __asm__ volatile(before "0:\n\t" body "dec %0\n\tjnz 0b\n\tvzeroupper" : "+r"(rounds) : "r"(&half)                         \
                     : XMM_REGISTERS, "cc", "memory")

static const float half = 0.5f;

#define ZERO(n) "vpxor %%xmm" #n ", %%xmm" #n ", %%xmm" #n "\n\t"
#define ONES_256 "vpcmpeqd %%ymm14, %%ymm14, %%ymm14\n\tvpsrlw $15, %%ymm14, %%ymm13\n\tvmovdqa %%ymm14, %%ymm15\n\t"
#define ONES_512                                                                                                               \
    "vpternlogd $255, %%zmm14, %%zmm14, %%zmm14\n\tvpsrlw $15, %%zmm14, %%zmm13\n\tvmovdqa64 %%zmm14, %%zmm15\n\t"
#define HALVES(r) "vbroadcastss (%1), %%" r "14\n\tvmovaps %%" r "14, %%" r "15\n\t"

/* Products of bytes in pairs, pairs of pairs, and the sum: where there is no instruction for the whole. */
#define MADD_256(sum, product)                                                                                                 \
    "vpmaddubsw %%ymm14, %%ymm15, %%ymm" #product "\n\tvpmaddwd %%ymm13, %%ymm" #product ", %%ymm" #product                    \
    "\n\tvpaddd %%ymm" #product ", %%ymm" #sum ", %%ymm" #sum "\n\t"
#define MADD_512(sum, product)                                                                                                 \
    "vpmaddubsw %%zmm14, %%zmm15, %%zmm" #product "\n\tvpmaddwd %%zmm13, %%zmm" #product ", %%zmm" #product                    \
    "\n\tvpaddd %%zmm" #product ", %%zmm" #sum ", %%zmm" #sum "\n\t"
#define VNNI_512(sum) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #sum "\n\t"
#define FMA_256(sum) "vfmadd132ps %%ymm14, %%ymm15, %%ymm" #sum "\n\t"
#define FMA_512(sum) "vfmadd132ps %%zmm14, %%zmm15, %%zmm" #sum "\n\t"

static void int8_avx2(uint64_t rounds) { LOOP(TWELVE(ZERO) ONES_256, SIX(MADD_256)); }
static void int8_avx512(uint64_t rounds) { LOOP(TWELVE(ZERO) ONES_512, SIX(MADD_512)); }
static void int8_vnni(uint64_t rounds) { LOOP(TWELVE(ZERO) ONES_512, TWELVE(VNNI_512)); }
static void f32_avx2(uint64_t rounds) { LOOP(TWELVE(ZERO) HALVES("ymm"), TWELVE(FMA_256)); }
static void f32_avx512(uint64_t rounds) { LOOP(TWELVE(ZERO) HALVES("zmm"), TWELVE(FMA_512)); }

/* Four sums of 16 x 16 from two tiles of 16 rows x 64 bytes on either side. */
static void int8_amx(uint64_t rounds) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _Static_assert(sizeof config == 64, "the layout that ldtilecfg reads");
    uint8_t data[1024];
    memset(data, 1, sizeof data);
    __asm__ volatile(
        "ldtilecfg (%1)\n\t"
        "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
        "tileloadd (%2,%3,1), %%tmm4\n\ttileloadd (%2,%3,1), %%tmm5\n\t"
        "tileloadd (%2,%3,1), %%tmm6\n\ttileloadd (%2,%3,1), %%tmm7\n\t"
        "0:\n\t"
        "tdpbssd %%tmm6, %%tmm4, %%tmm0\n\ttdpbssd %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbssd %%tmm6, %%tmm5, %%tmm2\n\ttdpbssd %%tmm7, %%tmm5, %%tmm3\n\t"
        "dec %0\n\tjnz 0b\n\ttilerelease"
        : "+r"(rounds) : "r"(&config), "r"(data), "r"((uint64_t)64) : "cc", "memory");
}

const limits_unit_t limits_int8[] = {
    {"amx_int8", "amx_int8", 4 * 2.0 * 16 * 16 * 64, int8_amx},
    {"avx512_vnni", "avx512_vnni", 12 * 2.0 * 64, int8_vnni},
    {"avx512", "avx512", 6 * 2.0 * 64, int8_avx512},
    {"avx2", "avx2", 6 * 2.0 * 32, int8_avx2},
    PORTABLE_INT8,
    {NULL, NULL, 0, NULL},
};
const limits_unit_t limits_f32[] = {
    {"avx512", "avx512", 12 * 2.0 * 16, f32_avx512},
    {"avx2", "avx2", 12 * 2.0 * 8, f32_avx2},
    PORTABLE_F32,
    {NULL, NULL, 0, NULL},
};

/* ---- 64-bit ARM ----------------------------------------------------------------------------------------------------- */

#elif defined(__aarch64__)
/* Operands v16 and v17, sums v0 to v11. */
#define TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define LOOP(before, body)                                                                                                     \
    __asm__ volatile(before "0:\n\t" body "subs %0, %0, #1\n\tb.ne 0b" : "+r"(rounds) :                                        \
                     : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16", "v17", "cc")
#define ZERO(n) "movi v" #n ".4s, #0\n\t"
#define ONES "movi v16.16b, #1\n\tmovi v17.16b, #1\n\t"
#define HALVES "fmov v16.4s, #0.5\n\tfmov v17.4s, #0.5\n\t"
#define SDOT(sum) "sdot v" #sum ".4s, v16.16b, v17.16b\n\t"
#define SMMLA(sum) "smmla v" #sum ".4s, v16.16b, v17.16b\n\t"
#define FMLA(sum) "fmla v" #sum ".4s, v16.4s, v17.4s\n\t"

__attribute__((target("arch=armv8.2-a+dotprod"))) static void int8_dotprod(uint64_t rounds) {
    LOOP(TWELVE(ZERO) ONES, TWELVE(SDOT));
}
__attribute__((target("arch=armv8.2-a+i8mm"))) static void int8_i8mm(uint64_t rounds) {
    LOOP(TWELVE(ZERO) ONES, TWELVE(SMMLA));
}
static void f32_neon(uint64_t rounds) { LOOP(TWELVE(ZERO) HALVES, TWELVE(FMLA)); }

const limits_unit_t limits_int8[] = {
    {"neon_i8mm", "i8mm", 12 * 2.0 * 32, int8_i8mm},
    {"neon_dotprod", "dotprod", 12 * 2.0 * 16, int8_dotprod},
    PORTABLE_INT8,
    {NULL, NULL, 0, NULL},
};
const limits_unit_t limits_f32[] = {
    {"neon", "neon", 12 * 2.0 * 4, f32_neon},
    PORTABLE_F32,
    {NULL, NULL, 0, NULL},
};

#else
const limits_unit_t limits_int8[] = {PORTABLE_INT8, {NULL, NULL, 0, NULL}};
const limits_unit_t limits_f32[] = {PORTABLE_F32, {NULL, NULL, 0, NULL}};
#endif

/* ---- What may be used ----------------------------------------------------------------------------------------------- */

/* Whether the library detected `word`: the processor has it and the system saves its registers. */
static int cpu_has(const char *word) {
    size_t length = strlen(word);
    for (const char *at = colibri_cpu_info(); *at != '\0'; at += strspn(at, " ")) {
        size_t n = strcspn(at, " ");
        if (n == length && memcmp(at, word, n) == 0) return 1;
        at += n;
    }
    return 0;
}

int limits_allowed(const limits_unit_t *unit) {
    if (unit->feature == NULL) return 1;
    if (!cpu_has(unit->feature)) return 0;
    if (strcmp(unit->feature, "amx_int8") != 0) return 1;
#if defined(__x86_64__) && defined(__linux__)
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM; the process and its threads keep it */
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
#else
    return 0;
#endif
}
