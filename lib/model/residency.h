/* residency.h: where expert weights live. The forward pass asks for an expert's address here and nowhere else, and hints what
 * comes next. In this version every expert lives in the file's mapping. */
#ifndef COLI_RESIDENCY_H
#define COLI_RESIDENCY_H

#include "model/weights.h"

/* The weights of one expert, valid for the rest of the call of infer. */
coli_mlp_t coli_residency_expert(const coli_weights_t *weights, uint32_t layer, uint32_t expert);

#endif
