/* arena.c: carve one block of memory from front to back, or only count what that would take; see arena.h. */
#include "base/arena.h"

void *coli_arena_take(coli_arena_t *arena, uint64_t count, uint64_t size) {
    uint64_t bytes, end;
    if (!coli_mul64(count, size, &bytes) || !coli_add64(bytes, COLI_ALIGN - 1, &bytes)) {
        arena->overflow = true;
        return NULL;
    }
    bytes &= ~(uint64_t)(COLI_ALIGN - 1);
    if (!coli_add64(arena->used, bytes, &end)) {
        arena->overflow = true;
        return NULL;
    }
    void *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used = end;
    return piece;
}
