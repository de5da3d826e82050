/* sampler.h: one token from a row of logits. */
#ifndef COLI_SAMPLER_H
#define COLI_SAMPLER_H

#include "forward/session.h"

/* See colibri_sample. `sampling` is already checked. */
int32_t coli_sample(const colibri_t *session, uint32_t slot, const colibri_sampling_t *sampling);
int32_t coli_argmax(const float *logits, uint32_t n); /* ties to the lower id */

#endif
