/* stats.h: what a session counted, as the public structs show it. */
#ifndef COLI_STATS_H
#define COLI_STATS_H

#include "forward/session.h"

void coli_stats_read(const colibri_t *session, colibri_stats_t *stats);
void coli_stats_reset(colibri_t *session);
/* After a successful infer of `ns` nanoseconds, before slots' lengths change. */
void coli_stats_count_infer(colibri_t *session, uint64_t ns);

#endif
