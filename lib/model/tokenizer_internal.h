/* tokenizer_internal.h: what the tokenizer's files share. tokenizer.c (open; text to parts) -> tokenizer_split.c (parts to words)
 * -> tokenizer_bpe.c (words to ids); tokenizer_decode.c (ids to text). */
#ifndef COLI_TOKENIZER_INTERNAL_H
#define COLI_TOKENIZER_INTERNAL_H

#include "base/status.h"
#include "model/tokenizer.h"
#include "model/tokenizer_format.h"
#include "model/unicode.h"

enum { COLI_TOK_RAW = 0, COLI_TOK_NORMALIZED = 1 };

/* The payload, checked so far as it can be without reading the big tables; their elements are checked where they are used. */
struct coli_tokenizer {
    uint32_t kind, flags, num_ids, max_probe, vocab_size;
    int32_t unk_id;
    const uint32_t *offsets;      /* [num_pieces + 1] unchecked */
    uint32_t num_pieces;          /* num_ids + number of aliases */
    const uint32_t *aliases;      /* [num_pieces - num_ids] unchecked */
    const uint8_t *token_flags;   /* [num_ids] */
    const uint8_t *bytes;         /* [num_bytes] */
    uint32_t num_bytes;
    const uint32_t *piece_slots;  /* [num_piece_slots] unchecked */
    uint32_t num_piece_slots;
    const coli_tok_merge *merges; /* [num_merges] unchecked */
    uint32_t num_merges;
    const uint32_t *merge_slots;  /* [num_merge_slots] unchecked */
    uint32_t num_merge_slots;
    const coli_tok_added *added[2]; /* [num_added], by COLI_TOK_RAW and _NORMALIZED; checked */
    uint32_t num_added[2];
    bool added_begins[2][256];    /* whether an added token begins with this byte */
    const uint32_t *prefix, *suffix; /* checked */
    uint32_t num_prefix, num_suffix;
    const coli_tok_step *steps;   /* checked */
    uint32_t num_steps;
    const coli_tok_range *ranges;
    int32_t byte_ids[256];        /* id of a byte or of its fallback, -1: none; checked */
    int32_t ascii_ids[128];       /* id of a one-character piece */
};

/* Two neighbours that merge, packed as rank << 32 | position, so that the smallest is next. */
typedef struct coli_tok_heap {
    uint64_t *data;
    size_t size, capacity;
} coli_tok_heap_t;

typedef struct coli_tok_symbol {
    uint32_t id;         /* COLI_TOK_DEAD once it was joined to the one before */
    uint32_t prev, next; /* COLI_TOK_NONE at the ends */
} coli_tok_symbol_t;
#define COLI_TOK_NONE UINT32_MAX
#define COLI_TOK_DEAD UINT32_MAX

/* One call of encode: where ids go, and memory that its words share. */
typedef struct coli_tok_job {
    const coli_tokenizer_t *tokenizer;
    bool parse_special;
    int32_t *tokens; /* [capacity] */
    size_t capacity, count;
    coli_bytes_t composed;   /* a part in NFC */
    coli_bytes_t normalized; /* a part, normalised */
    coli_bytes_t piece;      /* a part between added tokens, as the steps see it */
    coli_tok_symbol_t *symbols;
    size_t num_symbols, symbol_capacity;
    coli_tok_heap_t heap;
} coli_tok_job_t;

/* Write an id out. COLIBRI_ERR_FORMAT if the payload made it too large. */
colibri_status_t coli_tok_emit(coli_tok_job_t *job, uint32_t id);
colibri_status_t coli_tok_no_memory(void);
colibri_status_t coli_tok_damaged(void);

/* Cut valid text s[begin ... end - 1] by steps[step], [step + 1], ... and encode the words. */
colibri_status_t coli_tok_split(coli_tok_job_t *job, uint32_t step, const uint8_t *s, size_t begin, size_t end);
/* Encode one word, n > 0 bytes of valid text. */
colibri_status_t coli_tok_word(coli_tok_job_t *job, const uint8_t *s, size_t n);
/* The id of the piece with exactly these bytes, -1: none. */
int64_t coli_tok_find_piece(const coli_tokenizer_t *tokenizer, const uint8_t *s, size_t n);
/* The bytes of piece number `index`; empty if that or its offsets are out of range. */
const uint8_t *coli_tok_piece(const coli_tokenizer_t *tokenizer, uint32_t index, size_t *n);

#define COLI_TOK_METASPACE_TEXT "\xE2\x96\x81" /* U+2581 */
COLI_INLINE bool coli_tok_is_metaspace(const uint8_t *s, size_t n) { return n >= 3 && s[0] == 0xE2 && s[1] == 0x96 && s[2] == 0x81; }

#endif
