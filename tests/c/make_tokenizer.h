/* make_tokenizer.h: a small tokenizer payload, made by hand: what the tests of the tokenizer and of the format open.
 *
 * Byte level: ids 0 ... 255 are the bytes, 256 = "ab", 257 = "abc", 258 = <x>, added and special, put before every text. */
#ifndef MAKE_TOKENIZER_H
#define MAKE_TOKENIZER_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_format.h"

enum { NUM_IDS = 259, NUM_BYTES = 256 + 2 + 3 + 3 };

typedef struct payload {
    coli_tok_header header;
    uint32_t offsets[NUM_IDS + 1];
    uint8_t token_flags[NUM_IDS + 5];
    uint8_t bytes[NUM_BYTES];
    coli_tok_merge merges[2];
    uint32_t merge_slots[2];
    coli_tok_added added[1];
    uint32_t prefix[2];
    coli_tok_step steps[1];
    int32_t byte_ids[256];
} payload;

#define SECTION(number, member, elements)                                                                            \
    p->header.sections[number] = (coli_tok_section){offsetof(payload, member), elements}

static inline payload *make_payload(void) {
    payload *p = calloc(1, sizeof *p);
    memcpy(p->header.magic, COLI_TOK_MAGIC, 4);
    p->header.version = COLI_TOK_VERSION;
    p->header.size = sizeof *p;
    p->header.kind = COLI_TOK_BYTE_LEVEL;
    p->header.num_ids = NUM_IDS;
    p->header.unk_id = -1;
    p->header.max_probe = 2;
    for (int i = 0; i < COLI_TOK_NUM_SECTIONS; i++) p->header.sections[i].offset = sizeof p->header;
    SECTION(COLI_TOK_OFFSETS, offsets, NUM_IDS + 1);
    SECTION(COLI_TOK_TOKEN_FLAGS, token_flags, NUM_IDS);
    SECTION(COLI_TOK_BYTES, bytes, NUM_BYTES);
    SECTION(COLI_TOK_MERGES, merges, 2);
    SECTION(COLI_TOK_MERGE_SLOTS, merge_slots, 2);
    SECTION(COLI_TOK_ADDED_RAW, added, 1);
    SECTION(COLI_TOK_PREFIX, prefix, 1);
    SECTION(COLI_TOK_STEPS, steps, 1);
    SECTION(COLI_TOK_BYTE_IDS, byte_ids, 256);
    for (int i = 0; i < 256; i++) {
        p->bytes[i] = (uint8_t)i;
        p->offsets[i] = (uint32_t)i;
        p->byte_ids[i] = i;
    }
    memcpy(p->bytes + 256, "ababc<x>", 8);
    for (int i = 0; i < 4; i++) p->offsets[256 + i] = (uint32_t[]){256, 258, 261, 264}[i];
    memset(p->token_flags, COLI_TOK_KNOWN, NUM_IDS);
    p->token_flags[258] = COLI_TOK_KNOWN | COLI_TOK_SPECIAL;
    p->merges[0] = (coli_tok_merge){'a', 'b', 256};
    p->merges[1] = (coli_tok_merge){256, 'c', 257};
    p->merge_slots[0] = 1; /* two slots, both searched: any order is right */
    p->merge_slots[1] = 2;
    p->added[0] = (coli_tok_added){258, 261, 3, COLI_TOK_ADDED_SPECIAL};
    p->prefix[0] = 258;
    p->steps[0].kind = COLI_TOK_STEP_GPT2;
    return p;
}

#endif
