/* init.c: the first and only process of a Linux machine with several memory nodes, made by tests/python/test_numa.py in qemu.
 * Argument "two": nodes 0 (CPUs 0, 1) and 1 (CPUs 2, 3). "odd": node 0 (CPUs 0, 1), node 1 (CPU 2), node 2 (CPU 3, no memory,
 * near node 1), node 3 (memory, no CPU). Checks what the library sees, where it puts memory and where its threads stay, prints
 * what passed, ends with "numa: ok" and switches the machine off. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../c/check.h"
#include "../../c/make_file.h"
#include "base/numa.h"
#include "base/status.h"
#include "forward/session.h"

#define PAGE 4096
#define MB ((uint64_t)1 << 20)
#define MOST_PAGES (16 * MB / PAGE)

static coli_topology_t topology;
static coli_numa_t interleave;

/* ---- Where pages are ----------------------------------------------------------------------------------------------------- */

/* nodes[i]: the system's node of page i, -errno where there is none. */
static void where(const void *memory, uint64_t bytes, int *nodes) {
    static void *pages[MOST_PAGES];
    uint64_t n = bytes / PAGE;
    for (uint64_t i = 0; i < n; i++) pages[i] = (uint8_t *)(uintptr_t)memory + i * PAGE, nodes[i] = -1;
    CHECK_EQ(syscall(SYS_move_pages, 0, n, pages, NULL, nodes, 0), 0);
}

static uint64_t count_on(const void *memory, uint64_t bytes, int node) {
    static int nodes[MOST_PAGES];
    uint64_t count = 0;
    where(memory, bytes, nodes);
    for (uint64_t i = 0; i < bytes / PAGE; i++) count += nodes[i] == node;
    return count;
}

static void check_on(const void *memory, uint64_t bytes, int node) { CHECK_EQ(count_on(memory, bytes, node), bytes / PAGE); }

static uint8_t *fresh(uint64_t bytes) {
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    (void)madvise(memory, bytes, MADV_NOHUGEPAGE);
    return memory;
}

static uint64_t touch(const volatile uint8_t *memory, uint64_t bytes) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < bytes; i += PAGE) sum += memory[i];
    return sum;
}

static void write_text(const char *path, const char *text) {
    int file = open(path, O_WRONLY);
    CHECK(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
    close(file);
}

static void stay_on_cpu(int cpu) { CHECK(coli_os_pin(cpu)); }

static void go_anywhere(void) {
    cpu_set_t all;
    CPU_ZERO(&all);
    for (int cpu = 0; cpu < 4; cpu++) CPU_SET(cpu, &all);
    CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}

/* ---- What the library sees ----------------------------------------------------------------------------------------------- */

/* The same on both machines: CPU 3 of the odd one's node 2 counts for the nearest that has memory, node 3 for none. */
static void test_topology(void) {
    coli_os_topology(&topology);
    CHECK_EQ(topology.num_nodes, 2);
    CHECK_EQ(topology.num_cpus, 4);
    CHECK_EQ(topology.id[0], 0);
    CHECK_EQ(topology.id[1], 1);
    for (int cpu = 0; cpu < 4; cpu++) CHECK_EQ(topology.cpu_node[cpu], cpu / 2);
    CHECK_EQ(topology.cpu_node[4], -1);
    CHECK_EQ(coli_numa_parse("interleave", 4, &topology, &interleave), COLIBRI_OK);
    fprintf(stderr, "topology: passed\n");
}

/* A process that may use CPU 2 alone has one node, the system's 1, and its memory goes there. */
static void test_restricted(void) {
    static coli_topology_t seen;
    coli_numa_t numa;
    stay_on_cpu(2);
    coli_os_topology(&seen);
    CHECK_EQ(seen.num_nodes, 1);
    CHECK_EQ(seen.num_cpus, 1);
    CHECK_EQ(seen.id[0], 1);
    CHECK_EQ(seen.cpu_node[2], 0);
    CHECK_EQ(seen.cpu_node[0], -1);
    CHECK_EQ(coli_numa_parse("interleave", 4, &seen, &numa), COLIBRI_OK);
    stay_on_cpu(0);
    uint8_t *memory = fresh(MB);
    memset(memory, 1, MB);
    check_on(memory, MB, 0);
    CHECK(coli_os_place(&numa, memory, MB, -1));
    check_on(memory, MB, 1);
    munmap(memory, MB);
    go_anywhere();
    fprintf(stderr, "one node of two: passed\n");
}

/* ---- Memory -------------------------------------------------------------------------------------------------------------- */

static void test_memory(void) {
    uint8_t *memory = fresh(8 * MB);
    stay_on_cpu(0);
    memset(memory, 1, 4 * MB); /* the second half is not there yet */
    check_on(memory, 4 * MB, 0);
    CHECK(coli_os_place(&interleave, memory, 8 * MB, 1));
    check_on(memory, 4 * MB, 1);
    memset(memory + 4 * MB, 2, 4 * MB);
    check_on(memory, 8 * MB, 1);
    /* Not whole pages: those whose middle is in the range. */
    CHECK(coli_os_place(&interleave, memory + PAGE / 2 + 1, 2 * MB, 0));
    check_on(memory, PAGE, 1);
    check_on(memory + PAGE, 2 * MB, 0);
    check_on(memory + PAGE + 2 * MB, PAGE, 1);
    CHECK(coli_os_place(&interleave, memory + 5 * MB + 100, PAGE / 2 - 101, 0)); /* none */
    check_on(memory + 5 * MB, PAGE, 1);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < 8 * MB; i++) wrong += memory[i] != (i < 4 * MB ? 1 : 2);
    CHECK_EQ(wrong, 0);
    munmap(memory, 8 * MB);
    fprintf(stderr, "anonymous memory: passed\n");
}

static void test_interleave(void) {
    static int nodes[MOST_PAGES];
    uint8_t *memory = fresh(8 * MB);
    CHECK(coli_os_place(&interleave, memory, 8 * MB, -1));
    memset(memory, 1, 8 * MB);
    where(memory, 8 * MB, nodes);
    uint64_t turns = 0;
    for (uint64_t i = 1; i < 8 * MB / PAGE; i++) turns += nodes[i] != nodes[i - 1];
    CHECK(turns > 8 * MB / PAGE * 9 / 10); /* new pages: one here, one there */
    CHECK_EQ(count_on(memory, 8 * MB, 0) + count_on(memory, 8 * MB, 1), 8 * MB / PAGE);
    CHECK(coli_os_place(&interleave, memory, 8 * MB, 0));
    check_on(memory, 8 * MB, 0);
    CHECK(coli_os_place(&interleave, memory, 8 * MB, -1)); /* pages already there: 2 MiB here, 2 MiB there */
    CHECK_EQ(count_on(memory, 8 * MB, 0), 4 * MB / PAGE);
    CHECK_EQ(count_on(memory, 8 * MB, 1), 4 * MB / PAGE);
    munmap(memory, 8 * MB);
    coli_numa_t list; /* of the nodes that the list names */
    memory = fresh(8 * MB);
    CHECK_EQ(coli_numa_parse("0-3:1", 4, &topology, &list), COLIBRI_OK);
    CHECK(coli_os_place(&list, memory, 8 * MB, -1));
    memset(memory, 1, 8 * MB);
    check_on(memory, 8 * MB, 1);
    munmap(memory, 8 * MB);
    fprintf(stderr, "interleaved memory: passed\n");
}

/* Bytes on transparent huge pages of the mapping that holds an address. */
static uint64_t huge_bytes(const void *memory) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[256];
    unsigned long begin, end, kilobytes;
    bool inside = false;
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) inside = begin <= (uintptr_t)memory && (uintptr_t)memory < end;
        else if (inside && sscanf(line, "AnonHugePages: %lu", &kilobytes) == 1) break;
    }
    if (maps) fclose(maps);
    return inside ? kilobytes << 10 : 0;
}

/* Transparent huge pages stay whole, before and after they are there; an expert's border inside one does not split it. */
static void test_huge(void) {
    coli_numa_t numa = interleave;
    numa.page = 2 * MB;
    uint8_t *memory = coli_os_alloc(12 * MB);
    CHECK(memory && (uintptr_t)memory % (2 * MB) == 0);
    CHECK(coli_os_place(&numa, memory, 7 * MB - 1, 1)); /* three pages */
    memset(memory, 1, 12 * MB);
    check_on(memory, 6 * MB, 1);
    check_on(memory + 6 * MB, 6 * MB, 0);
    CHECK_EQ(huge_bytes(memory), 6 * MB);
    CHECK(coli_os_place(&numa, memory, 12 * MB, 0));
    check_on(memory, 12 * MB, 0);
    CHECK_EQ(huge_bytes(memory), 12 * MB);
    CHECK(coli_os_place(&numa, memory, 12 * MB, -1));
    CHECK_EQ(count_on(memory, 12 * MB, 0), 6 * MB / PAGE);
    CHECK_EQ(count_on(memory, 12 * MB, 1), 6 * MB / PAGE);
    CHECK_EQ(huge_bytes(memory), 12 * MB);
    coli_os_free(memory, 12 * MB);
    fprintf(stderr, "transparent huge pages: passed\n");
}

/* Pages of a reserved pool, all of them in use: whether they move is the pool's to say. */
static void test_pool(void) {
    coli_numa_t numa = interleave;
    numa.page = 2 * MB;
    for (int spare = 0; spare < 2; spare++) {
        write_text("/proc/sys/vm/nr_hugepages", spare ? "16" : "8");
        uint64_t bytes = 8 * 2 * MB;
        uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
        if (memory == MAP_FAILED) {
            fprintf(stderr, "reserved huge pages: none (errno %d)\n", errno);
            return;
        }
        memset(memory, 1, bytes);
        uint64_t before = count_on(memory, bytes, 1);
        bool placed = coli_os_place(&numa, memory, bytes, 1);
        uint64_t after = count_on(memory, bytes, 1);
        CHECK(!placed || after == bytes / PAGE); /* what it says is true */
        fprintf(stderr, "reserved huge pages, %d spare: %s, %d of 8 on node 1 (before: %d)\n", spare ? 8 : 0,
                placed ? "placed" : "refused", (int)(after * PAGE / (2 * MB)), (int)(before * PAGE / (2 * MB)));
        placed = coli_os_place(&numa, memory, bytes, -1);
        fprintf(stderr, "    interleaved: %s, %d of 8 on node 1\n", placed ? "placed" : "refused",
                (int)(count_on(memory, bytes, 1) * PAGE / (2 * MB)));
        munmap(memory, bytes);
    }
    write_text("/proc/sys/vm/nr_hugepages", "0");
}

/* ---- Mapped files -------------------------------------------------------------------------------------------------------- */

static const uint8_t *map_file(const char *path, int *file) {
    *file = open(path, O_RDONLY);
    CHECK(*file >= 0);
    const uint8_t *data = mmap(NULL, 4 * MB, PROT_READ, MAP_SHARED, *file, 0);
    CHECK(data != MAP_FAILED);
    return data;
}

static void make_file(const char *path) {
    static char block[65536];
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0);
    for (uint64_t i = 0; i < 4 * MB; i += sizeof block) CHECK_EQ(write(file, block, sizeof block), sizeof block);
    CHECK_EQ(fsync(file), 0);
    close(file);
}

static void tell(const char *name, const char *what, bool placed, const uint8_t *data) {
    fprintf(stderr, "%s: %s: %s, %d of %d pages on node 1\n", name, what, placed ? "placed" : "refused",
            (int)count_on(data, 4 * MB, 1), (int)(4 * MB / PAGE));
}

/* The second process of a file's mapping, asleep until it is killed. */
static pid_t other_process(const uint8_t *data) {
    int ready[2];
    CHECK_EQ(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        (void)touch(data, 4 * MB);
        (void)!write(ready[1], "", 1);
        for (;;) pause();
    }
    char byte;
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    return child;
}

/* must_move: pages in our tables alone are expected to move. */
static void test_file(const char *name, const char *path, bool must_move) {
    int file;
    stay_on_cpu(0);
    make_file(path);
    const uint8_t *data = map_file(path, &file);
    bool placed = coli_os_place(&interleave, data, 4 * MB, 1); /* in the page cache (written just now), not in our tables */
    (void)touch(data, 4 * MB);
    tell(name, "placed before it is touched", placed, data);
    CHECK(coli_os_place(&interleave, data, 4 * MB, 0) || !must_move);
    placed = coli_os_place(&interleave, data, 4 * MB, 1);
    tell(name, "touched, then placed", placed, data);
    CHECK(!must_move || (placed && count_on(data, 4 * MB, 1) == 4 * MB / PAGE));
    placed = coli_os_place(&interleave, data, 4 * MB, -1);
    tell(name, "then page by page", placed, data);
    CHECK(!must_move || (placed && count_on(data, 4 * MB, 1) == 2 * MB / PAGE));
    CHECK_EQ(mlock(data, 4 * MB), 0);
    placed = coli_os_place(&interleave, data, 4 * MB, 1);
    tell(name, "locked, then placed", placed, data);
    CHECK(!must_move || (placed && count_on(data, 4 * MB, 1) == 4 * MB / PAGE));
    pid_t child = other_process(data);
    placed = coli_os_place(&interleave, data, 4 * MB, 0);
    tell(name, "to node 0, while another process has it mapped", placed, data);
    CHECK(!placed || count_on(data, 4 * MB, 1) == 0); /* what it says is true */
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    munmap((void *)(uintptr_t)data, 4 * MB);
    close(file);
    sync();
    write_text("/proc/sys/vm/drop_caches", "3");
    data = map_file(path, &file);
    placed = coli_os_place(&interleave, data, 4 * MB, 1);
    (void)touch(data, 4 * MB);
    tell(name, "placed before it is read from disk", placed, data);
    munmap((void *)(uintptr_t)data, 4 * MB);
    close(file);
    unlink(path);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

static _Atomic uint32_t strays, workers_seen;

/* The calling thread's CPUs are those of its node. */
static void look(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const coli_numa_t *numa = argument;
    (void)begin, (void)end;
    if (thread == 0) return;
    cpu_set_t mine;
    CHECK_EQ(sched_getaffinity(0, sizeof mine, &mine), 0);
    for (int cpu = 0; cpu < 4; cpu++)
        if (!CPU_ISSET(cpu, &mine) != (topology.cpu_node[cpu] != numa->thread_node[thread])) atomic_fetch_add(&strays, 1);
    if (topology.cpu_node[sched_getcpu()] != numa->thread_node[thread]) atomic_fetch_add(&strays, 1);
    atomic_fetch_or(&workers_seen, 1u << thread);
}

static void test_threads(void) {
    static uint8_t memory[1 << 20] __attribute__((aligned(64)));
    coli_numa_t numa = interleave;
    coli_numa_threads(&numa, &topology, 4, NULL);
    CHECK_EQ(numa.thread_node[1], 0);
    CHECK_EQ(numa.thread_node[2], 1);
    CHECK(coli_pool_size(4) <= sizeof memory);
    coli_ties_t ties = {.topology = &topology, .nodes = numa.thread_node};
    coli_pool_t *pool = coli_pool_start(memory, 4, &ties);
    CHECK(pool != NULL);
    static const uint32_t node_chunks[2] = {40, 40};
    coli_share_t shares[4];
    coli_numa_shares(&numa, 4, node_chunks, shares);
    for (int i = 0; pool && i < 10000 && workers_seen != 0xE; i++) coli_pool_run_shares(pool, look, &numa, 80, 1, shares);
    CHECK_EQ(workers_seen, 0xE);
    CHECK_EQ(strays, 0);
    if (pool) coli_pool_stop(pool);
    fprintf(stderr, "threads: passed\n");
}

/* ---- Sessions ------------------------------------------------------------------------------------------------------------ */

#define MODEL "/tmp/model.colibri"
#define LAYERS 2
#define EXPERTS 4
#define VOCAB 97
#define TOKENS 7

/* Experts of 4.7 MB, f32. */
static void make_model(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.hidden = spec.inter = 600;
    spec.experts = EXPERTS;
    size_t size;
    uint8_t *file = make_model_file(&spec, &size);
    CHECK(file && write_model_file(MODEL, file, size));
    free(file);
}

static void log_line(int level, const char *message, void *user) {
    (void)user;
    if (level == COLIBRI_LOG_WARNING || strstr(message, "numa")) fprintf(stderr, "    %s\n", message);
}

/* Pages of an expert that lie elsewhere than on its node; large ones at its ends belong to a neighbour, too, and do not
 * count. */
static uint64_t misplaced(const colibri_t *s, uint32_t layer, uint32_t expert, uint64_t page, int node) {
    uintptr_t at = (uintptr_t)coli_residency_expert(&s->residency, layer, expert).gate_up.tiles;
    uintptr_t begin = (at + page - 1) & ~(page - 1), end = (at + s->weights->layers[layer].expert_stride) & ~(page - 1);
    CHECK(begin < end);
    return begin >= end ? 0 : (end - begin) / PAGE - count_on((void *)begin, end - begin, node);
}

typedef struct nodes_of {
    const char *policy;
    int32_t residency;
    bool pool; /* of reserved huge pages */
    int node[LAYERS][EXPERTS];
} nodes_of_t;

static void check_nodes(const colibri_t *s, const nodes_of_t *n) {
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    CHECK_EQ(colibri_stats(s, &stats), COLIBRI_OK);
    CHECK_EQ(stats.residency, n->residency);
    CHECK_EQ(stats.numa_nodes, n->policy ? 2 : 0);
    CHECK_EQ(stats.hugepage_pool, n->pool);
    uint64_t page = n->pool ? stats.hugepage_size : PAGE;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        colibri_expert_stats_t rows[EXPERTS];
        CHECK_EQ(colibri_expert_stats(s, (int32_t)layer, rows, EXPERTS), COLIBRI_OK);
        for (uint32_t e = 0; e < EXPERTS; e++) {
            CHECK_EQ(rows[e].node, n->node[layer][e]);
            if (n->node[layer][e] >= 0) CHECK_EQ(misplaced(s, layer, e, page, n->node[layer][e]), 0);
        }
    }
}

static void run_session(const nodes_of_t *n, float *logits) {
    static const int32_t tokens[TOKENS] = {1, 5, 90, 33, 2, 60, 17}, length = TOKENS;
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model_path = MODEL;
    c.num_threads = 4;
    c.max_seq_len = 16;
    c.outputs = COLIBRI_OUTPUT_ALL;
    c.residency = n->residency;
    c.numa_policy = n->policy;
    c.log = log_line;
    fprintf(stderr, "session: residency %d%s, %s\n", n->residency, n->pool ? " (pool)" : "",
            n->policy ? n->policy : "no policy");
    write_text("/proc/sys/vm/nr_hugepages", n->pool ? "32" : "0");
    colibri_t *s = colibri_init(&c);
    if (!s) fprintf(stderr, "%s\n", colibri_last_error());
    CHECK(s != NULL);
    if (!s) return;
    check_nodes(s, n);
    CHECK_EQ(colibri_set_input(s, tokens, &length, 1), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    CHECK_EQ(colibri_get_output(s, logits, TOKENS * VOCAB * sizeof(float)), COLIBRI_OK);
    check_nodes(s, n);
    colibri_free(s);
}

static void test_sessions(bool odd) {
    static const nodes_of_t settings[] = {
        {NULL, COLIBRI_RESIDENCY_MAP, false, {{-1, -1, -1, -1}, {-1, -1, -1, -1}}},
        {"interleave", COLIBRI_RESIDENCY_HUGE, false, {{0, 1, 0, 1}, {0, 1, 0, 1}}},
        {"1:0,0:1", COLIBRI_RESIDENCY_HUGE, false, {{1, 1, 1, 1}, {0, 0, 0, 0}}},
        {"interleave", COLIBRI_RESIDENCY_HUGE, true, {{0, 1, 0, 1}, {0, 1, 0, 1}}},
        {"1:0,0:1", COLIBRI_RESIDENCY_HUGE, true, {{1, 1, 1, 1}, {0, 0, 0, 0}}},
        {"interleave", COLIBRI_RESIDENCY_LOCK, false, {{0, 1, 0, 1}, {0, 1, 0, 1}}},
        {"0:0,1:1", COLIBRI_RESIDENCY_LOCK, false, {{0, 0, 0, 0}, {1, 1, 1, 1}}},
        {"interleave", COLIBRI_RESIDENCY_STREAM, false, {{-1, -1, -1, -1}, {-1, -1, -1, -1}}}};
    static float plain[TOKENS * VOCAB] __attribute__((aligned(64))), placed[TOKENS * VOCAB] __attribute__((aligned(64)));
    make_model();
    go_anywhere();
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (odd && settings[i].pool) continue; /* a third of the pool is node 3's, and the others need not have room for it */
        memset(placed, 0xFF, sizeof placed);
        run_session(&settings[i], i ? placed : plain);
        CHECK(i == 0 || memcmp(plain, placed, sizeof plain) == 0); /* where weights lie changes no bit */
    }
    write_text("/proc/sys/vm/nr_hugepages", "0");
    unlink(MODEL);
    fprintf(stderr, "sessions: done\n");
}

int main(int count, char **arguments) {
    bool odd = count > 1 && strcmp(arguments[1], "odd") == 0;
    mkdir("/proc", 0755), mkdir("/sys", 0755), mkdir("/dev", 0755), mkdir("/tmp", 0755), mkdir("/disk", 0755);
    CHECK_EQ(mount("proc", "/proc", "proc", 0, NULL), 0);
    CHECK_EQ(mount("sysfs", "/sys", "sysfs", 0, NULL), 0);
    CHECK_EQ(mount("devtmpfs", "/dev", "devtmpfs", 0, NULL), 0);
    CHECK_EQ(mount("tmpfs", "/tmp", "tmpfs", 0, NULL), 0);
    write_text("/proc/sys/kernel/numa_balancing", "0"); /* it moves pages, and hides them from `where` while it thinks */
    test_topology();
    test_restricted();
    test_threads();
    test_memory();
    test_interleave();
    test_huge();
    test_pool();
    test_sessions(odd);
    if (!odd) {
        test_file("tmpfs", "/tmp/file", true);
        test_file("initramfs", "/file", false);
        if (mount("/dev/nvme0n1", "/disk", "ext4", 0, NULL) == 0) test_file("ext4", "/disk/file", true);
        else fprintf(stderr, "ext4: no disk (errno %d)\n", errno);
    }
    if (check_report() == 0) fprintf(stderr, "numa: ok\n");
    sync();
    reboot(RB_POWER_OFF);
    return 1;
}
