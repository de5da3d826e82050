/* stats.h: what a session counted, as the public structs show it. */
#ifndef COLI_STATS_H
#define COLI_STATS_H

#include "forward/session.h"

void coli_stats_read(const colibri_t *session, colibri_stats_t *stats);
/* Expert `expert` of a layer that has experts. */
void coli_stats_expert(const colibri_t *session, uint32_t layer, uint32_t expert, colibri_expert_stats_t *row);
void coli_stats_reset(colibri_t *session);
/* After a successful infer of `ns` nanoseconds, before slots' lengths change. */
void coli_stats_count_infer(colibri_t *session, uint64_t ns);

#endif
