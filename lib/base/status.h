/* status.h: how a failure travels: a status is returned, its sentence waits in the thread for colibri_last_error(). */
#ifndef COLI_STATUS_H
#define COLI_STATUS_H

#include "base/base.h"

/* Record status and sentence (printf format) for this thread and return the status: `return coli_fail(..., "...")`.
 * Sentences name the thing and say what to do; paths and names from outside are cut to fit 511 bytes. */
colibri_status_t coli_fail(colibri_status_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Bytes of the longest beginning of `text` (UTF-8) that has at most `most` and ends between characters: for "%.*s". */
int coli_fitting(const char *text, int most);

#endif
