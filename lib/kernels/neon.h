/* neon.h: the 16 lanes of a tile (lanes.h) as four NEON registers. */
#ifndef COLI_NEON_H
#define COLI_NEON_H

#include <arm_neon.h>

#include "kernels/lanes.h"

typedef struct quarters {
    int32x4_t v[4];
} quarters_t;

COLI_INLINE quarters_t quarters(v16i v) {
    return (quarters_t){ { __builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7),
                           __builtin_shufflevector(v, v, 8, 9, 10, 11), __builtin_shufflevector(v, v, 12, 13, 14, 15) } };
}

COLI_INLINE v16i joined(quarters_t q) {
    typedef int32_t v8i __attribute__((vector_size(32)));
    v8i low = __builtin_shufflevector(q.v[0], q.v[1], 0, 1, 2, 3, 4, 5, 6, 7);
    v8i high = __builtin_shufflevector(q.v[2], q.v[3], 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

/* A lane's sum plus the products of its 4 signed bytes; x is never -128. */
typedef int32x4_t (*dot4_fn)(int32x4_t sum, int8x16_t w, int8x16_t x);

COLI_INLINE v16i dot_quarters(v16i sum, v16i w, v16i x, dot4_fn dot4) {
    quarters_t s = quarters(sum), ws = quarters(w), xs = quarters(x);
    EACH (i, 4) s.v[i] = dot4(s.v[i], vreinterpretq_s8_s32(ws.v[i]), vreinterpretq_s8_s32(xs.v[i]));
    return joined(s);
}

#endif
