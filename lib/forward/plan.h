/* plan.h: how much memory a session needs, and where in it everything lies. The same code counts and places. */
#ifndef COLI_PLAN_H
#define COLI_PLAN_H

#include "forward/session.h"

/* Carve the session's buffers for `options` and the model from the arena (counting if its base is NULL) into *session. Weights
 * that are copied are not among them. */
void coli_plan(coli_arena_t *arena, const colibri_model_t *model, const coli_options_t *options, colibri_t *session);

#endif
