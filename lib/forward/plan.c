/* plan.c: sizes of every buffer of a session, taken one after another from one arena. */
#include "forward/plan.h"

#include "forward/kvcache.h"

/* Rows of quantised activations of width k (padded), if any matrix wants them. f32 rows need no storage: act.f32 then points
 * at the source. */
static void plan_act(coli_arena_t *arena, coli_act_t *act, bool wanted, uint64_t rows, uint32_t k, uint32_t bits) {
    act->stride = k;
    act->bits = bits;
    act->f32 = NULL;
    if (!wanted) return;
    act->hi = coli_arena_take(arena, rows, k);
    act->lo = bits == 16 ? coli_arena_take(arena, rows, k) : NULL;
    act->scale = coli_arena_take(arena, rows, sizeof(float));
    act->sum_hi = coli_arena_take(arena, rows, sizeof(int32_t));
    act->sum_lo = coli_arena_take(arena, rows, sizeof(int32_t));
}

/* MLP rows: the routed experts see N * K pairs of their own width, shared and dense MLPs N rows of theirs. */
static void plan_inner(coli_arena_t *arena, const coli_weights_t *w, const coli_options_t *o, colibri_t *s) {
    const colibri_file_params *p = w->params;
    uint64_t pairs = (uint64_t)o->chunk * o->top_k;
    uint64_t routed = pairs * coli_pad_k(p->moe_intermediate);
    uint64_t single = (uint64_t)o->chunk * coli_pad_k(COLI_MAX(p->shared_intermediate, p->dense_intermediate));
    uint64_t rows = COLI_MAX(pairs, o->chunk);
    s->inner_floats = COLI_MAX(routed, single);
    s->b.inner = coli_arena_take(arena, s->inner_floats, sizeof(float));
    coli_act_t *act = &s->b.act_inner;
    act->f32 = NULL;
    s->b.expert_out = coli_arena_take(arena, pairs * s->hidden_stride, sizeof(float));
    if (!w->quantised_experts && !w->quantised_others) return;
    act->hi = coli_arena_take(arena, s->inner_floats, 1);
    act->lo = coli_arena_take(arena, COLI_MAX(o->expert_bits == 16 ? routed : 0, o->other_bits == 16 ? single : 0), 1);
    act->scale = coli_arena_take(arena, rows, sizeof(float));
    act->sum_hi = coli_arena_take(arena, rows, sizeof(int32_t));
    act->sum_lo = coli_arena_take(arena, rows, sizeof(int32_t));
}

static void plan_moe(coli_arena_t *arena, const colibri_file_params *p, const coli_options_t *o, colibri_t *s) {
    uint64_t pairs = (uint64_t)o->chunk * o->top_k, experts = p->num_experts;
    coli_buffers_t *b = &s->b;
    b->router_logits = coli_arena_take(arena, (uint64_t)o->chunk * coli_pad_rows(p->num_experts), sizeof(float));
    b->route_ids = coli_arena_take(arena, pairs, sizeof(int32_t));
    b->route_weights = coli_arena_take(arena, pairs, sizeof(float));
    b->shared_gate = coli_arena_take(arena, (uint64_t)o->chunk * COLIBRI_TILE_ROWS, sizeof(float));
    b->moe.expert_begin = coli_arena_take(arena, experts + 2, sizeof(uint32_t));
    b->moe.pair_token = coli_arena_take(arena, pairs, sizeof(uint32_t));
    b->moe.token_pair = coli_arena_take(arena, pairs, sizeof(uint32_t));
    b->moe.pair_weight = coli_arena_take(arena, pairs, sizeof(float));
    b->moe.active = coli_arena_take(arena, experts, sizeof(uint32_t));
    b->moe.parts_done = coli_arena_take(arena, experts, sizeof(uint32_t));
    s->counters.experts = coli_arena_take(arena, (uint64_t)p->num_layers * experts, sizeof(colibri_expert_stats_t));
    s->counters.expert_compute_ns = coli_arena_take(arena, experts, sizeof(uint64_t));
}

static void plan_attention(coli_arena_t *arena, const coli_weights_t *w, const coli_options_t *o, colibri_t *s) {
    const colibri_file_params *p = w->params;
    uint32_t q_stride = coli_pad_k(w->q_rows), group = p->num_heads / p->num_kv_heads;
    coli_buffers_t *b = &s->b;
    s->qkv_stride = coli_pad_rows(w->q_rows + 2 * w->kv_rows);
    s->score_stride = (uint32_t)coli_pad(o->seq, 16) + 16;
    s->run_tokens = COLI_MAX(1, COLI_QUERY_TILE / group);
    uint64_t queries = (uint64_t)s->run_tokens * group;
    b->qkv = coli_arena_take(arena, (uint64_t)o->chunk * s->qkv_stride, sizeof(float));
    b->attended = coli_arena_take(arena, (uint64_t)o->chunk * q_stride, sizeof(float));
    plan_act(arena, &b->act_out, w->quantised_others, o->chunk, q_stride, o->other_bits);
    b->rope_cos = coli_arena_take(arena, (uint64_t)o->chunk * (p->rotary_dim / 2), sizeof(float));
    b->rope_sin = coli_arena_take(arena, (uint64_t)o->chunk * (p->rotary_dim / 2), sizeof(float));
    b->scores = coli_arena_take(arena, o->threads * queries * s->score_stride, sizeof(float));
    coli_kvcache_plan(arena, w, o, &s->kv);
}

/* Per thread: one widest row to rotate, or a tile of gate and up products, or a tile of logits. */
static uint64_t scratch_floats(const coli_weights_t *w) {
    const colibri_file_params *p = w->params;
    uint64_t row = COLI_MAX(coli_pad_k(p->hidden_size), coli_pad_k(w->q_rows));
    row = COLI_MAX(row, coli_pad_k(p->moe_intermediate));
    row = COLI_MAX(row, coli_pad_k(COLI_MAX(p->shared_intermediate, p->dense_intermediate)));
    uint64_t tile = (uint64_t)COLI_TOKEN_TILE * 2 * COLIBRI_TILE_ROWS * COLI_PAIR_TILE;
    uint64_t head = (uint64_t)COLI_TOKEN_TILE * COLIBRI_TILE_ROWS * COLI_HEAD_TILE;
    return COLI_MAX(row, COLI_MAX(tile, head));
}

/* Look-ahead reads what the next layer's router sees; only where experts are fetched at all. */
static void plan_ahead(coli_arena_t *arena, const coli_options_t *o, colibri_t *s) {
    uint32_t n = COLI_MIN(COLI_AHEAD_TOKENS, o->chunk);
    s->b.ahead_normed = coli_arena_take(arena, (uint64_t)n * s->hidden_stride, sizeof(float));
    s->b.ahead_ids = coli_arena_take(arena, (uint64_t)n * o->top_k, sizeof(int32_t));
    s->b.ahead_weights = coli_arena_take(arena, (uint64_t)n * o->top_k, sizeof(float));
}

void coli_plan(coli_arena_t *arena, const colibri_model_t *model, const coli_options_t *o, colibri_t *s) {
    const coli_weights_t *w = &model->weights;
    const colibri_file_params *p = w->params;
    uint64_t n = o->chunk, history = (uint64_t)o->batch * o->seq;
    coli_buffers_t *b = &s->b;
    s->hidden_stride = coli_pad_k(p->hidden_size);
    s->vocab_stride = coli_pad_rows(p->vocab_size);
    s->thread_stride = scratch_floats(w);
    s->slots = coli_arena_take(arena, o->batch, sizeof(coli_slot_t));
    s->pool_memory = coli_arena_take(arena, coli_pool_size(o->threads), 1);
    b->hidden = coli_arena_take(arena, n * s->hidden_stride, sizeof(float));
    b->normed = coli_arena_take(arena, n * s->hidden_stride, sizeof(float));
    b->projected = coli_arena_take(arena, n * s->hidden_stride, sizeof(float));
    b->tokens = coli_arena_take(arena, n, sizeof(coli_token_t));
    b->runs = coli_arena_take(arena, n, sizeof(coli_run_t));
    b->kernel_scratch = coli_arena_take(arena, o->threads, COLI_KERNEL_SCRATCH);
    plan_act(arena, &b->act_other, w->quantised_others, n, s->hidden_stride, o->other_bits);
    plan_act(arena, &b->act_expert, w->quantised_experts, n, s->hidden_stride, o->expert_bits);
    plan_attention(arena, w, o, s);
    plan_moe(arena, p, o, s);
    plan_inner(arena, w, o, s);
    b->thread_scratch = coli_arena_take(arena, o->threads * s->thread_stride, sizeof(float));
    b->history = coli_arena_take(arena, history, sizeof(int32_t));
    b->final_hidden =
        coli_arena_take(arena, (o->outputs == COLIBRI_OUTPUT_LAST ? o->batch : history) * s->hidden_stride, sizeof(float));
    b->logits = coli_arena_take(arena, (uint64_t)o->batch * s->vocab_stride, sizeof(float));
    b->sample_ids = coli_arena_take(arena, p->vocab_size, sizeof(uint32_t));
    b->sample_values = coli_arena_take(arena, p->vocab_size, sizeof(float));
    b->active_slots = coli_arena_take(arena, o->batch, sizeof(uint32_t));
    b->last_rows = coli_arena_take(arena, o->batch, sizeof(uint32_t));
    b->slot_failed = coli_arena_take(arena, o->batch, 1);
    plan_ahead(arena, o, s);
    coli_residency_plan(arena, model, &o->residency, &s->residency);
}
