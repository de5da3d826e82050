/* tokenizer_decode.c: from ids to text, one token after another: the whole and the streaming form are the same code. Only whole
 * characters come out; bytes that begin one wait, and bytes that form none come out as U+FFFD. In a byte-level vocabulary one
 * U+FFFD stands for the longest beginning of a character, in a SentencePiece one for each byte. */
#include "model/tokenizer_internal.h"

enum { STARTED_TEXT = 1, STARTED_TOKENS = 2 }; /* colibri_stream_t.started */

typedef struct decoder {
    const coli_tokenizer_t *tok;
    bool special;
    uint32_t started;
    uint32_t num_pending;
    uint8_t pending[4]; /* the beginning of a character */
    char *text;         /* [capacity] */
    size_t capacity, size; /* size goes on beyond capacity */
} decoder;

static void put_character(decoder *d, const uint8_t *s, size_t n) {
    bool first = !(d->started & STARTED_TEXT);
    d->started |= STARTED_TEXT;
    if (first && d->tok->flags & COLI_TOK_DECODE_STRIP && s[0] == ' ') return;
    if (n <= d->capacity && d->size <= d->capacity - n) memcpy(d->text + d->size, s, n);
    d->size += n;
}

/* U+FFFD for the first n pending bytes. */
static void put_dead(decoder *d, size_t n) {
    size_t times = d->tok->kind == COLI_TOK_SENTENCEPIECE ? n : 1;
    for (size_t i = 0; i < times; i++) put_character(d, (const uint8_t *)"\xEF\xBF\xBD", 3);
    d->num_pending -= (uint32_t)n;
    memmove(d->pending, d->pending + n, d->num_pending);
}

static void put_byte(decoder *d, uint8_t byte) {
    if (d->num_pending == 0 && byte < 0x80) {
        put_character(d, &byte, 1);
        return;
    }
    d->pending[d->num_pending++] = byte;
    while (d->num_pending) {
        uint32_t c;
        size_t length;
        int kind = coli_utf8_read(d->pending, d->num_pending, &c, &length);
        if (kind == COLI_UTF8_PARTIAL) return;
        if (kind == COLI_UTF8_CHAR) { /* always the whole of pending: it was the beginning of a character before */
            d->num_pending = 0;
            put_character(d, d->pending, length);
            return;
        }
        put_dead(d, length);
    }
}

static void end_pending(decoder *d) {
    if (d->num_pending) put_dead(d, d->num_pending);
}

static uint8_t hex_digit(uint8_t c) { return (uint8_t)(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10) & 15; }

static void put_token(decoder *d, uint32_t id) {
    const coli_tokenizer_t *tok = d->tok;
    uint8_t flags = id < tok->num_ids ? tok->token_flags[id] : 0;
    if (!(flags & COLI_TOK_KNOWN) || (flags & COLI_TOK_SPECIAL && !d->special)) return;
    bool first = !(d->started & STARTED_TOKENS), characters = tok->kind == COLI_TOK_SENTENCEPIECE;
    d->started |= STARTED_TOKENS;
    size_t n;
    const uint8_t *s = coli_tok_piece(tok, id, &n);
    if (flags & COLI_TOK_BYTE && tok->flags & COLI_TOK_DECODE_BYTES && n == 6) {
        put_byte(d, (uint8_t)(hex_digit(s[3]) << 4 | hex_digit(s[4])));
        return;
    }
    if (characters) end_pending(d);
    for (size_t i = 0; i < n;) {
        if (tok->flags & COLI_TOK_DECODE_REPLACE && coli_tok_is_metaspace(s + i, n - i)) {
            end_pending(d);
            if (!(first && tok->flags & COLI_TOK_DECODE_DROP_FIRST)) put_character(d, (const uint8_t *)" ", 1);
            i += 3;
        } else {
            put_byte(d, s[i++]);
        }
    }
    if (characters) end_pending(d); /* only in a damaged payload */
}

static colibri_status_t check_token(const coli_tokenizer_t *tok, int32_t token) {
    if (token >= 0 && (uint32_t)token < tok->vocab_size) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_TOKEN, "token %d is not in 0 ... %u, the model's vocabulary", (int)token,
                     (unsigned)tok->vocab_size - 1);
}

static colibri_status_t check_output(const char *text, size_t capacity, const size_t *bytes, uint32_t flags) {
    if (!bytes) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "bytes is NULL; it receives the length of the text");
    if (!text && capacity)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "text is NULL but capacity is %zu; pass a buffer or 0", capacity);
    if (flags & ~COLIBRI_DETOKENIZE_SPECIAL) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "flags 0x%x has unknown bits; only COLIBRI_DETOKENIZE_SPECIAL is defined", (unsigned)flags);
    }
    return COLIBRI_OK;
}

static colibri_status_t check_fits(const decoder *d) {
    if (d->size <= d->capacity) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_BUFFER_TOO_SMALL, "the text takes %zu bytes, the buffer holds %zu", d->size, d->capacity);
}

colibri_status_t coli_tokenizer_decode(const coli_tokenizer_t *tok, const int32_t *tokens, size_t n, uint32_t flags, char *text,
                                       size_t capacity, size_t *bytes) {
    colibri_status_t status = check_output(text, capacity, bytes, flags);
    if (status) return status;
    *bytes = 0;
    if (!tokens && n) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "tokens is NULL but n is %zu", n);
    decoder d = {.tok = tok, .special = flags & COLIBRI_DETOKENIZE_SPECIAL, .text = text, .capacity = capacity};
    for (size_t i = 0; i < n; i++) {
        status = check_token(tok, tokens[i]);
        if (status) return status;
        put_token(&d, (uint32_t)tokens[i]);
    }
    end_pending(&d);
    *bytes = d.size;
    return check_fits(&d);
}

colibri_status_t coli_tokenizer_stream(const coli_tokenizer_t *tok, colibri_stream_t *stream, int32_t token, char *text,
                                       size_t capacity, size_t *bytes) {
    if (!stream) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "stream is NULL; begin with COLIBRI_STREAM_INIT");
    colibri_status_t status = check_output(text, capacity, bytes, stream->flags);
    if (!status && token != -1) status = check_token(tok, token);
    if (status) return status;
    decoder d = {.tok = tok, .special = stream->flags & COLIBRI_DETOKENIZE_SPECIAL, .started = stream->started,
                 .num_pending = stream->num_pending, .text = text, .capacity = capacity};
    if (d.num_pending > 3) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "the stream was not begun with COLIBRI_STREAM_INIT");
    memcpy(d.pending, stream->pending, d.num_pending);
    if (token == -1) end_pending(&d);
    else put_token(&d, (uint32_t)token);
    *bytes = d.size;
    status = check_fits(&d);
    if (status) return status;
    stream->started = token == -1 ? 0 : d.started;
    stream->num_pending = d.num_pending;
    memcpy(stream->pending, d.pending, d.num_pending);
    return COLIBRI_OK;
}
