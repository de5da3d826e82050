/* unicode.h: UTF-8, character classes and NFC, for the tokenizer. Tables: unicode_data.c. */
#ifndef COLI_UNICODE_H
#define COLI_UNICODE_H

#include "base/base.h"

/* Growable bytes from malloc; zero-initialised is empty. */
typedef struct coli_bytes {
    uint8_t *data;
    size_t size, capacity;
} coli_bytes_t;
bool coli_bytes_reserve(coli_bytes_t *bytes, size_t more); /* room for `more` after size; false: no memory */
void coli_bytes_free(coli_bytes_t *bytes);

/* Classes of code points: general categories, split where the tokenizer's patterns need it. */
enum {
    COLI_CHAR_OTHER = 0,        /* control, format, private, unassigned */
    COLI_CHAR_UPPER = 1,        /* Lu */
    COLI_CHAR_LOWER = 2,        /* Ll */
    COLI_CHAR_TITLE = 3,        /* Lt */
    COLI_CHAR_MODIFIER = 4,     /* Lm */
    COLI_CHAR_LETTER = 5,       /* Lo */
    COLI_CHAR_MARK = 6,         /* M */
    COLI_CHAR_NUMBER = 7,       /* Nd, Nl */
    COLI_CHAR_NUMBER_OTHER = 8, /* No */
    COLI_CHAR_CONNECTOR = 9,    /* Pc */
    COLI_CHAR_PUNCTUATION = 10, /* the rest of P */
    COLI_CHAR_SYMBOL_LETTER = 11, /* S that counts as alphabetic: circled letters */
    COLI_CHAR_SYMBOL = 12,      /* the rest of S */
    COLI_CHAR_SPACE = 13,       /* White_Space: \s, U+0085 included */
    COLI_CHAR_JOINER = 14       /* U+200C, U+200D */
};
/* Sets of classes, as masks. */
#define COLI_MASK(c) (1u << COLI_CHAR_##c)
#define COLI_MASK_L (COLI_MASK(UPPER) | COLI_MASK(LOWER) | COLI_MASK(TITLE) | COLI_MASK(MODIFIER) | COLI_MASK(LETTER))
#define COLI_MASK_M COLI_MASK(MARK)
#define COLI_MASK_N (COLI_MASK(NUMBER) | COLI_MASK(NUMBER_OTHER))
#define COLI_MASK_P (COLI_MASK(CONNECTOR) | COLI_MASK(PUNCTUATION))
#define COLI_MASK_S (COLI_MASK(SYMBOL_LETTER) | COLI_MASK(SYMBOL))
#define COLI_MASK_SPACE COLI_MASK(SPACE)
#define COLI_MASK_WORD \
    (COLI_MASK_L | COLI_MASK_M | COLI_MASK(NUMBER) | COLI_MASK(CONNECTOR) | COLI_MASK(SYMBOL_LETTER) | COLI_MASK(JOINER)) /* \w */

/* The class of a code point, as a mask of one bit; 1 << COLI_CHAR_OTHER above U+10FFFF. */
uint32_t coli_char_mask(uint32_t code_point);

/* What the first bytes of s[0 ... n - 1], n > 0, are; *length bytes belong together. */
enum {
    COLI_UTF8_CHAR,   /* a character, *code_point is set */
    COLI_UTF8_BAD,    /* no character: the longest piece that one U+FFFD stands for */
    COLI_UTF8_PARTIAL /* the beginning of a character that needs more than the n bytes there are (*length = n) */
};
int coli_utf8_read(const uint8_t *s, size_t n, uint32_t *code_point, size_t *length);
size_t coli_utf8_write(uint32_t code_point, uint8_t out[4]); /* bytes written */
bool coli_utf8_is_valid(const uint8_t *s, size_t n);
/* Append s to out, with U+FFFD for what is not UTF-8; false: no memory. */
bool coli_utf8_repair(const uint8_t *s, size_t n, coli_bytes_t *out);

/* The character at s of text known to be valid. */
COLI_INLINE uint32_t coli_utf8_at(const uint8_t *s, size_t *length) {
    if (s[0] < 0x80) return *length = 1, s[0];
    if (s[0] < 0xE0) return *length = 2, (uint32_t)(s[0] & 0x1F) << 6 | (s[1] & 0x3F);
    if (s[0] < 0xF0) return *length = 3, (uint32_t)(s[0] & 0x0F) << 12 | (uint32_t)(s[1] & 0x3F) << 6 | (s[2] & 0x3F);
    return *length = 4, (uint32_t)(s[0] & 7) << 18 | (uint32_t)(s[1] & 0x3F) << 12 | (uint32_t)(s[2] & 0x3F) << 6 | (s[3] & 0x3F);
}

bool coli_nfc_is_plain(const uint8_t *s, size_t n); /* NFC certainly leaves this valid text as it is (false: it may) */
/* Append valid text in NFC to out; false: no memory. Time is linear in n. */
bool coli_nfc(const uint8_t *s, size_t n, coli_bytes_t *out);

#endif
