/* project.h: activations made ready for a weight type, and a matrix product spread over the threads. */
#ifndef COLI_PROJECT_H
#define COLI_PROJECT_H

#include "forward/session.h"

float *coli_thread_scratch(const colibri_t *session, uint32_t thread); /* [thread_stride] */
void *coli_kernel_scratch(const colibri_t *session, uint32_t thread);  /* COLI_KERNEL_SCRATCH bytes for a product */

/* Rotate and quantise row `row` of width k (padded) into each of act and act2 (NULL: none); x itself stays. */
void coli_act_row(const coli_kernels_t *kernels, const float *x, uint32_t k, float *scratch, uint32_t row, coli_act_t *act,
                  coli_act_t *act2);

/* What matrix m multiplies: the quantised rows if it is q8 or q4, else the float rows x themselves. */
coli_act_t coli_act_choose(uint32_t dtype, const coli_act_t *quantised, float *x, uint32_t stride);

/* y[t] = m x[t] for n tokens; y rows are y_stride floats apart, rows of m padded to 16 are written. */
void coli_project(colibri_t *session, const coli_matrix_t *m, const coli_act_t *x, uint32_t n, float *y, uint64_t y_stride);

/* Blocks of a matrix in one work item, a multiple of `multiple`. With few tokens an item is what a core reads in about 16
 * microseconds, so that uneven threads end together; with many it is wide, so that what a kernel prepares of its tokens
 * serves many blocks. Choice of speed only. */
uint32_t coli_block_grain(uint64_t block_bytes, uint32_t multiple, uint32_t tokens);

#endif
