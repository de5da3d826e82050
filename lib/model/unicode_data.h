/* unicode_data.h: the tables of unicode_data.c (written by tools/gen_unicode.py); only unicode.c looks at them. */
#ifndef COLI_UNICODE_DATA_H
#define COLI_UNICODE_DATA_H

#include <stdint.h>

typedef struct coli_unsafe_range {
    uint32_t first;
    uint16_t count;
    uint16_t combining_class;
} coli_unsafe_range;

extern const uint32_t coli_class_end;
extern const uint8_t coli_class_index[];  /* [coli_class_end / 256] */
extern const uint8_t coli_class_blocks[]; /* [blocks][128], two code points a byte */
extern const uint64_t coli_decompositions[];
extern const uint32_t coli_num_decompositions;
extern const uint16_t coli_compositions[];
extern const uint32_t coli_num_compositions;
extern const coli_unsafe_range coli_unsafe_ranges[];
extern const uint32_t coli_num_unsafe_ranges;

#endif
