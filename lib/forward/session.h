/* session.h: one caller's mutable state, and the buffers of the forward pass. Everything lives in one arena that plan.c lays
 * out; the stages (attention, router, experts, head) find their inputs and outputs here by name.
 *
 * Widths: H = pad128(hidden), D = pad16(head_dim), Q = pad128(num_heads * D), N = tokens of a chunk (at most max_chunk_tokens),
 * K = experts per token, P = N * K token-expert pairs, V = pad16(vocab). Rows are padded with zeros and stay so. */
#ifndef COLI_SESSION_H
#define COLI_SESSION_H

#include "base/arena.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "model/residency.h"

#define COLI_TOKEN_TILE 64 /* tokens whose gate and up products are held in one thread's scratch */
#define COLI_PAIR_TILE 16  /* gate and up block pairs of one work item, at most */
#define COLI_QUERY_TILE 16 /* queries (tokens x heads of a KV head) that pass over the keys together, at least one token's */
#define COLI_HEAD_TILE 16  /* row blocks of the head in one work item */
#define COLI_AHEAD_TOKENS 8 /* chunks of more need nearly all experts: nothing to be told ahead */

/* The config, resolved: no defaults left. */
typedef struct coli_options {
    uint32_t batch, seq, threads, top_k, chunk;
    uint32_t outputs;      /* colibri_output_t */
    uint32_t kv_type;      /* index into coli_kernels_t.attention: 0 f32, 1 f16, 2 q8 */
    uint32_t expert_bits;  /* of q8 activations, 8 or 16 */
    uint32_t other_bits;
    colibri_isa_t isa;
    uint32_t balance;      /* colibri_load_balancing_t */
    float capacity_factor;
    coli_residency_options_t residency;
    colibri_parallel_for_fn parallel_for; /* the host's threads; NULL: our own */
    void *parallel_for_user_data;
    bool pinned;           /* thread i >= 1 stays on cpus[i] */
    int32_t cpus[COLI_MAX_THREADS];
} coli_options_t;

typedef struct coli_slot {
    uint32_t length;       /* tokens in the KV cache */
    uint32_t pending;      /* tokens handed over by set_input, kept behind `length` in the history */
    uint32_t rows;         /* its tokens in the latest infer */
    colibri_status_t status; /* of the latest infer */
    bool has_logits;       /* its row of `logits` belongs to its last token */
} coli_slot_t;

/* One token of a chunk. */
typedef struct coli_token {
    int32_t id;
    uint32_t slot, position;
} coli_token_t;

/* A run of tokens of one slot at consecutive positions: what one attention call takes. */
typedef struct coli_run {
    uint32_t first, count; /* tokens of the chunk */
} coli_run_t;

/* Where the keys and values lie: [layer][slot][kv head] pieces, laid out as coli_attention_t wants them. */
typedef struct coli_kvcache {
    uint8_t *keys, *values;
    float *key_scales, *value_scales; /* q8: [layer][slot][kv head][seq], else NULL */
    uint32_t type;         /* 0 f32, 1 f16, 2 q8 */
    uint32_t element;      /* bytes */
    uint32_t seq, head_dim, kv_heads, batch; /* seq padded to 16, head_dim padded */
} coli_kvcache_t;

/* Token-expert pairs of one chunk and layer, sorted by expert. */
typedef struct coli_moe_plan {
    uint32_t *expert_begin; /* [num_experts + 2] first pair of each expert; the last are dropped ones (capacity) */
    uint32_t *pair_token;   /* [P] token of each pair */
    uint32_t *token_pair;   /* [N][K] pairs of each token, ascending expert */
    float *pair_weight;     /* [N][K] routing weights in the same order */
    uint32_t *active;       /* [num_experts] experts that got tokens, in order of computation */
    _Atomic uint32_t *parts_done; /* [num_experts] gate and up parts done, by index into active; 0 between layers */
    uint32_t n_active;
} coli_moe_plan_t;

typedef struct coli_buffers {
    float *hidden;         /* [N][H] the residual stream */
    float *normed;         /* [N][H] */
    coli_act_t act_other;  /* [N][H] normed, for attention, shared expert, dense MLP and head */
    coli_act_t act_expert; /* [N][H] normed, for the routed experts */
    float *qkv;            /* [N][qkv_stride] q heads, k heads, v heads */
    float *attended;       /* [N][Q] heads' outputs */
    coli_act_t act_out;    /* [N][Q] */
    float *projected;      /* [N][H] output of attention, of dense and shared MLPs */
    float *rope_cos, *rope_sin; /* [N][rotary_dim / 2] */
    float *router_logits;  /* [N][pad16(num_experts)] */
    int32_t *route_ids;    /* [N][K] */
    float *route_weights;  /* [N][K] */
    float *shared_gate;    /* [N][16], first lane used */
    float *ahead_normed;   /* [COLI_AHEAD_TOKENS][H] what the next layer's router would see now */
    int32_t *ahead_ids;    /* [COLI_AHEAD_TOKENS][K], then the different ones of them */
    float *ahead_weights;  /* [COLI_AHEAD_TOKENS][K] not used */
    coli_moe_plan_t moe;
    float *inner;          /* [P or N][I padded] silu(gate) * up */
    coli_act_t act_inner;  /* the same, quantised; two uses with their own stride */
    float *expert_out;     /* [P][H] */
    float *thread_scratch; /* [threads][thread_stride] */
    float *scores;         /* [threads][query tile][score_stride] */
    uint8_t *kernel_scratch; /* [threads][COLI_KERNEL_SCRATCH] */
    coli_token_t *tokens;  /* [N] */
    coli_run_t *runs;      /* [N] */
    uint32_t n_runs;

    int32_t *history;      /* [batch][seq] */
    float *final_hidden;   /* [batch][H] of each slot's last token, or [batch * seq][H] with outputs ALL and HIDDEN */
    float *logits;         /* [batch][V] */
    uint32_t *sample_ids;  /* [vocab] */
    float *sample_values;  /* [vocab] */
    uint32_t *active_slots; /* [batch] slots with tokens in this infer, ascending */
    uint32_t *last_rows;   /* [batch] the row of final_hidden of each one's last token */
    uint8_t *slot_failed;  /* [batch] during infer */
} coli_buffers_t;

typedef struct coli_counters {
    colibri_stats_t totals;              /* the counting fields */
    colibri_expert_stats_t *experts;     /* [layers][num_experts] */
    _Atomic uint64_t *expert_compute_ns; /* [num_experts] of the layer being computed */
} coli_counters_t;

struct colibri_t {
    colibri_model_t *model;
    const coli_weights_t *weights; /* residency.weights */
    coli_residency_t residency;
    const coli_kernels_t *kernels;
    coli_options_t options;
    coli_pool_t *pool;
    void *pool_memory;
    coli_kvcache_t kv;
    coli_buffers_t b;
    coli_slot_t *slots;          /* [batch] */
    coli_counters_t counters;
    uint32_t hidden_stride;      /* H */
    uint32_t qkv_stride;         /* pad16 of all q, k, v rows */
    uint32_t vocab_stride;       /* V */
    uint32_t run_tokens;         /* tokens of a run, at most */
    uint32_t score_stride;       /* floats of one query's scores */
    uint64_t thread_stride;      /* floats of one thread's scratch */
    uint64_t inner_floats;       /* capacity of `inner` */
    bool input_ready, output_ready;
    uint32_t input_batch;        /* slots of the latest set_input */
    uint32_t output_rows;        /* tokens of the latest infer */
    uint32_t output_batch;       /* its slots */
    _Atomic uint32_t cancel;     /* set by colibri_cancel, taken by the next look */
    void *own_memory;            /* NULL with a caller's workspace */
    uint64_t own_bytes;          /* of it, whole huge pages if it lies on such */
    uint64_t memory_bytes;       /* of the workspace in use */
    void *fork_guard;
};

#endif
