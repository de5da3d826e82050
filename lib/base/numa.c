/* numa.c: from the text of config.numa_policy to a node for every weight, a node for every thread, and the pieces of work that
 * each thread begins with; see numa.h. Arithmetic alone: no system call. */
#include "base/numa.h"

#include "base/status.h"

#define MOST_NUMBER 100000000u /* beyond any layer or node */

/* ---- The text ------------------------------------------------------------------------------------------------------------ */

static bool read_number(const char **text, uint32_t *number) {
    if (**text < '0' || **text > '9') return false;
    for (*number = 0; **text >= '0' && **text <= '9'; (*text)++) {
        *number = *number * 10 + (uint32_t)(**text - '0');
        if (*number >= MOST_NUMBER) return false;
    }
    return true;
}

/* "first-last:node" or "layer:node". */
static bool read_run(const char **text, uint32_t run[3]) {
    if (!read_number(text, &run[0])) return false;
    run[1] = run[0];
    if (**text == '-') {
        ++*text;
        if (!read_number(text, &run[1]) || run[1] < run[0]) return false;
    }
    if (**text != ':') return false;
    ++*text;
    return read_number(text, &run[2]);
}

static colibri_status_t fail_text(const char *policy) {
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                     "config.numa_policy is \"%.*s\", allowed are none, interleave, or a list of layers and nodes as "
                     "0-15:0,16-31:1",
                     coli_fitting(policy, 64), policy);
}

/* Put a run in its place among the others; one that continues another on the same node becomes part of it. */
static colibri_status_t add_run(const char *policy, const uint32_t run[3], coli_numa_t *numa) {
    uint32_t at = numa->num_runs;
    while (at > 0 && numa->runs[at - 1].first > run[0]) at--;
    bool before = at > 0 && numa->runs[at - 1].last >= run[0], after = at < numa->num_runs && numa->runs[at].first <= run[1];
    if (before || after)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.numa_policy \"%.*s\" names layer %u twice",
                         coli_fitting(policy, 64), policy, before ? run[0] : numa->runs[at].first);
    if (at > 0 && numa->runs[at - 1].last + 1 == run[0] && numa->runs[at - 1].node == run[2]) {
        numa->runs[at - 1].last = run[1];
        return COLIBRI_OK;
    }
    if (numa->num_runs == COLI_MAX_NODE_RUNS)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.numa_policy has more than %d parts; use longer runs of layers",
                         COLI_MAX_NODE_RUNS);
    memmove(&numa->runs[at + 1], &numa->runs[at], (numa->num_runs - at) * sizeof *numa->runs);
    numa->runs[at].first = run[0];
    numa->runs[at].last = run[1];
    numa->runs[at].node = run[2];
    numa->num_runs++;
    return COLIBRI_OK;
}

/* One part of the list: layers and a node that are there. */
static colibri_status_t check_run(const char *policy, const uint32_t run[3], uint32_t num_layers, uint32_t num_nodes) {
    int shown = coli_fitting(policy, 64);
    if (run[1] >= num_layers)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.numa_policy \"%.*s\" names layer %u, but the model's are 0 to %u", shown,
                         policy, COLI_MAX(run[0], num_layers), num_layers - 1);
    if (run[2] >= num_nodes)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.numa_policy \"%.*s\" names node %u, but this process may use %u memory node%s, counted from 0",
                         shown, policy, run[2], num_nodes, num_nodes == 1 ? "" : "s");
    return COLIBRI_OK;
}

static colibri_status_t parse_list(const char *policy, uint32_t num_layers, coli_numa_t *numa) {
    for (const char *text = policy;; text++) {
        uint32_t run[3];
        if (!read_run(&text, run) || (*text != ',' && *text != '\0')) return fail_text(policy);
        colibri_status_t status = check_run(policy, run, num_layers, numa->num_nodes);
        if (!status) status = add_run(policy, run, numa);
        if (status) return status;
        numa->used |= (uint64_t)1 << run[2];
        if (*text == '\0') break;
    }
    uint32_t next = 0;
    for (uint32_t i = 0; i < numa->num_runs && numa->runs[i].first == next; i++) next = numa->runs[i].last + 1;
    if (next == num_layers) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                     "config.numa_policy \"%.*s\" names no node for layer %u; the model's are 0 to %u",
                     coli_fitting(policy, 64), policy, next, num_layers - 1);
}

colibri_status_t coli_numa_parse(const char *policy, uint32_t num_layers, const coli_topology_t *topology, coli_numa_t *numa) {
    memset(numa, 0, sizeof *numa);
    if (!policy || strcmp(policy, "none") == 0) return COLIBRI_OK;
    numa->num_nodes = topology->num_nodes;
    memcpy(numa->id, topology->id, sizeof numa->id);
    if (strcmp(policy, "interleave") == 0) {
        numa->kind = COLI_NUMA_INTERLEAVE;
        numa->used = ~(uint64_t)0 >> (COLI_MAX_NODES - topology->num_nodes);
    } else {
        colibri_status_t status = parse_list(policy, num_layers, numa);
        if (status) return status;
        numa->kind = COLI_NUMA_LAYERS;
    }
    for (uint32_t n = 0; n < numa->num_nodes; n++) numa->num_used += numa->used >> n & 1;
    return COLIBRI_OK;
}

/* ---- Nodes of weights ---------------------------------------------------------------------------------------------------- */

int32_t coli_numa_layer(const coli_numa_t *numa, uint32_t layer) {
    for (uint32_t i = 0; i < numa->num_runs; i++)
        if (layer <= numa->runs[i].last) return (int32_t)numa->runs[i].node;
    return -1; /* NONE, INTERLEAVE */
}

int32_t coli_numa_expert(const coli_numa_t *numa, uint32_t layer, uint32_t expert) {
    if (numa->kind == COLI_NUMA_INTERLEAVE) return (int32_t)(expert % numa->num_nodes);
    return coli_numa_layer(numa, layer);
}

/* ---- Nodes of threads ---------------------------------------------------------------------------------------------------- */

/* The node used that a thread more disturbs least: room on its CPUs first, then few threads, then a low number. */
static uint32_t emptiest(const coli_numa_t *numa, const uint32_t *threads, const uint32_t *cpus) {
    uint32_t best = COLI_MAX_NODES;
    for (uint32_t n = 0; n < numa->num_nodes; n++) {
        if (!(numa->used >> n & 1)) continue;
        if (best == COLI_MAX_NODES) best = n;
        bool room = threads[n] < cpus[n], best_room = threads[best] < cpus[best];
        if (room != best_room ? room : threads[n] < threads[best]) best = n;
    }
    return best;
}

void coli_numa_threads(coli_numa_t *numa, const coli_topology_t *topology, uint32_t num_threads, const int32_t *cpus) {
    uint32_t threads[COLI_MAX_NODES] = {0}, room[COLI_MAX_NODES] = {0};
    if (numa->kind == COLI_NUMA_NONE) return;
    if (cpus) {
        for (uint32_t i = 0; i < num_threads; i++) {
            int32_t node = cpus[i] >= 0 && cpus[i] < COLI_MAX_CPUS ? topology->cpu_node[cpus[i]] : 0;
            numa->thread_node[i] = (uint8_t)COLI_MAX(node, 0);
        }
        return;
    }
    for (uint32_t cpu = 0; cpu < COLI_MAX_CPUS; cpu++)
        if (topology->cpu_node[cpu] >= 0) room[topology->cpu_node[cpu]]++;
    for (uint32_t i = 0; i < num_threads; i++) threads[emptiest(numa, threads, room)]++;
    for (uint32_t n = 0, i = 0; n < numa->num_nodes; n++)
        for (uint32_t k = 0; k < threads[n]; k++) numa->thread_node[i++] = (uint8_t)n;
}

/* ---- Shares of work ------------------------------------------------------------------------------------------------------ */

/* What a region's threads do for a node. */
typedef struct group {
    uint32_t chunks;  /* pieces on the node */
    uint32_t own;     /* threads of the node */
    uint32_t wanted;  /* threads that begin there */
    uint32_t next, each, one_more; /* the next thread's first piece, pieces a thread, threads with one more */
} group_t;

/* Would one thread more at `a` spare more than at `b`? */
static bool needier(const group_t *a, const group_t *b) {
    uint64_t left = (uint64_t)a->chunks * b->wanted, right = (uint64_t)b->chunks * a->wanted;
    return left != right ? left > right : a->own > a->wanted && b->own <= b->wanted;
}

/* Threads by pieces: at least one wherever there are any, num_threads in all. (There are enough threads for that.) */
static void apportion(group_t *groups, uint32_t num_nodes, uint32_t num_threads, uint32_t chunks) {
    uint32_t given = 0;
    for (uint32_t n = 0; n < num_nodes; n++) {
        if (groups[n].chunks == 0) continue;
        groups[n].wanted = COLI_MAX((uint32_t)((uint64_t)groups[n].chunks * num_threads / chunks), 1);
        given += groups[n].wanted;
    }
    for (; given < num_threads; given++) {
        group_t *best = NULL;
        for (uint32_t n = 0; n < num_nodes; n++)
            if (groups[n].chunks && (!best || needier(&groups[n], best))) best = &groups[n];
        best->wanted++;
    }
    for (; given > num_threads; given--) {
        group_t *best = NULL; /* who has more than one and misses it least */
        for (uint32_t n = 0; n < num_nodes; n++)
            if (groups[n].wanted > 1 && (!best || needier(best, &groups[n]))) best = &groups[n];
        best->wanted--;
    }
}

static coli_share_t next_share(group_t *group) {
    coli_share_t share = {group->next, group->next + group->each + (group->one_more > 0)};
    group->one_more -= group->one_more > 0;
    group->next = share.end;
    return share;
}

/* Too few threads for every node: equal shares, whatever the nodes. */
static void share_equally(uint32_t num_threads, uint32_t chunks, coli_share_t *shares) {
    group_t all = {.each = chunks / num_threads, .one_more = chunks % num_threads};
    for (uint32_t i = 0; i < num_threads; i++) shares[i] = next_share(&all);
}

/* A share for every thread: of its own node while that wants threads, then the others where some are still wanted. */
static void deal(const coli_numa_t *numa, uint32_t num_threads, group_t *groups, coli_share_t *shares) {
    bool strange[COLI_MAX_THREADS];
    for (uint32_t i = 0; i < num_threads; i++) {
        group_t *group = &groups[numa->thread_node[i]];
        strange[i] = group->wanted == 0;
        if (strange[i]) continue;
        group->wanted--;
        shares[i] = next_share(group);
    }
    group_t *group = groups;
    for (uint32_t i = 0; i < num_threads; i++) {
        if (!strange[i]) continue;
        while (group->wanted == 0) group++;
        group->wanted--;
        shares[i] = next_share(group);
    }
}

void coli_numa_shares(const coli_numa_t *numa, uint32_t num_threads, const uint32_t *node_chunks, coli_share_t *shares) {
    group_t groups[COLI_MAX_NODES];
    uint32_t chunks = 0, busy = 0;
    COLI_ASSERT(numa->kind != COLI_NUMA_NONE);
    for (uint32_t n = 0; n < numa->num_nodes; n++) {
        groups[n] = (group_t){.chunks = node_chunks[n], .next = chunks};
        chunks += node_chunks[n];
        busy += node_chunks[n] != 0;
    }
    if (busy == 0 || busy > num_threads) {
        share_equally(num_threads, chunks, shares);
        return;
    }
    for (uint32_t i = 0; i < num_threads; i++) groups[numa->thread_node[i]].own++;
    apportion(groups, numa->num_nodes, num_threads, chunks);
    for (uint32_t n = 0; n < numa->num_nodes; n++) {
        if (groups[n].wanted == 0) continue;
        groups[n].each = groups[n].chunks / groups[n].wanted;
        groups[n].one_more = groups[n].chunks % groups[n].wanted;
    }
    deal(numa, num_threads, groups, shares);
}
