/* test_numa.c: numa_policy's text, nodes of weights, nodes of threads and shares of work, on machines that are made up: two to
 * 64 nodes, uneven ones, CPUs missing. Then the machine at hand, whatever it has. */
#include <stdlib.h>

#include "base/numa.h"
#include "base/status.h"
#include "check.h"

static uint32_t random_state = 12345;

static uint32_t random_below(uint32_t bound) {
    random_state = random_state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)(random_state >> 8) * bound >> 24);
}

/* A machine: cpus[i] is one character a CPU, the number of its node, or '.' for one that this process may not use. */
static coli_topology_t machine(const char *cpus) {
    coli_topology_t t = {0};
    memset(t.cpu_node, 0xFF, sizeof t.cpu_node);
    for (uint32_t i = 0; cpus[i]; i++) {
        if (cpus[i] == '.') continue;
        t.cpu_node[i] = (int16_t)(cpus[i] - '0');
        t.num_cpus++;
        t.num_nodes = COLI_MAX(t.num_nodes, (uint32_t)t.cpu_node[i] + 1);
    }
    for (uint32_t n = 0; n < t.num_nodes; n++) t.id[n] = (int32_t)(2 * n + 1);
    return t;
}

/* ---- The text ------------------------------------------------------------------------------------------------------------ */

static void accept(const char *policy, uint32_t layers, const char *cpus, const char *nodes) {
    coli_topology_t t = machine(cpus);
    coli_numa_t numa;
    CHECK_EQ(coli_numa_parse(policy, layers, &t, &numa), COLIBRI_OK);
    CHECK_EQ(numa.kind, COLI_NUMA_LAYERS);
    CHECK_EQ(numa.num_nodes, t.num_nodes);
    CHECK_EQ(numa.id[numa.num_nodes - 1], t.id[t.num_nodes - 1]);
    uint64_t used = 0;
    uint32_t count = 0;
    for (uint32_t layer = 0; layer < layers; layer++) {
        CHECK_EQ(coli_numa_layer(&numa, layer), nodes[layer] - '0');
        for (uint32_t e = 0; e < 5; e++) CHECK_EQ(coli_numa_expert(&numa, layer, e), nodes[layer] - '0');
        used |= 1ull << (nodes[layer] - '0');
    }
    for (int n = 0; n < 64; n++) count += used >> n & 1;
    CHECK_EQ(numa.used, used);
    CHECK_EQ(numa.num_used, count);
}

static void reject(const char *policy, const char *says) {
    coli_topology_t t = machine("0011");
    coli_numa_t numa;
    CHECK_EQ(coli_numa_parse(policy, 8, &t, &numa), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK(strncmp(colibri_last_error(), "config.numa_policy ", 19) == 0);
    if (strstr(colibri_last_error(), says)) CHECK(true);
    else fprintf(stderr, "\"%s\": \"%s\" does not say \"%s\"\n", policy, colibri_last_error(), says), CHECK(false);
}

static void test_texts(void) {
    coli_topology_t two = machine("0011"), one = machine("0");
    coli_numa_t numa;
    CHECK_EQ(coli_numa_parse(NULL, 8, &two, &numa), COLIBRI_OK);
    CHECK(numa.kind == COLI_NUMA_NONE && numa.num_nodes == 0 && numa.num_used == 0);
    CHECK_EQ(coli_numa_parse("none", 8, &two, &numa), COLIBRI_OK);
    CHECK(numa.kind == COLI_NUMA_NONE && coli_numa_layer(&numa, 0) == -1 && coli_numa_expert(&numa, 7, 1) == -1);
    CHECK_EQ(coli_numa_parse("interleave", 8, &one, &numa), COLIBRI_OK);
    CHECK(numa.kind == COLI_NUMA_INTERLEAVE && numa.num_nodes == 1 && numa.used == 1 && coli_numa_expert(&numa, 3, 7) == 0);
    accept("0-7:0,8-15:1", 16, "0011", "0000000011111111");
    accept("0-7:0", 8, "0", "00000000");
    accept("0-7:1", 8, "0101", "11111111");
    accept("5-7:1,0:0,2-4:0,1:1", 8, "0011", "01000111");
    accept("0:0,1:1,2:2,3:3", 4, "00112233", "0123");
    accept("3:0,2:1,1:0,0:1", 4, "01", "1010");
    accept("0:00,1-01:0001", 2, "0011", "01");
    static const char *const no_text[] = {
        "", "Interleave", "interleave ", "0", "0-7", "0-7:", ":0", "0-7:0,", ",0-7:0", "0-7:0;", "7-0:0", "-7:0", "0-:0",
        "0--7:0", "+0-7:0", " 0-7:0", "0-7:0 ", "0-7:0\n", "0-7:-1", "0-7:1:0", "0-7=0", "0x0-7:0", "99999999999999999999:0",
        "0-7:4294967296", "0-4294967303:0", "0-7:0,interleave", "none,0-7:0", "\xc3\xa9"};
    for (size_t i = 0; i < sizeof no_text / sizeof *no_text; i++) reject(no_text[i], "allowed are none, interleave, or a list");
    reject("0-7:2", "names node 2, but this process may use 2 memory nodes");
    reject("0-8:0", "names layer 8, but the model's are 0 to 7");
    reject("0-7:0,11-12:1", "names layer 11, but");
    reject("0-3:0", "names no node for layer 4");
    reject("1-7:0", "names no node for layer 0");
    reject("0-2:0,4-7:1", "names no node for layer 3");
    reject("0-4:0,4-7:1", "names layer 4 twice");
    reject("4-7:1,0-4:0", "names layer 4 twice");
    reject("0-7:0,3:0", "names layer 3 twice");
    reject("3:0,0-7:0", "names layer 3 twice");
    reject("0:0,2:0,1-3:1", "names layer 2 twice");
}

/* A layer a part: up to COLI_MAX_NODE_RUNS of them, one more is too many; parts that continue each other count as one. */
static void test_long_texts(void) {
    static char text[16 * 1024];
    coli_topology_t t = machine("0011");
    coli_numa_t numa;
    for (uint32_t layers = COLI_MAX_NODE_RUNS; layers <= COLI_MAX_NODE_RUNS + 1; layers++)
        for (uint32_t alternate = 0; alternate < 2; alternate++) {
            int used = 0;
            for (uint32_t i = 0; i < layers; i++)
                used += snprintf(text + used, sizeof text - (size_t)used, "%s%u:%u", i ? "," : "", i, alternate ? i % 2 : 1);
            bool good = !alternate || layers == COLI_MAX_NODE_RUNS;
            CHECK_EQ(coli_numa_parse(text, layers, &t, &numa) == COLIBRI_OK, good);
            if (!good) CHECK(strstr(colibri_last_error(), "more than 128 parts") != NULL);
            for (uint32_t i = 0; good && i < layers; i++) CHECK_EQ(coli_numa_layer(&numa, i), alternate ? i % 2 : 1);
        }
}

/* Any split of any layers in any order gives what was written; one part left out, or a layer more, is an error. */
static void test_random_texts(void) {
    coli_topology_t t = machine("00112233");
    for (int round = 0; round < 500; round++) {
        struct { uint32_t first, last, node; } parts[40];
        uint32_t count = 0, layers = 1 + random_below(65535), begin = 0;
        while (begin < layers && count < 40) {
            uint32_t last = count == 39 ? layers - 1 : begin + random_below(COLI_MIN(layers - begin, layers / 8 + 1));
            parts[count].first = begin, parts[count].last = last, parts[count++].node = random_below(4);
            begin = last + 1;
        }
        uint32_t left_out = random_below(2) ? random_below(count) : count;
        char text[1024];
        int used = 0;
        for (uint32_t k = 0, step = 1 + 2 * random_below(20); k < 41; k++) { /* 41 is prime: any step visits all */
            uint32_t i = k * step % 41;
            if (i >= count || i == left_out) continue;
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%u", used ? "," : "", parts[i].first);
            if (parts[i].first != parts[i].last || random_below(2))
                used += snprintf(text + used, sizeof text - (size_t)used, "-%u", parts[i].last);
            used += snprintf(text + used, sizeof text - (size_t)used, ":%u", parts[i].node);
        }
        coli_numa_t numa;
        bool good = left_out == count;
        if (used == 0) continue;
        CHECK_EQ(coli_numa_parse(text, layers, &t, &numa), good ? COLIBRI_OK : COLIBRI_ERR_INVALID_ARGUMENT);
        for (uint32_t i = 0; good && i < count; i++)
            for (uint32_t layer = parts[i].first; layer <= parts[i].last; layer += 1 + (parts[i].last - layer) / 2)
                CHECK_EQ(coli_numa_layer(&numa, layer), parts[i].node);
        if (good) CHECK_EQ(coli_numa_parse(text, layers + 1, &t, &numa), COLIBRI_ERR_INVALID_ARGUMENT);
    }
}

static void test_interleave(void) {
    static const char *const machines[] = {"0", "0011", "0123", "001122233"};
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++) {
        coli_topology_t t = machine(machines[m]);
        coli_numa_t numa;
        CHECK_EQ(coli_numa_parse("interleave", 3, &t, &numa), COLIBRI_OK);
        CHECK_EQ(numa.num_used, t.num_nodes);
        CHECK_EQ(numa.used, (1ull << t.num_nodes) - 1);
        for (uint32_t layer = 0; layer < 3; layer++) {
            CHECK_EQ(coli_numa_layer(&numa, layer), -1);
            for (uint32_t e = 0; e < 300; e++) CHECK_EQ(coli_numa_expert(&numa, layer, e), e % t.num_nodes);
        }
    }
    coli_topology_t most = machine("0");
    most.num_nodes = COLI_MAX_NODES;
    coli_numa_t numa;
    CHECK_EQ(coli_numa_parse("interleave", 3, &most, &numa), COLIBRI_OK);
    CHECK(numa.used == UINT64_MAX && numa.num_used == 64 && coli_numa_expert(&numa, 0, 127) == 63);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------------- */

static void threads(const char *policy, const char *cpus, uint32_t num_threads, const int32_t *on, const char *nodes) {
    coli_topology_t t = machine(cpus);
    coli_numa_t numa;
    CHECK_EQ(coli_numa_parse(policy, 4, &t, &numa), COLIBRI_OK);
    coli_numa_threads(&numa, &t, num_threads, on);
    for (uint32_t i = 0; i < num_threads; i++) CHECK_EQ(numa.thread_node[i], nodes[i] - '0');
}

static void test_threads(void) {
    threads("interleave", "0000", 3, NULL, "000");
    threads("interleave", "00001111", 1, NULL, "0");
    threads("interleave", "00001111", 2, NULL, "01");
    threads("interleave", "00001111", 3, NULL, "001");
    threads("interleave", "00001111", 8, NULL, "00001111");
    threads("interleave", "01010101", 8, NULL, "00001111");
    threads("interleave", "0000....1111", 6, NULL, "000111");
    threads("interleave", "00..1111", 6, NULL, "001111");         /* offline or forbidden CPUs are no room */
    threads("interleave", "00111111", 4, NULL, "0011");           /* equal while there is room */
    threads("interleave", "00111111", 8, NULL, "00111111");       /* then where room is left */
    threads("interleave", "00111111", 10, NULL, "0000111111");    /* beyond all CPUs: fewer first */
    threads("interleave", "00112233", 4, NULL, "0123");
    threads("interleave", "00112233", 3, NULL, "012");
    threads("interleave", "0122223333", 10, NULL, "0122223333");
    threads("0-3:1", "00001111", 4, NULL, "1111");                /* only nodes that have weights */
    threads("0-1:0,2-3:2", "001122", 4, NULL, "0022");
    static const int32_t alternate[] = {0, 4, 1, 5, 7}, one_node[] = {6, 7, 4};
    threads("interleave", "00001111", 5, alternate, "01011");
    threads("0-3:0", "00001111", 3, one_node, "111");
    coli_topology_t t = machine("0011");
    coli_numa_t none;
    CHECK_EQ(coli_numa_parse("none", 4, &t, &none), COLIBRI_OK);
    coli_numa_threads(&none, &t, 4, NULL);
    CHECK_EQ(none.thread_node[3], 0);
}

static void test_random_threads(void) {
    for (int round = 0; round < 300; round++) {
        char cpus[65] = {0};
        uint32_t num_nodes = 1 + random_below(6), room[6] = {0}, given[6] = {0}, n = 1 + random_below(100), free = 0;
        for (uint32_t i = 0; i < 64; i++) {
            uint32_t node = i < num_nodes ? i : random_below(num_nodes);
            bool missing = i >= num_nodes && random_below(3) == 0;
            cpus[i] = missing ? '.' : (char)('0' + node);
            if (!missing) room[node]++;
        }
        coli_topology_t t = machine(cpus);
        coli_numa_t numa;
        coli_numa_parse("interleave", 4, &t, &numa);
        coli_numa_threads(&numa, &t, n, NULL);
        for (uint32_t i = 0; i < n; i++) {
            given[numa.thread_node[i]]++;
            CHECK(i == 0 || numa.thread_node[i] >= numa.thread_node[i - 1]);
        }
        for (uint32_t a = 0; a < num_nodes; a++) free += room[a] > given[a] ? room[a] - given[a] : 0;
        for (uint32_t a = 0; a < num_nodes; a++) {
            CHECK(given[a] <= room[a] || free == 0);
            for (uint32_t b = 0; b < num_nodes; b++) CHECK(given[a] <= given[b] + 1 || given[b] >= room[b]);
        }
    }
}

/* ---- Shares -------------------------------------------------------------------------------------------------------------- */

typedef struct setting {
    coli_numa_t numa;
    uint32_t num_threads, chunks;
    uint32_t node_chunks[COLI_MAX_NODES];
    coli_share_t shares[COLI_MAX_THREADS];
} setting_t;

static void prepare(setting_t *s, const char *thread_nodes, const char *chunks) {
    memset(s, 0, sizeof *s);
    s->numa.kind = COLI_NUMA_INTERLEAVE;
    s->numa.num_nodes = (uint32_t)strlen(chunks);
    s->num_threads = (uint32_t)strlen(thread_nodes);
    for (uint32_t i = 0; i < s->num_threads; i++) s->numa.thread_node[i] = (uint8_t)(thread_nodes[i] - '0');
    for (uint32_t n = 0; n < s->numa.num_nodes; n++) s->chunks += s->node_chunks[n] = (uint32_t)(chunks[n] - '0');
}

/* Every piece is some thread's first, and no other's. */
static void check_cover(setting_t *s) {
    static uint8_t times[1 << 20];
    memset(times, 0, s->chunks);
    uint32_t wrong = 0;
    coli_numa_shares(&s->numa, s->num_threads, s->node_chunks, s->shares);
    for (uint32_t i = 0; i < s->num_threads; i++) {
        CHECK(s->shares[i].begin <= s->shares[i].end && s->shares[i].end <= s->chunks);
        for (uint32_t k = s->shares[i].begin; k < s->shares[i].end && k < s->chunks; k++) times[k]++;
    }
    for (uint32_t k = 0; k < s->chunks; k++) wrong += times[k] != 1;
    CHECK_EQ(wrong, 0);
}

/* As text: "0-3 3-6 6-8", pieces of each thread. */
static void shares(const char *thread_nodes, const char *chunks, const char *expected) {
    setting_t s;
    char text[256] = "";
    int used = 0;
    prepare(&s, thread_nodes, chunks);
    check_cover(&s);
    for (uint32_t i = 0; i < s.num_threads; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%u-%u", i ? " " : "", s.shares[i].begin, s.shares[i].end);
    if (strcmp(text, expected) != 0) fprintf(stderr, "%s, %s: \"%s\", expected \"%s\"\n", thread_nodes, chunks, text, expected);
    CHECK(strcmp(text, expected) == 0);
}

static void test_shares(void) {
    shares("0", "7", "0-7");
    shares("01", "44", "0-4 4-8");
    shares("10", "44", "4-8 0-4");                     /* threads in any order of node (cpu_affinity) */
    shares("0101", "44", "0-2 4-6 2-4 6-8");
    shares("0011", "84", "0-4 4-8 8-10 10-12");
    shares("0011", "93", "0-3 3-6 9-12 6-9");          /* the work of node 0 is worth three threads of four */
    shares("0011", "80", "0-2 2-4 4-6 6-8");           /* a layer on one node: all begin there, its own threads first */
    shares("1100", "80", "4-6 6-8 0-2 2-4");
    shares("0011", "08", "4-6 6-8 0-2 2-4");
    shares("0000", "44", "0-2 2-4 4-6 6-8");           /* a node without threads */
    shares("02", "363", "0-6 6-12");                   /* fewer threads than nodes with work */
    shares("012", "303", "0-2 2-3 3-6");
    shares("0011", "00", "0-0 0-0 0-0 0-0");
    shares("0011", "10", "0-1 1-1 1-1 1-1");
    shares("0011", "11", "0-1 1-1 1-2 2-2");
    shares("00011", "44", "0-2 2-3 3-4 4-6 6-8");
}

/* Nodes of work, threads and pieces at random: covered once; a thread's share is of one node; a node's shares differ by one
 * piece at most; with work, a node's own thread does not go elsewhere while a stranger comes. */
static void check_random(setting_t *s) {
    uint32_t busy = 0;
    for (uint32_t n = 0; n < s->numa.num_nodes; n++) busy += s->node_chunks[n] != 0;
    check_cover(s);
    if (busy > s->num_threads) return;
    for (uint32_t n = 0, begin = 0; n < s->numa.num_nodes; n++) {
        uint32_t end = begin + s->node_chunks[n], least = UINT32_MAX, most = 0, strangers = 0, away = 0, here = 0;
        for (uint32_t i = 0; i < s->num_threads; i++) {
            uint32_t size = s->shares[i].end - s->shares[i].begin;
            bool inside = size > 0 && s->shares[i].begin >= begin && s->shares[i].end <= end, own = s->numa.thread_node[i] == n;
            CHECK(size == 0 || inside || s->shares[i].begin >= end || s->shares[i].end <= begin);
            if (inside) least = COLI_MIN(least, size), most = COLI_MAX(most, size), here++;
            strangers += inside && !own;
            away += own && size > 0 && !inside;
        }
        CHECK(s->node_chunks[n] == 0 || (here > 0 && most - least <= 1));
        CHECK(strangers == 0 || away == 0);
        begin = end;
    }
}

static void test_random_shares(void) {
    for (int round = 0; round < 20000; round++) {
        setting_t s;
        uint32_t most = 1u << random_below(14), nodes = 1 + random_below(round % 10 ? 4 : COLI_MAX_NODES);
        memset(&s, 0, sizeof s);
        s.numa.kind = COLI_NUMA_LAYERS;
        s.numa.num_nodes = nodes;
        s.num_threads = 1 + random_below(round % 10 ? 12 : COLI_MAX_THREADS);
        uint32_t near = random_below(nodes);
        for (uint32_t i = 0; i < s.num_threads; i++) {
            uint32_t any = random_below(2) ? near : random_below(nodes);
            s.numa.thread_node[i] = (uint8_t)(random_below(3) ? i * nodes / s.num_threads : any);
        }
        for (uint32_t n = 0; n < nodes; n++) s.chunks += s.node_chunks[n] = random_below(3) ? random_below(most) : 0;
        check_random(&s);
    }
}

/* ---- This machine -------------------------------------------------------------------------------------------------------- */

static void test_here(void) {
    static coli_topology_t t;
    memset(&t, 0xAA, sizeof t);
    coli_os_topology(&t);
    CHECK(t.num_nodes >= 1 && t.num_nodes <= COLI_MAX_NODES);
    uint32_t cpus = 0;
    for (int i = 0; i < COLI_MAX_CPUS; i++) {
        CHECK(t.cpu_node[i] >= -1 && t.cpu_node[i] < (int)t.num_nodes);
        cpus += t.cpu_node[i] >= 0;
    }
    CHECK_EQ(cpus, t.num_cpus);
    CHECK(t.num_nodes == 1 || t.id[0] >= 0);
    coli_numa_t numa;
    CHECK_EQ(coli_numa_parse("interleave", 4, &t, &numa), COLIBRI_OK);
    static uint8_t memory[1 << 16];
    if (t.id[0] < 0) { /* one node: everything is where it should be */
        CHECK(coli_os_place(&numa, memory, sizeof memory, 0));
        CHECK(coli_os_place(&numa, memory, sizeof memory, -1));
        CHECK(coli_os_pin_node(&t, 0));
    }
    fprintf(stderr, "this machine: %u node(s), %u CPUs\n", t.num_nodes, t.num_cpus);
}

int main(void) {
    test_texts();
    test_long_texts();
    test_random_texts();
    test_interleave();
    test_threads();
    test_random_threads();
    test_shares();
    test_random_shares();
    test_here();
    return check_report();
}
