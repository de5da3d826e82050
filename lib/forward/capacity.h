/* capacity.h: at most so many token-expert pairs for one expert: between the router and the experts. */
#ifndef COLI_CAPACITY_H
#define COLI_CAPACITY_H

#include "forward/session.h"

/* One layer's routing of the tokens that are computed together, n of them, at most 65536. */
typedef struct coli_capacity_job {
    uint32_t strategy;    /* colibri_load_balancing_t, not NONE */
    float factor;         /* above 0, at most 1024 */
    uint32_t n, top_k, num_experts;
    const float *exps;    /* [n][pad16(num_experts)] what coli_route leaves in the logits: softmax without its denominator */
    bool norm_topk;
    float routed_scale;
    int32_t *ids;         /* [n][top_k] distinct, most likely first. Out: of a dropped pair num_experts. HARD leaves it where it
                             was; SOFT puts those that stay first, then the moved ones, then the dropped ones */
    float *weights;       /* [n][top_k] of a dropped pair 0. All NaN: a token that is left alone and takes no room */
    uint32_t *counts;     /* [num_experts] scratch; afterwards the pairs of each expert, if any expert could have been full */
    uint64_t moved, dropped; /* out: pairs, added up */
} coli_capacity_job_t;

/* min(n, max(1, ceil(factor * n * top_k / num_experts))), of the exact product: an expert never has more than n pairs. */
uint32_t coli_expert_capacity(float factor, uint32_t n, uint32_t top_k, uint32_t num_experts);

/* What colibri_load_balancing_t says, O(n * top_k) and O(num_experts) for each moved or dropped pair of SOFT. */
void coli_capacity_apply(coli_capacity_job_t *job);

/* The chunk's n tokens, as coli_router left them in b.router_logits, route_ids and route_weights; counts in counters.totals.
 * Uses b.moe.active, which is filled later. */
void coli_capacity(colibri_t *session, uint32_t n);

#endif
