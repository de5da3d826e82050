/* router.h: which experts a token goes to, and with what weight. */
#ifndef COLI_ROUTER_H
#define COLI_ROUTER_H

#include "forward/session.h"

/* One token: softmax over all experts, the top_k largest logits (ties to the lower id), most likely first; weights divided by
 * their sum if norm_topk, times routed_scale (Mixtral, arXiv 2401.04088; OLMoE, arXiv 2409.02060). NaN counts as the least.
 * Returns false if a logit is not finite (ids are still valid, weights NaN). logits: [pad16(num_experts)], aligned; in their
 * place it leaves the exponentials. */
bool coli_route(const coli_kernels_t *kernels, const colibri_file_params *params, uint32_t top_k, float *logits, int32_t *ids,
                float *weights);

/* Say which experts the first layer with experts from `next` on will probably choose: those that its router chooses for
 * b.hidden as it is now, before its attention and what else comes first have added to it. Only for few tokens, and where
 * experts are fetched. */
void coli_look_ahead(colibri_t *session, uint32_t next, uint32_t n);

/* The chunk's n tokens (b.normed) of a MoE layer: fills b.route_ids, b.route_weights. */
void coli_router(colibri_t *session, const coli_layer_t *layer, uint32_t n);

/* The router for a host's own rows [n][hidden_size] (unpadded), in chunks: ids and weights [n][top_k], most
 * likely first. Rows with logits that are not finite get ids -1 and weights 0; returns the first such row, or -1. */
int32_t coli_route_rows(colibri_t *session, uint32_t layer, const float *hidden, uint32_t n, int32_t *ids, float *weights);

#endif
