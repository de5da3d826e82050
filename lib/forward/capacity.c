/* capacity.c: load balancing by expert capacity, after the router and before pairs are sorted by expert. One thread, tokens in
 * order: who comes first is part of the definition (colibri_load_balancing_t). */
#include "forward/capacity.h"

/* Of a count: the token at hand has this expert. It looks full then, which is all that is asked of it. */
#define TAKEN 0x80000000u

uint32_t coli_expert_capacity(float factor, uint32_t n, uint32_t top_k, uint32_t num_experts) {
    uint32_t bits;
    memcpy(&bits, &factor, sizeof bits);
    COLI_ASSERT(factor > 0 && factor <= 1024);
    uint32_t exponent = bits >> 23, fraction = bits & 0x7fffff;
    if (exponent) fraction |= 0x800000;
    else exponent = 1;
    uint32_t shift = 150 - exponent; /* factor = fraction / 2^shift; 13 ... 149 */
    uint64_t product = (uint64_t)n * top_k * fraction; /* below 2^32 * 2^24 */
    if (shift > 56) return 1;
    /* ceil(ceil(a / b) / c) = ceil(a / (b * c)) */
    uint64_t pairs = (product + ((uint64_t)1 << shift) - 1) >> shift, capacity = (pairs + num_experts - 1) / num_experts;
    return (uint32_t)COLI_MAX(1, COLI_MIN(capacity, n));
}

static void apply_hard(coli_capacity_job_t *job, uint32_t capacity, int32_t *ids, float *weights) {
    for (uint32_t i = 0; i < job->top_k; i++) {
        uint32_t *count = &job->counts[ids[i]];
        if (*count < capacity) {
            ++*count;
            continue;
        }
        ids[i] = (int32_t)job->num_experts;
        weights[i] = 0;
        job->dropped++;
    }
}

/* The expert that a pair moves to: the largest of exps, above 0, ties to the lower id, neither full nor the token's; or -1. */
static int32_t next_expert(const coli_capacity_job_t *job, uint32_t capacity, const float *exps) {
    float most = 0;
    int32_t found = -1;
    for (uint32_t e = 0; e < job->num_experts; e++) {
        if (job->counts[e] >= capacity || !(exps[e] > most)) continue;
        most = exps[e];
        found = (int32_t)e;
    }
    return found;
}

/* As coli_route would, for the token's `used` experts: the same operations in the same order. The likeliest expert may be gone
 * and with it everything that is not 0. */
static void weigh(const coli_capacity_job_t *job, const float *exps, const int32_t *ids, uint32_t used, float *weights) {
    float sum = 0;
    if (job->norm_topk)
        for (uint32_t i = 0; i < used; i++) sum += exps[ids[i]];
    else
        for (uint32_t e = 0; e < job->num_experts; e++) sum += exps[e];
    for (uint32_t i = 0; i < job->top_k; i++) weights[i] = i < used && sum > 0 ? exps[ids[i]] / sum * job->routed_scale : 0;
}

static void apply_soft(coli_capacity_job_t *job, uint32_t capacity, const float *exps, int32_t *ids, float *weights) {
    uint32_t stay = 0;
    for (uint32_t i = 0; i < job->top_k; i++) {
        uint32_t *count = &job->counts[ids[i]];
        if (*count >= capacity) continue;
        *count = (*count + 1) | TAKEN;
        ids[stay++] = ids[i];
    }
    uint32_t used = stay;
    for (int32_t e; used < job->top_k && (e = next_expert(job, capacity, exps)) >= 0; used++) {
        job->counts[e] = (job->counts[e] + 1) | TAKEN;
        ids[used] = e;
    }
    for (uint32_t i = 0; i < used; i++) job->counts[ids[i]] &= ~TAKEN;
    if (stay == job->top_k) return;
    for (uint32_t i = used; i < job->top_k; i++) ids[i] = (int32_t)job->num_experts;
    weigh(job, exps, ids, used, weights);
    job->moved += used - stay;
    job->dropped += job->top_k - used;
}

void coli_capacity_apply(coli_capacity_job_t *job) {
    uint32_t capacity = coli_expert_capacity(job->factor, job->n, job->top_k, job->num_experts);
    if (capacity >= job->n) return; /* none can be full */
    memset(job->counts, 0, job->num_experts * sizeof *job->counts);
    for (uint32_t t = 0; t < job->n; t++) {
        int32_t *ids = job->ids + (uint64_t)t * job->top_k;
        float *weights = job->weights + (uint64_t)t * job->top_k;
        if (weights[0] != weights[0]) continue; /* its slot fails; the other tokens are none the worse */
        if (job->strategy == COLIBRI_BALANCE_HARD_CAPACITY) apply_hard(job, capacity, ids, weights);
        else apply_soft(job, capacity, job->exps + (uint64_t)t * coli_pad_rows(job->num_experts), ids, weights);
    }
}

void coli_capacity(colibri_t *s, uint32_t n) {
    const colibri_file_params *p = s->weights->params;
    coli_capacity_job_t job = {.strategy = s->options.balance,
                               .factor = s->options.capacity_factor,
                               .n = n,
                               .top_k = s->options.top_k,
                               .num_experts = p->num_experts,
                               .exps = s->b.router_logits,
                               .norm_topk = p->norm_topk != 0,
                               .routed_scale = p->routed_scale,
                               .ids = s->b.route_ids,
                               .weights = s->b.route_weights,
                               .counts = s->b.moe.active};
    if (job.strategy == COLIBRI_BALANCE_NONE) return;
    coli_capacity_apply(&job);
    s->counters.totals.capacity_moved += job.moved;
    s->counters.totals.capacity_dropped += job.dropped;
}
