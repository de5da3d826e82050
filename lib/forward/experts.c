/* experts.c: tokens are grouped by expert, so that each expert's weights are read once per chunk: gate and up products and
 * SiLU, requantisation, down product, then each token's weighted sum in ascending expert order (DESIGN sections 6 and 8). */
#include "forward/experts.h"

#include <stdatomic.h>

#include "base/math.h"
#include "base/os.h"
#include "base/status.h"
#include "forward/capacity.h"
#include "forward/project.h"
#include "forward/router.h"

/* A set of MLPs of equal size, each with its own tokens: the routed experts, or one shared or dense MLP with all tokens. */
typedef struct mlp_set {
    colibri_t *s;
    uint32_t layer;
    const coli_mlp_t *single;  /* shared or dense MLP; NULL: the routed experts of b.moe */
    coli_act_t x;              /* normed rows */
    coli_act_t inner;          /* quantised rows of silu(gate) * up */
    uint32_t first, n_mlps;    /* of the routed experts: a wave of b.moe.active */
    uint32_t n_rows;           /* tokens or pairs */
    uint32_t inner_stride;     /* pad128(intermediate) */
    float *out;                /* [n_rows][H] */
    uint32_t parts;            /* work items of one MLP */
    uint32_t grain;            /* block pairs (gate, up) or blocks (down) of an item */
} mlp_set_t;

/* One MLP of the set and its rows. */
typedef struct mlp_job {
    coli_mlp_t mlp;
    const uint32_t *tokens;    /* activation row of each row, or NULL: the same number */
    uint32_t first, count;     /* its rows of inner and out */
    uint32_t expert;
} mlp_job_t;

static mlp_job_t job_of(const mlp_set_t *set, uint32_t index) {
    if (set->single) return (mlp_job_t){*set->single, NULL, 0, set->n_rows, 0};
    const coli_moe_plan_t *plan = &set->s->b.moe;
    uint32_t e = plan->active[set->first + index], first = plan->expert_begin[e];
    return (mlp_job_t){coli_residency_expert(&set->s->residency, set->layer, e), plan->pair_token + first, first,
                       plan->expert_begin[e + 1] - first, e};
}

static void count_compute(const mlp_set_t *set, const mlp_job_t *job, uint64_t since) {
    if (!set->single)
        atomic_fetch_add_explicit(&set->s->counters.expert_compute_ns[job->expert], coli_os_now_ns() - since,
                                  memory_order_relaxed);
}

/* ---- gate, up and SiLU: block pairs of one MLP over tiles of its tokens ---- */

static void gate_up_tile(const mlp_set_t *set, const mlp_job_t *job, uint32_t pair, uint32_t pairs, uint32_t row, uint32_t rows,
                         uint32_t thread) {
    const coli_kernels_t *kernels = set->s->kernels;
    float *scratch = coli_thread_scratch(set->s, thread);
    const coli_matrix_t *m = &job->mlp.gate_up;
    uint32_t width = pairs * 2 * COLIBRI_TILE_ROWS, padded = coli_pad_rows(job->mlp.intermediate);
    coli_matmul_t call = {.w = m->tiles + 2 * pair * m->block_bytes,
                          .w_scale = m->scale ? m->scale + 2 * pair * COLIBRI_TILE_ROWS : NULL,
                          .block_bytes = m->block_bytes,
                          .n_blocks = 2 * pairs,
                          .k = coli_pad_k(m->k),
                          .x = &set->x,
                          .rows = job->tokens ? job->tokens + row : NULL,
                          .first_row = row,
                          .n_tokens = rows,
                          .y = scratch,
                          .y_stride = width,
                          .scratch = coli_kernel_scratch(set->s, thread)};
    kernels->matmul[m->dtype](&call);
    for (uint32_t r = 0; r < rows; r++) {
        float *inner = set->s->b.inner + (uint64_t)(job->first + row + r) * set->inner_stride;
        kernels->swiglu(scratch + (uint64_t)r * width, inner + (uint64_t)pair * COLIBRI_TILE_ROWS, pairs * COLIBRI_TILE_ROWS);
        if ((pair + pairs) * COLIBRI_TILE_ROWS == padded) /* the row's end: padding of k */
            memset(inner + padded, 0, (set->inner_stride - padded) * sizeof(float));
    }
}

static void requantize_rows(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    mlp_set_t *set = argument;
    for (uint32_t row = begin; row < end; row++)
        coli_act_row(set->s->kernels, set->s->b.inner + (uint64_t)row * set->inner_stride, set->inner_stride,
                     coli_thread_scratch(set->s, thread), row, &set->inner, NULL);
}

/* Is the job's expert there? Waits for it if it is on its way. */
static bool is_there(const mlp_set_t *set, const mlp_job_t *job) {
    return set->single || coli_residency_wait(&set->s->residency, set->layer, job->expert);
}

/* Whoever finishes the last part of a routed expert quantises its rows: no region of its own, no wait for other experts. */
static void finish_part(mlp_set_t *set, const mlp_job_t *job, uint32_t index, bool there, uint32_t thread) {
    if (set->single || !coli_is_quantised(job->mlp.down.dtype)) return;
    _Atomic uint32_t *done = &set->s->b.moe.parts_done[set->first + index];
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) + 1 < set->parts) return;
    atomic_store_explicit(done, 0, memory_order_relaxed); /* for the next layer */
    if (there) requantize_rows(set, job->first, job->first + job->count, thread);
}

static void gate_up_items(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    mlp_set_t *set = argument;
    for (uint32_t item = begin; item < end; item++) {
        mlp_job_t job = job_of(set, item / set->parts);
        bool there = is_there(set, &job); /* if not, the call fails at the layer's end */
        uint64_t since = set->single ? 0 : coli_os_now_ns();
        uint32_t all = coli_pad_rows(job.mlp.intermediate) / COLIBRI_TILE_ROWS, pair = item % set->parts * set->grain;
        uint32_t pairs = COLI_MIN(set->grain, all - pair);
        for (uint32_t row = 0; there && row < job.count; row += COLI_TOKEN_TILE)
            gate_up_tile(set, &job, pair, pairs, row, COLI_MIN(COLI_TOKEN_TILE, job.count - row), thread);
        finish_part(set, &job, item / set->parts, there, thread);
        count_compute(set, &job, since);
    }
}

/* ---- down ---- */

static void down_items(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const mlp_set_t *set = argument;
    for (uint32_t item = begin; item < end; item++) {
        uint64_t since = set->single ? 0 : coli_os_now_ns();
        mlp_job_t job = job_of(set, item / set->parts);
        if (!is_there(set, &job)) continue;
        const coli_matrix_t *m = &job.mlp.down;
        uint32_t block = item % set->parts * set->grain, all = coli_pad_rows(m->rows) / COLIBRI_TILE_ROWS;
        coli_act_t x = coli_act_choose(m->dtype, &set->inner, set->s->b.inner, set->inner_stride);
        coli_matmul_t call = {.w = m->tiles + block * m->block_bytes,
                              .w_scale = m->scale ? m->scale + block * COLIBRI_TILE_ROWS : NULL,
                              .block_bytes = m->block_bytes,
                              .n_blocks = COLI_MIN(set->grain, all - block),
                              .k = coli_pad_k(m->k),
                              .x = &x,
                              .first_row = job.first,
                              .n_tokens = job.count,
                              .y = set->out + (uint64_t)job.first * set->s->hidden_stride + block * COLIBRI_TILE_ROWS,
                              .y_stride = set->s->hidden_stride,
                              .scratch = coli_kernel_scratch(set->s, thread)};
        set->s->kernels->matmul[m->dtype](&call);
        count_compute(set, &job, since);
    }
}

/* Who begins with which experts. With experts to be waited for all threads take them in one order, those that are there first;
 * with several memory nodes every thread begins with its own node's. False: equal shares will do. */
static bool share_out(const mlp_set_t *set, coli_share_t *shares) {
    const coli_residency_t *r = &set->s->residency;
    uint32_t threads = set->s->options.threads, all = set->n_mlps * set->parts, node_chunks[COLI_MAX_NODES] = {0};
    if (r->mode == COLIBRI_RESIDENCY_STREAM) {
        for (uint32_t t = 0; t < threads; t++) shares[t] = (coli_share_t){t ? all : 0, all};
        return true;
    }
    if (r->options.numa.num_nodes < 2 || r->numa_refused) return false;
    for (uint32_t i = 0; i < set->n_mlps; i++)
        node_chunks[coli_numa_expert(&r->options.numa, set->layer, set->s->b.moe.active[set->first + i])] += set->parts;
    coli_numa_shares(&r->options.numa, threads, node_chunks, shares);
    return true;
}

/* Cut every MLP of the set into equal parts of whole blocks (or pairs of blocks) and run `work` over all of them. */
static void run_parts(mlp_set_t *set, coli_work_fn work, uint32_t blocks, uint64_t block_bytes, uint32_t multiple,
                      uint32_t most) {
    set->grain = COLI_MIN(most, coli_block_grain(block_bytes, multiple, set->n_rows / set->n_mlps));
    set->parts = (blocks + set->grain - 1) / set->grain;
    coli_share_t shares[COLI_MAX_THREADS];
    uint32_t items = set->n_mlps * set->parts;
    if (!set->single && share_out(set, shares)) coli_pool_run_shares(set->s->pool, work, set, items, 1, shares);
    else coli_pool_run(set->s->pool, work, set, items, 1);
}

static void run_set(mlp_set_t *set) {
    if (!set->n_mlps) return;
    coli_mlp_t mlp = job_of(set, 0).mlp;
    set->inner_stride = coli_pad_k(mlp.intermediate);
    set->inner.stride = set->inner_stride;
    uint32_t multiple = set->s->kernels->geometry[mlp.gate_up.dtype].blocks;
    run_parts(set, gate_up_items, coli_pad_rows(mlp.intermediate) / COLIBRI_TILE_ROWS, 2 * mlp.gate_up.block_bytes,
              (multiple + 1) / 2, COLI_PAIR_TILE);
    if (set->single && coli_is_quantised(mlp.down.dtype)) coli_pool_run(set->s->pool, requantize_rows, set, set->n_rows, 4);
    uint32_t blocks = coli_pad_rows(mlp.down.rows) / COLIBRI_TILE_ROWS;
    run_parts(set, down_items, blocks, mlp.down.block_bytes, multiple, blocks);
}

/* ---- the plan: token-expert pairs sorted by expert (counting sort) ---- */

static void sort_by_expert(int32_t *ids, float *weights, uint32_t k) {
    for (uint32_t i = 1; i < k; i++)
        for (uint32_t j = i; j > 0 && ids[j - 1] > ids[j]; j--) {
            int32_t id = ids[j]; ids[j] = ids[j - 1]; ids[j - 1] = id;
            float weight = weights[j]; weights[j] = weights[j - 1]; weights[j - 1] = weight;
        }
}

static void plan_pairs(colibri_t *s, uint32_t n) {
    coli_moe_plan_t *plan = &s->b.moe;
    uint32_t experts = s->weights->params->num_experts, k = s->options.top_k;
    memset(plan->expert_begin, 0, (experts + 2) * sizeof(uint32_t)); /* [experts]: pairs that were dropped */
    for (uint32_t i = 0; i < n * k; i++) plan->expert_begin[s->b.route_ids[i] + 1]++;
    plan->n_active = 0;
    for (uint32_t e = 0; e <= experts; e++) {
        if (e < experts && plan->expert_begin[e + 1]) plan->active[plan->n_active++] = e;
        plan->expert_begin[e + 1] += plan->expert_begin[e];
    }
    for (uint32_t t = 0; t < n; t++) {
        sort_by_expert(s->b.route_ids + (uint64_t)t * k, s->b.route_weights + (uint64_t)t * k, k);
        for (uint32_t i = t * k; i < (t + 1) * k; i++) {
            uint32_t pair = plan->expert_begin[s->b.route_ids[i]]++; /* shifted back below */
            plan->pair_token[pair] = t;
            plan->token_pair[i] = pair;
            plan->pair_weight[i] = s->b.route_weights[i];
        }
    }
    for (uint32_t e = experts + 1; e > 0; e--) plan->expert_begin[e] = plan->expert_begin[e - 1];
    plan->expert_begin[0] = 0;
}

/* ---- stages over tokens ---- */

typedef struct token_work {
    colibri_t *s;
    const coli_layer_t *layer;
    const float *given;     /* a host's own rows [n][hidden_size] for these tokens; NULL: the residual stream */
    float *output;          /* of a host: rows [n][hidden_size]; NULL: the residual stream */
    _Atomic uint32_t *bad;  /* of a host: the least row of output that is not finite */
    uint32_t first;         /* of a host: number of the row of token 0 */
} token_work_t;

/* b.normed[t] is there: its quantised forms, as the layer's matrices want them. */
static void quantise_token(const token_work_t *work, uint32_t t, uint32_t thread) {
    colibri_t *s = work->s;
    const coli_layer_t *layer = work->layer;
    bool other = layer->is_moe ? layer->has_shared && coli_is_quantised(layer->shared.gate_up.dtype)
                               : coli_is_quantised(layer->dense.gate_up.dtype);
    bool routed = layer->is_moe && coli_is_quantised(layer->expert_dtype);
    if (other || routed)
        coli_act_row(s->kernels, s->b.normed + (uint64_t)t * s->hidden_stride, s->hidden_stride, coli_thread_scratch(s, thread),
                     t, other ? &s->b.act_other : NULL, routed ? &s->b.act_expert : NULL);
}

static void norm_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const token_work_t *work = argument;
    colibri_t *s = work->s;
    const colibri_file_params *p = s->weights->params;
    uint32_t width = s->hidden_stride;
    for (uint32_t t = begin; t < end; t++) {
        s->kernels->rms_norm(s->b.hidden + (uint64_t)t * width, work->layer->mlp_norm, s->b.normed + (uint64_t)t * width, width,
                             p->hidden_size, p->rms_norm_eps);
        quantise_token(work, t, thread);
    }
}

static void given_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const token_work_t *work = argument;
    colibri_t *s = work->s;
    uint32_t width = s->hidden_stride, n = s->weights->params->hidden_size;
    for (uint32_t t = begin; t < end; t++) {
        float *row = s->b.normed + (uint64_t)t * width;
        memcpy(row, work->given + (uint64_t)t * n, n * sizeof(float));
        memset(row + n, 0, (width - n) * sizeof(float));
        quantise_token(work, t, thread);
    }
}

/* Token t's experts, ascending, + gate * shared, into sum [H]; of a dense layer the MLP's row. */
static void sum_experts(const token_work_t *work, uint32_t t, float *sum) {
    colibri_t *s = work->s;
    const coli_moe_plan_t *plan = &s->b.moe;
    uint32_t width = s->hidden_stride, k = s->options.top_k;
    const float *projected = s->b.projected + (uint64_t)t * width;
    if (!work->layer->is_moe) {
        memcpy(sum, projected, width * sizeof(float));
        return;
    }
    memset(sum, 0, width * sizeof(float));
    uint32_t kept = plan->expert_begin[s->weights->params->num_experts]; /* dropped pairs lie behind the others */
    for (uint32_t i = t * k; i < (t + 1) * k && plan->token_pair[i] < kept; i++)
        s->kernels->axpy(plan->pair_weight[i], s->b.expert_out + (uint64_t)plan->token_pair[i] * width, sum, width);
    if (!work->layer->has_shared) return;
    float gate = 1;
    if (work->layer->shared_gate.rows) gate = s->b.shared_gate[(uint64_t)t * COLIBRI_TILE_ROWS];
    s->kernels->axpy(gate, projected, sum, width);
}

/* hidden += residual_scale * (experts' sum). */
static void merge_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const token_work_t *work = argument;
    colibri_t *s = work->s;
    uint32_t width = s->hidden_stride;
    float *sum = coli_thread_scratch(s, thread);
    for (uint32_t t = begin; t < end; t++) {
        sum_experts(work, t, sum);
        s->kernels->axpy(s->weights->params->residual_scale, sum, s->b.hidden + (uint64_t)t * width, width);
    }
}

/* The sums as they are to the host; rows that are not finite become zeros. */
static void output_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const token_work_t *work = argument;
    uint32_t n = work->s->weights->params->hidden_size;
    float *sum = coli_thread_scratch(work->s, thread);
    for (uint32_t t = begin; t < end; t++) {
        float *out = work->output + (uint64_t)t * n;
        bool bad = false;
        sum_experts(work, t, sum);
        for (uint32_t i = 0; i < n; i++) bad |= sum[i] - sum[i] != 0;
        if (bad) memset(sum, 0, n * sizeof(float));
        memcpy(out, sum, n * sizeof(float));
        uint32_t row = work->first + t, least = atomic_load_explicit(work->bad, memory_order_relaxed);
        while (bad && row < least && !atomic_compare_exchange_weak(work->bad, &least, row)) continue;
    }
}

static float sigmoid(float x) { return 1.0f / (1.0f + coli_expf(-x)); }

/* b.shared_gate[t] = sigmoid(shared_gate . x) (Qwen2-MoE). */
static void shared_gate_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const token_work_t *work = argument;
    colibri_t *s = work->s;
    const coli_matrix_t *m = &work->layer->shared_gate;
    coli_act_t x = {.stride = s->hidden_stride, .f32 = s->b.normed};
    float *gate = s->b.shared_gate + (uint64_t)begin * COLIBRI_TILE_ROWS;
    coli_matmul_t call = {.w = m->tiles, .block_bytes = m->block_bytes, .n_blocks = 1, .k = coli_pad_k(m->k), .x = &x,
                          .first_row = begin, .n_tokens = end - begin, .y = gate, .y_stride = COLIBRI_TILE_ROWS,
                          .scratch = coli_kernel_scratch(s, thread)};
    s->kernels->matmul[COLIBRI_FILE_F32](&call);
    for (uint32_t t = 0; t < end - begin; t++)
        gate[(uint64_t)t * COLIBRI_TILE_ROWS] = sigmoid(gate[(uint64_t)t * COLIBRI_TILE_ROWS]);
}

static void count_layer(colibri_t *s, uint32_t layer, uint64_t merge_ns) {
    const coli_moe_plan_t *plan = &s->b.moe;
    uint32_t experts = s->weights->params->num_experts, pairs = plan->expert_begin[experts];
    colibri_expert_stats_t *rows = s->counters.experts + (uint64_t)layer * experts;
    uint64_t bytes = coli_mlp_bytes(s->weights->layers[layer].expert_dtype, s->weights->params->moe_intermediate,
                                    s->weights->params->hidden_size);
    for (uint32_t i = 0; i < plan->n_active; i++) {
        uint32_t e = plan->active[i], tokens = plan->expert_begin[e + 1] - plan->expert_begin[e];
        rows[e].tokens += tokens;
        rows[e].calls++;
        rows[e].compute_ns += s->counters.expert_compute_ns[e];
        rows[e].merge_ns += merge_ns * tokens / pairs;
        s->counters.expert_compute_ns[e] = 0;
        s->counters.totals.weight_bytes += bytes;
    }
}

static void run_single(colibri_t *s, uint32_t layer, const coli_mlp_t *mlp, uint32_t n) {
    mlp_set_t set = {
        .s = s, .layer = layer, .single = mlp, .n_mlps = 1, .n_rows = n, .out = s->b.projected, .inner = s->b.act_inner};
    set.inner.bits = s->options.other_bits;
    set.x = coli_act_choose(mlp->gate_up.dtype, &s->b.act_other, s->b.normed, s->hidden_stride);
    run_set(&set);
    s->counters.totals.weight_bytes += mlp->bytes;
}

/* With several memory nodes the experts of one stand together. */
static void order_by_node(colibri_t *s, uint32_t layer) {
    const coli_numa_t *numa = &s->residency.options.numa;
    coli_moe_plan_t *plan = &s->b.moe;
    if (numa->kind != COLI_NUMA_INTERLEAVE || numa->num_nodes < 2 || s->residency.mode == COLIBRI_RESIDENCY_STREAM) return;
    for (uint32_t i = 1; i < plan->n_active; i++) { /* few: insertion sort by node, stable */
        uint32_t e = plan->active[i], j = i;
        int32_t node = coli_numa_expert(numa, layer, e);
        for (; j > 0 && coli_numa_expert(numa, layer, plan->active[j - 1]) > node; j--) plan->active[j] = plan->active[j - 1];
        plan->active[j] = e;
    }
}

static colibri_status_t run_routed(colibri_t *s, uint32_t index, uint32_t n, const token_work_t *work) {
    const coli_moe_plan_t *plan = &s->b.moe;
    mlp_set_t set = {.s = s, .layer = index, .out = s->b.expert_out, .inner = s->b.act_inner};
    set.inner.bits = s->options.expert_bits;
    set.x = coli_act_choose(work->layer->expert_dtype, &s->b.act_expert, s->b.normed, s->hidden_stride);
    uint32_t pairs = plan->expert_begin[s->weights->params->num_experts];
    coli_residency_begin(&s->residency, index, s->b.moe.active, plan->n_active, plan->expert_begin, n);
    if (!work->output) coli_look_ahead(s, index + 1, n);
    while ((set.n_mlps = coli_residency_wave(&s->residency, set.first)) > 0) {
        set.n_rows = (uint32_t)((uint64_t)pairs * set.n_mlps / plan->n_active); /* about: it sets the size of work items */
        run_set(&set);
        set.first += set.n_mlps;
    }
    colibri_status_t status = coli_residency_end(&s->residency);
    for (uint32_t i = 0; status && i < plan->n_active; i++) s->counters.expert_compute_ns[plan->active[i]] = 0; /* in vain */
    return status;
}

/* The layer's MLPs over the chunk's n tokens in b.normed: into b.expert_out and b.projected, for sum_experts. */
static colibri_status_t run_mlps(colibri_t *s, uint32_t index, uint32_t n, token_work_t *work) {
    const coli_layer_t *layer = work->layer;
    if (!layer->is_moe) {
        run_single(s, index, &layer->dense, n);
        return COLIBRI_OK;
    }
    uint64_t since = coli_os_now_ns();
    coli_router(s, layer, n);
    if (s->options.balance != COLIBRI_BALANCE_NONE) coli_capacity(s, n);
    plan_pairs(s, n);
    order_by_node(s, index);
    s->counters.totals.router_ns += coli_os_now_ns() - since;
    if (layer->has_shared) run_single(s, index, &layer->shared, n);
    if (layer->shared_gate.rows) coli_pool_run(s->pool, shared_gate_tokens, work, n, 16);
    return run_routed(s, index, n, work);
}

static void merge(colibri_t *s, uint32_t index, uint32_t n, token_work_t *work) {
    uint64_t since = coli_os_now_ns();
    coli_pool_run(s->pool, work->output ? output_tokens : merge_tokens, work, n, 4);
    if (work->layer->is_moe) count_layer(s, index, coli_os_now_ns() - since);
}

colibri_status_t coli_mlp(colibri_t *s, uint32_t index, uint32_t n) {
    token_work_t work = {.s = s, .layer = &s->weights->layers[index]};
    coli_pool_run(s->pool, norm_tokens, &work, n, 4);
    colibri_status_t status = run_mlps(s, index, n, &work);
    if (!status) merge(s, index, n, &work);
    return status;
}

colibri_status_t coli_mlp_rows(colibri_t *s, uint32_t index, const float *hidden, uint32_t n, float *output) {
    uint64_t width = s->weights->params->hidden_size;
    _Atomic uint32_t bad = UINT32_MAX;
    for (uint32_t begin = 0; begin < n; begin += s->options.chunk) {
        uint32_t count = COLI_MIN(n - begin, s->options.chunk);
        token_work_t work = {.s = s, .layer = &s->weights->layers[index], .given = hidden + begin * width,
                             .output = output + begin * width, .bad = &bad, .first = begin};
        coli_pool_run(s->pool, given_tokens, &work, count, 4);
        colibri_status_t status = run_mlps(s, index, count, &work);
        if (status) return status;
        merge(s, index, count, &work);
    }
    if (bad == UINT32_MAX) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_NOT_FINITE, "the result of row %u is NaN or infinite", (unsigned)bad);
}
