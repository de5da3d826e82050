/* libc.h: libc.c's functions, with the types that the library's object files expect (LP64 Linux). */
#ifndef FIRMWARE_LIBC_H
#define FIRMWARE_LIBC_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct timespec {
    long tv_sec, tv_nsec;
};

void *memcpy(void *to, const void *from, size_t bytes);
void *memset(void *memory, int value, size_t bytes);
void *memchr(const void *memory, int value, size_t bytes);
size_t strlen(const char *text);
int strcmp(const char *a, const char *b);
size_t strcspn(const char *text, const char *stop);
int snprintf(char *text, size_t capacity, const char *format, ...) __attribute__((format(printf, 3, 4)));
int vsnprintf(char *text, size_t capacity, const char *format, va_list values);
void qsort(void *values, size_t n, size_t bytes, int (*compare)(const void *, const void *));
void *malloc(size_t bytes);
void *calloc(size_t n, size_t bytes);
void *realloc(void *memory, size_t bytes);
void free(void *memory);
unsigned long getauxval(unsigned long type);
int clock_gettime(int clock, struct timespec *time);

void heap_init(void *memory, size_t bytes); /* before anything is allocated */
size_t heap_peak(void);                     /* bytes of it that were ever in use, holes included */

#endif
