/* forward.c: the story of a forward pass:
 *
 *     for each chunk of tokens:
 *         hidden = embedding[token] * embedding_scale
 *         for each layer:
 *             hidden += residual_scale * attention(norm(hidden))
 *             hidden += residual_scale * experts(norm(hidden))
 *         final_hidden = norm(hidden)
 *     logits = head(final_hidden) * logit_scale
 *
 * How a prompt is cut into chunks changes nothing: a chunk's keys are all stored before its queries run, and every other stage
 * treats each token alone. */
#include "forward/forward.h"

#include <stdatomic.h>

#include "base/math.h"
#include "base/os.h"
#include "base/status.h"
#include "forward/attention.h"
#include "forward/experts.h"
#include "forward/project.h"
#include "forward/router.h"

bool coli_take_cancel(colibri_t *s) {
    return atomic_load_explicit(&s->cancel, memory_order_relaxed) &&
           atomic_exchange_explicit(&s->cancel, 0, memory_order_relaxed);
}

static bool not_finite(float x) { return x - x != 0; }

/* ---- embedding ---- */

static void embed_row(const coli_weights_t *w, int32_t id, float *row, uint32_t width) {
    const uint8_t *source = w->embedding + (uint64_t)id * w->embedding_stride;
    uint32_t n = w->params->hidden_size;
    float scale = w->params->embedding_scale;
    for (uint32_t i = 0; i < n; i++) {
        float x;
        if (w->embedding_dtype == COLIBRI_FILE_F32) x = ((const float *)source)[i];
        else if (w->embedding_dtype == COLIBRI_FILE_F16) x = coli_f16_to_f32(((const uint16_t *)source)[i]);
        else x = coli_bf16_to_f32(((const uint16_t *)source)[i]);
        row[i] = x * scale;
    }
    memset(row + n, 0, (width - n) * sizeof(float));
}

static void embed_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    colibri_t *s = argument;
    for (uint32_t t = begin; t < end; t++)
        embed_row(s->weights, s->b.tokens[t].id, s->b.hidden + (uint64_t)t * s->hidden_stride, s->hidden_stride);
}

/* ---- the final norm: where every number of the residual stream is checked ---- */

typedef struct final_work {
    colibri_t *s;
    uint32_t first_row; /* outputs ALL and HIDDEN: row of the chunk's first token */
} final_work_t;

static bool is_last_of_slot(const colibri_t *s, coli_token_t token) {
    return token.position + 1 == s->slots[token.slot].length + s->slots[token.slot].pending;
}

/* A NaN or infinity anywhere in a token's layers stays in its residual stream, so a look at the norm's input finds it; a look
 * at its output finds one of the norm's own. Both are looks at a sum of squares. */
static void final_norm_tokens(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const final_work_t *work = argument;
    colibri_t *s = work->s;
    const colibri_file_params *p = s->weights->params;
    for (uint32_t t = begin; t < end; t++) {
        coli_token_t token = s->b.tokens[t];
        bool every = s->options.outputs != COLIBRI_OUTPUT_LAST;
        float *row = coli_thread_scratch(s, thread);
        if (every) row = s->b.final_hidden + (uint64_t)(work->first_row + t) * s->hidden_stride;
        else if (is_last_of_slot(s, token)) row = s->b.final_hidden + (uint64_t)token.slot * s->hidden_stride;
        float squares = s->kernels->rms_norm(s->b.hidden + (uint64_t)t * s->hidden_stride, s->weights->final_norm, row,
                                             s->hidden_stride, p->hidden_size, p->rms_norm_eps);
        float normed_squares = s->kernels->rms_norm(row, NULL, NULL, s->hidden_stride, p->hidden_size, p->rms_norm_eps);
        if (not_finite(squares) || not_finite(normed_squares))
            __atomic_store_n(&s->b.slot_failed[token.slot], 1, __ATOMIC_RELAXED);
    }
}

/* ---- the head ---- */

typedef struct head_work {
    colibri_t *s;
    const uint32_t *rows;  /* [n] rows of final_hidden, NULL: first + i */
    const uint32_t *slots; /* [n] rows of out, NULL: i */
    uint32_t first, n;
    float *out;            /* rows out_stride floats apart */
    uint64_t out_stride;
    uint32_t begin;        /* first row of this group */
    bool may_cancel;
} head_work_t;

static void head_quantize(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const head_work_t *work = argument;
    colibri_t *s = work->s;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = work->rows ? work->rows[work->begin + i] : work->first + work->begin + i;
        coli_act_row(s->kernels, s->b.final_hidden + (uint64_t)row * s->hidden_stride, s->hidden_stride,
                     coli_thread_scratch(s, thread), i, &s->b.act_other, NULL);
    }
}

static void head_tile(const head_work_t *work, uint32_t block, uint32_t blocks, uint32_t i, uint32_t count, uint32_t thread) {
    colibri_t *s = work->s;
    float *scratch = coli_thread_scratch(s, thread);
    const coli_matrix_t *m = &s->weights->head;
    uint32_t width = blocks * COLIBRI_TILE_ROWS, column = block * COLIBRI_TILE_ROWS;
    coli_act_t x = coli_act_choose(m->dtype, &s->b.act_other, s->b.final_hidden, s->hidden_stride);
    bool quantised = coli_is_quantised(m->dtype);
    coli_matmul_t call = {.w = m->tiles + block * m->block_bytes,
                          .w_scale = m->scale ? m->scale + column : NULL,
                          .block_bytes = m->block_bytes,
                          .n_blocks = blocks,
                          .k = coli_pad_k(m->k),
                          .x = &x,
                          .n_tokens = count,
                          .y = scratch,
                          .y_stride = width,
                          .scratch = coli_kernel_scratch(s, thread),
                          .rows = quantised || !work->rows ? NULL : work->rows + work->begin + i,
                          .first_row = quantised ? i : work->first + work->begin + i};
    s->kernels->matmul[m->dtype](&call);
    uint32_t keep = COLI_MIN(width, m->rows - column);
    for (uint32_t t = 0; t < count; t++) {
        uint32_t row = work->slots ? work->slots[work->begin + i + t] : work->begin + i + t;
        float *out = work->out + row * work->out_stride + column;
        for (uint32_t c = 0; c < keep; c++) out[c] = scratch[(uint64_t)t * width + c] * s->weights->params->logit_scale;
    }
}

static void head_items(void *argument, uint32_t begin, uint32_t end, uint32_t thread) {
    const head_work_t *work = argument;
    uint32_t all = coli_pad_rows(work->s->weights->head.rows) / COLIBRI_TILE_ROWS;
    uint32_t n = COLI_MIN(work->n - work->begin, work->s->options.chunk);
    for (uint32_t item = begin; item < end; item++) {
        uint32_t block = item * COLI_HEAD_TILE;
        for (uint32_t i = 0; i < n; i += COLI_TOKEN_TILE)
            head_tile(work, block, COLI_MIN(COLI_HEAD_TILE, all - block), i, COLI_MIN(COLI_TOKEN_TILE, n - i), thread);
    }
}

/* All rows of the work, as many at a time as act_other holds. Only work that leaves the slots alone may be cancelled on the
 * way. */
static bool run_head(head_work_t *work) {
    colibri_t *s = work->s;
    const coli_matrix_t *m = &s->weights->head;
    uint32_t items = (coli_pad_rows(m->rows) / COLIBRI_TILE_ROWS + COLI_HEAD_TILE - 1) / COLI_HEAD_TILE;
    uint64_t since = coli_os_now_ns();
    for (work->begin = 0; work->begin < work->n; work->begin += s->options.chunk) {
        if (work->may_cancel && coli_take_cancel(s)) return false;
        uint32_t n = COLI_MIN(work->n - work->begin, s->options.chunk);
        if (coli_is_quantised(m->dtype)) coli_pool_run(s->pool, head_quantize, work, n, 4);
        coli_pool_run(s->pool, head_items, work, items, 1);
        s->counters.totals.weight_bytes += coli_matrix_bytes(m->dtype, m->rows, m->k);
    }
    s->counters.totals.head_ns += coli_os_now_ns() - since;
    return true;
}

bool coli_head_rows(colibri_t *s, uint32_t first, uint32_t n, float *out) {
    head_work_t work = {
        .s = s, .first = first, .n = n, .out = out, .out_stride = s->weights->params->vocab_size, .may_cancel = true};
    return run_head(&work);
}

/* Logits of each active slot's last token, all in one pass over the head. With every row kept, a slot's last row is found by
 * counting. */
static bool head_last(colibri_t *s) {
    uint32_t n = 0, tokens = 0;
    if (coli_take_cancel(s)) return false;
    for (uint32_t slot = 0; slot < s->input_batch; slot++) {
        if (!s->slots[slot].pending) continue;
        tokens += s->slots[slot].pending;
        s->b.active_slots[n] = slot;
        s->b.last_rows[n++] = s->options.outputs == COLIBRI_OUTPUT_LAST ? slot : tokens - 1;
    }
    head_work_t work = {.s = s,
                        .rows = s->b.last_rows,
                        .slots = s->b.active_slots,
                        .n = n,
                        .out = s->b.logits,
                        .out_stride = s->vocab_stride};
    return run_head(&work);
}

static void check_logits(colibri_t *s) {
    for (uint32_t slot = 0; slot < s->input_batch; slot++) {
        if (!s->slots[slot].pending) continue;
        const float *logits = s->b.logits + (uint64_t)slot * s->vocab_stride;
        bool bad = false;
        for (uint32_t i = 0; i < s->weights->params->vocab_size; i++) bad |= not_finite(logits[i]);
        if (bad) s->b.slot_failed[slot] = 1;
    }
}

/* ---- chunks and layers ---- */

static colibri_status_t cancelled(void) {
    return coli_fail(COLIBRI_ERR_CANCELLED, "colibri_infer was cancelled; the slots are as before");
}

static colibri_status_t run_layers(colibri_t *s, uint32_t n) {
    coli_pool_run(s->pool, embed_tokens, s, n, 16);
    coli_rope_tables(s, n);
    coli_look_ahead(s, 0, n);
    for (uint32_t layer = 0; layer < s->weights->params->num_layers; layer++) {
        if (coli_take_cancel(s)) return cancelled();
        const coli_layer_t *l = &s->weights->layers[layer];
        uint64_t start = coli_os_now_ns(), router_ns = s->counters.totals.router_ns;
        coli_attention(s, layer, n);
        uint64_t middle = coli_os_now_ns();
        colibri_status_t status = coli_mlp(s, layer, n);
        if (status) return status;
        s->counters.totals.attention_ns += middle - start;
        s->counters.totals.experts_ns += coli_os_now_ns() - middle - (s->counters.totals.router_ns - router_ns);
        s->counters.totals.weight_bytes += coli_matrix_bytes(l->qkv.dtype, l->qkv.rows, l->qkv.k) +
                                           coli_matrix_bytes(l->out.dtype, l->out.rows, l->out.k);
    }
    return COLIBRI_OK;
}

/* Put the next tokens into b.tokens, at most a chunk, continuing at (*slot, *done). Returns how many. */
static uint32_t next_chunk(colibri_t *s, uint32_t *slot, uint32_t *done) {
    uint32_t n = 0;
    while (n < s->options.chunk && *slot < s->input_batch) {
        const coli_slot_t *state = &s->slots[*slot];
        if (*done == state->pending) {
            (*slot)++;
            *done = 0;
            continue;
        }
        uint32_t position = state->length + (*done)++;
        s->b.tokens[n++] = (coli_token_t){s->b.history[(uint64_t)*slot * s->options.seq + position], *slot, position};
    }
    return n;
}

/* The chunk's tokens as runs of one slot, at most run_tokens long. */
static void find_runs(colibri_t *s, uint32_t n) {
    s->b.n_runs = 0;
    for (uint32_t t = 0; t < n; t++) {
        coli_run_t *run = s->b.n_runs ? &s->b.runs[s->b.n_runs - 1] : NULL;
        if (run && run->count < s->run_tokens && s->b.tokens[run->first].slot == s->b.tokens[t].slot) run->count++;
        else s->b.runs[s->b.n_runs++] = (coli_run_t){t, 1};
    }
}

colibri_status_t coli_forward(colibri_t *s) {
    uint32_t slot = 0, done = 0, n;
    final_work_t work = {s, 0};
    memset(s->b.slot_failed, 0, s->options.batch);
    while ((n = next_chunk(s, &slot, &done)) > 0) {
        find_runs(s, n);
        colibri_status_t status = run_layers(s, n);
        if (status) return status;
        coli_pool_run(s->pool, final_norm_tokens, &work, n, 4);
        work.first_row += n;
    }
    if (s->options.outputs == COLIBRI_OUTPUT_HIDDEN) return coli_residency_intact(&s->residency);
    if (!head_last(s)) return cancelled();
    check_logits(s);
    return coli_residency_intact(&s->residency);
}
