/* fuzz_tokenizer.c: libFuzzer harness for the tokenizer. The input is a payload, a text and ids: a u16 with the text's length, the
 * text, and then the payload, whose size field is put right so that mutations get past the first door. What opens must encode
 * the text, decode the ids it gives and some it does not, and stream them, without a bad access, without end or growth, and
 * the stream must give what decoding gives.
 *
 *     clang -std=gnu11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Iinclude -Ilib \
 *         tests/fuzz/fuzz_tokenizer.c lib/model/tokenizer.c lib/model/tokenizer_split.c lib/model/tokenizer_bpe.c \
 *         lib/model/tokenizer_decode.c lib/model/unicode.c lib/model/unicode_data.c lib/base/status.c -o fuzz_tokenizer
 *     python tests/fuzz/seed_tokenizer.py corpus        writes payloads of both kinds, then
 *     ./fuzz_tokenizer corpus -use_value_profile=1 -max_len=32768 -max_total_time=180
 */
#include <stdlib.h>

#include "model/tokenizer.h"
#include "model/tokenizer_format.h"

#define VOCAB 4096
#define MAX_IDS 4096
#define MAX_TEXT 65536

static int32_t ids[MAX_IDS];
static char whole[MAX_TEXT], parts[MAX_TEXT], small[8];

/* Decode, at once and one by one, and compare. */
static void decode(const coli_tokenizer_t *t, size_t n, uint32_t flags) {
    size_t size, piece, at = 0;
    if (coli_tokenizer_decode(t, ids, n, flags, whole, MAX_TEXT, &size) != COLIBRI_OK) return; /* ids out of range, or long pieces */
    colibri_stream_t stream = COLIBRI_STREAM_INIT;
    stream.flags = flags;
    for (size_t i = 0; i <= n; i++) {
        int32_t id = i < n ? ids[i] : -1;
        if (coli_tokenizer_stream(t, &stream, id, small, sizeof small, &piece) == COLIBRI_OK) {
            if (piece > size - at) abort();
            memcpy(parts + at, small, piece);
        } else if (piece > size - at || coli_tokenizer_stream(t, &stream, id, parts + at, piece, &piece) != COLIBRI_OK) {
            abort();
        }
        at += piece;
    }
    if (at != size || memcmp(whole, parts, size) != 0) abort();
}

static void use(const coli_tokenizer_t *t, const uint8_t *text, size_t n) {
    for (uint32_t flags = 0; flags < 4; flags += 3) {
        size_t count = 0;
        colibri_status_t status = coli_tokenizer_encode(t, (const char *)text, n, flags, ids, MAX_IDS, &count);
        if (status != COLIBRI_OK) continue;
        if (count > MAX_IDS) abort();
        for (size_t i = 0; i < count; i++) {
            if (ids[i] < 0 || ids[i] >= VOCAB) abort();
        }
        decode(t, count, flags & 1);
    }
    size_t count = n / 2 < MAX_IDS ? n / 2 : MAX_IDS;
    for (size_t i = 0; i < count; i++) ids[i] = (text[2 * i] | text[2 * i + 1] << 8) % (VOCAB + 1);
    decode(t, count, 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    size_t text = (size_t)data[0] | (size_t)data[1] << 8, rest = size - 2;
    if (text > rest) text = rest;
    size_t payload = rest - text;
    uint8_t *copy = malloc(payload + !payload), *words = malloc(text + !text); /* exact ends, for the sanitizer */
    memcpy(words, data + 2, text);
    memcpy(copy, data + 2 + text, payload);
    if (payload >= 12) memcpy(copy + 8, &(uint32_t){(uint32_t)payload}, 4);
    coli_tokenizer_t *t;
    if (coli_tokenizer_open(copy, payload, VOCAB, &t) == COLIBRI_OK) {
        use(t, words, text);
        coli_tokenizer_close(t);
    }
    free(words);
    free(copy);
    return 0;
}
