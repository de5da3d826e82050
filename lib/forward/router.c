/* router.c: f32 logits from unrotated hidden states, then softmax and top-k in one written order. */
#include "forward/router.h"

#include "base/math.h"
#include "forward/project.h"

/* A total order in which NaN is least, so that the choice is always valid. */
static float rank(float logit) { return logit == logit ? logit : -__builtin_inff(); }

static void choose(uint32_t experts, uint32_t top_k, const float *logits, int32_t *ids) {
    for (uint32_t n = 0; n < top_k; n++) ids[n] = -1;
    for (uint32_t e = 0; e < experts; e++) {
        uint32_t at = top_k; /* insertion from the end: an equal logit stays behind the lower id */
        while (at > 0 && (ids[at - 1] < 0 || rank(logits[e]) > rank(logits[ids[at - 1]]))) at--;
        if (at == top_k) continue;
        for (uint32_t n = top_k - 1; n > at; n--) ids[n] = ids[n - 1];
        ids[at] = (int32_t)e;
    }
}

bool coli_route(const colibri_file_params *p, uint32_t top_k, const float *logits, int32_t *ids, float *weights) {
    choose(p->num_experts, top_k, logits, ids);
    float most = logits[ids[0]], sum = 0;
    bool finite = true;
    for (uint32_t n = 0; n < top_k; n++) weights[n] = coli_expf(logits[ids[n]] - most);
    for (uint32_t e = 0; e < p->num_experts; e++) finite = finite && logits[e] - logits[e] == 0;
    if (p->norm_topk) /* most likely first */
        for (uint32_t n = 0; n < top_k; n++) sum += weights[n];
    else
        for (uint32_t e = 0; e < p->num_experts; e++) sum += coli_expf(logits[e] - most);
    if (!finite) sum = __builtin_nanf("");
    for (uint32_t n = 0; n < top_k; n++) weights[n] = weights[n] / sum * p->routed_scale;
    return finite;
}

typedef struct router_work {
    colibri_t *s;
    const coli_layer_t *layer;
} router_work_t;

static void route_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const router_work_t *work = argument;
    colibri_t *s = work->s;
    const coli_matrix_t *m = &work->layer->router;
    uint32_t k = s->options.top_k, stride = coli_pad_rows(m->rows);
    coli_act_t x = {.stride = s->hidden_stride, .f32 = s->b.normed};
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
        coli_route(s->weights->params, k, s->b.router_logits + (uint64_t)t * stride, s->b.route_ids + (uint64_t)t * k,
                   s->b.route_weights + (uint64_t)t * k);
}

void coli_router(colibri_t *s, const coli_layer_t *layer, uint32_t n) {
    router_work_t work = {s, layer};
    coli_pool_run(s->pool, route_tokens, &work, n, 8);
}

int32_t coli_route_rows(colibri_t *s, uint32_t layer, const float *hidden, uint32_t n, int32_t *ids, float *weights) {
    uint32_t width = s->weights->params->hidden_size, k = s->options.top_k;
    int32_t bad = -1;
    for (uint32_t begin = 0; begin < n; begin += s->options.chunk) {
        uint32_t count = COLI_MIN(n - begin, s->options.chunk);
        for (uint32_t t = 0; t < count; t++) {
            float *row = s->b.normed + (uint64_t)t * s->hidden_stride;
            memcpy(row, hidden + (uint64_t)(begin + t) * width, width * sizeof(float));
            memset(row + width, 0, (s->hidden_stride - width) * sizeof(float)); /* a damaged token may have left NaN there */
        }
        coli_router(s, &s->weights->layers[layer], count);
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
