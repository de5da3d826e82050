/* numa.h: which memory node a weight lies on, and which threads work for which node. Pure arithmetic on a topology, so that a
 * test can bring its own; the system's is read by coli_os_topology. */
#ifndef COLI_NUMA_H
#define COLI_NUMA_H

#include "base/os.h"
#include "base/threads.h"

#define COLI_MAX_NODES 64
#define COLI_MAX_NODE_RUNS 64
#define COLI_MAX_CPUS 8192

/* Memory nodes with CPUs that this process may use, and its CPUs. Nodes are numbered 0 ... num_nodes - 1 here, as in
 * numa_policy; id is the system's number. */
typedef struct coli_topology {
    uint32_t num_nodes;            /* at least 1 */
    uint32_t num_cpus;
    int32_t id[COLI_MAX_NODES];
    int16_t cpu_node[COLI_MAX_CPUS]; /* node of a CPU; -1: this process may not use it */
} coli_topology_t;

typedef enum coli_numa_kind { COLI_NUMA_NONE, COLI_NUMA_INTERLEAVE, COLI_NUMA_LAYERS } coli_numa_kind_t;

/* A policy, resolved. */
typedef struct coli_numa {
    coli_numa_kind_t kind;
    uint32_t num_nodes;
    int32_t id[COLI_MAX_NODES];
    uint32_t num_runs;             /* LAYERS */
    struct { uint32_t first, last, node; } runs[COLI_MAX_NODE_RUNS]; /* ascending, every layer in exactly one */
    uint8_t thread_node[COLI_MAX_THREADS]; /* node that each thread works for; thread 0 is the caller's */
} coli_numa_t;

void coli_os_topology(coli_topology_t *topology); /* of this process; one node where the system does not say. Reads files */
/* The text of config.numa_policy. INVALID_ARGUMENT: not such a text, a node that is not there, a layer missing, twice, or not
 * there. With NONE num_nodes is 0. */
colibri_status_t coli_numa_parse(const char *policy, uint32_t num_layers, const coli_topology_t *topology, coli_numa_t *numa);
/* Fill thread_node: by cpus[i] if threads stay on CPUs (NULL: they do not), else equal shares in order of node. */
void coli_numa_threads(coli_numa_t *numa, const coli_topology_t *topology, uint32_t num_threads, const int32_t *cpus);
/* Node of an expert; of a layer's other weights, -1: page by page over all; both -1 with NONE. */
int32_t coli_numa_expert(const coli_numa_t *numa, uint32_t layer, uint32_t expert);
int32_t coli_numa_layer(const coli_numa_t *numa, uint32_t layer);
/* How many of `chunks` pieces of work, of which node n has node_chunks[n] (their sum is chunks; pieces lie in order of node),
 * each thread begins with: ends[i] is one past thread i's last. A node without threads is shared by all. */
void coli_numa_shares(const coli_numa_t *numa, uint32_t num_threads, const uint32_t *node_chunks, uint32_t *ends);

/* Put memory on a node (-1: page by page over all nodes of the policy): pages there move, later ones begin there. False: refused.
 * mbind by system call. */
bool coli_os_place(const coli_numa_t *numa, const void *memory, uint64_t bytes, int32_t node);
/* Tie the calling thread to the CPUs of a node that this process may use. False: refused. */
bool coli_os_pin_node(const coli_topology_t *topology, uint32_t node);

#endif
