/* tokenizer_bpe.c: from one word to ids: units (bytes or characters) are joined by the merges, lowest rank first, leftmost
 * first among equals. Short words search for the next merge, long ones keep a heap: n log n, whatever the text. */
#include <stdlib.h>

#include "model/tokenizer_internal.h"

#define SHORT_WORD 24 /* units up to which searching is quicker than a heap */

/* ---- Tables of the payload ---------------------------------------------------------------------------------------------- */

const uint8_t *coli_tok_piece(const coli_tokenizer_t *tok, uint32_t index, size_t *n) {
    *n = 0;
    if (index >= tok->num_pieces) return tok->bytes;
    uint32_t begin = tok->offsets[index], end = tok->offsets[index + 1];
    if (begin > end || end > tok->num_bytes) return tok->bytes;
    *n = end - begin;
    return tok->bytes + begin;
}

int64_t coli_tok_find_piece(const coli_tokenizer_t *tok, const uint8_t *s, size_t n) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ s[i]) * 16777619u;
    h ^= h >> 15;
    h *= 0x2c1b3c6du;
    h ^= h >> 12;
    uint32_t slots = tok->num_piece_slots, slot = (uint32_t)((uint64_t)h * slots >> 32);
    for (uint32_t i = 0; i < tok->max_probe && slots; i++) {
        uint32_t index = tok->piece_slots[slot] - 1;
        if (index >= tok->num_pieces) return -1; /* an empty slot is UINT32_MAX here */
        size_t length;
        const uint8_t *piece = coli_tok_piece(tok, index, &length);
        if (length == n && memcmp(piece, s, n) == 0) return index < tok->num_ids ? index : tok->aliases[index - tok->num_ids];
        if (++slot == slots) slot = 0;
    }
    return -1;
}

/* The rank at which two neighbours merge, COLI_TOK_NONE: never. */
static uint32_t find_merge(const coli_tokenizer_t *tok, uint32_t left, uint32_t right) {
    uint64_t x = left * 0x9E3779B97F4A7C15u + right * 0xC2B2AE3D27D4EB4Fu;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    uint32_t slots = tok->num_merge_slots, slot = (uint32_t)((x >> 32) * slots >> 32);
    for (uint32_t i = 0; i < tok->max_probe && slots; i++) {
        uint32_t rank = tok->merge_slots[slot] - 1;
        if (rank >= tok->num_merges) return COLI_TOK_NONE; /* an empty slot is COLI_TOK_NONE here */
        if (tok->merges[rank].left == left && tok->merges[rank].right == right) return rank;
        if (++slot == slots) slot = 0;
    }
    return COLI_TOK_NONE;
}

/* ---- Units -------------------------------------------------------------------------------------------------------------- */

static colibri_status_t reserve_symbols(coli_tok_job_t *job, size_t n) {
    if (n <= job->symbol_capacity) return COLIBRI_OK;
    size_t capacity = COLI_MAX(n, job->symbol_capacity * 2);
    if (capacity > SIZE_MAX / sizeof(coli_tok_symbol_t)) return coli_tok_no_memory(); /* where size_t has 32 bits */
    coli_tok_symbol_t *symbols = realloc(job->symbols, capacity * sizeof *symbols);
    if (!symbols) return coli_tok_no_memory();
    job->symbols = symbols;
    job->symbol_capacity = capacity;
    return COLIBRI_OK;
}

COLI_INLINE void push_symbol(coli_tok_job_t *job, uint32_t id) {
    COLI_ASSERT(job->num_symbols < job->symbol_capacity);
    job->symbols[job->num_symbols++].id = id;
}

/* Characters that are no piece: as their bytes, as unk, or left out. `waiting`: an unk is still to be written. (Bytes do not
 * write it first: so it is defined, by what `tokenizers` does.) */
static void push_unknown(coli_tok_job_t *job, const uint8_t *s, size_t n, bool *waiting) {
    const coli_tokenizer_t *tok = job->tokenizer;
    bool fallback = (tok->flags & COLI_TOK_BYTE_FALLBACK) != 0;
    for (size_t i = 0; fallback && i < n; i++) fallback = tok->byte_ids[s[i]] >= 0;
    if (fallback) {
        for (size_t i = 0; i < n; i++) push_symbol(job, (uint32_t)tok->byte_ids[s[i]]);
    } else if (tok->unk_id >= 0) {
        if (*waiting && !(tok->flags & COLI_TOK_FUSE_UNK)) push_symbol(job, (uint32_t)tok->unk_id);
        *waiting = true;
    }
}

/* The word as units, in job->symbols: at most one per byte. */
static colibri_status_t make_units(coli_tok_job_t *job, const uint8_t *s, size_t n) {
    const coli_tokenizer_t *tok = job->tokenizer;
    colibri_status_t status = reserve_symbols(job, n);
    if (status) return status;
    job->num_symbols = 0;
    bool waiting = false, characters = tok->kind == COLI_TOK_SENTENCEPIECE;
    size_t length = 1;
    for (size_t at = 0; at < n; at += length) {
        int64_t id;
        if (!characters) {
            id = tok->byte_ids[s[at]];
        } else if (s[at] < 0x80) {
            length = 1;
            id = tok->ascii_ids[s[at]];
        } else {
            coli_utf8_at(s + at, &length);
            id = coli_tok_find_piece(tok, s + at, length);
        }
        if (id >= 0) {
            if (waiting) push_symbol(job, (uint32_t)tok->unk_id);
            waiting = false;
            push_symbol(job, (uint32_t)id);
        } else {
            push_unknown(job, s + at, length, &waiting);
        }
    }
    if (waiting) push_symbol(job, (uint32_t)tok->unk_id);
    return COLIBRI_OK;
}

/* ---- Merging ------------------------------------------------------------------------------------------------------------ */

/* Few units: look through all pairs for the lowest rank, as often as there is one. */
static colibri_status_t merge_short(coli_tok_job_t *job) {
    const coli_tokenizer_t *tok = job->tokenizer;
    coli_tok_symbol_t *symbols = job->symbols;
    uint32_t rank[SHORT_WORD]; /* of symbols i and i + 1 */
    size_t n = job->num_symbols;
    for (size_t i = 0; i + 1 < n; i++) rank[i] = find_merge(tok, symbols[i].id, symbols[i + 1].id);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == COLI_TOK_NONE) break;
        symbols[best].id = tok->merges[rank[best]].merged;
        for (size_t i = best + 1; i + 1 < n; i++) {
            symbols[i].id = symbols[i + 1].id;
            rank[i - 1] = rank[i]; /* of the pairs right of the merged one; rank[best] is set below */
        }
        n--;
        if (best > 0) rank[best - 1] = find_merge(tok, symbols[best - 1].id, symbols[best].id);
        if (best + 1 < n) rank[best] = find_merge(tok, symbols[best].id, symbols[best + 1].id);
    }
    colibri_status_t status = COLIBRI_OK;
    for (size_t i = 0; i < n && !status; i++) status = coli_tok_emit(job, symbols[i].id);
    return status;
}

static void sift_down(uint64_t *heap, size_t size, size_t at) {
    uint64_t x = heap[at];
    for (size_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= x) break;
        heap[at] = heap[child];
    }
    heap[at] = x;
}

static bool heap_append(coli_tok_heap_t *heap, uint64_t x) {
    if (heap->size == heap->capacity) {
        size_t capacity = COLI_MAX((size_t)256, heap->capacity * 2);
        if (capacity > SIZE_MAX / sizeof(uint64_t)) return false;
        uint64_t *data = realloc(heap->data, capacity * sizeof *data);
        if (!data) return false;
        heap->data = data;
        heap->capacity = capacity;
    }
    heap->data[heap->size++] = x;
    return true;
}

static bool heap_push(coli_tok_heap_t *heap, uint64_t x) {
    if (!heap_append(heap, x)) return false;
    size_t at = heap->size - 1;
    for (size_t parent; at > 0 && heap->data[parent = (at - 1) / 2] > x; at = parent) heap->data[at] = heap->data[parent];
    heap->data[at] = x;
    return true;
}

static uint64_t heap_pop(coli_tok_heap_t *heap) {
    uint64_t top = heap->data[0];
    heap->data[0] = heap->data[--heap->size];
    if (heap->size) sift_down(heap->data, heap->size, 0);
    return top;
}

/* Push the pair that begins at `left`, if it merges. */
static bool push_pair(coli_tok_job_t *job, uint32_t left) {
    const coli_tok_symbol_t *symbols = job->symbols;
    if (left == COLI_TOK_NONE || symbols[left].next == COLI_TOK_NONE) return true;
    uint32_t rank = find_merge(job->tokenizer, symbols[left].id, symbols[symbols[left].next].id);
    return rank == COLI_TOK_NONE || heap_push(&job->heap, (uint64_t)rank << 32 | left);
}

/* Link the symbols and fill the heap with the pairs that merge. */
static bool start_heap(coli_tok_job_t *job) {
    coli_tok_symbol_t *symbols = job->symbols;
    size_t n = job->num_symbols;
    coli_tok_heap_t *heap = &job->heap;
    heap->size = 0;
    for (size_t i = 0; i < n; i++) {
        symbols[i].prev = i ? (uint32_t)(i - 1) : COLI_TOK_NONE;
        symbols[i].next = i + 1 < n ? (uint32_t)(i + 1) : COLI_TOK_NONE;
        uint32_t rank = i + 1 < n ? find_merge(job->tokenizer, symbols[i].id, symbols[i + 1].id) : COLI_TOK_NONE;
        if (rank != COLI_TOK_NONE && !heap_append(heap, (uint64_t)rank << 32 | i)) return false;
    }
    for (size_t i = heap->size / 2; i-- > 0;) sift_down(heap->data, heap->size, i);
    return true;
}

static colibri_status_t merge_long(coli_tok_job_t *job) {
    const coli_tokenizer_t *tok = job->tokenizer;
    coli_tok_symbol_t *symbols = job->symbols;
    if (!start_heap(job)) return coli_tok_no_memory();
    while (job->heap.size) {
        uint64_t top = heap_pop(&job->heap);
        const coli_tok_merge *merge = tok->merges + (top >> 32);
        uint32_t left = (uint32_t)top, right = symbols[left].next;
        /* A pair that has changed since it was pushed is not this merge's pair any more. */
        if (symbols[left].id != merge->left || right == COLI_TOK_NONE || symbols[right].id != merge->right) continue;
        if (merge->merged >= tok->num_ids) return coli_tok_damaged();
        symbols[left].id = merge->merged;
        symbols[left].next = symbols[right].next;
        if (symbols[right].next != COLI_TOK_NONE) symbols[symbols[right].next].prev = left;
        symbols[right].id = COLI_TOK_DEAD;
        symbols[right].next = COLI_TOK_NONE;
        if (!push_pair(job, symbols[left].prev) || !push_pair(job, left)) return coli_tok_no_memory();
    }
    colibri_status_t status = COLIBRI_OK;
    for (uint32_t i = 0; i != COLI_TOK_NONE && !status; i = symbols[i].next) status = coli_tok_emit(job, symbols[i].id);
    return status;
}

static colibri_status_t merge_word(coli_tok_job_t *job, const uint8_t *s, size_t n) {
    colibri_status_t status = make_units(job, s, n);
    if (status || job->num_symbols == 0) return status;
    return job->num_symbols <= SHORT_WORD ? merge_short(job) : merge_long(job);
}

colibri_status_t coli_tok_word(coli_tok_job_t *job, const uint8_t *s, size_t n) {
    const coli_tokenizer_t *tok = job->tokenizer;
    if (tok->flags & COLI_TOK_IGNORE_MERGES) {
        int64_t id = coli_tok_find_piece(tok, s, n);
        if (id >= 0) return coli_tok_emit(job, (uint32_t)id);
    }
    if (!(tok->flags & COLI_TOK_CUT_AT_SPACE)) return merge_word(job, s, n);
    for (size_t begin = 0, at = 0; begin < n; begin = at) {
        while (coli_tok_is_metaspace(s + at, n - at)) at += 3;
        while (at < n && !coli_tok_is_metaspace(s + at, n - at)) at++;
        colibri_status_t status = merge_word(job, s + begin, at - begin);
        if (status) return status;
    }
    return COLIBRI_OK;
}
