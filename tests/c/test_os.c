/* test_os.c: files read at offsets, past the page cache too; large pages, locked memory, and how much there is; signals
 * of worker threads. What only root may set up (reserved pages, control groups) is set up where it may be, and put back. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/os.h"
#include "check.h"

#define SKIPPED(...) (fprintf(stderr, "skipped: " __VA_ARGS__), fputc('\n', stderr))
#define MIB ((uint64_t)1 << 20)

static int lowest_free_descriptor(void) {
    int descriptor = open("/dev/null", O_RDONLY);
    close(descriptor);
    return descriptor;
}

/* ---- Files ---------------------------------------------------------------------------------------------------------- */

static uint8_t byte_at(uint64_t offset) { return (uint8_t)((offset * 2654435761u) >> 13); }

/* A new file in the current folder; `path` (a template of mkstemp) is its name. */
static coli_file_t make_file(char *path, uint64_t size) {
    coli_file_t file = {.handle = -1};
    int descriptor = mkstemp(path);
    FILE *out = fdopen(descriptor, "wb");
    CHECK(out != NULL);
    if (!out) return file;
    for (uint64_t i = 0; i < size; i++) fputc(byte_at(i), out);
    CHECK_EQ(fclose(out), 0);
    CHECK_EQ(coli_os_open(path, &file), COLIBRI_OK);
    CHECK_EQ(file.size, size);
    CHECK_EQ(file.alignment, 1);
    return file;
}

/* Whether a read gives `expected` bytes, the right ones, and writes nothing behind them (past the page cache: whole blocks). */
static bool reads(const coli_file_t *file, uint8_t *to, uint64_t bytes, uint64_t offset, int64_t expected) {
    memset(to, 0xEE, (size_t)bytes + 1);
    int64_t got = coli_os_read(file, to, bytes, offset);
    bool right = got == expected;
    if (!right) fprintf(stderr, "read %lld bytes, expected %lld\n", (long long)got, (long long)expected);
    for (int64_t i = 0; right && i < got; i++) right = to[i] == byte_at(offset + (uint64_t)i);
    for (uint64_t i = file->alignment > 1 ? bytes : (uint64_t)COLI_MAX(got, 0); right && i <= bytes; i++) right = to[i] == 0xEE;
    return right;
}

static void test_read(void) {
    enum { SIZE = 10000 };
    static uint8_t to[2 * SIZE];
    char path[] = "colibri-test-XXXXXX";
    int descriptor = lowest_free_descriptor(), ends[2];
    coli_file_t file = make_file(path, SIZE);
    unlink(path); /* reads need no name */
    CHECK(reads(&file, to, SIZE, 0, SIZE));
    CHECK(reads(&file, to, 1, SIZE - 1, 1));
    CHECK(reads(&file, to, 4097, 4095, 4097));
    CHECK(reads(&file, to, 2000, 9000, 1000)); /* less only at the end */
    CHECK(reads(&file, to, 2000, SIZE, 0));
    CHECK(reads(&file, to, 2000, (uint64_t)1 << 40, 0));
    CHECK(reads(&file, to, 0, 7, 0));
    CHECK_EQ(coli_os_read(&file, to, 1, (uint64_t)1 << 63), -EOVERFLOW);
    CHECK_EQ(coli_os_read(&file, to, 1, UINT64_MAX), -EOVERFLOW);
    CHECK_EQ(pipe(ends), 0);
    CHECK_EQ(coli_os_read(&(coli_file_t){ends[0], 5, 1}, to, 5, 0), -ESPIPE);
    close(ends[0]), close(ends[1]);
    coli_os_close(&file);
    CHECK_EQ(file.handle, -1);
    coli_os_close(&file);
    CHECK_EQ(coli_os_read(&file, to, 1, 0), -EBADF);
    CHECK_EQ(lowest_free_descriptor(), descriptor);
    CHECK(strcmp(coli_os_reason(EIO), "input/output error") == 0);
    CHECK(coli_os_reason(-1)[0] != 0);
}

/* Offsets and sizes that do not fit into 32 bits. */
static void test_large_file(void) {
    char path[] = "colibri-test-XXXXXX";
    const uint64_t far = ((uint64_t)5 << 30) + 3;
    uint8_t to[16];
    coli_file_t file = {.handle = -1};
    int descriptor = mkstemp(path);
    bool made = ftruncate(descriptor, (off_t)far) == 0 && pwrite(descriptor, "beyond", 6, (off_t)far) == 6;
    close(descriptor);
    if (made) {
        CHECK_EQ(coli_os_open(path, &file), COLIBRI_OK);
        CHECK(file.size == far + 6);
        CHECK_EQ(coli_os_read(&file, to, sizeof to, far), 6);
        CHECK(memcmp(to, "beyond", 6) == 0);
        CHECK_EQ(coli_os_read(&file, to, sizeof to, far - ((uint64_t)1 << 32)), sizeof to);
        coli_os_close(&file);
    } else SKIPPED("no file of 5 GiB can be made here");
    unlink(path);
}

typedef struct read_thread {
    pthread_t handle;
    const coli_file_t *file;
    uint64_t seed;
    bool good;
} read_thread_t;

static void *read_pieces(void *argument) {
    read_thread_t *t = argument;
    uint8_t to[4001];
    for (int i = 0; i < 200 && t->good; i++) {
        t->seed = t->seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t offset = t->seed >> 33, bytes = (t->seed >> 13) % (sizeof to - 1);
        offset %= t->file->size - bytes;
        t->good = reads(t->file, to, bytes, offset, (int64_t)bytes);
    }
    return NULL;
}

static void test_read_threads(void) {
    char path[] = "colibri-test-XXXXXX";
    coli_file_t file = make_file(path, 50000);
    read_thread_t threads[4];
    for (uint64_t i = 0; i < 4; i++) {
        threads[i] = (read_thread_t){.file = &file, .seed = i, .good = true};
        CHECK_EQ(pthread_create(&threads[i].handle, NULL, read_pieces, &threads[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i].handle, NULL);
        CHECK(threads[i].good);
    }
    coli_os_close(&file);
    unlink(path);
}

static void check_direct(uint64_t size) {
    static uint8_t scratch[8192 + 1];
    static _Alignas(4096) uint8_t to[4 * 4096 + 1];
    char path[] = "colibri-test-XXXXXX", other[] = "colibri-test-XXXXXX";
    coli_file_t file = make_file(path, size), second = make_file(other, 1), direct;
    CHECK_EQ(rename(other, path), 0); /* another file has the name now */
    if (coli_os_open_direct(&file, scratch + 1, &direct)) {
        const uint64_t block = direct.alignment, whole = size / block * block, rest = size - whole;
        CHECK_EQ(block, 4096);
        CHECK_EQ(direct.size, size);
        CHECK(direct.handle != file.handle);
#if defined(O_DIRECT)
        CHECK(fcntl((int)direct.handle, F_GETFL) & O_DIRECT);
#endif
        CHECK(reads(&direct, to, 4 * block, 0, (int64_t)COLI_MIN(4 * block, size)));
        CHECK(reads(&direct, to, 4 * block, block, (int64_t)COLI_MIN(4 * block, size - COLI_MIN(size, block))));
        CHECK(reads(&direct, to, 3 * block, whole, (int64_t)rest)); /* and no error behind the end */
        CHECK(reads(&direct, to, block, whole + block, 0));
        coli_os_close(&direct);
    } else SKIPPED("the page cache cannot be bypassed in this folder");
    CHECK(reads(&file, to, 4096, 0, (int64_t)COLI_MIN(4096, size))); /* the first one is as it was */
    coli_os_close(&file);
    coli_os_close(&second);
    unlink(path);
}

static void test_direct(void) {
    static uint8_t scratch[8192];
    char path[] = "colibri-test-XXXXXX";
    int descriptor = lowest_free_descriptor(), ends[2];
    coli_file_t direct, file = make_file(path, 9000);
    CHECK_EQ(truncate(path, 100), 0); /* shorter than when it was opened: not read as it should be */
    CHECK(!coli_os_open_direct(&file, scratch, &direct));
    coli_os_close(&file);
    unlink(path);
    CHECK(!coli_os_open_direct(&file, scratch, &direct));
    CHECK_EQ(pipe(ends), 0); /* can be opened again, but has no offsets */
    CHECK(!coli_os_open_direct(&(coli_file_t){ends[0], 5, 1}, scratch, &direct));
    close(ends[0]), close(ends[1]);
    static const uint64_t sizes[] = {1, 511, 4095, 4096, 4097, 8192, 20000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) check_direct(sizes[i]);
    CHECK_EQ(lowest_free_descriptor(), descriptor);
}

/* ---- Advice on a mapping -------------------------------------------------------------------------------------------- */

#if defined(__linux__)
/* Run it in a child, where it may lower limits or die; its failures are ours. */
static void in_child(void (*body)(void)) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        check_failures = 0;
        body();
        _exit(check_failures != 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static bool resident(const void *page) {
    unsigned char there = 0;
    return mincore((void *)(uintptr_t)page, 1, &there) == 0 && (there & 1);
}

/* Pages that the system has dropped come back without being touched. */
static void test_will_need(void) {
    char path[] = "colibri-test-XXXXXX";
    coli_file_t file = make_file(path, 300000);
    coli_file_map_t map = {0};
    CHECK_EQ(coli_os_map(&file, path, &map), COLIBRI_OK);
    bool dropped = fsync((int)file.handle) == 0 && posix_fadvise((int)file.handle, 0, 0, POSIX_FADV_DONTNEED) == 0;
    if (dropped && !resident(map.data) && !resident(map.data + 200000 / 65536 * 65536)) {
        coli_os_will_need(map.data + 100, 250000);
        bool back = false;
        for (int i = 0; i < 30000 && !back; i++) {
            back = resident(map.data) && resident(map.data + 200000 / 65536 * 65536);
            usleep(1000);
        }
        CHECK(back);
    } else SKIPPED("the page cache keeps files of this folder");
    coli_os_will_need(map.data, 0);
    coli_os_will_need(NULL, 0);
    coli_os_will_need(map.data, UINT64_MAX);
    coli_os_unmap(&map);
    coli_os_close(&file);
    unlink(path);
}

/* ---- Large pages ---------------------------------------------------------------------------------------------------- */

static int64_t number_in(const char *path) {
    long long value = -1;
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%lld", &value) != 1) value = -1;
    if (file) fclose(file);
    return value;
}

static bool write_text(const char *path, const char *text) {
    int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool good = descriptor >= 0 && write(descriptor, text, strlen(text)) == (ssize_t)strlen(text);
    if (descriptor >= 0) close(descriptor);
    return good;
}

#define POOL "/sys/kernel/mm/hugepages/hugepages-2048kB/"

/* At least 8 pages are in the pool, `before` are free. */
static void use_pool(void) {
    int64_t before = number_in(POOL "free_hugepages");
    uint8_t *memory = coli_os_alloc_pool(10 * MIB + 1, 2 * MIB);
    CHECK(memory != NULL);
    if (!memory) return;
    CHECK_EQ((uintptr_t)memory % (2 * MIB), 0);
    CHECK_EQ(number_in(POOL "free_hugepages"), before - 6); /* there, not only promised */
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 12 * MIB; i += 64) sum += memory[i]++;
    CHECK_EQ(sum, 0);
    if (number_in(POOL "nr_overcommit_hugepages") == 0)
        CHECK(coli_os_alloc_pool((uint64_t)(before - 5) * 2 * MIB, 2 * MIB) == NULL); /* one more than is left */
    CHECK_EQ(number_in(POOL "free_hugepages"), before - 6);
    CHECK(coli_os_lock(memory, 12 * MIB) || geteuid() != 0);
    coli_os_unlock(memory, 12 * MIB);
    coli_os_free(memory, 12 * MIB);
    CHECK_EQ(number_in(POOL "free_hugepages"), before);
}

static void test_pool(void) {
    static const uint64_t no_pages[] = {0, 3, 4096, 3 * MIB, (uint64_t)1 << 63};
    for (size_t i = 0; i < sizeof no_pages / sizeof *no_pages; i++) CHECK(coli_os_alloc_pool(MIB, no_pages[i]) == NULL);
    CHECK(coli_os_alloc_pool(0, 2 * MIB) == NULL);
    CHECK(coli_os_alloc_pool((uint64_t)1 << 45, 2 * MIB) == NULL);
    CHECK(coli_os_alloc_pool((uint64_t)1 << 45, 1024 * MIB) == NULL);
    CHECK(coli_os_alloc_pool(UINT64_MAX, 2 * MIB) == NULL);
    int64_t before = number_in(POOL "nr_hugepages");
    char text[32], back[32];
    snprintf(text, sizeof text, "%lld\n", (long long)before + 8);
    snprintf(back, sizeof back, "%lld\n", (long long)before);
    if (before < 0 || access(POOL "nr_hugepages", W_OK) != 0 || !write_text(POOL "nr_hugepages", text)) {
        SKIPPED("no pages of 2 MiB can be reserved");
        return;
    }
    if (number_in(POOL "nr_hugepages") == before + 8) in_child(use_pool);
    else SKIPPED("the system does not find 8 pages of 2 MiB to reserve");
    CHECK(write_text(POOL "nr_hugepages", back));
}

/* What coli_os_huge_bytes is to say, read in another way. */
static uint64_t huge_bytes_by_hand(const void *memory, uint64_t size) {
    unsigned long long first = (uintptr_t)memory, end = first + size, a = 0, b = 0, x, y, kib, sum = 0;
    size_t room = 0;
    char *line = NULL, dash, space;
    FILE *file = fopen("/proc/self/smaps", "r");
    while (file && getline(&line, &room, file) > 0) {
        if (sscanf(line, "%llx%c%llx%c", &x, &dash, &y, &space) == 4 && dash == '-' && space == ' ')
            a = COLI_MAX(x, first), b = COLI_MIN(y, end);
        else if (a < b && sscanf(line, "AnonHugePages: %llu kB", &kib) == 1) sum += COLI_MIN(kib << 10, b - a);
    }
    if (file) fclose(file);
    free(line);
    return sum;
}

static void check_huge_bytes(const uint8_t *memory, uint64_t size) {
    uint64_t expected = huge_bytes_by_hand(memory, size);
    CHECK_EQ(coli_os_huge_bytes(memory, size), expected);
    CHECK(expected <= size);
}

/* Huge pages that are asked for; a range of them; the pages at the ends of what is asked for are left alone. */
static void test_want_huge(void) {
    const uint64_t size = 10 * MIB;
    uint8_t *memory = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    if (memory == MAP_FAILED) return;
    CHECK_EQ(coli_os_huge_bytes(memory, size), 0); /* nothing is there */
    coli_os_want_huge(memory + 123, size - 123 - 77);
    for (uint64_t i = 0; i < size; i += 4096) memory[i] = 1;
    check_huge_bytes(memory, size);
    check_huge_bytes(memory + size / 2 + 5, 4096);
    check_huge_bytes(memory, 4096);
    check_huge_bytes(memory - MIB, 3 * MIB);
    CHECK_EQ(coli_os_huge_bytes(memory, 0), 0);
    CHECK_EQ(coli_os_huge_bytes(NULL, 4096), 0);
    CHECK_EQ(coli_os_huge_bytes(NULL, UINT64_MAX), huge_bytes_by_hand(NULL, UINT64_MAX));
    if (coli_os_huge_bytes(memory, size) == 0) SKIPPED("the system gives no transparent huge pages");
    coli_os_want_huge(memory + 1, 100); /* no whole page */
    coli_os_want_huge(memory, UINT64_MAX);
    coli_os_want_huge(NULL, 0);
    munmap(memory, (size_t)size);
    memory = coli_os_alloc(size); /* aligned and advised from the start: all of it, or what the system had */
    memset(memory, 1, (size_t)size);
    check_huge_bytes(memory, size);
    coli_os_free(memory, size);
}

static void test_collapse(void) {
    const uint64_t size = 8 * MIB;
    uint8_t *memory = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    if (memory == MAP_FAILED) return;
    for (uint64_t i = 0; i < size; i++) memory[i] = byte_at(i);
    uint64_t before = coli_os_huge_bytes(memory, size);
    coli_os_collapse(memory + 1, size - 2);
    uint64_t after = coli_os_huge_bytes(memory, size);
    CHECK(after >= before);
    if (after == 0) {
        (void)madvise(memory, (size_t)size, 25); /* MADV_COLLAPSE */
        CHECK_EQ(coli_os_huge_bytes(memory, size), 0);
        SKIPPED("touched pages do not become huge here");
    }
    bool same = true;
    for (uint64_t i = 0; i < size; i++) same = same && memory[i] == byte_at(i);
    CHECK(same);
    coli_os_collapse(memory, 0);
    coli_os_collapse(memory, UINT64_MAX);
    munmap(memory, (size_t)size);
}

/* A line of the system's file that is longer than any buffer: a mapping of a file in deep folders, right before huge pages. */
static void test_long_lines(void) {
    enum { DEPTH = 20 };
    char name[201];
    memset(name, 'f', 200); /* as if it were a hexadecimal number */
    name[200] = '\0';
    int depth = 0;
    while (depth < DEPTH && mkdir(name, 0700) == 0 && chdir(name) == 0) depth++;
    int descriptor = open(name, O_RDWR | O_CREAT, 0600);
    const size_t size = 6 << 20, head = 1 << 16;
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    if (descriptor >= 0 && depth == DEPTH && ftruncate(descriptor, (off_t)head) == 0) {
        CHECK(mmap(memory, head, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, 0) == memory);
        coli_os_want_huge(memory + head, size - head);
        for (size_t i = head; i < size; i += 4096) memory[i] = 1;
        check_huge_bytes(memory, size);
        check_huge_bytes(memory + head, size - head);
    } else SKIPPED("no folders as deep as that");
    munmap(memory, size);
    close(descriptor);
    unlink(name);
    for (; depth > 0; depth--) CHECK(chdir("..") == 0 && rmdir(name) == 0);
}

/* ---- Locked memory -------------------------------------------------------------------------------------------------- */

static int64_t locked_pages(void) {
    char line[256];
    long long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "VmLck: %lld", &kib) != 1) {}
    if (file) fclose(file);
    return kib < 0 ? -1 : kib * 1024 / sysconf(_SC_PAGESIZE);
}

/* Sanitizers make it a call that does nothing, and an emulator may. */
static bool can_lock(void) {
    static uint8_t something;
    bool can = locked_pages() == 0 && mlock(&something, 1) == 0 && locked_pages() > 0;
    munlock(&something, 1);
    if (!can) SKIPPED("memory cannot be locked, or it does not show");
    return can;
}

/* With room for 16 pages, and without the rights that lift the limit. */
static void lock_within_limit(void) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    struct rlimit limit = {16 * page, 16 * page};
    uint8_t *memory = mmap(NULL, 64 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!can_lock()) return;
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || (geteuid() == 0 && setuid(65534) != 0)) {
        SKIPPED("locked memory cannot be limited here");
        return;
    }
    CHECK(coli_os_lock(memory + 100, 5 * page));
    CHECK_EQ(locked_pages(), 6);
    for (int i = 0; i < 6; i++) CHECK(resident(memory + i * page));
    CHECK(coli_os_lock(memory, 3 * page)); /* not counted */
    coli_os_unlock(memory, 6 * page);
    CHECK_EQ(locked_pages(), 0);
    CHECK(!coli_os_lock(memory, 17 * page));
    CHECK(!coli_os_lock(memory, UINT64_MAX));
    CHECK(!coli_os_lock(memory, UINTPTR_MAX - (uintptr_t)memory - 5));
    CHECK(coli_os_lock(memory, 0));
    CHECK_EQ(locked_pages(), 0);
    munmap(memory + 8 * page, page);
    CHECK(!coli_os_lock(memory + 4 * page, 9 * page)); /* a hole: what came before it is let go */
    CHECK_EQ(locked_pages(), 0);
}

/* A mapping whose file has become shorter: an error, no signal, and nothing stays locked. */
static void lock_lost_pages(void) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    char path[] = "colibri-test-XXXXXX";
    coli_file_t file = make_file(path, 4 * page);
    coli_file_map_t map = {0};
    CHECK_EQ(coli_os_map(&file, path, &map), COLIBRI_OK);
    if (can_lock() && coli_os_lock(map.data, map.size)) {
        coli_os_unlock(map.data, map.size);
        CHECK_EQ(truncate(path, (off_t)page), 0);
        CHECK(!coli_os_lock(map.data, map.size));
        CHECK_EQ(locked_pages(), 0);
    }
    coli_os_unmap(&map);
    coli_os_close(&file);
    unlink(path);
}
#endif

/* ---- How much memory there is --------------------------------------------------------------------------------------- */

static void test_limit_of_machine(void) {
    uint64_t limit = coli_os_memory_limit();
    CHECK(limit >= MIB);
#if defined(_SC_PHYS_PAGES)
    CHECK(limit <= (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
#endif
    CHECK_EQ(coli_os_memory_limit(), limit);
}

#if defined(__linux__)
#include <sched.h>
#include <sys/mount.h>

#define GROUPS "/sys/fs/cgroup"
#define LIMIT1 "memory.limit_in_bytes"

/* What a system shows of its control groups, and the limit that follows; 0: the machine's. */
static const struct groups_case {
    const char *groups; /* /proc/self/cgroup */
    const char *files[4][2]; /* below /sys/fs/cgroup, and what they say */
    uint64_t limit;
} groups_cases[] = {
    {"0::/a/b\n", {{"a/b/memory.max", "max\n"}, {"a/memory.max", "50000000\n"}}, 50000000},
    {"0::/a/b\n", {{"a/b/memory.max", "30000000\n"}, {"a/memory.max", "50000000\n"}}, 30000000},
    {"0::/a/b/\n", {{"a/b/memory.max", "60000000\n"}, {"a/memory.max", "50000000\n"}, {"c/memory.max", "1\n"}}, 50000000},
    {"0::/\n", {{"memory.max", "20000000\n"}, {"a/memory.max", "1\n"}}, 20000000},
    {"0::/a", {{"a/memory.max", "41000000"}}, 41000000}, /* no newline */
    {"0::/gone/x\n", {{"memory.max", "20000000\n"}}, 20000000}, /* inside a container */
    {"0::/../x\n", {{"memory.max", "21000000\n"}}, 21000000},   /* of another container */
    {"0::/a\n", {{"a/memory.max", "max\n"}}, 0},
    {"0::/a\n", {{"a/memory.max", "9223372036854771712\n"}}, 0},
    {"0::/a\n", {{"a/memory.max", "0\n"}, {"memory.max", "5\n"}}, 0}, /* marked below: a limit of zero is one */
    {"9:cpu:/z\n5:memory:/a/b\n0::/\n",
     {{"memory/a/" LIMIT1, "40000000\n"}, {"memory/a/b/" LIMIT1, "9223372036854771712\n"}, {"memory/z/" LIMIT1, "1\n"}},
     40000000},
    {"5:memory:/docker/x\n", {{"memory/" LIMIT1, "25000000\n"}}, 25000000},
    {"5:memory:/../a\n", {{"memory/" LIMIT1, "22000000\n"}, {"a/" LIMIT1, "1\n"}}, 22000000},
    {"5:cpu,memory,pids:/a\n", {{"memory/a/" LIMIT1, "26000000\n"}}, 26000000},
    {"5:memorystick:/a\n6:name=memory:/a\n7:cpu:/memory,\n",
     {{"memory/a/" LIMIT1, "1\n"}, {"memory/memory,/" LIMIT1, "1\n"}}, 0},
    {"4:pids:/\n0::/a\n", {{"unified/a/memory.max", "27000000\n"}}, 27000000},
    {"4:memory:/b\n0::/a\n", {{"unified/a/memory.max", "28000000\n"}, {"memory/b/" LIMIT1, "27500000\n"}}, 27500000},
    {"\n:\n::\n:::\nx\n0:\n0::\n0::a\n", {{"memory.max", "1\n"}, {"a/memory.max", "1\n"}}, 0},
};

static void write_below(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, GROUPS "/%s", name);
    for (char *slash = path + sizeof GROUPS; (slash = strchr(slash, '/')) != NULL; *slash++ = '/') {
        *slash = '\0';
        mkdir(path, 0700);
    }
    CHECK(write_text(path, text));
}

static void check_groups(const struct groups_case *c, uint64_t machine) {
    static char text[30000];
    uint64_t expected = c->limit || strstr(c->files[0][1], "0\n") == c->files[0][1] ? c->limit : machine;
    if (mount("none", GROUPS, "tmpfs", 0, NULL) != 0) {
        SKIPPED("nothing can be mounted at " GROUPS);
        return;
    }
    for (int i = 0; i < 4 && c->files[i][0]; i++) write_below(c->files[i][0], c->files[i][1]);
    write_below("memory/evil/" LIMIT1, "1\n");
    for (int longer = 0; longer < 3; longer++) { /* behind a line that is longer than any buffer, whose rest looks like one */
        int zeros = longer == 1 ? 4087 : 20000;
        size_t n = longer == 0 ? 0 : (size_t)snprintf(text, sizeof text, "3:cpu:/%0*d:memory:/evil\n", zeros, 0);
        snprintf(text + n, sizeof text - n, "%s", c->groups);
        CHECK(write_text(GROUPS "/groups", text));
        if (mount(GROUPS "/groups", "/proc/self/cgroup", "none", MS_BIND, NULL) != 0) {
            SKIPPED("nothing can be mounted at /proc/self/cgroup");
            break;
        }
        uint64_t limit = coli_os_memory_limit();
        if (limit != expected) fprintf(stderr, "groups: %s", c->groups);
        CHECK_EQ(limit, expected);
        CHECK_EQ(umount("/proc/self/cgroup"), 0);
    }
    CHECK_EQ(umount2(GROUPS, MNT_DETACH), 0);
}

/* As root, or as the root of a user namespace of its own. */
static bool own_mounts(void) {
    char users[64], members[64];
    snprintf(users, sizeof users, "0 %d 1\n", (int)geteuid());
    snprintf(members, sizeof members, "0 %d 1\n", (int)getegid());
    if (unshare(CLONE_NEWNS) != 0) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || !write_text("/proc/self/setgroups", "deny")) return false;
        if (!write_text("/proc/self/uid_map", users) || !write_text("/proc/self/gid_map", members)) return false;
    }
    return mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) == 0;
}

/* Other files in their place, for this process alone. */
static void with_other_groups(void) {
    if (!own_mounts()) {
        SKIPPED("this process may not have mounts of its own");
        return;
    }
    uint64_t machine = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < sizeof groups_cases / sizeof *groups_cases; i++) check_groups(&groups_cases[i], machine);
}

static char group[600]; /* a group of this test's own */

static void join_group(void) {
    char path[640], pid[32];
    snprintf(path, sizeof path, "%s/cgroup.procs", group);
    snprintf(pid, sizeof pid, "%d\n", (int)getpid());
    if (write_text(path, pid)) CHECK_EQ(coli_os_memory_limit(), 48 * MIB);
    else SKIPPED("the control group cannot be joined");
}

/* A real one, below that of this process; the child leaves it by ending. */
static void test_real_group(void) {
    char line[512], path[640];
    bool made = false;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (!made && file && fgets(line, sizeof line, file)) {
        char *version1 = strstr(line, ":memory:"), *version2 = strncmp(line, "0::", 3) == 0 ? line + 3 : NULL;
        const char *name = version1 ? LIMIT1 : "memory.max", *at = version1 ? version1 + 8 : version2;
        if (!at) continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(group, sizeof group, GROUPS "%s%s/colibri-test-%d", version1 ? "/memory" : "", at, (int)getpid());
        if (mkdir(group, 0700) != 0) continue;
        snprintf(path, sizeof path, "%s/%s", group, name);
        made = access(path, W_OK) == 0 && write_text(path, "50331648\n");
        if (made) in_child(join_group);
        CHECK_EQ(rmdir(group), 0);
    }
    if (file) fclose(file);
    if (!made) SKIPPED("no control group with a limit of memory can be made");
}
#endif

/* ---- Signals of threads --------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t handled;

static void on_signal(int signal) { handled = signal; }

static void see_signals(void *argument) {
    pthread_sigmask(SIG_SETMASK, NULL, argument);
    raise(SIGFPE); /* as if it had divided by zero */
}

static void test_signals(void) {
    static const int own[] = {SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP, SIGABRT};
    static const int others[] = {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGCHLD, SIGPROF};
    struct sigaction action = {.sa_handler = on_signal}, before_action;
    sigset_t before, mask, after;
    coli_os_thread_t thread;
    sigaction(SIGFPE, &action, &before_action);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    CHECK(coli_os_thread_start(&thread, see_signals, &mask));
    coli_os_thread_join(&thread);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK_EQ(handled, SIGFPE);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) CHECK(sigismember(&mask, own[i]) == 0);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) CHECK(sigismember(&mask, others[i]) == 1);
    for (int i = 1; i < 32; i++) CHECK(sigismember(&before, i) == sigismember(&after, i)); /* the caller's are as they were */
    sigaction(SIGFPE, &before_action, NULL);
}

int main(void) {
    test_read();
    test_large_file();
    test_read_threads();
    test_direct();
    test_limit_of_machine();
    test_signals();
#if defined(__linux__)
    test_will_need();
    test_pool();
    test_want_huge();
    test_collapse();
    test_long_lines();
    in_child(lock_within_limit);
    in_child(lock_lost_pages);
    in_child(with_other_groups);
    test_real_group();
#endif
    return check_report();
}
