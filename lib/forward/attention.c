/* attention.c: grouped-query attention with RoPE over the KV cache. Every token sees keys of its own slot, from the window's
 * start up to itself; all keys of the chunk are stored before any query runs, so cutting a prompt changes nothing. */
#include "forward/attention.h"

#include "base/math.h"
#include "forward/kvcache.h"
#include "forward/project.h"

typedef struct attention_work {
    colibri_t *s;
    const coli_layer_t *layer;
    uint32_t index; /* of the layer */
} attention_work_t;

/* ---- RoPE ---- */

/* theta of "dynamic NTK" scaling for a sequence that ends at this position (see colibri_format.h). */
static double dynamic_theta(const colibri_file_params *p, uint32_t position) {
    double length = (double)position + 1, original = p->rope_original_max, d = p->rotary_dim;
    if (length <= original || p->rotary_dim <= 2) return p->rope_theta;
    double grown = (double)p->rope_factor * length / original - ((double)p->rope_factor - 1);
    return (double)p->rope_theta * coli_pow(grown, d / (d - 2));
}

static void rope_row(const coli_weights_t *w, uint32_t position, float *cosines, float *sines) {
    const colibri_file_params *p = w->params;
    double log_theta = w->rope_inv_freq ? 0 : coli_log(dynamic_theta(p, position));
    for (uint32_t i = 0; i < p->rotary_dim / 2; i++) {
        float frequency = w->rope_inv_freq ? w->rope_inv_freq[i] : (float)coli_exp(-log_theta * (2.0 * i / p->rotary_dim));
        double sine, cosine;
        coli_sincos((double)((float)position * frequency), &sine, &cosine);
        cosines[i] = (float)cosine * p->rope_attention_factor;
        sines[i] = (float)sine * p->rope_attention_factor;
    }
}

static void rope_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    colibri_t *s = argument;
    uint64_t half = s->weights->params->rotary_dim / 2;
    for (uint32_t t = begin; t < end; t++)
        rope_row(s->weights, s->b.tokens[t].position, s->b.rope_cos + t * half, s->b.rope_sin + t * half);
}

void coli_rope_tables(colibri_t *s, uint32_t n) { coli_pool_run(s->pool, rope_tokens, s, n, 16); }

static void rotate_head(float *x, const float *cosines, const float *sines, uint32_t half) {
    for (uint32_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

/* ---- Stage by stage, each over tokens begin ... end - 1 ---- */

static void norm_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const attention_work_t *work = argument;
    colibri_t *s = work->s;
    const colibri_file_params *p = s->weights->params;
    uint64_t width = s->hidden_stride;
    for (uint32_t t = begin; t < end; t++) {
        float *normed = s->b.normed + t * width;
        s->kernels->rms_norm(s->b.hidden + t * width, work->layer->attn_norm, normed, (uint32_t)width, p->hidden_size,
                             p->rms_norm_eps);
        if (coli_is_quantised(work->layer->qkv.dtype))
            coli_act_row(s->kernels, normed, (uint32_t)width, coli_thread_scratch(s, thread), t, &s->b.act_other, NULL);
    }
}

/* RMSNorm of q or k: of every head alone, or of all heads together (their padding is zero). */
static void norm_heads(const colibri_t *s, float *x, const float *weight, uint32_t heads) {
    const colibri_file_params *p = s->weights->params;
    uint32_t dim = s->weights->head_dim_padded;
    if (p->qk_norm == COLIBRI_QK_NORM_WIDTH)
        s->kernels->rms_norm(x, weight, x, heads * dim, heads * p->head_dim, p->rms_norm_eps);
    else
        for (uint32_t h = 0; h < heads; h++)
            s->kernels->rms_norm(x + (uint64_t)h * dim, weight, x + (uint64_t)h * dim, dim, p->head_dim, p->rms_norm_eps);
}

static void clip(float *x, uint32_t n, float limit) {
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

/* Bias, norm, clip, RoPE; then keys and values go into the cache. */
static void finish_qkv_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const attention_work_t *work = argument;
    colibri_t *s = work->s;
    const coli_weights_t *w = s->weights;
    const colibri_file_params *p = w->params;
    uint32_t half = p->rotary_dim / 2, dim = w->head_dim_padded;
    for (uint32_t t = begin; t < end; t++) {
        float *q = s->b.qkv + (uint64_t)t * s->qkv_stride, *k = q + w->q_rows, *v = k + w->kv_rows;
        if (work->layer->qkv_bias) s->kernels->add(work->layer->qkv_bias, q, w->q_rows + 2 * w->kv_rows);
        if (work->layer->q_norm) norm_heads(s, q, work->layer->q_norm, p->num_heads);
        if (work->layer->k_norm) norm_heads(s, k, work->layer->k_norm, p->num_kv_heads);
        if (p->clip_qkv > 0) clip(q, w->q_rows + 2 * w->kv_rows, p->clip_qkv);
        const float *cosines = s->b.rope_cos + (uint64_t)t * half, *sines = s->b.rope_sin + (uint64_t)t * half;
        for (uint32_t h = 0; h < p->num_heads + p->num_kv_heads; h++) rotate_head(q + (uint64_t)h * dim, cosines, sines, half);
        coli_kvcache_put(&s->kv, s->kernels, work->index, s->b.tokens[t].slot, s->b.tokens[t].position, k, v);
    }
}

/* Items are (run of tokens, KV head), the last runs first: they see the most keys. The query heads of a group and the tokens of
 * a run read the keys together. */
static void attend_items(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const attention_work_t *work = argument;
    colibri_t *s = work->s;
    const coli_weights_t *w = s->weights;
    uint32_t kv_heads = w->params->num_kv_heads, group = w->params->num_heads / kv_heads, dim = w->head_dim_padded;
    for (uint32_t item = begin; item < end; item++) {
        coli_run_t run = s->b.runs[s->b.n_runs - 1 - item / kv_heads];
        uint32_t head = item % kv_heads, column = head * group * dim;
        coli_token_t token = s->b.tokens[run.first];
        coli_attention_t call = {.head_dim = dim, .n_tokens = run.count, .n_heads = group, .position = token.position,
                                 .window = work->layer->window, .scale = w->params->attention_scale,
                                 .q = s->b.qkv + (uint64_t)run.first * s->qkv_stride + column, .q_stride = s->qkv_stride,
                                 .out_stride = coli_pad_k(w->q_rows), .score_stride = s->score_stride};
        call.out = s->b.attended + run.first * call.out_stride + column;
        call.scores = s->b.scores + (uint64_t)thread * s->run_tokens * group * s->score_stride;
        coli_kvcache_view(&s->kv, work->index, token.slot, head, &call);
        s->kernels->attention[s->options.kv_type](&call);
    }
}

static void requantize_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const attention_work_t *work = argument;
    colibri_t *s = work->s;
    uint32_t width = coli_pad_k(s->weights->q_rows);
    for (uint32_t t = begin; t < end; t++)
        coli_act_row(s->kernels, s->b.attended + (uint64_t)t * width, width, coli_thread_scratch(s, thread), t, &s->b.act_out,
                     NULL);
}

static void residual_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const attention_work_t *work = argument;
    colibri_t *s = work->s;
    uint32_t width = s->hidden_stride, written = coli_pad_rows(s->weights->params->hidden_size);
    for (uint32_t t = begin; t < end; t++) {
        float *projected = s->b.projected + (uint64_t)t * width;
        if (work->layer->out_bias) s->kernels->add(work->layer->out_bias, projected, written); /* the rest stays zero */
        s->kernels->axpy(s->weights->params->residual_scale, projected, s->b.hidden + (uint64_t)t * width, width);
    }
}

void coli_attention(colibri_t *s, uint32_t index, uint32_t n) {
    const coli_layer_t *layer = &s->weights->layers[index];
    attention_work_t work = {s, layer, index};
    uint32_t q_stride = coli_pad_k(s->weights->q_rows);

    coli_pool_run(s->pool, norm_tokens, &work, n, 4);
    coli_act_t x = coli_act_choose(layer->qkv.dtype, &s->b.act_other, s->b.normed, s->hidden_stride);
    coli_project(s, &layer->qkv, &x, n, s->b.qkv, s->qkv_stride);
    coli_pool_run(s->pool, finish_qkv_tokens, &work, n, 4);
    coli_pool_run(s->pool, attend_items, &work, s->b.n_runs * s->weights->params->num_kv_heads, 1);
    if (coli_is_quantised(layer->out.dtype)) coli_pool_run(s->pool, requantize_tokens, &work, n, 4);
    x = coli_act_choose(layer->out.dtype, &s->b.act_out, s->b.attended, q_stride);
    coli_project(s, &layer->out, &x, n, s->b.projected, s->hidden_stride);
    coli_pool_run(s->pool, residual_tokens, &work, n, 4);
}
