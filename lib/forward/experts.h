/* experts.h: the MLP sublayer: routed experts, shared expert, or a dense MLP: hidden += mlp(norm(hidden)). */
#ifndef COLI_EXPERTS_H
#define COLI_EXPERTS_H

#include "forward/session.h"

void coli_mlp(colibri_t *session, uint32_t layer, uint32_t n);

#endif
