/* status.c: the thread's latest failure, and the names of statuses. Bottom of every error path; see status.h. */
#include "base/status.h"

#include "base/os.h"

#include <stdarg.h>
#include <stdio.h>

#define SENTENCE_BYTES 512 /* with the terminating zero: the header promises 511 */

static COLI_THREAD_LOCAL struct {
    colibri_status_t status;
    char sentence[SENTENCE_BYTES];
} last;

/* If the text was cut inside a UTF-8 character, drop the piece: the sentence stays valid UTF-8. */
static void trim_partial_character(char *text, size_t length) {
    size_t start = length;
    while (start > 0 && length - start < 3 && ((uint8_t)text[start - 1] & 0xC0) == 0x80) start--;
    if (start == 0) return;
    uint8_t lead = (uint8_t)text[start - 1];
    size_t need = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
    if (length - start + 1 < need) text[start - 1] = '\0';
}

colibri_status_t coli_fail(colibri_status_t status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(last.sentence, SENTENCE_BYTES, format, arguments);
    va_end(arguments);
    if (length < 0) last.sentence[0] = '\0';
    if (length >= SENTENCE_BYTES) trim_partial_character(last.sentence, SENTENCE_BYTES - 1);
    last.status = status;
    return status;
}

int coli_fitting(const char *text, int most) {
    int n = 0;
    while (n < most && text[n]) n++;
    if (!text[n]) return n;
    while (n > 0 && ((unsigned char)text[n] & 0xC0) == 0x80) n--;
    return n;
}

colibri_status_t colibri_last_status(void) { return last.status; }

const char *colibri_last_error(void) { return last.sentence; }

const char *colibri_status_name(colibri_status_t status) {
    static const char *const names[COLIBRI_STATUS_COUNT_] = {
        [COLIBRI_OK] = "COLIBRI_OK",
        [COLIBRI_ERR_INVALID_ARGUMENT] = "COLIBRI_ERR_INVALID_ARGUMENT",
        [COLIBRI_ERR_ALIGNMENT] = "COLIBRI_ERR_ALIGNMENT",
        [COLIBRI_ERR_OUT_OF_MEMORY] = "COLIBRI_ERR_OUT_OF_MEMORY",
        [COLIBRI_ERR_WORKSPACE] = "COLIBRI_ERR_WORKSPACE",
        [COLIBRI_ERR_BUFFER_TOO_SMALL] = "COLIBRI_ERR_BUFFER_TOO_SMALL",
        [COLIBRI_ERR_NOT_FOUND] = "COLIBRI_ERR_NOT_FOUND",
        [COLIBRI_ERR_IO] = "COLIBRI_ERR_IO",
        [COLIBRI_ERR_FORMAT] = "COLIBRI_ERR_FORMAT",
        [COLIBRI_ERR_VERSION] = "COLIBRI_ERR_VERSION",
        [COLIBRI_ERR_CHECKSUM] = "COLIBRI_ERR_CHECKSUM",
        [COLIBRI_ERR_UNSUPPORTED] = "COLIBRI_ERR_UNSUPPORTED",
        [COLIBRI_ERR_TOKEN] = "COLIBRI_ERR_TOKEN",
        [COLIBRI_ERR_SLOT_FULL] = "COLIBRI_ERR_SLOT_FULL",
        [COLIBRI_ERR_STATE] = "COLIBRI_ERR_STATE",
        [COLIBRI_ERR_NOT_FINITE] = "COLIBRI_ERR_NOT_FINITE",
        [COLIBRI_ERR_CANCELLED] = "COLIBRI_ERR_CANCELLED",
        [COLIBRI_ERR_NO_TOKENIZER] = "COLIBRI_ERR_NO_TOKENIZER",
        [COLIBRI_ERR_ISA] = "COLIBRI_ERR_ISA",
        [COLIBRI_ERR_THREAD] = "COLIBRI_ERR_THREAD",
    };
    if ((unsigned)status >= COLIBRI_STATUS_COUNT_) return "COLIBRI_ERR_UNKNOWN";
    return names[status];
}
