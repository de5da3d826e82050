/* base.h: what every file of the library includes: integer types, asserts for our own mistakes, checked arithmetic for
 * numbers that come from outside. Bottom of the include order: base <- kernels <- model <- forward <- colibri.c. */
#ifndef COLI_BASE_H
#define COLI_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "colibri.h"
#include "colibri_format.h"

#define COLI_ALIGN 64 /* bytes: one cache line, one tile step, every buffer */

/* A broken promise inside the library. Checked in debug builds only; never for anything a caller or a file can cause. */
#if defined(NDEBUG)
#  define COLI_ASSERT(x) ((void)0)
#else
#  define COLI_ASSERT(x) ((x) ? (void)0 : __builtin_trap())
#endif

#define COLI_INLINE static inline __attribute__((always_inline))
#define COLI_MIN(a, b) ((a) < (b) ? (a) : (b))
#define COLI_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Round x up to a multiple of a (a power of two). Callers guarantee no overflow (sizes already validated). */
COLI_INLINE size_t coli_pad(size_t x, size_t a) { return (x + a - 1) & ~(a - 1); }
COLI_INLINE uint32_t coli_pad_rows(uint32_t rows) { return (uint32_t)coli_pad(rows, COLIBRI_TILE_ROWS); }
COLI_INLINE uint32_t coli_pad_k(uint32_t k) { return (uint32_t)coli_pad(k, COLIBRI_TILE_K); }
/* Weights that are rotated, held as integers and multiplied with quantised activations; their matrices have row scales. */
COLI_INLINE bool coli_is_quantised(uint32_t file_dtype) {
    return file_dtype == COLIBRI_FILE_Q8 || file_dtype == COLIBRI_FILE_Q4;
}

/* Checked arithmetic on untrusted numbers: false on overflow. */
COLI_INLINE bool coli_mul64(uint64_t a, uint64_t b, uint64_t *r) { return !__builtin_mul_overflow(a, b, r); }
COLI_INLINE bool coli_add64(uint64_t a, uint64_t b, uint64_t *r) { return !__builtin_add_overflow(a, b, r); }

#endif
