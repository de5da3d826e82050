/* residency_use.h: what experts are worth, between residency.c and residency_use.c. */
#ifndef COLI_RESIDENCY_USE_H
#define COLI_RESIDENCY_USE_H

#include "model/residency.h"

void coli_usage_start(coli_residency_t *r); /* nothing was used yet; the cache asks here what an expert is worth */
/* Is it chosen so much more often than others that it stays in the cache? */
bool coli_usage_pinned(const coli_residency_t *r, uint32_t key);
/* Share of its layer's latest tokens that chose it, 0 ... 1. */
float coli_usage_rate(const coli_residency_t *r, uint32_t key);
void coli_usage_set_rate(coli_residency_t *r, uint32_t key, float rate);
/* STREAM: read an expert before anything asks for it: false if there is no room. settle waits for all such reads. */
bool coli_residency_fetch_ahead(coli_residency_t *r, uint32_t key);
colibri_status_t coli_residency_settle(coli_residency_t *r);

#endif
