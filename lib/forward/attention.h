/* attention.h: the attention sublayer: hidden += out(attention(rope(norm(qkv(norm(hidden)))))). */
#ifndef COLI_ATTENTION_H
#define COLI_ATTENTION_H

#include "forward/session.h"

/* cos and sin for the chunk's n tokens (Su et al., arXiv 2104.09864; halves paired as in transformers). */
void coli_rope_tables(colibri_t *session, uint32_t n);
/* One layer over the chunk's n tokens: reads and updates b.hidden, appends to the KV cache. */
void coli_attention(colibri_t *session, uint32_t layer, uint32_t n);

#endif
