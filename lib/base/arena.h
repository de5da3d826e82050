/* arena.h: one block of memory, carved from front to back, 64-byte aligned pieces. With base NULL it only counts, so the same
 * planning code answers "how much" and then hands out the addresses. */
#ifndef COLI_ARENA_H
#define COLI_ARENA_H

#include "base/base.h"

typedef struct coli_arena {
    uint8_t *base;  /* NULL: counting */
    uint64_t used;  /* bytes, multiple of COLI_ALIGN */
    bool overflow;  /* a size did not fit 64 bits (counting) */
} coli_arena_t;

/* count * size bytes, aligned; NULL while counting. Memory is not cleared. */
void *coli_arena_take(coli_arena_t *arena, uint64_t count, uint64_t size);

#endif
