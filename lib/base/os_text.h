/* os_text.h: the small texts in which Linux says things about itself (/proc, /sys), for the files os*.c. */
#ifndef COLI_OS_TEXT_H
#define COLI_OS_TEXT_H

#include <fcntl.h>
#include <unistd.h>

#include "base/base.h"

/* The first `capacity - 1` bytes of a small file, zero-terminated; false if it cannot be read. */
static inline bool read_small_file(const char *path, char *text, size_t capacity) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return false;
    ssize_t length = read(descriptor, text, capacity - 1);
    close(descriptor);
    if (length <= 0) return false;
    text[length] = '\0';
    return true;
}

/* The number at *text, which moves past it; -1 where there is none. Of one beyond INT64_MAX / 20 the first digits. */
static inline int64_t read_number(const char **text) {
    if (**text < '0' || **text > '9') return -1;
    int64_t value = 0;
    for (; **text >= '0' && **text <= '9' && value < INT64_MAX / 20; (*text)++) value = value * 10 + (**text - '0');
    return value;
}

#endif
