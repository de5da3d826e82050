/* attention_body.h: attention in 16-lane vectors, included by the file of each instruction set. */
#ifndef COLI_ATTENTION_BODY_H
#define COLI_ATTENTION_BODY_H

#include "kernels/body.h"

static void attention_f32(const coli_attention_t *a) { coli_kernels_ref()->attention[0](a); }
static void attention_f16(const coli_attention_t *a) { coli_kernels_ref()->attention[1](a); }
static void attention_q8(const coli_attention_t *a) { coli_kernels_ref()->attention[2](a); }

#endif
