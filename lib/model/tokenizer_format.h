/* tokenizer_format.h: the tokenizer payload of a .colibri file (COLIBRI_ROLE_TOKENIZER), as C structs. This header is its
 * specification; python/colibri/convert/tokenizer.py writes it, tokenizer.c reads it where it lies, without parsing.
 *
 * All integers are little-endian. The payload is 64-byte aligned, offsets count bytes from its start. It begins with a
 * coli_tok_header; its table of sections says where each array lies (8-byte aligned) and how many elements it has. Two hash
 * tables are stored ready to use, with open addressing and linear probing: a key of 32-bit hash h begins at slot
 * (h * slots) >> 32 and lies within max_probe slots, wrapping around; a slot holds index + 1, and 0 ends the search.
 *     pieces   key: the bytes of a piece     h: 32-bit FNV-1a, then h ^= h >> 15, h *= 0x2c1b3c6d, h ^= h >> 12
 *     merges   key: (left id, right id)      x = left * 0x9E3779B97F4A7C15 + right * 0xC2B2AE3D27D4EB4F mod 2^64,
 *                                            x ^= x >> 32, x *= 0xD6E8FEB86659FD93, h = x >> 32
 *
 * From text to ids: the text is cut at added tokens (ADDED_RAW), each part is normalised (NFC, prepend, replace: as the flags
 * say), cut at ADDED_NORMALIZED, cut into words by the steps, each applied to the pieces that the one before left, and every
 * word is put together from single units by merges, lowest rank first. */
#ifndef COLI_TOKENIZER_FORMAT_H
#define COLI_TOKENIZER_FORMAT_H

#include <stdint.h>

#define COLI_TOK_MAGIC "CTOK"
#define COLI_TOK_VERSION 1
#define COLI_TOK_MAX_STEPS 8
#define COLI_TOK_MAX_PROBE 4096
#define COLI_TOK_MAX_ADDED_BYTES 1024 /* of one added token's text */

enum {
    COLI_TOK_SENTENCEPIECE = 1, /* units are characters; pieces are UTF-8 with U+2581 for a space */
    COLI_TOK_BYTE_LEVEL = 2     /* units are bytes; pieces are the raw bytes */
};

/* header.flags */
enum {
    COLI_TOK_NFC = 1 << 0,              /* normalise to NFC */
    COLI_TOK_PREPEND = 1 << 1,          /* normalise: put U+2581 before every non-empty part */
    COLI_TOK_REPLACE = 1 << 2,          /* normalise: space becomes U+2581 */
    COLI_TOK_METASPACE = 1 << 3,        /* after ADDED_NORMALIZED: space becomes U+2581 */
    COLI_TOK_METASPACE_ALWAYS = 1 << 4, /* ... and one is put before every part that does not begin with it */
    COLI_TOK_METASPACE_FIRST = 1 << 5,  /* ... and one is put before the text, if it does not begin with it */
    COLI_TOK_PREFIX_SPACE = 1 << 6,     /* after ADDED_NORMALIZED: a space before every part that does not begin with one */
    COLI_TOK_BYTE_FALLBACK = 1 << 7,    /* an unknown character becomes its bytes, if all have ids */
    COLI_TOK_FUSE_UNK = 1 << 8,         /* neighbouring unknown characters become one unk_id */
    COLI_TOK_IGNORE_MERGES = 1 << 9,    /* a word that is a piece is that piece */
    COLI_TOK_CUT_AT_SPACE = 1 << 10,    /* no merge crosses from another character to U+2581: words may be cut there */
    COLI_TOK_DECODE_REPLACE = 1 << 11,  /* decoding: U+2581 becomes a space */
    COLI_TOK_DECODE_STRIP = 1 << 12,    /* decoding: one space at the very start is dropped */
    COLI_TOK_DECODE_BYTES = 1 << 13,    /* decoding: pieces <0xXX> are bytes */
    COLI_TOK_DECODE_DROP_FIRST = 1 << 14, /* decoding: every U+2581 of the first token is dropped */
    COLI_TOK_ALL_FLAGS = (1 << 15) - 1
};

/* Sections, in the order of header.sections. */
enum {
    COLI_TOK_OFFSETS = 0,          /* u32 [num_ids + aliases + 1]: piece i is BYTES[OFFSETS[i] ... OFFSETS[i + 1]). An id decodes
                                      to its piece; what follows num_ids are pieces under which an id is found besides */
    COLI_TOK_TOKEN_FLAGS = 1,      /* u8 [num_ids]: COLI_TOK_KNOWN ... */
    COLI_TOK_BYTES = 2,            /* u8 [] */
    COLI_TOK_PIECE_SLOTS = 3,      /* u32 []: hash table of the pieces that text can become */
    COLI_TOK_MERGES = 4,           /* coli_tok_merge [], by rank */
    COLI_TOK_MERGE_SLOTS = 5,      /* u32 []: hash table */
    COLI_TOK_ADDED_RAW = 6,        /* coli_tok_added [], sorted by text: matched before normalising */
    COLI_TOK_ADDED_NORMALIZED = 7, /* the same, matched after normalising */
    COLI_TOK_PREFIX = 8,           /* u32 []: ids added before the text */
    COLI_TOK_SUFFIX = 9,           /* u32 []: ids added after the text */
    COLI_TOK_STEPS = 10,           /* coli_tok_step [] */
    COLI_TOK_RANGES = 11,          /* coli_tok_range []: sorted within each step's part */
    COLI_TOK_BYTE_IDS = 12,        /* i32 [256]: the id of each byte (byte level, or the fallback <0xXX>), -1: none */
    COLI_TOK_ALIASES = 13,         /* u32 [aliases]: the id of piece num_ids + i */
    COLI_TOK_NUM_SECTIONS = 14
};

/* TOKEN_FLAGS */
enum {
    COLI_TOK_KNOWN = 1,   /* the id has a piece (an empty entry decodes to nothing) */
    COLI_TOK_SPECIAL = 2, /* left out when decoding, unless asked for */
    COLI_TOK_BYTE = 4     /* the piece is <0xXX>, one byte */
};

/* coli_tok_added.flags */
enum { COLI_TOK_ADDED_SPECIAL = 1, COLI_TOK_ADDED_LSTRIP = 2, COLI_TOK_ADDED_RSTRIP = 4, COLI_TOK_ADDED_SINGLE_WORD = 8 };

/* coli_tok_step.kind: how a piece is cut further. Matches and what lies between them become pieces. */
enum {
    COLI_TOK_STEP_GPT2 = 1,      /* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
    COLI_TOK_STEP_WORDS = 2,     /* (?i:'s|...)|[^\r\n\p{L}\p{N}]?A+|\p{N}{1,max}| ?[^\sA\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
                                    where A is class_mask (letters, or letters and marks): Llama 3, Qwen 2, 3 and 3.5 */
    COLI_TOK_STEP_O200K = 3,     /* GPT-4o and gpt-oss: see match_o200k */
    COLI_TOK_STEP_DEEPSEEK3 = 4, /* the third step of DeepSeek V3: see match_deepseek3 */
    COLI_TOK_STEP_RUN = 5,       /* S{1,max}, before it \s? or " ?" as prefix says; S: class_mask and ranges, negated or not */
    COLI_TOK_STEP_SPACE_END = 6, /* \s+$ */
    COLI_TOK_STEP_METASPACE = 7  /* a piece begins at every U+2581 */
};
enum { COLI_TOK_PREFIX_NONE = 0, COLI_TOK_PREFIX_ANY_SPACE = 1 /* \s? */, COLI_TOK_PREFIX_BLANK = 2 /* " ?" */ };

typedef struct coli_tok_section {
    uint32_t offset;
    uint32_t count; /* elements */
} coli_tok_section;

typedef struct coli_tok_header {
    uint8_t magic[4];   /*   0 COLI_TOK_MAGIC */
    uint32_t version;   /*   4 COLI_TOK_VERSION */
    uint32_t size;      /*   8 of the payload */
    uint32_t kind;      /*  12 */
    uint32_t flags;     /*  16 */
    uint32_t num_ids;   /*  20 at most the model's vocab_size */
    int32_t unk_id;     /*  24 -1: unknown units are left out */
    uint32_t max_probe; /*  28 longest search in either hash table, in slots */
    coli_tok_section sections[COLI_TOK_NUM_SECTIONS]; /* 32 */
    uint32_t reserved[12]; /* 144 zero */
} coli_tok_header;

typedef struct coli_tok_merge {
    uint32_t left, right, merged; /* ids */
} coli_tok_merge;

typedef struct coli_tok_added {
    uint32_t id;
    uint32_t offset, length; /* its text, in BYTES */
    uint32_t flags;
} coli_tok_added;

typedef struct coli_tok_step {
    uint32_t kind;
    uint32_t max;        /* 0: unlimited */
    uint32_t prefix;     /* COLI_TOK_PREFIX_* */
    uint32_t class_mask; /* 1 << COLI_CHAR_* (unicode.h) */
    uint32_t negate;     /* 1: everything but class_mask and ranges */
    uint32_t first_range, num_ranges; /* in RANGES */
    uint32_t reserved;   /* zero */
} coli_tok_step;

typedef struct coli_tok_range {
    uint32_t first, last; /* code points, both included */
} coli_tok_range;

_Static_assert(sizeof(coli_tok_header) == 192, "header");
_Static_assert(sizeof(coli_tok_merge) == 12 && sizeof(coli_tok_added) == 16, "entries");
_Static_assert(sizeof(coli_tok_step) == 32 && sizeof(coli_tok_range) == 8, "steps");

#endif
