/* weights.c: the checked directory as named, typed pointers (format -> weights -> plan). Nothing here can fail: format.c has
 * proven that every tensor the parameters speak of is there once, inside the file, with the size its shape demands. */
#include "model/weights.h"

/* A matrix at an address; its scales, if the type has them, follow its blocks. */
static coli_matrix_t matrix_view(const uint8_t *data, uint32_t dtype, uint32_t rows, uint32_t k) {
    coli_matrix_t m = {.tiles = data, .dtype = dtype, .rows = rows, .k = k};
    uint64_t block = coli_matrix_bytes(dtype, COLIBRI_TILE_ROWS, k); /* if quantised with its 16 scales, which lie elsewhere */
    m.block_bytes = coli_is_quantised(dtype) ? block - COLIBRI_TILE_ROWS * sizeof(float) : block;
    if (coli_is_quantised(dtype)) m.scale = (const float *)(data + m.block_bytes * (coli_pad_rows(rows) / COLIBRI_TILE_ROWS));
    return m;
}

coli_mlp_t coli_mlp_view(const uint8_t *data, uint32_t dtype, uint32_t intermediate, uint32_t hidden) {
    coli_mlp_t mlp = {.intermediate = intermediate, .bytes = coli_mlp_bytes(dtype, intermediate, hidden)};
    uint32_t gate_up_rows = 2 * coli_pad_rows(intermediate);
    mlp.gate_up = matrix_view(data, dtype, gate_up_rows, hidden);
    mlp.down = matrix_view(data + coli_matrix_bytes(dtype, gate_up_rows, hidden), dtype, hidden, intermediate);
    return mlp;
}

static coli_matrix_t entry_matrix(const uint8_t *data, const colibri_file_entry *e) {
    return matrix_view(data, e->dtype, e->rows, e->k);
}

/* A tensor that belongs to the model as a whole. */
static void place_in_model(coli_weights_t *w, const colibri_file_entry *e, const uint8_t *data) {
    switch (e->role) {
    case COLIBRI_ROLE_EMBEDDING:
        w->embedding = data;
        w->embedding_stride = e->stride;
        w->embedding_dtype = e->dtype;
        break;
    case COLIBRI_ROLE_FINAL_NORM: w->final_norm = (const float *)data; break;
    case COLIBRI_ROLE_HEAD: w->head = entry_matrix(data, e); break;
    case COLIBRI_ROLE_ROPE_INV_FREQ: w->rope_inv_freq = (const float *)data; break;
    default: break; /* bytes: tokenizer and texts are found by role */
    }
}

static void place_in_layer(coli_layer_t *l, const colibri_file_entry *e, const uint8_t *data) {
    const float *vector = (const float *)data;
    switch (e->role) {
    case COLIBRI_ROLE_ATTN_NORM: l->attn_norm = vector; break;
    case COLIBRI_ROLE_ATTN_QKV: l->qkv = entry_matrix(data, e); break;
    case COLIBRI_ROLE_ATTN_QKV_BIAS: l->qkv_bias = vector; break;
    case COLIBRI_ROLE_ATTN_Q_NORM: l->q_norm = vector; break;
    case COLIBRI_ROLE_ATTN_K_NORM: l->k_norm = vector; break;
    case COLIBRI_ROLE_ATTN_OUT: l->out = entry_matrix(data, e); break;
    case COLIBRI_ROLE_ATTN_OUT_BIAS: l->out_bias = vector; break;
    case COLIBRI_ROLE_MLP_NORM: l->mlp_norm = vector; break;
    case COLIBRI_ROLE_ROUTER: l->router = entry_matrix(data, e); break;
    case COLIBRI_ROLE_EXPERTS:
        l->experts = data;
        l->experts_offset = e->offset;
        l->expert_stride = e->stride;
        l->expert_dtype = e->dtype;
        break;
    case COLIBRI_ROLE_SHARED_EXPERT:
        l->has_shared = true;
        l->shared = coli_mlp_view(data, e->dtype, e->rows, e->k);
        break;
    case COLIBRI_ROLE_SHARED_GATE: l->shared_gate = entry_matrix(data, e); break;
    case COLIBRI_ROLE_DENSE_MLP: l->dense = coli_mlp_view(data, e->dtype, e->rows, e->k); break;
    default: break;
    }
}

static bool belongs_to_layer(uint32_t role) { return role >= COLIBRI_ROLE_ATTN_NORM && role <= COLIBRI_ROLE_DENSE_MLP; }

void coli_weights_view(const coli_directory_t *directory, coli_address_fn address, const void *context, coli_layer_t *layers,
                       coli_weights_t *weights) {
    const colibri_file_params *p = directory->params;
    *weights = (coli_weights_t){.params = p, .layers = layers, .head_dim_padded = coli_pad_rows(p->head_dim)};
    weights->q_rows = p->num_heads * weights->head_dim_padded;
    weights->kv_rows = p->num_kv_heads * weights->head_dim_padded;
    for (uint32_t i = 0; i < p->num_layers; i++) {
        layers[i] =
            (coli_layer_t){.window = directory->layers[i].window, .is_moe = directory->layers[i].kind == COLIBRI_LAYER_MOE};
    }
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        const colibri_file_entry *e = &directory->entries[i];
        const uint8_t *data = address ? address(context, i) : directory->file + e->offset;
        bool *quantised = e->role == COLIBRI_ROLE_EXPERTS ? &weights->quantised_experts : &weights->quantised_others;
        *quantised |= coli_is_quantised(e->dtype);
        if (belongs_to_layer(e->role)) {
            place_in_layer(&layers[e->layer], e, data);
        } else {
            place_in_model(weights, e, data);
        }
    }
}

/* Unpadded parameters of one tensor: rows of padded heads do not count. */
static uint64_t parameters(const colibri_file_params *p, const colibri_file_entry *e) {
    uint64_t width = coli_pad_rows(p->head_dim);
    switch (e->role) {
    case COLIBRI_ROLE_ROPE_INV_FREQ: return 0; /* computed from the config, not learned */
    case COLIBRI_ROLE_ATTN_QKV: return e->rows / width * p->head_dim * e->k;
    case COLIBRI_ROLE_ATTN_OUT: return e->rows * (e->k / width * p->head_dim);
    case COLIBRI_ROLE_ATTN_QKV_BIAS:
    case COLIBRI_ROLE_ATTN_Q_NORM:
    case COLIBRI_ROLE_ATTN_K_NORM: return e->k / width * p->head_dim;
    case COLIBRI_ROLE_EXPERTS:
    case COLIBRI_ROLE_SHARED_EXPERT:
    case COLIBRI_ROLE_DENSE_MLP: return 3 * (uint64_t)e->rows * e->k * e->count;
    default: return (uint64_t)e->rows * e->k; /* bytes have k 0 */
    }
}

static uint64_t active(const colibri_file_params *p, const colibri_file_entry *e) {
    switch (e->role) {
    case COLIBRI_ROLE_EXPERTS: return p->top_k * coli_mlp_bytes(e->dtype, e->rows, e->k);
    case COLIBRI_ROLE_ATTN_QKV:
    case COLIBRI_ROLE_ATTN_OUT:
    case COLIBRI_ROLE_ROUTER:
    case COLIBRI_ROLE_SHARED_EXPERT:
    case COLIBRI_ROLE_SHARED_GATE:
    case COLIBRI_ROLE_DENSE_MLP:
    case COLIBRI_ROLE_HEAD: return e->size;
    default: return 0; /* an embedding row and the vectors: too little to matter */
    }
}

/* No sum can overflow: a tensor has no more parameters, and no more active bytes (top_k <= num_experts), than bytes stored. */
void coli_weights_totals(const coli_directory_t *directory, uint64_t *num_parameters, uint64_t *active_bytes) {
    *num_parameters = *active_bytes = 0;
    for (uint32_t i = 0; i < directory->num_entries; i++) {
        *num_parameters += parameters(directory->params, &directory->entries[i]);
        *active_bytes += active(directory->params, &directory->entries[i]);
    }
}
