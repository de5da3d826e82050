/* tokenizer_split.c: from a part of the text to words: the pre-tokenizer's regular expressions, written out by hand.
 *
 * A matcher answers where the match that begins at `at` ends; `at` itself means that none begins there. It repeats what a
 * backtracking engine would find (first alternative that can succeed, greedy counts), in time linear in what it looks at.
 * Text is valid UTF-8. A piece's end is the text's end for a matcher: (?!\S) holds there. */
#include "model/tokenizer_internal.h"

typedef struct span {
    const uint8_t *s;
    size_t end;
} span;

typedef struct glyph {
    uint32_t code, mask; /* mask 0: the end of the piece */
    size_t length;
} glyph;

COLI_INLINE glyph look(span t, size_t at) {
    glyph g = {0, 0, 0};
    if (at < t.end) {
        g.code = coli_utf8_at(t.s + at, &g.length);
        g.mask = coli_char_mask(g.code);
    }
    return g;
}

/* The end of the run of characters whose class is in `mask`. */
static size_t run_end(span t, size_t at, uint32_t mask) {
    for (glyph g = look(t, at); g.mask & mask; g = look(t, at)) at += g.length;
    return at;
}

COLI_INLINE bool is_newline(uint32_t code) { return code == '\r' || code == '\n'; }

static size_t newlines_end(span t, size_t at) {
    while (at < t.end && is_newline(t.s[at])) at++;
    return at;
}

/* 's|'t|'re|'ve|'m|'ll|'d, `fold`: in either case (s also as U+017F). */
static size_t match_contraction(span t, size_t at, bool fold) {
    size_t n = t.end - at;
    const uint8_t *s = t.s + at;
    if (n < 2 || s[0] != '\'') return at;
    uint8_t lower = fold ? 0x20 : 0;
    uint8_t a = s[1] | lower, b = n > 2 ? (uint8_t)(s[2] | lower) : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return at + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return at + 3;
    return fold && n > 2 && s[1] == 0xC5 && s[2] == 0xBF ? at + 3 : at;
}

/* \s*[\r\n]+ (if newlines) | \s+(?!\S) | \s+ */
static size_t match_space(span t, size_t at, bool newlines) {
    size_t end = at, last = at, after_newline = at;
    for (glyph g = look(t, at); g.mask & COLI_MASK_SPACE; g = look(t, end)) {
        last = end;
        end += g.length;
        if (is_newline(g.code)) after_newline = end;
    }
    if (newlines && after_newline > at) return after_newline;
    if (end == t.end || last == at) return end; /* the lookahead holds at once, or only the last alternative is left */
    return last;
}

/* " ?" and then a run of `mask`; `at` if there is no run. */
static size_t match_blank_run(span t, size_t at, uint32_t mask) {
    size_t from = at < t.end && t.s[at] == ' ' ? at + 1 : at;
    size_t end = run_end(t, from, mask);
    return end > from ? end : at; /* a blank itself is never in mask */
}

static size_t match_gpt2(span t, size_t at) {
    size_t end = match_contraction(t, at, false);
    if (end == at) end = match_blank_run(t, at, COLI_MASK_L);
    if (end == at) end = match_blank_run(t, at, COLI_MASK_N);
    if (end == at) end = match_blank_run(t, at, ~(COLI_MASK_SPACE | COLI_MASK_L | COLI_MASK_N));
    return end > at ? end : match_space(t, at, false);
}

/* S{1,max} of a class; max 0: unlimited. */
static size_t match_count(span t, size_t at, uint32_t mask, uint32_t max) {
    size_t end = at;
    uint32_t count = 0;
    for (glyph g = look(t, at); g.mask & mask && (max == 0 || count < max); g = look(t, end)) {
        end += g.length;
        count++;
    }
    return end;
}

/* [not \r, \n nor of class `barred`]? and then a run of `letters`. */
static size_t match_prefixed_run(span t, size_t at, uint32_t barred, uint32_t letters) {
    glyph g = look(t, at);
    if (g.length && !is_newline(g.code) && !(g.mask & barred)) {
        size_t end = run_end(t, at + g.length, letters);
        if (end > at + g.length) return end;
    }
    return run_end(t, at, letters);
}

static size_t match_words(span t, size_t at, const coli_tok_step *step) {
    uint32_t letters = step->class_mask;
    size_t end = match_contraction(t, at, true);
    if (end == at) end = match_prefixed_run(t, at, COLI_MASK_L | COLI_MASK_N, letters);
    if (end == at) end = match_count(t, at, COLI_MASK_N, step->max);
    if (end == at) {
        end = match_blank_run(t, at, ~(COLI_MASK_SPACE | letters | COLI_MASK_N));
        if (end > at) end = newlines_end(t, end);
    }
    return end > at ? end : match_space(t, at, true);
}

/* With U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] and D = [\p{Ll}\p{Lm}\p{Lo}\p{M}], from `from` on: U*D+ if `lower`, else U+D*. */
static size_t match_cased(span t, size_t from, bool lower) {
    const uint32_t both = COLI_MASK(MODIFIER) | COLI_MASK(LETTER) | COLI_MASK_M;
    const uint32_t upper = both | COLI_MASK(UPPER) | COLI_MASK(TITLE), down = both | COLI_MASK(LOWER);
    size_t end = from, after_both = from;
    for (glyph g = look(t, end); g.mask & upper; g = look(t, end)) {
        end += g.length;
        if (g.mask & both) after_both = end;
    }
    size_t rest = run_end(t, end, down);
    if (!lower) return end > from ? rest : from;
    /* U* gives back characters until D+ has one: the last that is in both. */
    return rest > end ? rest : after_both;
}

/* P?U*D+C?|P?U+D*C?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
 * where P = [^\r\n\p{L}\p{N}] and C = (?i:'s|'t|'re|'ve|'m|'ll|'d) */
static size_t match_o200k(span t, size_t at) {
    glyph g = look(t, at);
    bool prefix = g.length && !is_newline(g.code) && !(g.mask & (COLI_MASK_L | COLI_MASK_N));
    for (int lower = 1; lower >= 0; lower--) {
        size_t from = at + g.length, end = prefix ? match_cased(t, from, lower) : from;
        if (end == from) end = match_cased(t, from = at, lower);
        if (end > from) return match_contraction(t, end, true);
    }
    size_t end = match_count(t, at, COLI_MASK_N, 3);
    if (end > at) return end;
    end = match_blank_run(t, at, ~(COLI_MASK_SPACE | COLI_MASK_L | COLI_MASK_N));
    if (end == at) return match_space(t, at, true);
    while (end < t.end && (is_newline(t.s[end]) || t.s[end] == '/')) end++;
    return end;
}

static bool is_ascii_letter(uint8_t c) { return (uint8_t)((c | 0x20) - 'a') < 26; }

/* [ASCII punctuation][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t match_deepseek3(span t, size_t at) {
    uint8_t c = t.s[at];
    size_t end = at;
    if (c > ' ' && c < 0x7F && !is_ascii_letter(c) && (c < '0' || c > '9')) {
        for (end = at + 1; end < t.end && is_ascii_letter(t.s[end]);) end++;
        if (end > at + 1) return end;
    }
    end = match_prefixed_run(t, at, COLI_MASK_L | COLI_MASK_P | COLI_MASK_S, COLI_MASK_L | COLI_MASK_M);
    if (end > at) return end;
    end = match_blank_run(t, at, COLI_MASK_P | COLI_MASK_S);
    return end > at ? newlines_end(t, end) : match_space(t, at, true);
}

static bool in_set(const coli_tokenizer_t *tok, const coli_tok_step *step, glyph g) {
    bool inside = (g.mask & step->class_mask) != 0;
    const coli_tok_range *ranges = tok->ranges + step->first_range;
    uint32_t low = 0, high = step->num_ranges;
    while (!inside && low < high) {
        uint32_t middle = (low + high) / 2;
        if (ranges[middle].last < g.code) low = middle + 1;
        else if (ranges[middle].first > g.code) high = middle;
        else inside = true;
    }
    return g.length && inside != (step->negate != 0);
}

static size_t set_run_end(const coli_tokenizer_t *tok, const coli_tok_step *step, span t, size_t at) {
    uint32_t count = 0;
    for (glyph g = look(t, at); in_set(tok, step, g) && (step->max == 0 || count < step->max); g = look(t, at)) {
        at += g.length;
        count++;
    }
    return at;
}

static size_t match_run(const coli_tokenizer_t *tok, const coli_tok_step *step, span t, size_t at) {
    glyph g = look(t, at);
    bool prefix = (step->prefix == COLI_TOK_PREFIX_ANY_SPACE && g.mask & COLI_MASK_SPACE) ||
                  (step->prefix == COLI_TOK_PREFIX_BLANK && g.code == ' ');
    if (prefix) {
        size_t end = set_run_end(tok, step, t, at + g.length);
        if (end > at + g.length) return end;
    }
    return set_run_end(tok, step, t, at);
}

/* \s+$, where $ also holds before a line feed. *resume: where to look next if there is no match: none begins before. */
static size_t match_space_end(span t, size_t at, size_t *resume) {
    size_t end = run_end(t, at, COLI_MASK_SPACE);
    *resume = end;
    if (end == t.end) return end;
    for (size_t i = end; i > at + 1; i--) {
        if (t.s[i - 1] == '\n') return i - 1;
    }
    return at;
}

/* A piece that reaches to the next U+2581. */
static size_t match_metaspace(span t, size_t at) {
    for (size_t i = at + 1; i < t.end; i++) {
        if (coli_tok_is_metaspace(t.s + i, t.end - i)) return i;
    }
    return t.end;
}

static size_t match(const coli_tokenizer_t *tok, const coli_tok_step *step, span t, size_t at, size_t *resume) {
    switch (step->kind) {
    case COLI_TOK_STEP_GPT2: return match_gpt2(t, at);
    case COLI_TOK_STEP_WORDS: return match_words(t, at, step);
    case COLI_TOK_STEP_O200K: return match_o200k(t, at);
    case COLI_TOK_STEP_DEEPSEEK3: return match_deepseek3(t, at);
    case COLI_TOK_STEP_RUN: return match_run(tok, step, t, at);
    case COLI_TOK_STEP_SPACE_END: return match_space_end(t, at, resume);
    default: return match_metaspace(t, at);
    }
}

/* The depth of recursion is the number of steps, at most COLI_TOK_MAX_STEPS. */
colibri_status_t coli_tok_split(coli_tok_job_t *job, uint32_t step, const uint8_t *s, size_t begin, size_t end) {
    const coli_tokenizer_t *tok = job->tokenizer;
    if (step == tok->num_steps) return coli_tok_word(job, s + begin, end - begin);
    span t = {s, end};
    colibri_status_t status = COLIBRI_OK;
    size_t gap = begin; /* what no match has taken yet */
    for (size_t at = begin; at < end && !status;) {
        size_t resume = at, length;
        size_t stop = match(tok, tok->steps + step, t, at, &resume);
        if (stop > at) {
            if (gap < at) status = coli_tok_split(job, step + 1, s, gap, at);
            if (!status) status = coli_tok_split(job, step + 1, s, at, stop);
            gap = at = stop;
        } else if (resume > at) {
            at = resume;
        } else {
            coli_utf8_at(s + at, &length);
            at += length;
        }
    }
    return !status && gap < end ? coli_tok_split(job, step + 1, s, gap, end) : status;
}
