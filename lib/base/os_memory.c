/* os_memory.c: memory on Linux, macOS and other POSIX systems: getting it, large pages, keeping it there, and how much of it
 * there is; see os.h. Windows: os_windows.c. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include "base/os.h"

#if !defined(_WIN32) && !defined(COLI_NO_PAGES)
#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#include "base/os_text.h"
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define HUGE_PAGE ((uint64_t)2 << 20)

/* ---- Getting it ------------------------------------------------------------------------------------------------------ */

static void *map_zeroed(uint64_t size, int more_flags) {
    if (size > SIZE_MAX) return NULL;
    void *memory = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | more_flags, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void *coli_os_alloc(uint64_t size) {
    if (size == 0) return NULL;
#if defined(MADV_HUGEPAGE)
    /* Huge pages begin at multiples of their size: ask for one more and give back the ends. */
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), kept;
    if (size >= HUGE_PAGE && page < HUGE_PAGE && coli_add64(size, HUGE_PAGE + page, &kept)) {
        kept = (size + page - 1) & ~(page - 1);
        uint8_t *memory = map_zeroed(kept + HUGE_PAGE, 0);
        if (memory) {
            uint64_t head = (0 - (uint64_t)(uintptr_t)memory) & (HUGE_PAGE - 1);
            if (head) munmap(memory, (size_t)head);
            munmap(memory + head + kept, (size_t)(HUGE_PAGE - head));
            (void)madvise(memory + head, (size_t)kept, MADV_HUGEPAGE); /* where the system has none: ordinary pages */
            return memory + head;
        }
    }
#endif
    return map_zeroed(size, 0);
}

void coli_os_free(void *memory, uint64_t size) {
    if (memory) munmap(memory, (size_t)size); /* the kernel rounds up to whole pages, as it did when mapping */
}

/* The pool's pages are promised when they are mapped, but a control group or the nodes that this process may use can still keep
 * them away. MAP_POPULATE says nothing then, and the first touch would be a SIGBUS: look at each page. */
void *coli_os_alloc_pool(uint64_t size, uint64_t page) {
#if defined(__linux__) && defined(MAP_HUGETLB)
    enum { SIZE_SHIFT = 26 }; /* MAP_HUGE_SHIFT, which older headers lack: the logarithm of the page size goes there */
    uint64_t whole;
    if (size == 0 || page == 0 || (page & (page - 1)) || !coli_add64(size, page - 1, &whole)) return NULL;
    whole &= ~(page - 1);
    uint8_t *memory = map_zeroed(whole, MAP_HUGETLB | MAP_POPULATE | (int)((unsigned)__builtin_ctzll(page) << SIZE_SHIFT));
    if (!memory) return NULL;
    bool good = (uintptr_t)memory % page == 0; /* an emulator may know nothing of such pages */
    for (uint64_t at = 0; good && at < whole; at += page) {
        unsigned char there = 0;
        good = mincore(memory + at, (size_t)sysconf(_SC_PAGESIZE), &there) == 0 && (there & 1);
    }
    if (good) return memory;
    munmap(memory, (size_t)whole);
#else
    (void)size, (void)page;
#endif
    return NULL;
}

/* ---- Advice about it, keeping it ------------------------------------------------------------------------------------- */

typedef struct pages {
    void *start;
    size_t bytes; /* 0: none, or more than there are addresses */
} pages_t;

/* The pages of a range: all that it touches, or those that lie in it whole. */
static pages_t pages_of(const void *memory, uint64_t size, bool whole) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)memory;
    if (size == 0 || size > UINTPTR_MAX - page - start) return (pages_t){NULL, 0};
    uintptr_t first = (start + (whole ? page - 1 : 0)) & ~(page - 1);
    uintptr_t end = (start + (uintptr_t)size + (whole ? 0 : page - 1)) & ~(page - 1);
    return (pages_t){(void *)first, end > first ? end - first : 0};
}

void coli_os_will_need(const void *data, uint64_t bytes) {
    pages_t p = pages_of(data, bytes, false);
    if (p.bytes) (void)madvise(p.start, p.bytes, MADV_WILLNEED);
}

void coli_os_want_huge(void *memory, uint64_t size) {
#if defined(MADV_HUGEPAGE)
    pages_t p = pages_of(memory, size, true); /* what else lies on the pages at the ends is not ours */
    if (p.bytes) (void)madvise(p.start, p.bytes, MADV_HUGEPAGE);
#else
    (void)memory, (void)size;
#endif
}

void coli_os_collapse(void *memory, uint64_t size) {
#if defined(__linux__)
    enum { COLLAPSE = 25 }; /* MADV_COLLAPSE; older kernels refuse it */
    pages_t p = pages_of(memory, size, true);
    if (p.bytes) (void)madvise(p.start, p.bytes, COLLAPSE);
#else
    (void)memory, (void)size;
#endif
}

bool coli_os_lock(const void *memory, uint64_t size) {
    pages_t p = pages_of(memory, size, false);
    if (p.bytes == 0) return size == 0;
    if (mlock(p.start, p.bytes) == 0) return true;
    (void)munlock(p.start, p.bytes); /* it may have come half the way */
    return false;
}

void coli_os_unlock(const void *memory, uint64_t size) {
    pages_t p = pages_of(memory, size, false);
    if (p.bytes) (void)munlock(p.start, p.bytes);
}

/* ---- What the system says about it ----------------------------------------------------------------------------------- */

#if defined(__linux__)
#define LINE_BYTES 4096

/* A text of any length, line by line. */
typedef struct lines {
    int descriptor;
    bool cut; /* what comes is the rest of a line whose beginning has been handed out */
    size_t begin, end; /* text not yet handed out */
    char text[LINE_BYTES];
} lines_t;

static size_t fill(lines_t *l) {
    ssize_t got;
    memmove(l->text, l->text + l->begin, l->end - l->begin);
    l->end -= l->begin;
    l->begin = 0;
    do got = read(l->descriptor, l->text + l->end, LINE_BYTES - 1 - l->end);
    while (got < 0 && errno == EINTR);
    if (got > 0) l->end += (size_t)got;
    return got > 0 ? (size_t)got : 0;
}

/* The next line, zero-terminated, until the next call; of one longer than the buffer the beginning. NULL: no more. */
static char *next_line(lines_t *l) {
    for (;;) {
        char *line = l->text + l->begin, *newline = memchr(line, '\n', l->end - l->begin);
        bool rest = l->cut, full = !newline && l->end - l->begin == LINE_BYTES - 1;
        if (!newline && !full && fill(l) > 0) continue;
        if (!newline && !full) line = l->text; /* the end: a last line without newline, or nothing */
        if (!newline && l->end == l->begin) return NULL;
        size_t length = newline ? (size_t)(newline - line) : l->end - l->begin;
        line[length] = '\0';
        l->begin = newline ? l->begin + length + 1 : l->end;
        l->cut = full;
        if (!rest) return line;
    }
}

/* The hexadecimal number at *text, which moves past it; false where there is none (or one of capital letters). */
static bool read_hex(const char **text, uint64_t *value) {
    const char *start = *text;
    for (*value = 0; (**text >= '0' && **text <= '9') || (**text >= 'a' && **text <= 'f'); (*text)++)
        *value = *value << 4 | (uint64_t)(**text <= '9' ? **text - '0' : **text - 'a' + 10);
    return *text > start;
}

/* How much of "1000-5000 rw-p ...", the first line about a mapping, lies in [first, end); false: another line. */
static bool overlap_of(const char *line, uint64_t first, uint64_t end, uint64_t *overlap) {
    uint64_t a, b;
    if (!read_hex(&line, &a) || *line++ != '-' || !read_hex(&line, &b) || *line != ' ') return false;
    a = COLI_MAX(a, first);
    b = COLI_MIN(b, end);
    *overlap = a < b ? b - a : 0;
    return true;
}

uint64_t coli_os_huge_bytes(const void *memory, uint64_t size) {
    static const char key[] = "AnonHugePages:";
    uint64_t first = (uintptr_t)memory, end, overlap = 0, sum = 0;
    lines_t lines = {.descriptor = open("/proc/self/smaps", O_RDONLY | O_CLOEXEC)};
    if (lines.descriptor < 0) return 0;
    if (!coli_add64(first, size, &end)) end = UINT64_MAX;
    for (const char *line; (line = next_line(&lines)) != NULL;) {
        if (overlap_of(line, first, end, &overlap) || overlap == 0 || strncmp(line, key, sizeof key - 1) != 0) continue;
        for (line += sizeof key - 1; *line == ' '; line++) {}
        int64_t kib = read_number(&line);
        /* Where in the mapping they are is not said: a mapping partly outside counts with what lies inside at most. */
        if (kib > 0) sum += COLI_MIN((uint64_t)kib * 1024, overlap);
    }
    close(lines.descriptor);
    return sum;
}

/* The least number that files called `name` hold in a control group and all groups above it. A group that is not there (a
 * container sees its own as the root) or lies outside of what is mounted here ("/../x") leaves those that are. */
static uint64_t least_limit(const char *root, const char *group, const char *name) {
    char path[LINE_BYTES + 64], text[32];
    uint64_t least = UINT64_MAX;
    size_t base = strlen(root), length = base;
    memcpy(path, root, base);
    if (strncmp(group, "/..", 3) != 0) length += strlen(group);
    memcpy(path + base, group, length - base);
    for (;;) {
        while (length > base && path[length - 1] == '/') length--;
        memcpy(path + length, name, strlen(name) + 1);
        const char *position = text;
        int64_t limit = read_small_file(path, text, sizeof text) ? read_number(&position) : -1; /* "max" */
        if (limit >= 0) least = COLI_MIN(least, (uint64_t)limit);
        if (length == base) return least;
        while (length > base && path[--length] != '/') {}
    }
}

/* Lines of /proc/self/cgroup: "4:cpu,memory:/group" (version 1), "0::/group" (version 2, alone or beside version 1). */
static uint64_t limit_of_groups(void) {
    uint64_t limit = UINT64_MAX, found;
    lines_t lines = {.descriptor = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC)};
    if (lines.descriptor < 0) return limit;
    for (char *line; (line = next_line(&lines)) != NULL;) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group || group[1] != '/') continue;
        *group++ = ','; /* every name lies between two signs now */
        *controllers = ',';
        bool version2 = controllers + 2 == group;
        bool version1 = strstr(controllers, ",memory,") != NULL && strstr(controllers, ",memory,") < group;
        if (version1) found = least_limit("/sys/fs/cgroup/memory", group, "/memory.limit_in_bytes");
        else if (version2) {
            found = least_limit("/sys/fs/cgroup", group, "/memory.max");
            limit = COLI_MIN(limit, found);
            found = least_limit("/sys/fs/cgroup/unified", group, "/memory.max");
        } else continue;
        limit = COLI_MIN(limit, found);
    }
    close(lines.descriptor);
    return limit;
}
#else
uint64_t coli_os_huge_bytes(const void *memory, uint64_t size) {
    (void)memory, (void)size;
    return 0;
}

static uint64_t limit_of_groups(void) { return UINT64_MAX; }
#endif

uint64_t coli_os_memory_limit(void) {
    uint64_t machine = UINT64_MAX;
#if defined(__APPLE__)
    size_t size = sizeof machine;
    if (sysctlbyname("hw.memsize", &machine, &size, NULL, 0) != 0) machine = UINT64_MAX;
#elif defined(_SC_PHYS_PAGES)
    long pages = sysconf(_SC_PHYS_PAGES);
    if (pages > 0) machine = (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
#endif
    uint64_t groups = limit_of_groups();
    return COLI_MIN(machine, groups);
}

#else
typedef int coli_os_memory_not_posix; /* ISO C wants a declaration in every file */
#endif
