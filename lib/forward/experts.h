/* experts.h: the MLP sublayer: routed experts, shared expert, or a dense MLP: hidden += mlp(norm(hidden)). */
#ifndef COLI_EXPERTS_H
#define COLI_EXPERTS_H

#include "forward/session.h"

void coli_mlp(colibri_t *session, uint32_t layer, uint32_t n);

/* The same for a host's own rows [n][hidden_size] (unpadded, normed, no residual), in chunks through b.normed. Rows of output
 * that are not finite become zeros; returns the first such row, or -1. output may be hidden. */
int32_t coli_mlp_rows(colibri_t *session, uint32_t layer, const float *hidden, uint32_t n, float *output);

#endif
