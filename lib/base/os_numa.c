/* os_numa.c: memory nodes as the system has them, and moving memory and threads there; contract in numa.h. Linux by raw system
 * calls (mbind, move_pages, get_mempolicy: no libnuma); elsewhere there is one node. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif

#include "base/numa.h"

#if defined(__linux__) && !defined(COLI_NO_PAGES)
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LONG_BITS (8 * sizeof(unsigned long))
#define CPU_LONGS (COLI_MAX_CPUS / LONG_BITS)
#define MOST_IDS 1024 /* nodes that a kernel can be built for */
#define ID_LONGS (MOST_IDS / LONG_BITS)
#define LIST_BYTES 8192

/* linux/mempolicy.h, which comes with other headers than the C library's on some systems. */
enum { POLICY_PREFERRED = 1, POLICY_INTERLEAVE = 3, ALL_OR_ERROR = 1, MOVE = 2, ALLOWED_NODES = 4 };

#define STRIPE ((uint64_t)2 << 20) /* no page of a size of its own crosses one */
#define BATCH 512

static bool has(const unsigned long *set, int64_t i) { return set[(size_t)i / LONG_BITS] >> ((size_t)i % LONG_BITS) & 1; }

static void put(unsigned long *set, int64_t i) { set[(size_t)i / LONG_BITS] |= 1ul << ((size_t)i % LONG_BITS); }

/* ---- What there is ------------------------------------------------------------------------------------------------------- */

/* A file below /sys/devices/system/node, zero-terminated; false if it cannot be read. */
static bool read_about(const char *format, int id, char text[LIST_BYTES]) {
    char path[96];
    int used = snprintf(path, sizeof path, "/sys/devices/system/node/");
    snprintf(path + used, sizeof path - (size_t)used, format, id);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return false;
    ssize_t got, length = 0;
    while (length < LIST_BYTES - 1 && (got = read(descriptor, text + length, (size_t)(LIST_BYTES - 1 - length))) > 0)
        length += got;
    close(descriptor);
    text[length] = '\0';
    return length > 0;
}

/* The number at *text, which moves past it; -1 where there is none. */
static int64_t read_number(const char **text) {
    if (**text < '0' || **text > '9') return -1;
    int64_t value = 0;
    for (; **text >= '0' && **text <= '9' && value < INT_MAX; (*text)++) value = value * 10 + (**text - '0');
    return value;
}

/* Put the members of "0-3,8" into a set of `most`. */
static void read_list(const char *text, unsigned long *set, int64_t most) {
    for (int64_t first; (first = read_number(&text)) >= 0; text++) {
        int64_t last = first;
        if (*text == '-') text++, last = read_number(&text);
        for (int64_t i = first; i <= last && i < most; i++) put(set, i);
        if (*text != ',') return;
    }
}

/* Nodes with memory that this process may use (cpuset); what the kernel says, else what /sys says. */
static bool memory_nodes(unsigned long nodes[ID_LONGS]) {
    char text[LIST_BYTES];
    if (syscall(SYS_get_mempolicy, NULL, nodes, MOST_IDS, NULL, ALLOWED_NODES) == 0) return true;
    memset(nodes, 0, ID_LONGS * sizeof *nodes);
    if (!read_about("has_memory", 0, text)) return false;
    read_list(text, nodes, MOST_IDS);
    return true;
}

/* The node with memory that is nearest to one without; -1: none is known. distance: a number for each node that is online. */
static int nearest(int id, const unsigned long *online, const unsigned long *memory) {
    char text[LIST_BYTES];
    int best = -1;
    int64_t least = INT64_MAX;
    if (!read_about("node%d/distance", id, text)) return -1;
    const char *position = text;
    for (int other = 0; other < MOST_IDS; other++) {
        if (!has(online, other)) continue;
        int64_t distance = read_number(&position);
        if (distance < 0) break;
        while (*position == ' ') position++;
        if (has(memory, other) && distance < least) best = other, least = distance;
    }
    return best;
}

/* owner[cpu] = id of the node with memory that each allowed CPU belongs to, -1: none. Returns how many nodes have memory. */
static int read_owners(const unsigned long *allowed, int16_t owner[COLI_MAX_CPUS]) {
    unsigned long online[ID_LONGS] = {0}, memory[ID_LONGS] = {0};
    char text[LIST_BYTES];
    int with_memory = 0;
    if (!read_about("online", 0, text)) return 0;
    read_list(text, online, MOST_IDS);
    if (!memory_nodes(memory)) return 0;
    for (int id = 0; id < MOST_IDS; id++) {
        unsigned long cpus[CPU_LONGS] = {0};
        if (!has(online, id)) continue;
        with_memory += has(memory, id);
        int home = has(memory, id) ? id : nearest(id, online, memory);
        if (home < 0 || !read_about("node%d/cpulist", id, text)) continue;
        read_list(text, cpus, COLI_MAX_CPUS);
        for (int cpu = 0; cpu < COLI_MAX_CPUS; cpu++)
            if (has(cpus, cpu) && has(allowed, cpu)) owner[cpu] = (int16_t)home;
    }
    return with_memory;
}

/* Number the nodes in order of the system's. False: some allowed CPU belongs to none, so this is not to be believed. */
static bool number_nodes(const unsigned long *allowed, coli_topology_t *topology) {
    int16_t number[MOST_IDS];
    memset(number, 0xFF, sizeof number);
    for (int cpu = 0; cpu < COLI_MAX_CPUS; cpu++) {
        if (!has(allowed, cpu)) continue;
        if (topology->cpu_node[cpu] < 0) return false;
        number[topology->cpu_node[cpu]] = 0;
    }
    uint32_t count = 0;
    for (int id = 0; id < MOST_IDS; id++) {
        if (number[id] < 0) continue;
        if (count == COLI_MAX_NODES) return false;
        topology->id[count] = id;
        number[id] = (int16_t)count++;
    }
    for (int cpu = 0; cpu < COLI_MAX_CPUS; cpu++)
        if (topology->cpu_node[cpu] >= 0) topology->cpu_node[cpu] = number[topology->cpu_node[cpu]];
    topology->num_nodes = count;
    return count > 0;
}

/* False: as if there were one node. */
static bool read_topology(coli_topology_t *topology) {
    unsigned long allowed[CPU_LONGS] = {0};
    if (sched_getaffinity(0, sizeof allowed, (cpu_set_t *)allowed) != 0) return false;
    memset(topology->cpu_node, 0xFF, sizeof topology->cpu_node);
    return read_owners(allowed, topology->cpu_node) > 1 && number_nodes(allowed, topology);
}

/* ---- Placing ------------------------------------------------------------------------------------------------------------- */

static bool set_policy(uint64_t begin, uint64_t end, int policy, const unsigned long *nodes, unsigned flags) {
    return syscall(SYS_mbind, (void *)(uintptr_t)begin, (unsigned long)(end - begin), policy, nodes, MOST_IDS, flags) == 0;
}

/* Of BATCH pages spread over the range, does none lie elsewhere? The kernel (6.1) is silent about pages that it leaves because
 * another process has them mapped, too, and about a node that was full. */
static bool lies_on(uint64_t begin, uint64_t end, uint64_t page, int id) {
    const void *pages[BATCH];
    int status[BATCH];
    unsigned long n = 0;
    uint64_t step = ((end - begin) / page + BATCH - 1) / BATCH * page;
    for (; begin < end; begin += step) {
        pages[n] = (const void *)(uintptr_t)begin;
        status[n++] = -ENOENT;
    }
    if (syscall(SYS_move_pages, 0, n, pages, NULL, status, 0) != 0) return true; /* not to be known */
    for (unsigned long i = 0; i < n; i++)
        if (status[i] >= 0 && status[i] != id) return false;
    return true;
}

/* Preferred, not bound: a full node is no reason to be killed. */
static bool put_on(uint64_t begin, uint64_t end, uint64_t page, int id) {
    unsigned long nodes[ID_LONGS] = {0};
    put(nodes, id);
    return set_policy(begin, end, POLICY_PREFERRED, nodes, MOVE | ALL_OR_ERROR) && lies_on(begin, end, page, id);
}

/* Pages already there go to ids[stripe mod count]: MOVE leaves a page alone that lies on any of a policy's nodes. Each stripe
 * gets the final policy before the next one's turn, so that the kernel sees one area and not a thousand. (move_pages would say
 * where each page goes, but passes over those that automatic NUMA balancing has marked.) */
static bool deal_out(uint64_t begin, uint64_t end, uint64_t page, const int *ids, uint32_t count) {
    unsigned long nodes[ID_LONGS] = {0};
    uint64_t stripe = COLI_MAX(STRIPE, page), next;
    bool all = true;
    for (uint32_t i = 0; i < count; i++) put(nodes, ids[i]);
    for (; begin < end; begin = next) {
        next = COLI_MIN((begin / stripe + 1) * stripe, end);
        all = put_on(begin, next, page, ids[begin / stripe % count]) && all;
        if (!set_policy(begin, next, POLICY_INTERLEAVE, nodes, 0)) return false;
    }
    return all;
}

bool coli_os_place(const coli_numa_t *numa, const void *memory, uint64_t bytes, int32_t node) {
    if (numa->kind == COLI_NUMA_NONE || numa->id[0] < 0) return true;
    int ids[COLI_MAX_NODES];
    uint32_t count = 0;
    uint64_t page = numa->page ? numa->page : (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t begin = ((uint64_t)(uintptr_t)memory + page / 2) & ~(page - 1);
    uint64_t end = ((uint64_t)(uintptr_t)memory + bytes + page / 2) & ~(page - 1);
    if (begin >= end) return true;
    for (uint32_t n = 0; n < numa->num_nodes; n++)
        if (node < 0 ? numa->used >> n & 1 : n == (uint32_t)node) ids[count++] = numa->id[n];
    if (count > 1) return deal_out(begin, end, page, ids, count);
    return count == 1 && put_on(begin, end, page, ids[0]);
}

bool coli_os_pin_node(const coli_topology_t *topology, uint32_t node) {
    if (topology->id[0] < 0) return true;
    unsigned long cpus[CPU_LONGS] = {0};
    for (int cpu = 0; cpu < COLI_MAX_CPUS; cpu++)
        if (topology->cpu_node[cpu] == (int)node) put(cpus, cpu);
    return sched_setaffinity(0, sizeof cpus, (cpu_set_t *)cpus) == 0; /* 0: this thread */
}
#else
static bool read_topology(coli_topology_t *topology) {
    (void)topology;
    return false;
}

bool coli_os_place(const coli_numa_t *numa, const void *memory, uint64_t bytes, int32_t node) {
    (void)memory, (void)bytes, (void)node;
    return numa->kind == COLI_NUMA_NONE || numa->id[0] < 0;
}

bool coli_os_pin_node(const coli_topology_t *topology, uint32_t node) {
    (void)node;
    return topology->id[0] < 0;
}
#endif

void coli_os_topology(coli_topology_t *topology) {
    int32_t cpus[COLI_MAX_CPUS];
    int count = COLI_MIN(coli_os_cpus(false, cpus, COLI_MAX_CPUS), COLI_MAX_CPUS);
    topology->num_cpus = (uint32_t)COLI_MAX(count, 0);
    if (read_topology(topology)) return;
    topology->num_nodes = 1;
    topology->id[0] = -1;
    memset(topology->cpu_node, 0xFF, sizeof topology->cpu_node);
    for (int i = 0; i < count; i++)
        if (cpus[i] >= 0 && cpus[i] < COLI_MAX_CPUS) topology->cpu_node[cpus[i]] = 0;
}
