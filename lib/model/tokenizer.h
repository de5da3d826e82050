/* tokenizer.h: text to ids and back, from the tokenizer payload of the file (tokenizer_format.h), which is used as it lies in
 * memory. */
#ifndef COLI_TOKENIZER_H
#define COLI_TOKENIZER_H

#include "base/base.h"

typedef struct coli_tokenizer coli_tokenizer_t;

/* Check an untrusted payload and make a view of it (small, from malloc; the payload must stay and not change). vocab_size
 * bounds ids. */
colibri_status_t coli_tokenizer_open(const uint8_t *payload, uint64_t size, uint32_t vocab_size, coli_tokenizer_t **tokenizer);
void coli_tokenizer_close(coli_tokenizer_t *tokenizer);

/* See colibri_tokenize, colibri_detokenize and colibri_stream_token for the contracts. */
colibri_status_t coli_tokenizer_encode(const coli_tokenizer_t *tokenizer, const char *text, size_t bytes, uint32_t flags,
                                       int32_t *tokens, size_t capacity, size_t *count);
colibri_status_t coli_tokenizer_decode(const coli_tokenizer_t *tokenizer, const int32_t *tokens, size_t n, uint32_t flags,
                                       char *text, size_t capacity, size_t *bytes);
colibri_status_t coli_tokenizer_stream(const coli_tokenizer_t *tokenizer, colibri_stream_t *stream, int32_t token,
                                       char *text, size_t capacity, size_t *bytes);

#endif
