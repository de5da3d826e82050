/* libc.c: all that a bare libcolibri.a asks for, so that nothing of an operating system's C library is linked. Firmware that
 * has newlib or picolibc takes it from there. (memcpy, memmove, memset, bcmp: the compiler's own support library has them.) */
#include "libc.h"

/* ---- Text ---------------------------------------------------------------------------------------------------------------- */

size_t strlen(const char *s) {
    size_t n = 0;
    while (s[n]) n++;
    return n;
}

int strcmp(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return (unsigned char)*a - (unsigned char)*b;
}

size_t strcspn(const char *s, const char *stop) {
    size_t n = 0;
    for (; s[n]; n++)
        for (const char *t = stop; *t; t++)
            if (s[n] == *t) return n;
    return n;
}

void *memchr(const void *memory, int value, size_t n) {
    const unsigned char *at = memory;
    for (; n > 0; n--, at++)
        if (*at == (unsigned char)value) return (void *)(uintptr_t)at;
    return NULL;
}

/* ---- Formatted text ------------------------------------------------------------------------------------------------------ */

typedef struct sink {
    char *text;
    size_t capacity, length; /* length: of the whole text, whether it fits or not */
} sink_t;

static void put(sink_t *sink, char c) {
    if (sink->length + 1 < sink->capacity) sink->text[sink->length] = c;
    sink->length++;
}

static void put_padded(sink_t *sink, const char *text, size_t n, size_t width, char pad) {
    for (size_t i = n; i < width; i++) put(sink, pad);
    for (size_t i = 0; i < n; i++) put(sink, text[i]);
}

static void put_number(sink_t *sink, unsigned long long value, unsigned base, size_t width, char pad) {
    char digits[24];
    size_t n = sizeof digits;
    do digits[--n] = "0123456789abcdef"[value % base];
    while (value /= base);
    put_padded(sink, digits + n, sizeof digits - n, width, pad);
}

/* %.nf, for values that the integers hold */
static void put_fixed(sink_t *sink, double value, int decimals) {
    unsigned long long scale = 1;
    for (int i = 0; i < decimals; i++) scale *= 10;
    if (value < 0) put(sink, '-'), value = -value;
    unsigned long long scaled = (unsigned long long)(value * (double)scale + 0.5);
    put_number(sink, scaled / scale, 10, 0, ' ');
    if (decimals > 0) put(sink, '.'), put_number(sink, scaled % scale, 10, (size_t)decimals, '0');
}

/* Six digits of a value above 0: value is about digits * 10^(exponent - 5). */
static unsigned long long six_digits(double value, int *exponent) {
    int e = 0;
    while (value >= 1e6) value /= 10, e++;
    while (value < 1e5) value *= 10, e--;
    unsigned long long digits = (unsigned long long)(value + 0.5);
    if (digits == 1000000) digits = 100000, e++;
    *exponent = e + 5;
    return digits;
}

/* The digits, with the point behind digit `point` (before all of them, and zeros between, if it is below 0). */
static void put_digits(sink_t *sink, const char *digits, int n, int point) {
    if (point < 0) put(sink, '0'), put(sink, '.');
    for (int i = point + 1; i < 0; i++) put(sink, '0');
    for (int i = 0; i < n || i <= point; i++) {
        put(sink, i < n ? digits[i] : '0');
        if (i == point && i + 1 < n) put(sink, '.');
    }
}

/* %g */
static void put_general(sink_t *sink, double value) {
    char text[6];
    int n = 6, exponent;
    if (value != value) return put_padded(sink, "nan", 3, 0, ' ');
    if (value < 0) put(sink, '-'), value = -value;
    if (value > 1.7976931348623157e308) return put_padded(sink, "inf", 3, 0, ' ');
    if (value == 0) return put(sink, '0');
    unsigned long long digits = six_digits(value, &exponent);
    for (int i = n - 1; i >= 0; i--) text[i] = (char)('0' + digits % 10), digits /= 10;
    while (n > 1 && text[n - 1] == '0') n--;
    bool scientific = exponent < -4 || exponent > 5;
    put_digits(sink, text, n, scientific ? 0 : exponent);
    if (!scientific) return;
    put(sink, 'e'), put(sink, exponent < 0 ? '-' : '+');
    put_number(sink, (unsigned)(exponent < 0 ? -exponent : exponent), 10, 2, '0');
}

typedef struct spec {
    char pad;
    size_t width;
    int precision; /* -1: none */
    int longs;     /* 'l's, of 8 bytes; z counts as one */
} spec_t;

static const char *read_spec(const char *at, spec_t *spec, va_list *values) {
    *spec = (spec_t){' ', 0, -1, 0};
    if (*at == '0') spec->pad = '0', at++;
    for (; *at >= '0' && *at <= '9'; at++) spec->width = spec->width * 10 + (size_t)(*at - '0');
    if (*at == '.' && at[1] == '*') spec->precision = va_arg(*values, int), at += 2;
    else if (*at == '.')
        for (spec->precision = 0, at++; *at >= '0' && *at <= '9'; at++) spec->precision = spec->precision * 10 + (*at - '0');
    for (; *at == 'l' || *at == 'z'; at++) spec->longs++;
    return at;
}

static void put_text(sink_t *sink, const char *text, const spec_t *spec) {
    size_t n = 0;
    while ((spec->precision < 0 || n < (size_t)spec->precision) && text[n]) n++;
    put_padded(sink, text, n, spec->width, ' ');
}

static void put_signed(sink_t *sink, long long value, const spec_t *spec) {
    if (value < 0) put(sink, '-');
    put_number(sink, value < 0 ? 0 - (unsigned long long)value : (unsigned long long)value, 10, spec->width, spec->pad);
}

/* One value, as its letter says; a letter that is not known here shows itself. */
static void put_value(sink_t *sink, char letter, const spec_t *spec, va_list *values) {
    unsigned base = letter == 'x' ? 16 : 10;
    switch (letter) {
        case 'd': return put_signed(sink, spec->longs ? va_arg(*values, long) : va_arg(*values, int), spec);
        case 'u':
        case 'x':
            return put_number(sink, spec->longs ? va_arg(*values, unsigned long) : va_arg(*values, unsigned), base, spec->width,
                              spec->pad);
        case 's': return put_text(sink, va_arg(*values, const char *), spec);
        case 'c': return put(sink, (char)va_arg(*values, int));
        case 'f': return put_fixed(sink, va_arg(*values, double), spec->precision < 0 ? 6 : spec->precision);
        case 'g': return put_general(sink, va_arg(*values, double));
        case '%': return put(sink, '%');
        default: put(sink, '%'), put(sink, letter);
    }
}

/* What the library's sentences need: d u x s c f g, 0 and a width, a precision, l, ll and z. */
int vsnprintf(char *text, size_t capacity, const char *format, va_list arguments) {
    sink_t sink = {text, capacity, 0};
    va_list values;
    va_copy(values, arguments);
    for (const char *at = format; *at; at++) {
        spec_t spec;
        if (*at != '%') {
            put(&sink, *at);
            continue;
        }
        at = read_spec(at + 1, &spec, &values);
        if (!*at) break;
        put_value(&sink, *at, &spec, &values);
    }
    va_end(values);
    if (capacity > 0) text[sink.length < capacity ? sink.length : capacity - 1] = '\0';
    return (int)sink.length;
}

int snprintf(char *text, size_t capacity, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int length = vsnprintf(text, capacity, format, values);
    va_end(values);
    return length;
}

/* ---- Sorting ------------------------------------------------------------------------------------------------------------- */

typedef int (*compare_t)(const void *, const void *);

static void swap(unsigned char *a, unsigned char *b, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        unsigned char kept = a[i];
        a[i] = b[i], b[i] = kept;
    }
}

static void sift(unsigned char *first, size_t root, size_t n, size_t bytes, compare_t compare) {
    for (size_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && compare(first + child * bytes, first + (child + 1) * bytes) < 0) child++;
        if (compare(first + root * bytes, first + child * bytes) >= 0) return;
        swap(first + root * bytes, first + child * bytes, bytes);
    }
}

/* Heapsort: no recursion, no memory. */
void qsort(void *values, size_t n, size_t bytes, compare_t compare) {
    unsigned char *first = values;
    for (size_t root = n / 2; root-- > 0;) sift(first, root, n, bytes, compare);
    for (size_t left = n; left-- > 1;) {
        swap(first, first + left * bytes, bytes);
        sift(first, 0, left, bytes, compare);
    }
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

/* A list of free blocks by address; freed neighbours grow together. A block begins with its size, in units of itself. */
typedef struct block {
    size_t units;
    struct block *next;
} block_t;

static block_t *unused;
static uint8_t *heap_first, *heap_highest;

void heap_init(void *memory, size_t bytes) {
    unused = memory;
    *unused = (block_t){bytes / sizeof(block_t), NULL};
    heap_first = heap_highest = memory;
}

size_t heap_peak(void) { return (size_t)(heap_highest - heap_first); }

void *malloc(size_t bytes) {
    if (bytes > SIZE_MAX / 2) return NULL;
    size_t units = (bytes + sizeof(block_t) - 1) / sizeof(block_t) + 1;
    block_t **link = &unused;
    while (*link && (*link)->units < units) link = &(*link)->next;
    block_t *found = *link;
    if (!found) return NULL;
    if (found->units == units) {
        *link = found->next;
    } else {
        *link = found + units;
        **link = (block_t){found->units - units, found->next};
    }
    found->units = units;
    uint8_t *end = (uint8_t *)(found + units);
    if (end > heap_highest) heap_highest = end;
    return found + 1;
}

static void join(block_t *block) {
    if (block + block->units != block->next) return;
    block->units += block->next->units;
    block->next = block->next->next;
}

void free(void *memory) {
    if (!memory) return;
    block_t *block = (block_t *)memory - 1, *before = NULL, *after = unused;
    while (after && after < block) before = after, after = after->next;
    block->next = after;
    if (before) before->next = block;
    else unused = block;
    join(block);
    if (before) join(before);
}

void *calloc(size_t n, size_t bytes) {
    if (bytes > 0 && n > SIZE_MAX / bytes) return NULL;
    void *memory = malloc(n * bytes);
    return memory ? memset(memory, 0, n * bytes) : NULL;
}

void *realloc(void *memory, size_t bytes) {
    void *moved = malloc(bytes);
    if (!moved || !memory) return moved;
    size_t had = (((block_t *)memory - 1)->units - 1) * sizeof(block_t);
    memcpy(moved, memory, had < bytes ? had : bytes);
    free(memory);
    return moved;
}

/* ---- Processor and time -------------------------------------------------------------------------------------------------- */

/* What Linux tells programs about an ARM64 processor, as far as the library asks: HWCAP_ASIMDDP, HWCAP2_I8MM. */
unsigned long getauxval(unsigned long type) {
    uint64_t isar0, isar1;
    __asm__("mrs %0, id_aa64isar0_el1" : "=r"(isar0));
    __asm__("mrs %0, id_aa64isar1_el1" : "=r"(isar1));
    if (type == 16) return (unsigned long)((isar0 >> 44 & 15) != 0) << 20;
    if (type == 26) return (unsigned long)((isar1 >> 52 & 15) != 0) << 13;
    return 0;
}

int clock_gettime(int clock, struct timespec *time) {
    uint64_t ticks, frequency;
    (void)clock;
    __asm__ volatile("isb\n\tmrs %0, cntvct_el0" : "=r"(ticks));
    __asm__("mrs %0, cntfrq_el0" : "=r"(frequency));
    time->tv_sec = (long)(ticks / frequency);
    time->tv_nsec = (long)(ticks % frequency * 1000000000u / frequency);
    return 0;
}
