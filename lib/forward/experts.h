/* experts.h: the MLP sublayer: routed experts, shared expert, or a dense MLP: hidden += mlp(norm(hidden)). */
#ifndef COLI_EXPERTS_H
#define COLI_EXPERTS_H

#include "forward/session.h"

colibri_status_t coli_mlp(colibri_t *session, uint32_t layer, uint32_t n); /* COLIBRI_ERR_IO: experts could not be read */

/* The same for a host's own rows [n][hidden_size] (unpadded, normed, no residual), in chunks through b.normed. Rows of output
 * that are not finite become zeros: COLIBRI_ERR_NOT_FINITE with the first such row. output may be hidden. */
colibri_status_t coli_mlp_rows(colibri_t *session, uint32_t layer, const float *hidden, uint32_t n, float *output);

#endif
