/* kvcache.h: keys and values of every layer, slot and KV head. Keys are stored in blocks of 16 so that scores come 16 at a
 * time; values key by key. The layout is coli_attention_t's (kernels.h). */
#ifndef COLI_KVCACHE_H
#define COLI_KVCACHE_H

#include "forward/session.h"

void coli_kvcache_plan(coli_arena_t *arena, const coli_weights_t *weights, const coli_options_t *options, coli_kvcache_t *kv);
uint64_t coli_kvcache_bytes(const coli_kvcache_t *kv, uint32_t layers); /* with scales */

/* The cache of one head into the call's k_cache, v_cache, k_scale, v_scale. */
void coli_kvcache_view(const coli_kvcache_t *kv, uint32_t layer, uint32_t slot, uint32_t head, coli_attention_t *call);

/* Store one token's keys and values, each [kv_heads][D], at a position. */
void coli_kvcache_put(const coli_kvcache_t *kv, const coli_kernels_t *kernels, uint32_t layer, uint32_t slot, uint32_t position,
                      const float *keys, const float *values);

#endif
