/* test_tokenizer.c: UTF-8, classes and NFC; a small hand-made payload: encoding, decoding, streaming, and every damaged header
 * field refused. The vocabularies of real models are compared with their reference in tests/python/test_tokenizer.py. */
#include "check.h"
#include "make_tokenizer.h"

#include <stdlib.h>

#include "model/tokenizer.h"
#include "model/unicode.h"

/* ---- Unicode -------------------------------------------------------------------------------------------------------- */

static void check_repair(const char *in, size_t n, const char *expected) {
    coli_bytes_t out = {0};
    CHECK(coli_utf8_repair((const uint8_t *)in, n, &out));
    CHECK(out.size == strlen(expected) && memcmp(out.data, expected, out.size) == 0);
    coli_bytes_free(&out);
}

static void check_nfc(const char *in, const char *expected) {
    coli_bytes_t out = {0};
    CHECK(coli_nfc((const uint8_t *)in, strlen(in), &out));
    CHECK(out.size == strlen(expected) && memcmp(out.data, expected, out.size) == 0);
    CHECK(!coli_nfc_is_plain((const uint8_t *)in, strlen(in)) || strcmp(in, expected) == 0);
    coli_bytes_free(&out);
}

static void test_unicode(void) {
#define DEAD "\xEF\xBF\xBD"
    check_repair("a\xF0\x9F\xA6\x99z", 6, "a\xF0\x9F\xA6\x99z");
    check_repair("\xF0\x9F\xA6z", 4, DEAD "z");          /* the beginning of a character: one */
    check_repair("\xED\xA0\x80", 3, DEAD DEAD DEAD);     /* a surrogate: each byte */
    check_repair("\xC0\x80\xFF", 3, DEAD DEAD DEAD);     /* overlong; no lead byte */
    check_repair("\xF4\x90\x80\x80\xE4\xB8", 6, DEAD DEAD DEAD DEAD DEAD);
    check_nfc("e\xCC\x81", "\xC3\xA9");                  /* e, acute */
    check_nfc("e\xCC\x81\xCC\xA3", "\xE1\xBA\xB9\xCC\x81"); /* e, acute, dot below: reordered, then e with dot below */
    check_nfc("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81"); /* Hangul G, A, G */
    check_nfc("\xE2\x84\xAB", "\xC3\x85");               /* angstrom sign */
    check_nfc("\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC"); /* excluded from composition */
    check_nfc("plain", "plain");
    CHECK_EQ(coli_char_mask('A'), COLI_MASK(UPPER));
    CHECK_EQ(coli_char_mask(0x85), COLI_MASK_SPACE);
    CHECK_EQ(coli_char_mask(0x3000), COLI_MASK_SPACE);
    CHECK_EQ(coli_char_mask(0xBD), COLI_MASK(NUMBER_OTHER));
    CHECK_EQ(coli_char_mask(0x4E2D), COLI_MASK(LETTER));
    CHECK_EQ(coli_char_mask(0x301), COLI_MASK_M);
    CHECK_EQ(coli_char_mask('$'), COLI_MASK(SYMBOL));
    CHECK_EQ(coli_char_mask(0x10FFFF), COLI_MASK(OTHER));
}

/* ---- The payload of make_tokenizer.h -------------------------------------------------------------------------------- */

static coli_tokenizer_t *open_payload(const payload *p) {
    coli_tokenizer_t *t = NULL;
    CHECK_EQ(coli_tokenizer_open((const uint8_t *)p, sizeof *p, 300, &t), COLIBRI_OK);
    return t;
}

static void check_encode(const coli_tokenizer_t *t, const char *text, uint32_t flags, const int32_t *expected, size_t n) {
    int32_t ids[32];
    size_t count;
    CHECK_EQ(coli_tokenizer_encode(t, text, strlen(text), flags, ids, 32, &count), COLIBRI_OK);
    CHECK_EQ(count, n);
    for (size_t i = 0; i < n && i < count; i++) CHECK_EQ(ids[i], expected[i]);
}

static void test_encode(void) {
    payload *p = make_payload();
    coli_tokenizer_t *t = open_payload(p);
    check_encode(t, "abc ab", 3, (const int32_t[]){258, 257, ' ', 256}, 4);
    check_encode(t, "abc ab", 0, (const int32_t[]){257, ' ', 256}, 3);
    check_encode(t, "a<x>b", COLIBRI_TOKENIZE_PARSE_SPECIAL, (const int32_t[]){'a', 258, 'b'}, 3);
    check_encode(t, "a<x>b", 0, (const int32_t[]){'a', '<', 'x', '>', 'b'}, 5);
    check_encode(t, "\xF0\x9F", 0, (const int32_t[]){0xEF, 0xBF, 0xBD}, 3);
    check_encode(t, "", 0, NULL, 0);
    int32_t ids[2];
    size_t count = 0;
    CHECK_EQ(coli_tokenizer_encode(t, "abcd", 4, 3, ids, 2, &count), COLIBRI_ERR_BUFFER_TOO_SMALL);
    CHECK_EQ(count, 3);
    CHECK_EQ(coli_tokenizer_encode(t, "abcd", 4, 3, NULL, 0, &count), COLIBRI_ERR_BUFFER_TOO_SMALL);
    CHECK_EQ(coli_tokenizer_encode(t, NULL, 4, 3, ids, 2, &count), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(coli_tokenizer_encode(t, "a", 1, 64, ids, 2, &count), COLIBRI_ERR_INVALID_ARGUMENT);
    coli_tokenizer_close(t);
    free(p);
}

static void test_decode(void) {
    payload *p = make_payload();
    coli_tokenizer_t *t = open_payload(p);
    char text[64];
    size_t size;
    const int32_t ids[] = {258, 257, 0xF0, 0x9F, 258, 0xA6, 0x99, 280, 0xF0, 'z', 0xE4, 0xB8}; /* 280: not the tokenizer's */
    CHECK_EQ(coli_tokenizer_decode(t, ids, 12, 0, text, 64, &size), COLIBRI_OK);
    const char *expected = "abc\xF0\x9F\xA6\x99" DEAD "z" DEAD;
    CHECK(size == strlen(expected) && memcmp(text, expected, size) == 0);
    CHECK_EQ(coli_tokenizer_decode(t, ids, 2, COLIBRI_DETOKENIZE_SPECIAL, text, 64, &size), COLIBRI_OK);
    CHECK(size == 6 && memcmp(text, "<x>abc", 6) == 0);
    CHECK_EQ(coli_tokenizer_decode(t, ids, 2, 0, text, 2, &size), COLIBRI_ERR_BUFFER_TOO_SMALL);
    CHECK_EQ(size, 3);
    CHECK_EQ(coli_tokenizer_decode(t, (const int32_t[]){300}, 1, 0, text, 64, &size), COLIBRI_ERR_TOKEN);
    CHECK_EQ(coli_tokenizer_decode(t, (const int32_t[]){-1}, 1, 0, text, 64, &size), COLIBRI_ERR_TOKEN);

    colibri_stream_t stream = COLIBRI_STREAM_INIT;
    char out[64];
    size_t at = 0;
    for (int i = 0; i <= 12; i++) {
        CHECK_EQ(coli_tokenizer_stream(t, &stream, i < 12 ? ids[i] : -1, out + at, 64 - at, &size), COLIBRI_OK);
        if (i == 2 || i == 3 || i == 5) CHECK_EQ(size, 0);
        if (i == 6) CHECK_EQ(size, 4);
        at += size;
    }
    CHECK(at == strlen(expected) && memcmp(out, expected, at) == 0);
    CHECK_EQ(coli_tokenizer_stream(t, &stream, 257, out, 2, &size), COLIBRI_ERR_BUFFER_TOO_SMALL);
    CHECK_EQ(size, 3);
    CHECK_EQ(coli_tokenizer_stream(t, &stream, 257, out, 3, &size), COLIBRI_OK);
    coli_tokenizer_close(t);
    free(p);
}

static colibri_status_t open_status(const payload *p) {
    coli_tokenizer_t *t = NULL;
    colibri_status_t status = coli_tokenizer_open((const uint8_t *)p, sizeof *p, 300, &t);
    CHECK((status == COLIBRI_OK) == (t != NULL));
    coli_tokenizer_close(t);
    return status;
}

#define REFUSED(change, expected)           \
    do {                                    \
        payload *p = make_payload();        \
        change;                             \
        CHECK_EQ(open_status(p), expected); \
        free(p);                            \
    } while (0)

static void test_damage(void) {
    REFUSED((void)0, COLIBRI_OK);
    REFUSED(p->header.magic[0] = 'X', COLIBRI_ERR_FORMAT);
    REFUSED(p->header.version = 2, COLIBRI_ERR_VERSION);
    REFUSED(p->header.size -= 1, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.kind = 3, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.flags = 1u << 31, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.num_ids = 301, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.num_ids = 258, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.unk_id = NUM_IDS, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.max_probe = UINT32_MAX, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.reserved[11] = 1, COLIBRI_ERR_FORMAT);
    REFUSED(p->header.sections[COLI_TOK_ALIASES].count = UINT32_MAX - NUM_IDS, COLIBRI_ERR_FORMAT);
    for (int i = 0; i < COLI_TOK_NUM_SECTIONS; i++) {
        REFUSED(p->header.sections[i].offset = (uint32_t)sizeof *p + 8, COLIBRI_ERR_FORMAT);
        REFUSED(p->header.sections[i].offset += 4, COLIBRI_ERR_FORMAT);
        REFUSED(p->header.sections[i].count = UINT32_MAX, COLIBRI_ERR_FORMAT);
    }
    REFUSED(p->added[0].id = NUM_IDS, COLIBRI_ERR_FORMAT);
    REFUSED(p->added[0].offset = NUM_BYTES - 2, COLIBRI_ERR_FORMAT);
    REFUSED(p->added[0].length = 0, COLIBRI_ERR_FORMAT);
    REFUSED(p->bytes[261] = 0xA6, COLIBRI_ERR_FORMAT);
    REFUSED(p->prefix[0] = NUM_IDS, COLIBRI_ERR_FORMAT);
    REFUSED(p->steps[0].kind = 99, COLIBRI_ERR_FORMAT);
    REFUSED(p->steps[0].num_ranges = 1, COLIBRI_ERR_FORMAT);
    REFUSED(p->byte_ids[7] = -2, COLIBRI_ERR_FORMAT);
    REFUSED(p->byte_ids[7] = NUM_IDS, COLIBRI_ERR_FORMAT);

    payload *p = make_payload(); /* what is checked where it is used */
    p->merges[1].merged = 5000;
    p->offsets[256] = UINT32_MAX;
    coli_tokenizer_t *t = open_payload(p);
    int32_t ids[8];
    size_t count;
    char text[8];
    CHECK_EQ(coli_tokenizer_encode(t, "abc", 3, 0, ids, 8, &count), COLIBRI_ERR_FORMAT);
    CHECK_EQ(coli_tokenizer_decode(t, (const int32_t[]){256}, 1, 0, text, 8, &count), COLIBRI_OK);
    CHECK_EQ(count, 0);
    coli_tokenizer_close(t);
    free(p);
}

int main(void) {
    test_unicode();
    test_encode();
    test_decode();
    test_damage();
    return check_report();
}
