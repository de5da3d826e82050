/* kvcache.c: addresses inside the KV cache and the one function that writes to it. */
#include "forward/kvcache.h"

#define KEY_BLOCK 16
#define MAX_HEAD_DIM 1024 /* format.c allows no wider head */

void coli_kvcache_plan(coli_arena_t *arena, const coli_weights_t *w, const coli_options_t *o, coli_kvcache_t *kv) {
    kv->seq = (uint32_t)coli_pad(o->seq, KEY_BLOCK);
    kv->head_dim = w->head_dim_padded;
    kv->kv_heads = w->params->num_kv_heads;
    kv->batch = o->batch;
    kv->element = o->kv_f16 ? 2 : 4;
    uint64_t heads = (uint64_t)w->params->num_layers * kv->batch * kv->kv_heads; /* at most 2^16 * 2^12 * 2^13 */
    uint64_t bytes = (uint64_t)kv->seq * kv->head_dim * kv->element;            /* of one; at most 2^24 * 2^10 * 2^2 */
    kv->keys = coli_arena_take(arena, heads, bytes); /* which notices that the product is too large */
    kv->values = coli_arena_take(arena, heads, bytes);
}

uint64_t coli_kvcache_bytes(const coli_kvcache_t *kv, uint32_t layers) {
    return 2 * (uint64_t)layers * kv->batch * kv->kv_heads * kv->seq * kv->head_dim * kv->element;
}

static uint64_t head_offset(const coli_kvcache_t *kv, uint32_t layer, uint32_t slot, uint32_t head) {
    uint64_t index = ((uint64_t)layer * kv->batch + slot) * kv->kv_heads + head;
    return index * kv->seq * kv->head_dim * kv->element;
}

uint8_t *coli_kvcache_keys(const coli_kvcache_t *kv, uint32_t layer, uint32_t slot, uint32_t head) {
    return kv->keys + head_offset(kv, layer, slot, head);
}

uint8_t *coli_kvcache_values(const coli_kvcache_t *kv, uint32_t layer, uint32_t slot, uint32_t head) {
    return kv->values + head_offset(kv, layer, slot, head);
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
    _Alignas(COLI_ALIGN) uint16_t half[MAX_HEAD_DIM];
    COLI_ASSERT(dim <= MAX_HEAD_DIM);
    kernels->f32_to_f16(k, half, dim);
    uint16_t *column = (uint16_t *)keys + (uint64_t)(position / KEY_BLOCK) * dim * KEY_BLOCK + position % KEY_BLOCK;
    for (uint32_t d = 0; d < dim; d++) column[d * KEY_BLOCK] = half[d];
    kernels->f32_to_f16(v, (uint16_t *)values + (uint64_t)position * dim, dim);
}

void coli_kvcache_put(const coli_kvcache_t *kv, const coli_kernels_t *kernels, uint32_t layer, uint32_t slot, uint32_t position,
                      const float *keys, const float *values) {
    for (uint32_t h = 0; h < kv->kv_heads; h++) {
        uint8_t *k = coli_kvcache_keys(kv, layer, slot, h), *v = coli_kvcache_values(kv, layer, slot, h);
        const float *key = keys + (uint64_t)h * kv->head_dim, *value = values + (uint64_t)h * kv->head_dim;
        if (kv->element == 4) put_f32(kv, k, v, position, key, value);
        else put_f16(kv, kernels, k, v, position, key, value);
    }
}
