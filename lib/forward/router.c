/* router.c: f32 logits from unrotated hidden states, then softmax and top-k in one written order. */
#include "forward/router.h"

#include "base/math.h"
#include "forward/project.h"

#define LANES COLIBRI_TILE_ROWS
#define MAX_CANDIDATES 64

/* A total order in which NaN is least, so that the choice is always valid. */
static float rank(float logit) { return logit == logit ? logit : -__builtin_inff(); }

/* A value that at least top_k logits reach: the least of 8 or 16 maxima, each over logits of its own. */
static float threshold(uint32_t experts, uint32_t top_k, const float *logits) {
    float most[LANES], least = __builtin_inff();
    if (top_k > LANES || experts < LANES) return -__builtin_inff();
    for (uint32_t i = 0; i < LANES; i++) most[i] = -__builtin_inff();
    for (uint32_t e = 0; e + LANES <= experts; e += LANES)
        for (uint32_t i = 0; i < LANES; i++) most[i] = logits[e + i] > most[i] ? logits[e + i] : most[i];
    if (top_k <= LANES / 2)
        for (uint32_t i = 0; i < LANES / 2; i++) most[i] = COLI_MAX(most[i], most[i + LANES / 2]);
    for (uint32_t i = 0; i < (top_k <= LANES / 2 ? LANES / 2 : LANES); i++) least = COLI_MIN(least, most[i]);
    return least;
}

/* The top_k largest logits, largest first; an equal logit stays behind the lower id. For any number of experts. */
static void choose_slowly(uint32_t experts, uint32_t top_k, const float *logits, int32_t *ids) {
    for (uint32_t n = 0; n < top_k; n++) ids[n] = -1;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t at = top_k;
        while (at > 0 && (ids[at - 1] < 0 || rank(logits[e]) > rank(logits[ids[at - 1]]))) at--;
        if (at == top_k) continue;
        for (uint32_t n = top_k - 1; n > at; n--) ids[n] = ids[n - 1];
        ids[at] = (int32_t)e;
    }
}

typedef float v4f __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));

/* How many of the values (n, padded with -infinity to whole vectors) come before value i. */
static uint32_t place_of(const v4f *values, uint32_t n, float value, int32_t i) {
    v4f mine = { value, value, value, value };
    v4i index = { 0, 1, 2, 3 }, before = { 0 };
    for (uint32_t j = 0; j * 4 < n; j++, index += 4) before -= (values[j] > mine) | ((values[j] == mine) & (index < i));
    return (uint32_t)(before[0] + before[1] + before[2] + before[3]);
}

/* The same without a branch that depends on the logits: the few experts that reach the threshold are collected, and each one's
 * place is the number of those before it. */
static void choose(uint32_t experts, uint32_t top_k, const float *logits, int32_t *ids) {
    _Alignas(16) float value[MAX_CANDIDATES + 4];
    float least = threshold(experts, top_k, logits);
    uint32_t id[MAX_CANDIDATES], found = 0;
    for (uint32_t e = 0; e < experts; e++) {
        if (found == MAX_CANDIDATES) {
            choose_slowly(experts, top_k, logits, ids);
            return;
        }
        value[found] = rank(logits[e]);
        id[found] = e;
        found += !(logits[e] < least); /* a NaN too */
    }
    for (uint32_t j = found; j < found + 4; j++) value[j] = -__builtin_inff();
    for (uint32_t i = 0; i < found; i++) {
        uint32_t place = place_of((const v4f *)(const void *)value, found, value[i], (int32_t)i);
        if (place < top_k) ids[place] = (int32_t)id[i];
    }
}

static bool all_finite(const float *x, uint32_t n) {
    uint32_t bad = 0, bits;
    for (uint32_t i = 0; i < n; i++) {
        memcpy(&bits, x + i, 4);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return !bad;
}

bool coli_route(const coli_kernels_t *kernels, const colibri_file_params *p, uint32_t top_k, float *logits, int32_t *ids,
                float *weights) {
    choose(p->num_experts, top_k, logits, ids);
    float sum = 0;
    bool finite = all_finite(logits, p->num_experts);
    kernels->exps(logits, logits[ids[0]], logits, coli_pad_rows(p->num_experts));
    if (p->norm_topk) /* most likely first */
        for (uint32_t n = 0; n < top_k; n++) sum += logits[ids[n]];
    else
        for (uint32_t e = 0; e < p->num_experts; e++) sum += logits[e];
    if (!finite) sum = __builtin_nanf("");
    for (uint32_t n = 0; n < top_k; n++) weights[n] = logits[ids[n]] / sum * p->routed_scale;
    return finite;
}

typedef struct router_work {
    colibri_t *s;
    const coli_layer_t *layer;
    const float *rows;  /* [n][hidden_stride] */
    int32_t *ids;       /* [n][top_k] */
    float *weights;     /* [n][top_k] */
} router_work_t;

static void route_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const router_work_t *work = argument;
    colibri_t *s = work->s;
    const coli_matrix_t *m = &work->layer->router;
    uint32_t k = s->options.top_k, stride = coli_pad_rows(m->rows);
    coli_act_t x = {.stride = s->hidden_stride, .f32 = (float *)work->rows}; /* read only */
    coli_matmul_t call = {.w = m->tiles,
                          .block_bytes = m->block_bytes,
                          .n_blocks = stride / COLIBRI_TILE_ROWS,
                          .k = coli_pad_k(m->k),
                          .x = &x,
                          .first_row = begin,
                          .n_tokens = end - begin,
                          .y = s->b.router_logits + (uint64_t)begin * stride,
                          .y_stride = stride,
                          .scratch = coli_kernel_scratch(s, thread)};
    s->kernels->matmul[COLIBRI_FILE_F32](&call);
    for (uint32_t t = begin; t < end; t++)
        coli_route(s->kernels, s->weights->params, k, s->b.router_logits + (uint64_t)t * stride,
                   work->ids + (uint64_t)t * k, work->weights + (uint64_t)t * k);
}

static void route_rows(colibri_t *s, const coli_layer_t *layer, const float *rows, uint32_t n, int32_t *ids, float *weights) {
    router_work_t work = {s, layer, rows, ids, weights};
    coli_pool_run(s->pool, route_tokens, &work, n, s->kernels->geometry[COLIBRI_FILE_F32].tokens);
}

void coli_router(colibri_t *s, const coli_layer_t *layer, uint32_t n) {
    route_rows(s, layer, s->b.normed, n, s->b.route_ids, s->b.route_weights);
}

/* The different ones of n ids, in order of first appearance, to the front. Returns how many. */
static uint32_t unique(int32_t *ids, uint32_t n) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = 0;
        while (j < found && ids[j] != ids[i]) j++;
        if (j == found) ids[found++] = ids[i];
    }
    return found;
}

void coli_look_ahead(colibri_t *s, uint32_t next, uint32_t n) {
    const colibri_file_params *p = s->weights->params;
    uint32_t width = s->hidden_stride;
    while (next < p->num_layers && !s->weights->layers[next].is_moe) next++;
    if (next == p->num_layers || n > COLI_AHEAD_TOKENS || !coli_residency_wants_expectations(&s->residency)) return;
    const coli_layer_t *l = &s->weights->layers[next];
    for (uint32_t t = 0; t < n; t++)
        s->kernels->rms_norm(s->b.hidden + (uint64_t)t * width, l->mlp_norm, s->b.ahead_normed + (uint64_t)t * width, width,
                             p->hidden_size, p->rms_norm_eps);
    route_rows(s, l, s->b.ahead_normed, n, s->b.ahead_ids, s->b.ahead_weights);
    coli_residency_expect(&s->residency, next, s->b.ahead_ids, unique(s->b.ahead_ids, n * s->options.top_k), n == 1);
}

/* n rows of the host's as the products want them: themselves, or padded copies in b.normed. */
static const float *padded_rows(colibri_t *s, const float *rows, uint32_t n) {
    uint32_t width = s->weights->params->hidden_size;
    if (width == s->hidden_stride) return rows;
    for (uint32_t t = 0; t < n; t++) {
        float *row = s->b.normed + (uint64_t)t * s->hidden_stride;
        memcpy(row, rows + (uint64_t)t * width, width * sizeof(float));
        memset(row + width, 0, (s->hidden_stride - width) * sizeof(float)); /* a damaged token may have left NaN there */
    }
    return s->b.normed;
}

int32_t coli_route_rows(colibri_t *s, uint32_t layer, const float *hidden, uint32_t n, int32_t *ids, float *weights) {
    uint32_t k = s->options.top_k;
    int32_t bad = -1;
    for (uint32_t begin = 0; begin < n; begin += s->options.chunk) {
        uint32_t count = COLI_MIN(n - begin, s->options.chunk);
        const float *rows = hidden + (uint64_t)begin * s->weights->params->hidden_size;
        route_rows(s, &s->weights->layers[layer], padded_rows(s, rows, count), count, s->b.route_ids, s->b.route_weights);
        memcpy(ids + (uint64_t)begin * k, s->b.route_ids, (uint64_t)count * k * sizeof(int32_t));
        memcpy(weights + (uint64_t)begin * k, s->b.route_weights, (uint64_t)count * k * sizeof(float));
    }
    for (uint64_t i = 0; i < (uint64_t)n * k; i++) { /* weights of such a row are all NaN */
        if (weights[i] == weights[i]) continue;
        if (bad < 0) bad = (int32_t)(i / k);
        ids[i] = -1;
        weights[i] = 0;
    }
    return bad;
}
