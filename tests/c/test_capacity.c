/* test_capacity.c: load balancing by expert capacity: how many pairs an expert takes, the core against a slow reference that
 * follows colibri_load_balancing_t's words, what must hold in any case, and the weights against the router's own. Then
 * sessions: the same bits for any threads and instruction set, counts that add up, one token alone unchanged. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "forward/capacity.h"
#include "forward/router.h"
#include "make_file.h"

#define MAX_TOKENS 48
#define MAX_EXPERTS 80
#define ROW 80 /* floats of a row, at most */

static uint64_t random_state = 1;

static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static float random_unit(void) { return (float)random_below(1 << 24) / (1 << 23) - 1.0f; }

static bool same_bits(const void *a, const void *b, size_t bytes) { return memcmp(a, b, bytes) == 0; }

/* ---- how many pairs an expert takes ---- */

static void test_limit(void) {
    static const struct { float factor; uint32_t n, top_k, experts, limit; } known[] = {
        {1.0f, 8, 2, 4, 4},         {1.0f, 9, 2, 4, 5},          {1.25f, 8, 2, 8, 3},          {0.5f, 8, 2, 4, 2},
        {1e-6f, 8, 2, 4, 1},        {0x1p-149f, 512, 8, 64, 1},  {0x1p-126f, 512, 8, 64, 1},   {1024.0f, 8, 2, 4, 8},
        {1.0f, 1, 1, 1, 1},         {1.0f, 1, 8, 64, 1},         {1024.0f, 1, 8, 64, 1},       {2.0f, 100, 3, 3, 100},
        {1.1f, 10, 1, 11, 2},       {0.9f, 10, 1, 9, 1},         {0x1.fffffep-1f, 4, 1, 2, 2}, {0x1.000002p+0f, 4, 1, 2, 3},
        {1.0f, 65536, 1, 65535, 2}, {1.0f, 65536, 65535, 65535, 65536},
        /* 65535 * 65534 * (1 - 2^-24) = 4294705280.015: no double holds product and quotient exactly, so near an integer */
        {0x1.fffffep-1f, 65535, 65534, 65535, 65534}, {0x1.fffffep-2f, 65536, 65535, 65535, 32768},
        {0x1.000002p-1f, 65536, 65535, 65535, 32769}, {0x1.000002p-20f, 65536, 16384, 1024, 2}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK_EQ(coli_expert_capacity(known[i].factor, known[i].n, known[i].top_k, known[i].experts), known[i].limit);
    for (uint32_t i = 0; i < 20000; i++) { /* products below 2^53: exact in double */
        uint32_t experts = 1 + random_below(300), top_k = 1 + random_below(experts), n = 1 + random_below(600);
        float factor = random_below(2) ? (1 + random_below(64)) / 16.0f : 1e-3f + 2 * fabsf(random_unit());
        double pairs = (double)factor * n * top_k;
        uint32_t limit = 1;
        while (limit < n && (double)limit * experts < pairs) limit++;
        CHECK_EQ(coli_expert_capacity(factor, n, top_k, experts), limit);
    }
}

/* ---- a case ---- */

typedef struct routing {
    uint32_t n, top_k, experts;
    colibri_file_params params;
    _Alignas(64) float logits[MAX_TOKENS * ROW];
    _Alignas(64) float exps[MAX_TOKENS * ROW];
    int32_t ids[MAX_TOKENS * MAX_EXPERTS];
    float weights[MAX_TOKENS * MAX_EXPERTS];
    bool bad[MAX_TOKENS]; /* a logit is not finite */
} routing_t;

static uint32_t stride_of(const routing_t *r) { return coli_pad_rows(r->experts); }

/* Logits of many kinds: ties, some experts that all tokens want, so far apart that softmax is 0, not finite. */
static void fill(routing_t *r, uint32_t n, uint32_t top_k, uint32_t experts, bool damaged) {
    uint32_t kind = random_below(5), stride = coli_pad_rows(experts);
    r->n = n;
    r->top_k = top_k;
    r->experts = experts;
    r->params = (colibri_file_params){.num_experts = experts, .norm_topk = random_below(2), .routed_scale = 1};
    if (random_below(2)) r->params.routed_scale = 2.5f;
    memset(r->exps, 0, sizeof r->exps);
    for (uint32_t t = 0; t < n; t++) {
        float *row = r->logits + t * stride;
        memset(row, 0, stride * sizeof *row);
        for (uint32_t e = 0; e < experts; e++) {
            row[e] = random_unit();
            if (kind == 1) row[e] = (float)random_below(3);
            if (kind == 2) row[e] += 4.0f * (float)e / (float)experts;
            if (kind == 3) row[e] *= 150;
            if (kind == 4) row[e] = 1;
        }
        r->bad[t] = damaged && random_below(4) == 0;
        if (r->bad[t]) row[random_below(experts)] = random_below(2) ? NAN : INFINITY;
        memcpy(r->exps + t * stride, row, stride * sizeof *row);
        coli_route(coli_kernels_select(COLIBRI_ISA_REF), &r->params, top_k, r->exps + t * stride, r->ids + t * top_k,
                   r->weights + t * top_k);
    }
}

static coli_capacity_job_t job_of(routing_t *r, uint32_t strategy, float factor, uint32_t *counts) {
    return (coli_capacity_job_t){.strategy = strategy, .factor = factor, .n = r->n, .top_k = r->top_k,
                                 .num_experts = r->experts, .exps = r->exps, .norm_topk = r->params.norm_topk != 0,
                                 .routed_scale = r->params.routed_scale, .ids = r->ids, .weights = r->weights,
                                 .counts = counts};
}

/* ---- the reference: no counts, no marks; everything is asked anew ---- */

static uint32_t load_before(const routing_t *r, uint32_t token, int32_t expert) {
    uint32_t load = 0;
    for (uint32_t t = 0; t < token; t++)
        for (uint32_t i = 0; i < r->top_k && !r->bad[t]; i++) load += r->ids[t * r->top_k + i] == expert;
    return load;
}

/* Whether a moved pair would rather go to a than to b. */
static bool likelier(const float *exps, int32_t a, int32_t b) {
    return b < 0 || exps[a] > exps[b] || (exps[a] == exps[b] && a < b);
}

static uint32_t expected_soft(routing_t *r, uint32_t t, uint32_t limit, const int32_t *was, int32_t *now) {
    const float *exps = r->exps + t * stride_of(r);
    uint32_t stay = 0, used;
    for (uint32_t i = 0; i < r->top_k; i++)
        if (load_before(r, t, was[i]) < limit) now[stay++] = was[i];
    for (used = stay; used < r->top_k; used++) {
        int32_t best = -1;
        for (int32_t e = (int32_t)r->experts - 1; e >= 0; e--) {
            bool own = false;
            for (uint32_t i = 0; i < r->top_k; i++) own |= was[i] == e; /* full ones of them are no choice either */
            for (uint32_t i = 0; i < used; i++) own |= now[i] == e;
            if (!own && exps[e] != 0 && load_before(r, t, e) < limit && likelier(exps, e, best)) best = e;
        }
        if (best < 0) break;
        now[used] = best;
    }
    for (uint32_t i = used; i < r->top_k; i++) now[i] = (int32_t)r->experts;
    return stay;
}

static void expected_weights(const routing_t *r, uint32_t t, const int32_t *ids, float *weights) {
    const float *exps = r->exps + t * stride_of(r);
    float sum = 0;
    for (uint32_t i = 0; r->params.norm_topk && i < r->top_k; i++)
        if (ids[i] < (int32_t)r->experts) sum += exps[ids[i]];
    for (uint32_t e = 0; !r->params.norm_topk && e < r->experts; e++) sum += exps[e];
    for (uint32_t i = 0; i < r->top_k; i++) {
        weights[i] = ids[i] == (int32_t)r->experts ? 0 : exps[ids[i]] / sum * r->params.routed_scale;
        if (sum == 0) weights[i] = 0;
    }
}

static void expected(routing_t *r, uint32_t strategy, uint32_t limit, uint64_t *moved, uint64_t *dropped) {
    uint32_t k = r->top_k;
    for (uint32_t t = 0; t < r->n; t++) {
        int32_t *ids = r->ids + t * k, was[MAX_EXPERTS];
        if (r->bad[t]) continue;
        memcpy(was, ids, k * sizeof *ids);
        if (strategy == COLIBRI_BALANCE_SOFT_CAPACITY) {
            uint32_t stay = expected_soft(r, t, limit, was, ids);
            for (uint32_t i = stay; i < k; i++) (*(ids[i] == (int32_t)r->experts ? dropped : moved))++;
            if (stay < k) expected_weights(r, t, ids, r->weights + t * k);
            continue;
        }
        for (uint32_t i = 0; i < k; i++) {
            if (load_before(r, t, was[i]) < limit) continue;
            ids[i] = (int32_t)r->experts;
            r->weights[t * k + i] = 0;
            ++*dropped;
        }
    }
}

/* ---- what must hold in any case ---- */

static void check_token(const routing_t *was, const routing_t *now, uint32_t strategy, uint32_t t, uint32_t *load) {
    uint32_t k = now->top_k, used = 0;
    const int32_t *ids = now->ids + t * k;
    const float *weights = now->weights + t * k;
    double sum = 0, exps = 0;
    for (uint32_t i = 0; i < k; i++) {
        CHECK(ids[i] >= 0 && ids[i] <= (int32_t)now->experts);
        for (uint32_t j = 0; j < i; j++) CHECK(ids[i] != ids[j] || ids[i] == (int32_t)now->experts);
        if (ids[i] == (int32_t)now->experts) {
            CHECK(weights[i] == 0);
            continue;
        }
        used++;
        load[ids[i]]++;
        sum += weights[i];
        exps += now->exps[t * stride_of(now) + (uint32_t)ids[i]];
        if (strategy == COLIBRI_BALANCE_HARD_CAPACITY) CHECK(same_bits(weights + i, was->weights + t * k + i, sizeof *weights));
    }
    if (strategy == COLIBRI_BALANCE_SOFT_CAPACITY && now->params.norm_topk && used)
        CHECK(fabs(sum - (exps > 0 ? now->params.routed_scale : 0)) < 1e-5);
}

static void check_case(const routing_t *given, uint32_t strategy, float factor) {
    static routing_t ours, theirs;
    uint32_t counts[MAX_EXPERTS + 1], load[MAX_EXPERTS] = {0};
    uint32_t limit = coli_expert_capacity(factor, given->n, given->top_k, given->experts), pairs = given->n * given->top_k;
    uint64_t moved = 0, dropped = 0;
    ours = *given;
    theirs = *given;
    memset(counts, 0xab, sizeof counts);
    coli_capacity_job_t job = job_of(&ours, strategy, factor, counts);
    coli_capacity_apply(&job);
    expected(&theirs, strategy, limit, &moved, &dropped);
    CHECK_EQ(job.moved, moved);
    CHECK_EQ(job.dropped, dropped);
    CHECK(same_bits(ours.ids, theirs.ids, pairs * sizeof *ours.ids));
    CHECK(same_bits(ours.weights, theirs.weights, pairs * sizeof *ours.weights));
    CHECK(same_bits(ours.exps, given->exps, sizeof ours.exps));
    CHECK_EQ(counts[given->experts], 0xabababab);
    for (uint32_t t = 0; t < given->n; t++) {
        if (!given->bad[t]) {
            check_token(given, &ours, strategy, t, load);
            continue;
        }
        CHECK(same_bits(ours.ids + t * ours.top_k, given->ids + t * ours.top_k, ours.top_k * sizeof *ours.ids));
        for (uint32_t i = 0; i < ours.top_k; i++) CHECK(isnan(ours.weights[t * ours.top_k + i]));
    }
    for (uint32_t e = 0; e < given->experts; e++) {
        CHECK(load[e] <= limit);
        if (limit < given->n) CHECK_EQ(counts[e], load[e]);
    }
    if (given->n == 1 || strategy == COLIBRI_BALANCE_NONE) CHECK_EQ(job.moved + job.dropped, 0);
}

static void test_random(void) {
    static const float factors[] = {1, 0.5f, 1.25f, 1e-3f, 0.1f, 2, 8};
    static routing_t r;
    for (uint32_t i = 0; i < 1500; i++) {
        uint32_t experts = 1 + random_below(i % 8 ? 20 : MAX_EXPERTS), n = 1 + random_below(i % 5 ? MAX_TOKENS : 3);
        uint32_t top_k = i % 3 ? 1 + random_below(experts < 9 ? experts : 9) : experts;
        if (i % 3 == 0 && experts > 20) top_k = experts / 2;
        fill(&r, n, top_k, experts, i % 4 == 0);
        float factor = i % 2 ? factors[random_below(7)] : 0.01f + fabsf(random_unit()) * 2;
        check_case(&r, COLIBRI_BALANCE_SOFT_CAPACITY, factor);
        check_case(&r, COLIBRI_BALANCE_HARD_CAPACITY, factor);
    }
}

/* A token alone is never changed, however small the factor. */
static void test_alone(void) {
    static routing_t r, was;
    uint32_t counts[MAX_EXPERTS];
    for (uint32_t i = 0; i < 200; i++) {
        uint32_t experts = 1 + random_below(20);
        fill(&r, 1, 1 + random_below(experts), experts, i % 4 == 0);
        was = r;
        for (uint32_t strategy = 1; strategy <= 2; strategy++) {
            coli_capacity_job_t job = job_of(&r, strategy, 1e-6f, counts);
            coli_capacity_apply(&job);
            CHECK_EQ(job.moved + job.dropped, 0);
            CHECK(same_bits(&r, &was, sizeof r));
        }
    }
}

/* ---- by hand ---- */

/* Four tokens that all want expert 0 most, then 1, 2, 3; two experts each, capacity 2. */
static void test_by_hand(void) {
    static routing_t r;
    uint32_t counts[4];
    static const int32_t soft[] = {0, 1, 0, 1, 2, 3, 2, 3}, hard[] = {0, 1, 0, 1, 4, 4, 4, 4};
    for (uint32_t strategy = 1; strategy <= 2; strategy++) {
        fill(&r, 4, 2, 4, false);
        r.params.norm_topk = 1;
        r.params.routed_scale = 1;
        for (uint32_t t = 0; t < 4; t++) {
            for (uint32_t e = 0; e < 4; e++) r.exps[t * 16 + e] = 1.0f / (float)(1u << e);
            for (uint32_t i = 0; i < 2; i++) r.ids[t * 2 + i] = (int32_t)i;
            r.weights[t * 2] = 2 / 3.0f;
            r.weights[t * 2 + 1] = 1 / 3.0f;
        }
        coli_capacity_job_t job = job_of(&r, strategy, 1, counts);
        coli_capacity_apply(&job);
        CHECK(same_bits(r.ids, strategy == COLIBRI_BALANCE_SOFT_CAPACITY ? soft : hard, sizeof soft));
        CHECK_EQ(job.moved, strategy == COLIBRI_BALANCE_SOFT_CAPACITY ? 4 : 0);
        CHECK_EQ(job.dropped, strategy == COLIBRI_BALANCE_SOFT_CAPACITY ? 0 : 4);
        CHECK(r.weights[0] == 2 / 3.0f && r.weights[1] == 1 / 3.0f);
        CHECK(r.weights[6] == (strategy == COLIBRI_BALANCE_SOFT_CAPACITY ? 0.25f / 0.375f : 0));
    }
}

/* The router itself, asked with the logits of all experts but the token's far away (norm_topk), or for all experts, gives the
 * weights that a moved pair has, bit for bit: nothing here repeats the arithmetic. */
static void test_weights_are_the_routers(void) {
    static routing_t r, was;
    const coli_kernels_t *kernels = coli_kernels_select(COLIBRI_ISA_REF);
    uint32_t counts[MAX_EXPERTS], compared = 0;
    for (uint32_t i = 0; i < 300; i++) {
        uint32_t experts = 4 + random_below(30), k = 2 + random_below(3);
        fill(&r, 20, k, experts, false);
        was = r;
        coli_capacity_job_t job = job_of(&r, COLIBRI_BALANCE_SOFT_CAPACITY, 1, counts);
        coli_capacity_apply(&job);
        for (uint32_t t = 0; t < r.n; t++) {
            const int32_t *ids = r.ids + t * k;
            _Alignas(64) float logits[ROW];
            float weights[MAX_EXPERTS];
            int32_t chosen[MAX_EXPERTS];
            bool whole = ids[0] == was.ids[t * k] && ids[k - 1] < (int32_t)experts; /* the same largest logit, none dropped */
            if (!whole || same_bits(ids, was.ids + t * k, k * sizeof *ids)) continue;
            memcpy(logits, r.logits + t * stride_of(&r), stride_of(&r) * sizeof *logits);
            for (uint32_t e = 0; e < experts && r.params.norm_topk; e++) {
                bool own = false;
                for (uint32_t j = 0; j < k; j++) own |= ids[j] == (int32_t)e;
                if (!own) logits[e] = -1e30f;
            }
            CHECK(coli_route(kernels, &r.params, r.params.norm_topk ? k : experts, logits, chosen, weights));
            for (uint32_t j = 0; j < k; j++)
                for (uint32_t c = 0; c < (r.params.norm_topk ? k : experts); c++)
                    if (chosen[c] == ids[j]) compared += same_bits(weights + c, r.weights + t * k + j, 4) ? 1 : (CHECK(0), 0);
        }
    }
    CHECK(compared > 1000);
}

/* ---- sessions ---- */

#define TOKENS 40
static char path[64]; /* of this process: several may run in one folder */

static void write_spec(const make_spec_t *spec) {
    size_t size;
    uint8_t *file = make_model_file(spec, &size);
    CHECK(file && write_model_file(path, file, size));
    free(file);
}

/* Logits of TOKENS tokens, `piece` a call; free() them. */
static float *run_session(colibri_config_t *c, const make_spec_t *spec, int32_t piece, colibri_stats_t *stats,
                          uint64_t *loads) {
    size_t bytes = TOKENS * spec->vocab * sizeof(float), room = (bytes + 127) / 64 * 64;
    float *all = malloc(bytes), *row = all;
    void *memory = malloc(room + 64);
    float *out = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    colibri_expert_stats_t experts[MAX_EXPERTS];
    c->struct_size = sizeof *c;
    c->model_path = path;
    c->max_seq_len = TOKENS;
    c->outputs = COLIBRI_OUTPUT_ALL;
    colibri_t *s = colibri_init(c);
    CHECK(s != NULL);
    for (int32_t at = 0; s && at < TOKENS; at += piece) {
        int32_t ids[TOKENS];
        for (int32_t i = 0; i < piece; i++) ids[i] = (at + i) * 7 % 5; /* few words: their experts are full soon */
        CHECK_EQ(colibri_set_input(s, ids, &piece, 1), COLIBRI_OK);
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
        CHECK_EQ(colibri_get_output(s, out, room), COLIBRI_OK);
        memcpy(row, out, (size_t)piece * spec->vocab * sizeof(float));
        row += (size_t)piece * spec->vocab;
    }
    *stats = (colibri_stats_t)COLIBRI_STATS_INIT;
    CHECK_EQ(colibri_stats(s, stats), COLIBRI_OK);
    for (uint32_t layer = 0; layer < spec->layers; layer++) {
        CHECK_EQ(colibri_expert_stats(s, (int32_t)layer, experts, MAX_EXPERTS), COLIBRI_OK);
        for (uint32_t e = 0; e < spec->experts; e++) loads[layer * spec->experts + e] = experts[e].tokens;
    }
    colibri_free(s);
    free(memory);
    return all;
}

static void check_session(const make_spec_t *spec, int32_t strategy) {
    size_t bytes = TOKENS * spec->vocab * sizeof(float);
    uint64_t loads[2 * MAX_EXPERTS], sum = 0;
    uint32_t most = coli_expert_capacity(0.75f, 16, spec->top_k, spec->experts); /* of the two groups of 16 and the one of 8 */
    uint32_t least = coli_expert_capacity(0.75f, 8, spec->top_k, spec->experts);
    colibri_stats_t stats, others;
    colibri_config_t c = {.load_balancing_strategy = strategy, .capacity_factor = 0.75f, .max_chunk_tokens = 16};
    c.num_threads = 1;
    float *expected = run_session(&c, spec, TOKENS, &stats, loads);
    CHECK(strategy == COLIBRI_BALANCE_SOFT_CAPACITY ? stats.capacity_moved > 0 : stats.capacity_moved == 0);
    CHECK(stats.capacity_dropped > 0);
    for (uint32_t i = 0; i < spec->layers * spec->experts; i++) {
        CHECK(loads[i] <= 2 * most + least);
        sum += loads[i];
    }
    CHECK_EQ(sum + stats.capacity_dropped, (uint64_t)TOKENS * spec->top_k * spec->layers);
    for (c.isa = COLIBRI_ISA_REF; c.isa < COLIBRI_ISA_COUNT_; c.isa++)
        for (c.num_threads = 1; c.num_threads <= 3 && colibri_isa_supported((colibri_isa_t)c.isa); c.num_threads += 2) {
            float *out = run_session(&c, spec, TOKENS, &others, loads);
            CHECK(same_bits(out, expected, bytes));
            CHECK(others.capacity_moved == stats.capacity_moved && others.capacity_dropped == stats.capacity_dropped);
            free(out);
        }
    colibri_config_t plain = {.num_threads = 1}, alone = c;
    alone.isa = 0;
    alone.num_threads = 2;
    float *unchanged = run_session(&plain, spec, TOKENS, &others, loads);
    CHECK(!same_bits(unchanged, expected, bytes));
    float *one = run_session(&alone, spec, 1, &stats, loads);
    CHECK(same_bits(unchanged, one, bytes));
    CHECK_EQ(stats.capacity_moved + stats.capacity_dropped + others.capacity_moved + others.capacity_dropped, 0);
    free(expected); free(unchanged); free(one);
}

static void test_sessions(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.experts = 9;
    spec.top_k = 4;
    for (uint32_t i = 0; i < 4; i++) {
        spec.dtype = i & 1 ? COLIBRI_FILE_Q8 : COLIBRI_FILE_F32;
        spec.norm_topk = i >> 1;
        spec.shared = i & 1 ? 56 : 0;
        write_spec(&spec);
        check_session(&spec, COLIBRI_BALANCE_SOFT_CAPACITY);
        check_session(&spec, COLIBRI_BALANCE_HARD_CAPACITY);
    }
    remove(path);
}

int main(void) {
    snprintf(path, sizeof path, "test_capacity_%d.colibri", (int)getpid());
    test_limit();
    test_random();
    test_alone();
    test_by_hand();
    test_weights_are_the_routers();
    test_sessions();
    return check_report();
}
