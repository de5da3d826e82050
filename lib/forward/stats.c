/* stats.c: counters are written by the stages as they run; here they are read, reset and completed per call. */
#include "forward/stats.h"

#include "base/histogram.h"
#include "forward/kvcache.h"

void coli_stats_read(const colibri_t *s, colibri_stats_t *stats) {
    *stats = s->counters.totals;
    stats->struct_size = sizeof *stats;
    stats->num_threads = (int32_t)s->options.threads;
    stats->isa = s->kernels->isa;
    stats->num_layers = (int32_t)s->weights->params->num_layers;
    stats->num_experts = (int32_t)s->weights->params->num_experts;
    stats->workspace_bytes = s->memory_bytes;
    stats->kv_bytes = coli_kvcache_bytes(&s->kv, s->weights->params->num_layers);
    coli_residency_stats(&s->residency, stats);
}

void coli_stats_expert(const colibri_t *s, uint32_t layer, uint32_t expert, colibri_expert_stats_t *row) {
    *row = s->counters.experts[(uint64_t)layer * s->weights->params->num_experts + expert];
    coli_residency_row(&s->residency, layer, expert, row);
}

void coli_stats_reset(colibri_t *s) {
    const colibri_file_params *p = s->weights->params;
    memset(&s->counters.totals, 0, sizeof s->counters.totals);
    memset(s->counters.experts, 0, (uint64_t)p->num_layers * p->num_experts * sizeof(colibri_expert_stats_t));
}

void coli_stats_count_infer(colibri_t *s, uint64_t ns) {
    colibri_stats_t *totals = &s->counters.totals;
    for (uint32_t i = 0; i < s->input_batch; i++) {
        if (s->slots[i].pending == 1) totals->decode_tokens++;
        else totals->prompt_tokens += s->slots[i].pending;
    }
    totals->infer_calls++;
    totals->infer_ns += ns;
    totals->last_infer_ns = ns;
    coli_histogram_add(totals->infer_histogram, ns);
}
