/* numa.h: which memory node a weight lies on, and which threads work for which node. Pure arithmetic on a topology, so that a
 * test can bring its own; the system's is read by coli_os_topology, and os_numa.c moves memory and threads. */
#ifndef COLI_NUMA_H
#define COLI_NUMA_H

#include "base/os.h"
#include "base/threads.h"

#define COLI_MAX_NODES 64
#define COLI_MAX_NODE_RUNS 128
#ifdef COLI_NO_PAGES
#  define COLI_MAX_CPUS 64 /* such a system names none: do not let a firmware's stack pay for them */
#else
#  define COLI_MAX_CPUS 8192
#endif

/* Memory nodes that this process may use and that have CPUs it may use, and those CPUs. Nodes are numbered 0 ... num_nodes - 1
 * here, as in numa_policy; id is the system's number. A node without memory lends its CPUs to the nearest one that has some; a
 * node without CPUs (of this process) holds no weights. */
typedef struct coli_topology {
    uint32_t num_nodes;              /* at least 1 */
    uint32_t num_cpus;               /* of this process; 0: the system does not say */
    int32_t id[COLI_MAX_NODES];      /* -1: the only node there is: nothing needs placing, no thread needs tying */
    int16_t cpu_node[COLI_MAX_CPUS]; /* node of a CPU; -1: this process may not use it */
} coli_topology_t;

typedef enum coli_numa_kind { COLI_NUMA_NONE, COLI_NUMA_INTERLEAVE, COLI_NUMA_LAYERS } coli_numa_kind_t;

/* A policy, resolved. */
typedef struct coli_numa {
    coli_numa_kind_t kind;
    uint32_t num_nodes;            /* of the topology; 0 with NONE */
    uint32_t num_used;             /* nodes that weights are put on: all with INTERLEAVE, those the list names with LAYERS */
    uint64_t used;                 /* bit n: node n is one of them */
    int32_t id[COLI_MAX_NODES];    /* the topology's */
    uint64_t page;                 /* bytes of a page of memory given to coli_os_place (2 MiB, 1 GiB); 0: the system's */
    uint32_t num_runs;             /* LAYERS */
    struct { uint32_t first, last, node; } runs[COLI_MAX_NODE_RUNS]; /* ascending, every layer in exactly one */
    uint8_t thread_node[COLI_MAX_THREADS]; /* node that each thread works for; thread 0 is the caller's */
} coli_numa_t;

void coli_os_topology(coli_topology_t *topology); /* of this process; one node where the system does not say. Reads files */
/* The text of config.numa_policy (NULL: "none"). INVALID_ARGUMENT: not such a text, a node that is not there, a layer missing,
 * twice, or not there. */
colibri_status_t coli_numa_parse(const char *policy, uint32_t num_layers, const coli_topology_t *topology, coli_numa_t *numa);
/* Fill thread_node: by cpus[i] if threads stay on CPUs (NULL: they do not), else equal shares of the nodes used, in order of
 * node, but no node more threads than it has CPUs while another has one to spare. */
void coli_numa_threads(coli_numa_t *numa, const coli_topology_t *topology, uint32_t num_threads, const int32_t *cpus);
/* Node of an expert; of a layer's other weights, -1: page by page over all; both -1 with NONE. */
int32_t coli_numa_expert(const coli_numa_t *numa, uint32_t layer, uint32_t expert);
int32_t coli_numa_layer(const coli_numa_t *numa, uint32_t layer);
/* Which of the pieces of work each thread begins with, for coli_pool_run_shares. node_chunks[n] pieces are node n's, and they
 * lie in order of node. Every node gets as many threads as its part of the work is worth, its own ones first, and those share
 * its pieces equally; so the threads of a node without work begin with another's, and a node without threads gets some. */
void coli_numa_shares(const coli_numa_t *numa, uint32_t num_threads, const uint32_t *node_chunks, coli_share_t *shares);

/* Put memory on a node (-1: page by page over all nodes used): pages there move, later ones begin there, or elsewhere when the
 * node is full. In pages of numa->page bytes: one that several ranges share goes with that which has its middle. For -1, pages
 * already there are dealt out 2 MiB (or a page, if that is more) at a time. False: refused, or some pages stayed where they
 * were. Of a mapped file only pages in this process's page tables, and in no other's, move, and nothing says so for those that
 * are in none; later ones go where the thread runs that first touches them. mbind by system call; true without one where the
 * system has one node (id -1). */
bool coli_os_place(const coli_numa_t *numa, const void *memory, uint64_t bytes, int32_t node);
/* Tie the calling thread to the CPUs of a node that this process may use. False: refused. */
bool coli_os_pin_node(const coli_topology_t *topology, uint32_t node);

#endif
