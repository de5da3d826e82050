/* residency.c: where expert weights live. In this version every expert lies in the file's mapping, at a product of small
 * numbers; the page cache does the rest. */
#include "model/residency.h"

coli_mlp_t coli_residency_expert(const coli_weights_t *weights, uint32_t layer, uint32_t expert) {
    const coli_layer_t *l = &weights->layers[layer];
    const colibri_file_params *p = weights->params;
    COLI_ASSERT(l->is_moe && expert < p->num_experts);
    return coli_mlp_view(l->experts + expert * l->expert_stride, l->expert_dtype, p->moe_intermediate, p->hidden_size);
}
