/* unicode.c: UTF-8, character classes and NFC, for the tokenizer. Text is read one character at a time, tables are searched
 * by halving; nothing here depends on the length of the text more than linearly, whatever the text. */
#include "model/unicode.h"

#include <stdlib.h>

#include "model/unicode_data.h"

/* ---- Bytes ---------------------------------------------------------------------------------------------------------- */

bool coli_bytes_reserve(coli_bytes_t *bytes, size_t more) {
    if (more <= bytes->capacity - bytes->size) return true;
    if (more > SIZE_MAX / 2 - bytes->size) return false;
    size_t capacity = COLI_MAX(bytes->size + more, COLI_MAX((size_t)256, bytes->capacity + bytes->capacity / 2));
    uint8_t *data = realloc(bytes->data, capacity);
    if (!data) return false;
    bytes->data = data;
    bytes->capacity = capacity;
    return true;
}

void coli_bytes_free(coli_bytes_t *bytes) {
    free(bytes->data);
    *bytes = (coli_bytes_t){0};
}

static bool append(coli_bytes_t *out, const uint8_t *s, size_t n) {
    if (!coli_bytes_reserve(out, n)) return false;
    if (n) memcpy(out->data + out->size, s, n);
    out->size += n;
    return true;
}

/* ---- Classes -------------------------------------------------------------------------------------------------------- */

uint32_t coli_char_mask(uint32_t code_point) {
    if (code_point >= coli_class_end) return 1u << COLI_CHAR_OTHER;
    uint32_t at = coli_class_index[code_point >> 8] * 128u + ((code_point & 255) >> 1);
    return 1u << ((coli_class_blocks[at] >> (4 * (code_point & 1))) & 15);
}

/* ---- UTF-8 ---------------------------------------------------------------------------------------------------------- */

int coli_utf8_read(const uint8_t *s, size_t n, uint32_t *code_point, size_t *length) {
    uint32_t lead = s[0];
    *length = 1;
    if (lead < 0x80) return *code_point = lead, COLI_UTF8_CHAR;
    if (lead < 0xC2 || lead > 0xF4) return COLI_UTF8_BAD;
    size_t need = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    /* The second byte's range keeps out overlong forms, surrogates and what lies above U+10FFFF. */
    uint32_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    uint32_t value = lead & (0x7Fu >> need);
    for (size_t i = 1; i < need; i++) {
        if (i == n) return *length = n, COLI_UTF8_PARTIAL;
        if (s[i] < low || s[i] > high) return *length = i, COLI_UTF8_BAD;
        value = value << 6 | (s[i] & 0x3F);
        low = 0x80;
        high = 0xBF;
    }
    *length = need;
    *code_point = value;
    return COLI_UTF8_CHAR;
}

size_t coli_utf8_write(uint32_t c, uint8_t out[4]) {
    if (c < 0x80) return out[0] = (uint8_t)c, 1;
    if (c < 0x800) return out[0] = (uint8_t)(0xC0 | c >> 6), out[1] = (uint8_t)(0x80 | (c & 0x3F)), 2;
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xE0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 0x3F));
        out[2] = (uint8_t)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (uint8_t)(0xF0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 0x3F));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 0x3F));
    out[3] = (uint8_t)(0x80 | (c & 0x3F));
    return 4;
}

/* Length of the valid text that s begins with. */
static size_t valid_prefix(const uint8_t *s, size_t n) {
    size_t at = 0, length;
    uint32_t c;
    while (at < n) {
        if (s[at] < 0x80) at++;
        else if (coli_utf8_read(s + at, n - at, &c, &length) == COLI_UTF8_CHAR) at += length;
        else break;
    }
    return at;
}

bool coli_utf8_is_valid(const uint8_t *s, size_t n) { return valid_prefix(s, n) == n; }

bool coli_utf8_repair(const uint8_t *s, size_t n, coli_bytes_t *out) {
    while (n) {
        size_t good = valid_prefix(s, n), bad;
        if (!append(out, s, good)) return false;
        s += good;
        n -= good;
        if (!n) break;
        uint32_t c;
        coli_utf8_read(s, n, &c, &bad);
        if (!append(out, (const uint8_t *)"\xEF\xBF\xBD", 3)) return false;
        s += bad;
        n -= bad;
    }
    return true;
}

/* ---- NFC ------------------------------------------------------------------------------------------------------------ */
/* The text is cut before every "safe" character: one that NFC never changes, moves or joins to what stands before it. Parts
 * are then decomposed, ordered and composed on their own. */

enum {
    HANGUL_S = 0xAC00,
    HANGUL_L = 0x1100,
    HANGUL_V = 0x1161,
    HANGUL_T = 0x11A7,
    NUM_V = 21,
    NUM_T = 28,
    NUM_S = 11172,
    NUM_L = 19
};

/* One character with its combining class in the top byte. */
#define COMBINED(c, k) ((c) | (uint32_t)(k) << 24)
#define CHARACTER(x) ((x) & 0x1FFFFF)
#define CLASS(x) ((x) >> 24)

/* The combining class of an unsafe character; -1: it is safe. */
static int unsafe_class(uint32_t c) {
    if (c < 0x300) return -1;
    uint32_t low = 0, high = coli_num_unsafe_ranges;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (coli_unsafe_ranges[middle].first + coli_unsafe_ranges[middle].count <= c) low = middle + 1;
        else high = middle;
    }
    return low < coli_num_unsafe_ranges && coli_unsafe_ranges[low].first <= c ? coli_unsafe_ranges[low].combining_class : -1;
}

bool coli_nfc_is_plain(const uint8_t *s, size_t n) {
    size_t length;
    for (size_t at = 0; at < n; at += length) {
        if (s[at] < 0xCC) { /* below U+0300 */
            length = s[at] < 0x80 ? 1 : 2;
            continue;
        }
        if (unsafe_class(coli_utf8_at(s + at, &length)) >= 0) return false;
    }
    return true;
}

/* Append c, decomposed. `first` of a row may decompose again, `second` never does. */
static bool decompose(uint32_t c, coli_bytes_t *out) {
    uint32_t tail[4], depth = 0;
    if (!coli_bytes_reserve(out, 8 * sizeof(uint32_t))) return false;
    if (c - HANGUL_S < NUM_S) {
        uint32_t index = c - HANGUL_S, t = index % NUM_T;
        if (t) tail[depth++] = HANGUL_T + t;
        tail[depth++] = HANGUL_V + index / NUM_T % NUM_V;
        c = HANGUL_L + index / NUM_T / NUM_V;
    }
    for (bool found = c >= 0xC0; found && depth < 4;) {
        uint32_t low = 0, high = coli_num_decompositions;
        while (low < high) {
            uint32_t middle = (low + high) / 2;
            if (coli_decompositions[middle] >> 43 < c) low = middle + 1;
            else high = middle;
        }
        found = low < coli_num_decompositions && coli_decompositions[low] >> 43 == c;
        if (!found) break;
        c = (uint32_t)(coli_decompositions[low] >> 22) & 0x1FFFFF;
        uint32_t second = (uint32_t)(coli_decompositions[low] >> 1) & 0x1FFFFF;
        if (second) tail[depth++] = second;
    }
    uint32_t *to = (uint32_t *)(void *)(out->data + out->size);
    *to++ = COMBINED(c, COLI_MAX(unsafe_class(c), 0));
    for (uint32_t i = depth; i-- > 0;) *to++ = COMBINED(tail[i], COLI_MAX(unsafe_class(tail[i]), 0));
    out->size += (depth + 1) * sizeof(uint32_t);
    return true;
}

/* Stable sort of a run of combining characters by class; spare has room for n. */
static void order_run(uint32_t *run, size_t n, uint32_t *spare) {
    if (n <= 24) {
        for (size_t i = 1; i < n; i++) {
            uint32_t x = run[i];
            size_t j = i;
            for (; j > 0 && CLASS(run[j - 1]) > CLASS(x); j--) run[j] = run[j - 1];
            run[j] = x;
        }
        return;
    }
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++) start[CLASS(run[i]) + 1]++;
    for (size_t i = 1; i < 257; i++) start[i] += start[i - 1];
    for (size_t i = 0; i < n; i++) spare[start[CLASS(run[i])]++] = run[i];
    memcpy(run, spare, n * sizeof *run);
}

/* The character that a and b compose to, 0: none. */
static uint32_t compose_pair(uint32_t a, uint32_t b) {
    if (a - HANGUL_L < NUM_L && b - HANGUL_V < NUM_V) return HANGUL_S + ((a - HANGUL_L) * NUM_V + (b - HANGUL_V)) * NUM_T;
    if (a - HANGUL_S < NUM_S && (a - HANGUL_S) % NUM_T == 0 && b - HANGUL_T - 1 < NUM_T - 1) return a + (b - HANGUL_T);
    uint64_t key = (uint64_t)a << 21 | b;
    uint32_t low = 0, high = coli_num_compositions;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if ((coli_decompositions[coli_compositions[middle]] >> 1 & 0x3FFFFFFFFFF) < key) low = middle + 1;
        else high = middle;
    }
    if (low == coli_num_compositions) return 0;
    uint64_t row = coli_decompositions[coli_compositions[low]];
    return (row >> 1 & 0x3FFFFFFFFFF) == key ? (uint32_t)(row >> 43) : 0;
}

/* Compose an ordered part in place; the new length. A character joins the last starter if nothing between blocks it. */
static size_t compose(uint32_t *part, size_t n) {
    size_t out = 0, starter = SIZE_MAX;
    uint32_t last = 0; /* class of the last character kept after the starter */
    for (size_t i = 0; i < n; i++) {
        uint32_t x = part[i], class = CLASS(x);
        if (starter != SIZE_MAX && (out == starter + 1 || (last < class && last != 0))) {
            uint32_t joined = compose_pair(CHARACTER(part[starter]), CHARACTER(x));
            if (joined) {
                part[starter] = joined;
                continue;
            }
        }
        if (class == 0) starter = out;
        last = class;
        part[out++] = x;
    }
    return out;
}

/* Append one part s[0 ... n - 1] in NFC. */
static bool normalise_part(const uint8_t *s, size_t n, coli_bytes_t *scratch, coli_bytes_t *out) {
    size_t length;
    scratch->size = 0;
    for (size_t at = 0; at < n; at += length) {
        if (!decompose(coli_utf8_at(s + at, &length), scratch)) return false;
    }
    size_t count = scratch->size / sizeof(uint32_t);
    if (!coli_bytes_reserve(scratch, scratch->size)) return false;
    uint32_t *part = (uint32_t *)(void *)scratch->data;
    for (size_t i = 0; i < count;) {
        size_t end = i;
        while (end < count && CLASS(part[end])) end++;
        order_run(part + i, end - i, part + count);
        i = end + 1;
    }
    count = compose(part, count);
    if (!coli_bytes_reserve(out, count * 4)) return false;
    for (size_t i = 0; i < count; i++) out->size += coli_utf8_write(CHARACTER(part[i]), out->data + out->size);
    return true;
}

bool coli_nfc(const uint8_t *s, size_t n, coli_bytes_t *out) {
    coli_bytes_t scratch = {0};
    bool ok = true;
    size_t length;
    for (size_t begin = 0, end; ok && begin < n; begin = end) {
        bool safe = unsafe_class(coli_utf8_at(s + begin, &length)) < 0;
        end = begin + length;
        bool alone = true;
        while (end < n && unsafe_class(coli_utf8_at(s + end, &length)) >= 0) {
            end += length;
            alone = false;
        }
        ok = safe && alone ? append(out, s + begin, end - begin) : normalise_part(s + begin, end - begin, &scratch, out);
    }
    coli_bytes_free(&scratch);
    return ok;
}
