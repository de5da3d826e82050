/* run_model.h: sequences through a session, call by call, their logits compared with what they should be: for tests that look
 * at residency. Uses make_file.h and check.h; header-only. */
#ifndef RUN_MODEL_H
#define RUN_MODEL_H

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "make_file.h"

#define SLOTS 3
#define TOKENS 24
#define VOCAB 97 /* of MAKE_SPEC_TINY */
#define SKIPPED(...) (fprintf(stderr, "skipped: " __VA_ARGS__), fputc('\n', stderr))

static char path[64]; /* of this process: several may run in one folder */

/* One of the ways weights can live. */
typedef struct way {
    const char *name;
    int32_t residency;
    uint64_t cache; /* STREAM: experts */
} way_t;

enum {
    MAP = COLIBRI_RESIDENCY_MAP,
    LOCK = COLIBRI_RESIDENCY_LOCK,
    HUGE = COLIBRI_RESIDENCY_HUGE,
    STREAM = COLIBRI_RESIDENCY_STREAM
};

/* Four layers, the first one dense, 36 experts, 3 a token. */
static inline make_spec_t rich_spec(uint32_t dtype) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.dtype = dtype;
    spec.layers = 4; spec.dense_layers = 1; spec.experts = 12; spec.top_k = 3; spec.shared = 56; spec.shared_gate = 1;
    return spec;
}

static inline uint8_t *write_spec(const make_spec_t *spec, size_t *size) { /* free() what it returns */
    uint8_t *file = make_model_file(spec, size);
    CHECK(file && write_model_file(path, file, *size));
    return file;
}

static inline colibri_config_t config_of(const way_t *way) {
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model_path = path;
    c.max_batch_size = SLOTS;
    c.max_seq_len = 2 * TOKENS;
    c.num_threads = 2;
    c.outputs = COLIBRI_OUTPUT_ALL;
    c.residency = way->residency;
    c.expert_cache_size = way->cache;
    return c;
}

static inline colibri_t *start(const colibri_config_t *c) {
    colibri_t *s = colibri_init(c);
    if (!s) fprintf(stderr, "%s\n", colibri_last_error());
    CHECK(s != NULL);
    return s;
}

static inline colibri_stats_t stats_of(const colibri_t *s) {
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    CHECK_EQ(colibri_stats(s, &stats), COLIBRI_OK);
    return stats;
}

static inline int32_t token_at(int32_t slot, int32_t position) {
    return (int32_t)(((uint32_t)position * 2654435761u + (uint32_t)slot * 40503u) % 65521 % VOCAB);
}

/* The next tokens of slots [0, slots): `piece`, of slot i i more (so that calls are ragged), up to position `end`. */
static inline bool hand_over(colibri_t *s, int32_t slots, int32_t piece, int32_t end, int32_t lengths[SLOTS]) {
    int32_t tokens[SLOTS * TOKENS], n = 0;
    for (int32_t i = 0; i < slots; i++) {
        int32_t at = colibri_slot_length(s, i);
        lengths[i] = end - at < piece + i ? end - at : piece + i;
        for (int32_t t = 0; t < lengths[i]; t++) tokens[n++] = token_at(i, at + t);
    }
    if (n) CHECK_EQ(colibri_set_input(s, tokens, lengths, slots), COLIBRI_OK);
    return n > 0;
}

/* Are the latest infer's rows those of `logits` [SLOTS][TOKENS][VOCAB]? Without `compare` they are put there instead. */
static inline bool rows_are(colibri_t *s, int32_t outputs, int32_t slots, const int32_t *lengths, float *logits,
                            bool compare) {
    static _Thread_local _Alignas(64) float out[SLOTS * TOKENS * VOCAB];
    size_t bytes, width = VOCAB;
    bool same = true;
    CHECK_EQ(colibri_output_size(s, &bytes), COLIBRI_OK);
    CHECK(bytes <= sizeof out);
    CHECK_EQ(colibri_get_output(s, out, bytes), COLIBRI_OK);
    const float *row = out;
    for (int32_t i = 0; i < slots; i++) {
        int32_t end = colibri_slot_length(s, i), n = outputs == COLIBRI_OUTPUT_LAST ? lengths[i] > 0 : lengths[i];
        float *want = logits + ((size_t)i * TOKENS + (size_t)(end - n)) * width;
        if (compare) same &= memcmp(row, want, (size_t)n * width * sizeof(float)) == 0;
        else memcpy(want, row, (size_t)n * width * sizeof(float));
        row += (size_t)(outputs == COLIBRI_OUTPUT_LAST ? 1 : n) * width;
    }
    return same;
}

/* Run all that is left of the slots' sequences up to `end` in calls of `piece` tokens. */
static inline bool run_to(colibri_t *s, int32_t outputs, int32_t slots, int32_t piece, int32_t end, float *logits,
                          bool compare) {
    int32_t lengths[SLOTS];
    bool same = true;
    while (hand_over(s, slots, piece, end, lengths)) {
        colibri_status_t status = colibri_infer(s);
        if (status) fprintf(stderr, "%s\n", colibri_last_error());
        CHECK_EQ(status, COLIBRI_OK);
        if (status) return false;
        same &= rows_are(s, outputs, slots, lengths, logits, compare);
    }
    return same;
}

/* The same from the start. */
static inline bool runs_right(colibri_t *s, int32_t outputs, int32_t slots, int32_t piece, float *logits) {
    CHECK_EQ(colibri_reset(s), COLIBRI_OK);
    return run_to(s, outputs, slots, piece, TOKENS, logits, true);
}

/* The logits [SLOTS][TOKENS][VOCAB] that every way must give, by MAP and one thread; free() them. */
static inline float *right_logits(void) {
    colibri_config_t c = config_of(&(way_t){"map", COLIBRI_RESIDENCY_MAP, 0});
    float *logits = calloc(SLOTS * TOKENS * VOCAB, sizeof(float));
    c.num_threads = 1;
    colibri_t *s = start(&c);
    run_to(s, c.outputs, SLOTS, TOKENS, TOKENS, logits, false);
    bool varied = false;
    for (size_t i = 1; i < SLOTS * TOKENS * VOCAB; i++) varied |= logits[i] != logits[0] && logits[i] - logits[i] == 0;
    CHECK(varied);
    colibri_free(s);
    return logits;
}

#endif
