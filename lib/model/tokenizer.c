/* tokenizer.c: opening the payload, and the outer half of encoding: text -> parts between added tokens -> normalised parts. The
 * words of a part are cut in tokenizer_split.c and encoded in tokenizer_bpe.c. */
#include "model/tokenizer.h"

#include <stdlib.h>

#include "model/tokenizer_internal.h"

#define MAX_TEXT_BYTES ((size_t)1 << 30) /* so that positions, also after normalising, fit 32 bits */

colibri_status_t coli_tok_no_memory(void) {
    return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the text's tokens; tokenize it in smaller parts");
}

colibri_status_t coli_tok_damaged(void) {
    return coli_fail(COLIBRI_ERR_FORMAT, "the file's tokenizer is damaged: an id is out of range; convert the model again");
}

/* ---- Opening ------------------------------------------------------------------------------------------------------------ */

static const uint8_t section_sizes[COLI_TOK_NUM_SECTIONS] = {4, 1, 1, 4, sizeof(coli_tok_merge), 4, sizeof(coli_tok_added),
    sizeof(coli_tok_added), 4, 4, sizeof(coli_tok_step), sizeof(coli_tok_range), 4, 4};

static colibri_status_t bad(const char *what, unsigned long long number) {
    return coli_fail(COLIBRI_ERR_FORMAT, "the file's tokenizer is damaged: %s (%llu); convert the model again", what, number);
}

static colibri_status_t check_header(const uint8_t *payload, uint64_t size, uint32_t vocab_size) {
    const coli_tok_header *h = (const void *)payload;
    if ((uintptr_t)payload % 8 != 0) return bad("it is not aligned to 8 bytes", (uintptr_t)payload % 8);
    if (size < sizeof *h || memcmp(h->magic, COLI_TOK_MAGIC, 4) != 0) return bad("it does not begin as a tokenizer does", size);
    if (h->version != COLI_TOK_VERSION) {
        return coli_fail(COLIBRI_ERR_VERSION, "the file's tokenizer has version %u, this library reads %u",
                         (unsigned)h->version, COLI_TOK_VERSION);
    }
    if (h->size != size) return bad("its size differs from the directory's", h->size);
    if (h->kind != COLI_TOK_SENTENCEPIECE && h->kind != COLI_TOK_BYTE_LEVEL) return bad("unknown kind", h->kind);
    if (h->flags & ~(uint32_t)COLI_TOK_ALL_FLAGS) return bad("unknown flags", h->flags);
    if (h->num_ids > vocab_size || h->num_ids > INT32_MAX)
        return bad("it has more ids than the model's vocabulary", h->num_ids);
    if (h->unk_id < -1 || (h->unk_id >= 0 && (uint32_t)h->unk_id >= h->num_ids)) return bad("unk_id", (uint32_t)h->unk_id);
    if (h->max_probe > COLI_TOK_MAX_PROBE) return bad("max_probe", h->max_probe);
    for (int i = 0; i < 12; i++) {
        if (h->reserved[i]) return bad("reserved bytes are not zero", h->reserved[i]);
    }
    for (int i = 0; i < COLI_TOK_NUM_SECTIONS; i++) {
        coli_tok_section section = h->sections[i];
        if (section.offset % 8 != 0 || section.offset > size ||
            (uint64_t)section.count * section_sizes[i] > size - section.offset) {
            return bad("a section lies outside", (unsigned)i);
        }
    }
    uint64_t num_pieces = (uint64_t)h->num_ids + h->sections[COLI_TOK_ALIASES].count;
    if (num_pieces >= UINT32_MAX || h->sections[COLI_TOK_OFFSETS].count != num_pieces + 1 ||
        h->sections[COLI_TOK_TOKEN_FLAGS].count != h->num_ids) {
        return bad("the table of pieces does not fit the number of ids", h->num_ids);
    }
    if (h->sections[COLI_TOK_BYTE_IDS].count != 256) return bad("byte ids", h->sections[COLI_TOK_BYTE_IDS].count);
    return COLIBRI_OK;
}

/* Take the sections' addresses; they lie inside. */
static void point_into(coli_tokenizer_t *t, const uint8_t *payload) {
    const coli_tok_header *h = (const void *)payload;
    const coli_tok_section *sections = h->sections;
#define SECTION(name, pointer, number)                           \
    do {                                                         \
        (pointer) = (const void *)(payload + sections[name].offset); \
        (number) = sections[name].count;                         \
    } while (0)
    uint32_t unused;
    t->kind = h->kind;
    t->flags = h->flags;
    t->num_ids = h->num_ids;
    t->max_probe = h->max_probe;
    t->unk_id = h->unk_id;
    SECTION(COLI_TOK_OFFSETS, t->offsets, unused);
    SECTION(COLI_TOK_ALIASES, t->aliases, unused);
    t->num_pieces = h->num_ids + unused;
    SECTION(COLI_TOK_TOKEN_FLAGS, t->token_flags, unused);
    SECTION(COLI_TOK_BYTES, t->bytes, t->num_bytes);
    SECTION(COLI_TOK_PIECE_SLOTS, t->piece_slots, t->num_piece_slots);
    SECTION(COLI_TOK_MERGES, t->merges, t->num_merges);
    SECTION(COLI_TOK_MERGE_SLOTS, t->merge_slots, t->num_merge_slots);
    SECTION(COLI_TOK_ADDED_RAW, t->added[COLI_TOK_RAW], t->num_added[COLI_TOK_RAW]);
    SECTION(COLI_TOK_ADDED_NORMALIZED, t->added[COLI_TOK_NORMALIZED], t->num_added[COLI_TOK_NORMALIZED]);
    SECTION(COLI_TOK_PREFIX, t->prefix, t->num_prefix);
    SECTION(COLI_TOK_SUFFIX, t->suffix, t->num_suffix);
    SECTION(COLI_TOK_STEPS, t->steps, t->num_steps);
    SECTION(COLI_TOK_RANGES, t->ranges, unused);
#undef SECTION
    (void)unused;
}

static colibri_status_t check_added(coli_tokenizer_t *t, int set) {
    for (uint32_t i = 0; i < t->num_added[set]; i++) {
        const coli_tok_added *added = t->added[set] + i;
        if (added->id >= t->num_ids || added->length == 0 || added->length > COLI_TOK_MAX_ADDED_BYTES ||
            added->offset > t->num_bytes || added->length > t->num_bytes - added->offset) {
            return bad("an added token is out of range", i);
        }
        /* Only whole characters are taken from a text, so that what is left of it is valid, too. */
        if (!coli_utf8_is_valid(t->bytes + added->offset, added->length)) return bad("an added token is not UTF-8", i);
        t->added_begins[set][t->bytes[added->offset]] = true;
    }
    return COLIBRI_OK;
}

static colibri_status_t check_steps(const coli_tokenizer_t *t, uint32_t num_ranges) {
    if (t->num_steps > COLI_TOK_MAX_STEPS) return bad("too many steps", t->num_steps);
    for (uint32_t i = 0; i < t->num_steps; i++) {
        const coli_tok_step *step = t->steps + i;
        if (step->kind < COLI_TOK_STEP_GPT2 || step->kind > COLI_TOK_STEP_METASPACE) return bad("unknown step", step->kind);
        if (step->first_range > num_ranges || step->num_ranges > num_ranges - step->first_range) {
            return bad("a step's ranges are out of range", i);
        }
    }
    return COLIBRI_OK;
}

static colibri_status_t check_ids(coli_tokenizer_t *t, const int32_t *byte_ids) {
    for (int i = 0; i < 256; i++) {
        if (byte_ids[i] < -1 || (byte_ids[i] >= 0 && (uint32_t)byte_ids[i] >= t->num_ids))
            return bad("the id of a byte", (unsigned)i);
        t->byte_ids[i] = byte_ids[i];
    }
    for (uint32_t i = 0; i < t->num_prefix; i++) {
        if (t->prefix[i] >= t->num_ids) return bad("an id before the text", t->prefix[i]);
    }
    for (uint32_t i = 0; i < t->num_suffix; i++) {
        if (t->suffix[i] >= t->num_ids) return bad("an id after the text", t->suffix[i]);
    }
    return COLIBRI_OK;
}

colibri_status_t coli_tokenizer_open(const uint8_t *payload, uint64_t size, uint32_t vocab_size, coli_tokenizer_t **tokenizer) {
    *tokenizer = NULL;
    colibri_status_t status = check_header(payload, size, vocab_size);
    if (status) return status;
    coli_tokenizer_t *t = calloc(1, sizeof *t);
    if (!t) return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the tokenizer's view (%zu bytes)", sizeof *t);
    const coli_tok_section *sections = ((const coli_tok_header *)(const void *)payload)->sections;
    point_into(t, payload);
    t->vocab_size = vocab_size;
    status = check_added(t, COLI_TOK_RAW);
    if (!status) status = check_added(t, COLI_TOK_NORMALIZED);
    if (!status) status = check_steps(t, sections[COLI_TOK_RANGES].count);
    if (!status) status = check_ids(t, (const void *)(payload + sections[COLI_TOK_BYTE_IDS].offset));
    if (status) {
        free(t);
        return status;
    }
    for (int i = 0; i < 128; i++) t->ascii_ids[i] = (int32_t)coli_tok_find_piece(t, (const uint8_t[]){(uint8_t)i}, 1);
    *tokenizer = t;
    return COLIBRI_OK;
}

void coli_tokenizer_close(coli_tokenizer_t *tokenizer) { free(tokenizer); }

/* ---- Encoding ----------------------------------------------------------------------------------------------------------- */

colibri_status_t coli_tok_emit(coli_tok_job_t *job, uint32_t id) {
    if (id >= job->tokenizer->num_ids) return coli_tok_damaged();
    if (job->count < job->capacity) job->tokens[job->count] = (int32_t)id;
    job->count++;
    return COLIBRI_OK;
}

static bool append(coli_bytes_t *out, const uint8_t *s, size_t n) {
    if (!coli_bytes_reserve(out, n)) return false;
    if (n) memcpy(out->data + out->size, s, n);
    out->size += n;
    return true;
}

/* Append s with every space as U+2581. */
static bool append_replaced(coli_bytes_t *out, const uint8_t *s, size_t n) {
    for (size_t at = 0; at < n;) {
        const uint8_t *space = memchr(s + at, ' ', n - at);
        size_t end = space ? (size_t)(space - s) : n;
        if (!append(out, s + at, end - at)) return false;
        if (space && !append(out, (const uint8_t *)COLI_TOK_METASPACE_TEXT, 3)) return false;
        at = space ? end + 1 : n;
    }
    return true;
}

/* What lies between added tokens: as the steps see it, then cut and encoded. `first`: it begins where the whole text begins. */
static colibri_status_t encode_piece(coli_tok_job_t *job, const uint8_t *s, size_t n, bool first) {
    uint32_t flags = job->tokenizer->flags;
    coli_bytes_t *piece = &job->piece;
    piece->size = 0;
    bool ok = true;
    if (flags & COLI_TOK_METASPACE) {
        bool begins = s[0] == ' ' || coli_tok_is_metaspace(s, n);
        bool prepend = flags & COLI_TOK_METASPACE_ALWAYS || (flags & COLI_TOK_METASPACE_FIRST && first);
        if (prepend && !begins) ok = append(piece, (const uint8_t *)COLI_TOK_METASPACE_TEXT, 3);
        ok = ok && append_replaced(piece, s, n);
    } else if (flags & COLI_TOK_PREFIX_SPACE && s[0] != ' ') {
        ok = append(piece, (const uint8_t *)" ", 1) && append(piece, s, n);
    } else {
        return coli_tok_split(job, 0, s, 0, n);
    }
    return ok ? coli_tok_split(job, 0, piece->data, 0, piece->size) : coli_tok_no_memory();
}

/* The longest added token of a set that s begins with, NULL: none. The set is sorted, so those that share the bytes read so far
 * are neighbours, and the range narrows byte by byte. */
static const coli_tok_added *longest_added(const coli_tokenizer_t *tok, int set, const uint8_t *s, size_t n) {
    const coli_tok_added *added = tok->added[set], *best = NULL;
    uint32_t low = 0, high = tok->num_added[set];
    for (uint32_t depth = 0; low < high; depth++) {
        if (added[low].length == depth) best = added + low++; /* the shortest of them stands first */
        if (depth == n) break;
        uint32_t bounds[2]; /* where entries whose next byte is at least s[depth], and more than it, begin */
        for (int side = 0; side < 2; side++) {
            uint32_t a = low, b = high;
            while (a < b) {
                uint32_t middle = (a + b) / 2;
                int byte = added[middle].length > depth ? tok->bytes[added[middle].offset + depth] : -1;
                if (byte < s[depth] + side) a = middle + 1;
                else b = middle;
            }
            bounds[side] = a;
        }
        low = bounds[0];
        high = bounds[1];
    }
    return best;
}

static uint32_t mask_before(const uint8_t *s, size_t at) {
    size_t begin = at - 1, length;
    while (begin > 0 && (s[begin] & 0xC0) == 0x80) begin--;
    return coli_char_mask(coli_utf8_at(s + begin, &length));
}

/* Widen a match s[*begin ... *end - 1] over white space as the token asks; false: it must be a word of its own and is not. */
static bool fit_added(const coli_tok_added *added, const uint8_t *s, size_t n, size_t taken, size_t *begin, size_t *end) {
    size_t length;
    if (added->flags & COLI_TOK_ADDED_SINGLE_WORD) {
        if (*begin > 0 && mask_before(s, *begin) & COLI_MASK_WORD) return false;
        if (*end < n && coli_char_mask(coli_utf8_at(s + *end, &length)) & COLI_MASK_WORD) return false;
    }
    if (added->flags & COLI_TOK_ADDED_LSTRIP) {
        size_t at = *begin;
        while (at > taken && mask_before(s, at) & COLI_MASK_SPACE) {
            do at--;
            while (at > taken && (s[at] & 0xC0) == 0x80);
        }
        *begin = COLI_MAX(at, taken);
    }
    if (added->flags & COLI_TOK_ADDED_RSTRIP) {
        while (*end < n && coli_char_mask(coli_utf8_at(s + *end, &length)) & COLI_MASK_SPACE) *end += length;
    }
    return true;
}

static colibri_status_t encode_part(coli_tok_job_t *job, const uint8_t *s, size_t n, bool first);

static colibri_status_t encode_between(coli_tok_job_t *job, int set, const uint8_t *s, size_t begin, size_t end, bool first) {
    if (begin >= end) return COLIBRI_OK;
    first = first && begin == 0;
    return set == COLI_TOK_RAW ? encode_part(job, s + begin, end - begin, first)
                               : encode_piece(job, s + begin, end - begin, first);
}

/* Find the added tokens of a set, write their ids, and encode what lies between them. */
static colibri_status_t encode_added(coli_tok_job_t *job, int set, const uint8_t *s, size_t n, bool first) {
    const coli_tokenizer_t *tok = job->tokenizer;
    colibri_status_t status = COLIBRI_OK;
    size_t taken = 0; /* text before this is done */
    for (size_t at = 0; at < n && tok->num_added[set] && !status;) {
        const coli_tok_added *added = tok->added_begins[set][s[at]] ? longest_added(tok, set, s + at, n - at) : NULL;
        if (!added) {
            at++;
            continue;
        }
        size_t begin = at, end = at + added->length;
        at = end;
        if (added->flags & COLI_TOK_ADDED_SPECIAL && !job->parse_special) continue;
        if (!fit_added(added, s, n, taken, &begin, &end)) continue;
        status = encode_between(job, set, s, taken, begin, first);
        /* Nothing is left of a token whose text the one before took as its white space. */
        if (!status && begin < end) status = coli_tok_emit(job, added->id);
        taken = end;
    }
    return status ? status : encode_between(job, set, s, taken, n, first);
}

/* Normalise a part, then look for added tokens that are matched in normalised text. */
static colibri_status_t encode_part(coli_tok_job_t *job, const uint8_t *s, size_t n, bool first) {
    uint32_t flags = job->tokenizer->flags;
    coli_bytes_t *normalized = &job->normalized;
    bool ok = true;
    if (flags & COLI_TOK_NFC && !coli_nfc_is_plain(s, n)) {
        job->composed.size = 0;
        ok = coli_nfc(s, n, &job->composed);
        s = job->composed.data;
        n = job->composed.size;
    }
    if (flags & (COLI_TOK_PREPEND | COLI_TOK_REPLACE)) {
        normalized->size = 0;
        if (flags & COLI_TOK_PREPEND) ok = ok && append(normalized, (const uint8_t *)COLI_TOK_METASPACE_TEXT, 3);
        ok = ok && (flags & COLI_TOK_REPLACE ? append_replaced(normalized, s, n) : append(normalized, s, n));
        s = normalized->data;
        n = normalized->size;
    }
    return ok ? encode_added(job, COLI_TOK_NORMALIZED, s, n, first) : coli_tok_no_memory();
}

static colibri_status_t encode_text(coli_tok_job_t *job, const uint8_t *s, size_t n, uint32_t flags) {
    const coli_tokenizer_t *tok = job->tokenizer;
    colibri_status_t status = COLIBRI_OK;
    bool add = flags & COLIBRI_TOKENIZE_ADD_SPECIAL;
    for (uint32_t i = 0; add && i < tok->num_prefix && !status; i++) status = coli_tok_emit(job, tok->prefix[i]);
    if (!status) status = encode_added(job, COLI_TOK_RAW, s, n, true);
    for (uint32_t i = 0; add && i < tok->num_suffix && !status; i++) status = coli_tok_emit(job, tok->suffix[i]);
    return status;
}

static colibri_status_t check_input(const char *text, size_t bytes, uint32_t flags, const int32_t *tokens, size_t capacity,
                                    const size_t *count) {
    if (!count) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "count is NULL; it receives the number of tokens");
    if (!text && bytes) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "text is NULL but bytes is %zu", bytes);
    if (!tokens && capacity) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "tokens is NULL but capacity is %zu", capacity);
    if (flags & ~(COLIBRI_TOKENIZE_ADD_SPECIAL | COLIBRI_TOKENIZE_PARSE_SPECIAL)) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "flags 0x%x has unknown bits; COLIBRI_TOKENIZE_* are defined",
                         (unsigned)flags);
    }
    if (bytes > MAX_TEXT_BYTES) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "the text has %zu bytes, at most %zu are taken at once; cut it", bytes,
                         MAX_TEXT_BYTES);
    }
    return COLIBRI_OK;
}

colibri_status_t coli_tokenizer_encode(const coli_tokenizer_t *tokenizer, const char *text, size_t bytes, uint32_t flags,
                                       int32_t *tokens, size_t capacity, size_t *count) {
    colibri_status_t status = check_input(text, bytes, flags, tokens, capacity, count);
    if (status) return status;
    *count = 0;
    coli_tok_job_t job = {.tokenizer = tokenizer, .tokens = tokens, .capacity = capacity,
                          .parse_special = (flags & COLIBRI_TOKENIZE_PARSE_SPECIAL) != 0};
    const uint8_t *s = (const uint8_t *)text;
    coli_bytes_t repaired = {0};
    if (!coli_utf8_is_valid(s, bytes)) {
        if (!coli_utf8_repair(s, bytes, &repaired)) status = coli_tok_no_memory();
        s = repaired.data;
        bytes = repaired.size;
    }
    if (!status) status = encode_text(&job, s, bytes, flags);
    coli_bytes_free(&repaired);
    coli_bytes_free(&job.composed);
    coli_bytes_free(&job.normalized);
    coli_bytes_free(&job.piece);
    free(job.symbols);
    free(job.heap.data);
    if (status) return status;
    *count = job.count;
    if (job.count <= capacity) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_BUFFER_TOO_SMALL, "the text takes %zu tokens, the buffer holds %zu", job.count, capacity);
}
