/* kvcache.c: addresses inside the KV cache and the one function that writes to it. */
#include "forward/kvcache.h"

#define KEY_BLOCK 16

void coli_kvcache_plan(coli_arena_t *arena, const coli_weights_t *w, const coli_options_t *o, coli_kvcache_t *kv) {
    static const uint32_t element[] = {4, 2, 1};
    kv->seq = (uint32_t)coli_pad(o->seq, KEY_BLOCK);
    kv->head_dim = w->head_dim_padded;
    kv->kv_heads = w->params->num_kv_heads;
    kv->batch = o->batch;
    kv->type = o->kv_type;
    kv->element = element[kv->type];
    uint64_t heads = (uint64_t)w->params->num_layers * kv->batch * kv->kv_heads; /* at most 2^16 * 2^12 * 2^13 */
    uint64_t bytes = (uint64_t)kv->seq * kv->head_dim * kv->element;            /* of one; at most 2^24 * 2^10 * 2^2 */
    kv->keys = coli_arena_take(arena, heads, bytes); /* which notices that the product is too large */
    kv->values = coli_arena_take(arena, heads, bytes);
    kv->key_scales = kv->type == 2 ? coli_arena_take(arena, heads, (uint64_t)kv->seq * sizeof(float)) : NULL;
    kv->value_scales = kv->type == 2 ? coli_arena_take(arena, heads, (uint64_t)kv->seq * sizeof(float)) : NULL;
}

uint64_t coli_kvcache_bytes(const coli_kvcache_t *kv, uint32_t layers) {
    uint64_t vector = (uint64_t)kv->head_dim * kv->element + (kv->type == 2 ? sizeof(float) : 0);
    return 2 * (uint64_t)layers * kv->batch * kv->kv_heads * kv->seq * vector;
}

/* First key of a head, counted over all heads. */
static uint64_t first_key(const coli_kvcache_t *kv, uint32_t layer, uint32_t slot, uint32_t head) {
    return (((uint64_t)layer * kv->batch + slot) * kv->kv_heads + head) * kv->seq;
}

void coli_kvcache_view(const coli_kvcache_t *kv, uint32_t layer, uint32_t slot, uint32_t head, coli_attention_t *call) {
    uint64_t first = first_key(kv, layer, slot, head), offset = first * kv->head_dim * kv->element;
    call->k_cache = kv->keys + offset;
    call->v_cache = kv->values + offset;
    call->k_scale = kv->key_scales ? kv->key_scales + first : NULL;
    call->v_scale = kv->value_scales ? kv->value_scales + first : NULL;
}

static void put_f32(const coli_kvcache_t *kv, uint8_t *keys, uint8_t *values, uint32_t position, const float *k,
                    const float *v) {
    uint32_t dim = kv->head_dim;
    float *column = (float *)keys + (uint64_t)(position / KEY_BLOCK) * dim * KEY_BLOCK + position % KEY_BLOCK;
    for (uint32_t d = 0; d < dim; d++) column[d * KEY_BLOCK] = k[d];
    memcpy((float *)values + (uint64_t)position * dim, v, dim * sizeof(float));
}

static void put_f16(const coli_kvcache_t *kv, const coli_kernels_t *kernels, uint8_t *keys, uint8_t *values, uint32_t position,
                    const float *k, const float *v) {
    uint32_t dim = kv->head_dim;
    _Alignas(COLI_ALIGN) uint16_t half[COLI_MAX_HEAD_DIM];
    COLI_ASSERT(dim <= COLI_MAX_HEAD_DIM);
    kernels->f32_to_f16(k, half, dim);
    uint16_t *column = (uint16_t *)keys + (uint64_t)(position / KEY_BLOCK) * dim * KEY_BLOCK + position % KEY_BLOCK;
    for (uint32_t d = 0; d < dim; d++) column[d * KEY_BLOCK] = half[d];
    kernels->f32_to_f16(v, (uint16_t *)values + (uint64_t)position * dim, dim);
}

/* k_scale and v_scale: this key's own. */
static void put_q8(const coli_kvcache_t *kv, const coli_kernels_t *kernels, const coli_attention_t *head, uint32_t position,
                   const float *k, const float *v) {
    uint32_t dim = kv->head_dim;
    int32_t unused;
    _Alignas(COLI_ALIGN) float rotated[COLI_MAX_HEAD_DIM];
    _Alignas(COLI_ALIGN) int8_t bytes[COLI_MAX_HEAD_DIM];
    COLI_ASSERT(dim <= COLI_MAX_HEAD_DIM);
    memcpy(rotated, k, dim * sizeof(float));
    kernels->hadamard(rotated, dim, coli_rotation_block(dim));
    kernels->quantize8(rotated, dim, bytes, (float *)head->k_scale + position, &unused);
    uint8_t *column = (uint8_t *)head->k_cache + (uint64_t)(position / KEY_BLOCK) * dim * KEY_BLOCK + position % KEY_BLOCK * 4;
    for (uint32_t d = 0; d < dim; d += 4) memcpy(column + d * KEY_BLOCK, bytes + d, 4);
    memcpy(rotated, v, dim * sizeof(float));
    kernels->quantize8(rotated, dim, bytes, (float *)head->v_scale + position, &unused);
    memcpy((uint8_t *)head->v_cache + (uint64_t)position * dim, bytes, dim);
}

void coli_kvcache_put(const coli_kvcache_t *kv, const coli_kernels_t *kernels, uint32_t layer, uint32_t slot, uint32_t position,
                      const float *keys, const float *values) {
    for (uint32_t h = 0; h < kv->kv_heads; h++) {
        coli_attention_t head;
        coli_kvcache_view(kv, layer, slot, h, &head);
        uint8_t *k = (uint8_t *)head.k_cache, *v = (uint8_t *)head.v_cache;
        const float *key = keys + (uint64_t)h * kv->head_dim, *value = values + (uint64_t)h * kv->head_dim;
        if (kv->type == 0) put_f32(kv, k, v, position, key, value);
        else if (kv->type == 1) put_f16(kv, kernels, k, v, position, key, value);
        else put_q8(kv, kernels, &head, position, key, value);
    }
}
