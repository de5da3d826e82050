/* test_base.c: status sentences, the arena and the operating system layer. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/cpu.h"
#include "base/os.h"
#include "base/status.h"
#include "check.h"

static void test_arena(void) {
    coli_arena_t counting = {0};
    CHECK(coli_arena_take(&counting, 3, 5) == NULL);
    CHECK_EQ(counting.used, 64);
    CHECK(coli_arena_take(&counting, 0, 8) == NULL);
    CHECK_EQ(counting.used, 64);
    _Alignas(64) uint8_t memory[256];
    coli_arena_t arena = {.base = memory};
    CHECK(coli_arena_take(&arena, 65, 1) == memory);
    CHECK(coli_arena_take(&arena, 1, 1) == memory + 128);
    CHECK_EQ(arena.used, 192);
    CHECK(!arena.overflow);
    CHECK(coli_arena_take(&counting, UINT64_MAX / 2, 3) == NULL);
    CHECK(counting.overflow);
    coli_arena_t full = {.used = UINT64_MAX - 63};
    coli_arena_take(&full, 64, 1);
    CHECK(full.overflow);
}

static void test_status(void) {
    CHECK_EQ(colibri_last_status(), COLIBRI_OK);
    CHECK_EQ(colibri_last_error()[0], 0);
    CHECK_EQ(coli_fail(COLIBRI_ERR_FORMAT, "row %d of %s", 7, "x"), COLIBRI_ERR_FORMAT);
    CHECK_EQ(colibri_last_status(), COLIBRI_ERR_FORMAT);
    CHECK(strcmp(colibri_last_error(), "row 7 of x") == 0);
    for (int i = 0; i < COLIBRI_STATUS_COUNT_; i++) CHECK(strncmp(colibri_status_name((colibri_status_t)i), "COLIBRI_", 8) == 0);
    CHECK(strcmp(colibri_status_name(COLIBRI_ERR_SLOT_FULL), "COLIBRI_ERR_SLOT_FULL") == 0);
    CHECK(strcmp(colibri_status_name((colibri_status_t)-1), "COLIBRI_ERR_UNKNOWN") == 0);
    CHECK(strcmp(colibri_status_name(COLIBRI_STATUS_COUNT_), "COLIBRI_ERR_UNKNOWN") == 0);
    /* A sentence that is too long is cut between characters: 511 is odd, each character here takes two bytes. */
    char name[1201] = "";
    for (int i = 0; i < 600; i++) memcpy(name + 2 * i, "\xC3\xA9", 3);
    coli_fail(COLIBRI_ERR_IO, "%s", name);
    CHECK_EQ(strlen(colibri_last_error()), 510);
}

static void *see_status(void *unused) {
    (void)unused;
    return (void *)(uintptr_t)(colibri_last_status() == COLIBRI_OK && colibri_last_error()[0] == 0);
}

static void test_status_of_thread(void) {
    pthread_t thread;
    void *clean = NULL;
    coli_fail(COLIBRI_ERR_STATE, "of this thread");
    CHECK_EQ(pthread_create(&thread, NULL, see_status, NULL), 0);
    pthread_join(thread, &clean);
    CHECK(clean != NULL);
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    if (!file) return;
    fputs(text, file);
    fclose(file);
}

static int lowest_free_descriptor(void) {
    int descriptor = open("/dev/null", O_RDONLY);
    close(descriptor);
    return descriptor;
}

/* The way a model takes; the file is closed before the mapping is used. */
static colibri_status_t map_path(const char *path, coli_file_map_t *map) {
    coli_file_t file = {.handle = -1};
    colibri_status_t status = coli_os_open(path, &file);
    if (status == COLIBRI_OK) status = coli_os_map(&file, path, map);
    coli_os_close(&file);
    return status;
}

static void test_map(void) {
    char folder[] = "/tmp/colibri-test-XXXXXX", path[512];
    CHECK(mkdtemp(folder) != NULL);
    coli_file_map_t map = {0};
    int descriptor = lowest_free_descriptor();
    snprintf(path, sizeof path, "%s/\xD0\x97\xD0\xB0\xD0\xB3\xD1\x80", folder); /* a Cyrillic name */
    CHECK_EQ(map_path(path, &map), COLIBRI_ERR_NOT_FOUND);
    CHECK(strstr(colibri_last_error(), path) != NULL);
    CHECK_EQ(map_path("", &map), COLIBRI_ERR_NOT_FOUND);
    write_file(path, "");
    CHECK_EQ(map_path(path, &map), COLIBRI_ERR_FORMAT);
    write_file(path, "COLI");
    CHECK_EQ(map_path(path, &map), COLIBRI_OK);
    CHECK_EQ(map.size, 4);
    CHECK(map.data && memcmp(map.data, "COLI", 4) == 0);
    coli_os_unmap(&map);
    CHECK(map.data == NULL);
    coli_os_unmap(&map); /* twice is harmless */
    CHECK_EQ(map_path(folder, &map), COLIBRI_ERR_FORMAT);
    CHECK_EQ(map_path("/dev/null", &map), COLIBRI_ERR_FORMAT);
    unlink(path);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_EQ(map_path(path, &map), COLIBRI_ERR_FORMAT); /* and does not wait for a writer */
    unlink(path);
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    CHECK_EQ(map_path(path, &map), COLIBRI_ERR_IO);
    rmdir(folder);
    CHECK_EQ(lowest_free_descriptor(), descriptor); /* nothing stayed open */
}

static void test_alloc(void) {
    static const uint64_t sizes[] = {1, 4096, 100000, (2u << 20) - 1, 2u << 20, (5u << 20) + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint8_t *memory = coli_os_alloc(sizes[i]);
        CHECK(memory != NULL);
        if (!memory) continue;
        CHECK_EQ((uintptr_t)memory % COLI_ALIGN, 0);
        uint64_t sum = 0;
        for (uint64_t k = 0; k < sizes[i]; k++) sum += memory[k];
        CHECK_EQ(sum, 0);
        memory[0] = memory[sizes[i] - 1] = 1;
        coli_os_free(memory, sizes[i]);
    }
    CHECK(coli_os_alloc(0) == NULL);
    CHECK(coli_os_alloc((uint64_t)1 << 62) == NULL);
    CHECK(coli_os_alloc(UINT64_MAX) == NULL);
    for (int i = 0; i < 200; i++) coli_os_free(coli_os_alloc((uint64_t)1 << 32), (uint64_t)1 << 32); /* given back, or it runs out */
    coli_os_free(NULL, 1);
}

static void test_machine(void) {
    uint64_t before = coli_os_now_ns();
    CHECK(coli_os_now_ns() >= before);
    CHECK(coli_os_num_cores() >= 1);
    CHECK(coli_os_num_cores() <= (int)sysconf(_SC_NPROCESSORS_ONLN));
    CHECK_EQ(coli_cpu_features(), coli_cpu_features());
    CHECK(coli_cpu_text()[0] != 0);
#if defined(__x86_64__)
    CHECK((coli_cpu_features() & COLI_CPU_AVX512) == 0 || (coli_cpu_features() & COLI_CPU_AVX2) != 0);
    CHECK(((coli_cpu_features() & COLI_CPU_AVX2) != 0) == (strstr(coli_cpu_text(), "avx2") != NULL));
    CHECK(((coli_cpu_features() & COLI_CPU_AVX512_VNNI) != 0) == (strstr(coli_cpu_text(), "avx512_vnni") != NULL));
#endif
}

static void test_fork_guard(void) {
    void *guard = coli_os_fork_guard_new();
    CHECK(!coli_os_forked(guard));
    CHECK(!coli_os_forked(NULL));
    pid_t child = fork();
    if (child == 0) _exit(guard ? coli_os_forked(guard) != true : 0);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(!coli_os_forked(guard));
    coli_os_fork_guard_free(guard);
    coli_os_fork_guard_free(NULL);
}

typedef struct handover {
    _Atomic uint32_t word;
    uint32_t value;
} handover_t;

static void hand_over(void *argument) {
    handover_t *handover = argument;
    uint8_t stack[600000]; /* more than musl's default */
    for (volatile size_t i = 0; i < sizeof stack; i += 4096) ((volatile uint8_t *)stack)[i] = 1;
    handover->value = 42;
    atomic_store(&handover->word, 1);
    coli_os_wake(&handover->word, true);
}

static void test_threads(void) {
    handover_t handover = {0};
    coli_os_thread_t thread;
    CHECK(coli_os_thread_start(&thread, hand_over, &handover));
    while (atomic_load(&handover.word) == 0) coli_os_wait(&handover.word, 0);
    CHECK_EQ(handover.value, 42);
    coli_os_wait(&handover.word, 0); /* the word differs: returns at once */
    coli_os_thread_join(&thread);
}

int main(void) {
    test_status();
    test_status_of_thread();
    test_arena();
    test_map();
    test_alloc();
    test_machine();
    test_fork_guard();
    test_threads();
    return check_report();
}
