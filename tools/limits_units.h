/* limits_units.h: loops that do nothing but multiply and add, or read, one per instruction set; measured by limits.c. */
#ifndef COLIBRI_LIMITS_UNITS_H
#define COLIBRI_LIMITS_UNITS_H

#include <stddef.h>
#include <stdint.h>

typedef struct limits_unit_t {
    const char *name;    /* as in the table: "avx512_vnni" */
    const char *feature; /* the word of colibri_cpu_info() that says it is usable; NULL: always */
    double ops;          /* multiplications and additions of one round, on the word's own type */
    void (*run)(uint64_t rounds);
} limits_unit_t;

extern const limits_unit_t limits_int8[], limits_f32[]; /* fastest first; the last one has name NULL */

/* Ask the system what a unit needs beyond the processor's word, once and before threads start: 1 if it may be used. */
int limits_allowed(const limits_unit_t *unit);

/* Read n bytes (a multiple of 64, p 64-byte aligned); what comes back depends on all of them. */
uint64_t limits_read(const void *p, size_t n);

#endif
