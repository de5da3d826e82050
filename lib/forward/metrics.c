/* metrics.c: colibri_metrics, the figures of a session (stats.h) in the Prometheus text format: families of samples, each after
 * its HELP and TYPE.
 *
 * Names say the unit: seconds, bytes, or a number of things. What ends in _total counts up since init or stats_reset; the rest
 * are gauges. Numbers are written digit by digit: printf would ask the host's locale for the decimal point. */
#include "base/histogram.h"
#include "base/status.h"
#include "forward/stats.h"

/* ---- The text: written as far as it fits, counted all the way ---- */

typedef struct text {
    char *bytes; /* [capacity] */
    size_t capacity, size;
} text_t;

/* Not inlined: many small texts, and nothing here is hot. */
__attribute__((noinline)) static void put_bytes(text_t *t, const char *from, size_t n) {
    for (size_t i = 0; i < n; i++, t->size++)
        if (t->size < t->capacity) t->bytes[t->size] = from[i];
}

__attribute__((noinline)) static void put(text_t *t, const char *from) { put_bytes(t, from, strlen(from)); }

__attribute__((noinline)) static void put_integer(text_t *t, uint64_t value) {
    char digits[20];
    size_t n = sizeof digits;
    do digits[--n] = (char)('0' + value % 10);
    while (value /= 10);
    put_bytes(t, digits + n, sizeof digits - n);
}

static void put_signed(text_t *t, int32_t value) {
    if (value < 0) put(t, "-");
    put_integer(t, value < 0 ? -(uint64_t)value : (uint64_t)value);
}

static void put_seconds(text_t *t, uint64_t ns) {
    char fraction[10] = ".";
    size_t n = sizeof fraction;
    put_integer(t, ns / 1000000000);
    for (uint64_t rest = ns % 1000000000, i = 9; i > 0; i--, rest /= 10) fraction[i] = (char)('0' + rest % 10);
    while (fraction[n - 1] == '0') n--;
    if (n > 1) put_bytes(t, fraction, n);
}

/* The lines that begin a family. */
static void put_family(text_t *t, const char *name, size_t length, const char *help, const char *type) {
    put(t, "# HELP colibri_");
    put_bytes(t, name, length);
    put(t, " ");
    put(t, help);
    put(t, "\n# TYPE colibri_");
    put_bytes(t, name, length);
    put(t, " ");
    put(t, type);
    put(t, "\n");
}

/* ---- Metrics that are one member of a struct each ---- */

typedef enum { INT32, COUNT, NS } kind_t;

typedef struct metric {
    uint16_t offset; /* of the member */
    uint8_t kind;    /* kind_t */
} metric_t;

/* X(name and labels, help, kind, member): no help: one more sample of the family before. */
#define TOTALS(X) \
    X("threads", "Threads that compute, the caller's included.", INT32, num_threads) \
    X("workspace_bytes", "Memory of the session.", COUNT, workspace_bytes) \
    X("kv_cache_bytes", "Memory of the session's KV cache, part of the workspace.", COUNT, kv_bytes) \
    X("tokens_total{phase=\"prompt\"}", "Tokens run: prompt, of slots with several in a call; decode, of slots with one.", \
      COUNT, prompt_tokens) \
    X("tokens_total{phase=\"decode\"}", "", COUNT, decode_tokens) \
    X("last_infer_seconds", "Duration of the latest call of infer.", NS, last_infer_ns) \
    X("stage_seconds_total{stage=\"attention\"}", "Wall time of the stages of infer, summed over layers.", NS, attention_ns) \
    X("stage_seconds_total{stage=\"router\"}", "", NS, router_ns) \
    X("stage_seconds_total{stage=\"experts\"}", "", NS, experts_ns) \
    X("stage_seconds_total{stage=\"head\"}", "", NS, head_ns) \
    X("weight_bytes_total", "Weights that the computation went through, from wherever they lay.", COUNT, weight_bytes) \
    X("guarded", "1: a lost page of the mapped file ends a call, not the process.", INT32, guarded) \
    X("hugepage_bytes", "Weights and cache that lie on huge pages.", COUNT, hugepage_bytes) \
    X("hugepage_pool", "1: the huge pages come from a reserved pool.", INT32, hugepage_pool) \
    X("direct_io", "1: reads bypass the page cache.", INT32, direct_io) \
    X("numa_nodes", "Memory nodes that weights were spread over; 0: no policy.", INT32, numa_nodes) \
    X("memory_short", "1: the mapped model is larger than the memory this process may use.", INT32, memory_short) \
    X("cache_experts", "Experts that the cache has room for.", COUNT, cache_experts) \
    X("cache_pinned_experts", "Experts held in the cache for being used often.", COUNT, cache_pinned) \
    X("cache_hits_total", "Experts that were in the cache when a layer needed them.", COUNT, cache_hits) \
    X("cache_hits_ahead_total", "Hits that look-ahead had read or begun to read.", COUNT, cache_hits_ahead) \
    X("cache_misses_total", "Experts that a layer had to wait for.", COUNT, cache_misses) \
    X("read_bytes_total", "Bytes read from the file, by look-ahead too.", COUNT, read_bytes) \
    X("read_ahead_bytes_total", "Bytes read from the file by look-ahead.", COUNT, read_bytes_ahead) \
    X("read_wait_seconds_total", "Time that threads waited for reads, summed.", NS, read_wait_ns) \
    X("ahead_predicted_total", "Experts that look-ahead expected for a single token.", COUNT, ahead_predicted) \
    X("ahead_correct_total", "Experts that look-ahead expected and the router chose.", COUNT, ahead_correct) \
    X("repeat_correct_total", "Experts chosen for a single token that had been chosen for the one before.", COUNT, \
      repeat_correct) \
    X("capacity_moved_total", "Token-expert pairs that load balancing moved.", COUNT, capacity_moved) \
    X("capacity_dropped_total", "Token-expert pairs that load balancing dropped.", COUNT, capacity_dropped)

#define EXPERTS(X) \
    X("expert_tokens_total", "Tokens routed to the expert.", COUNT, tokens) \
    X("expert_calls_total", "Chunks of tokens in which the expert had any.", COUNT, calls) \
    X("expert_hits_total", "Chunks that found the expert in memory.", COUNT, hits) \
    X("expert_misses_total", "Chunks that waited for the expert to be read.", COUNT, misses) \
    X("expert_read_bytes_total", "Bytes of the expert read from the file, by look-ahead too.", COUNT, bytes_read) \
    X("expert_load_seconds_total", "Time from asking for the expert's reads to having them.", NS, load_ns) \
    X("expert_compute_seconds_total", "Time of the expert's products, summed over threads.", NS, compute_ns) \
    X("expert_merge_seconds_total", "The expert's share of the weighted sum.", NS, merge_ns) \
    X("expert_place", "Where it is: 0 disk, 1 mapped, 2 locked, 3 in the workspace, 4 in the cache, 5 pinned there.", INT32, \
      place) \
    X("expert_node", "Memory node it was placed on; -1: no policy.", INT32, node)

/* One string each (name, help, name, help ...): pointers would have to be relocated by a shared library's loader. */
#define TEXT(name, help, kind, member) name "\0" help "\0"
#define TOTAL(name, help, kind, member) {offsetof(colibri_stats_t, member), kind},
#define EXPERT(name, help, kind, member) {offsetof(colibri_expert_stats_t, member), kind},
static const char total_texts[] = TOTALS(TEXT), expert_texts[] = EXPERTS(TEXT);
static const metric_t totals[] = {TOTALS(TOTAL)}, experts[] = {EXPERTS(EXPERT)};

static void put_value(text_t *t, const void *from, metric_t metric) {
    const char *member = (const char *)from + metric.offset;
    put(t, " ");
    if (metric.kind == INT32) put_signed(t, *(const int32_t *)(const void *)member);
    else if (metric.kind == NS) put_seconds(t, *(const uint64_t *)(const void *)member);
    else put_integer(t, *(const uint64_t *)(const void *)member);
    put(t, "\n");
}

/* Begin the metric's family, if it has a help of its own. Returns where the next metric's text begins. */
static const char *begin_metric(text_t *t, const char *name) {
    static const char counter[] = "_total";
    size_t length = strcspn(name, "{"), ending = sizeof counter - 1;
    const char *help = name + strlen(name) + 1;
    bool counts = length > ending && memcmp(name + length - ending, counter, ending) == 0;
    if (*help) put_family(t, name, length, help, counts ? "counter" : "gauge");
    return help + strlen(help) + 1;
}

static void put_totals(text_t *t, const colibri_stats_t *stats) {
    const char *name = total_texts;
    for (size_t i = 0; i < sizeof totals / sizeof *totals; i++) {
        const char *next = begin_metric(t, name);
        put(t, "colibri_");
        put(t, name);
        put_value(t, stats, totals[i]);
        name = next;
    }
}

static void put_expert(text_t *t, const colibri_t *s, const char *name, metric_t metric, uint32_t layer, uint32_t expert) {
    colibri_expert_stats_t row;
    coli_stats_expert(s, layer, expert, &row);
    put(t, "colibri_");
    put(t, name);
    put(t, "{layer=\"");
    put_integer(t, layer);
    put(t, "\",expert=\"");
    put_integer(t, expert);
    put(t, "\"}");
    put_value(t, &row, metric);
}

static void put_experts(text_t *t, const colibri_t *s) {
    const colibri_file_params *p = s->weights->params;
    const char *name = expert_texts;
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        const char *next = begin_metric(t, name);
        for (uint32_t layer = 0; layer < p->num_layers; layer++)
            for (uint32_t e = 0; s->weights->layers[layer].is_moe && e < p->num_experts; e++)
                put_expert(t, s, name, experts[i], layer, e);
        name = next;
    }
}

/* ---- The others ---- */

static void put_info(text_t *t, const colibri_stats_t *stats) {
    static const char build[] = "build_info", residency[] = "residency_info";
    static const char names[COLIBRI_RESIDENCY_COUNT_][8] = {"", "map", "lock", "huge", "stream"};
    put_family(t, build, sizeof build - 1, "The library and the instruction set in use.", "gauge");
    put(t, "colibri_build_info{version=\"" COLIBRI_VERSION_STRING "\",isa=\"");
    put(t, colibri_isa_name((colibri_isa_t)stats->isa));
    put(t, "\"} 1\n");
    put_family(t, residency, sizeof residency - 1, "Where weights live, and bytes of a huge page there (0: none).", "gauge");
    put(t, "colibri_residency_info{residency=\"");
    put(t, names[stats->residency]);
    put(t, "\",hugepage_size=\"");
    put_integer(t, stats->hugepage_size);
    put(t, "\"} 1\n");
}

/* Count and last bucket are the sum of all buckets, so that the three agree whoever counted. */
static void put_histogram(text_t *t, const char *name, const char *help, const uint64_t *buckets, uint64_t sum_ns) {
    uint64_t count = 0;
    put_family(t, name, strlen(name), help, "histogram");
    for (uint32_t i = 0; i < COLIBRI_HISTOGRAM; i++) {
        put(t, "colibri_");
        put(t, name);
        put(t, "_bucket{le=\"");
        if (i == COLIBRI_HISTOGRAM - 1) put(t, "+Inf");
        else put_seconds(t, coli_histogram_limit_ns(i));
        put(t, "\"} ");
        put_integer(t, count += buckets[i]);
        put(t, "\n");
    }
    put(t, "colibri_");
    put(t, name);
    put(t, "_sum ");
    put_seconds(t, sum_ns);
    put(t, "\ncolibri_");
    put(t, name);
    put(t, "_count ");
    put_integer(t, count);
    put(t, "\n");
}

/* What read_histogram counted one by one was added to its expert's load_ns. */
static uint64_t all_load_ns(const colibri_t *s) {
    const colibri_file_params *p = s->weights->params;
    colibri_expert_stats_t row;
    uint64_t ns = 0;
    for (uint32_t layer = 0; layer < p->num_layers; layer++)
        for (uint32_t e = 0; s->weights->layers[layer].is_moe && e < p->num_experts; e++) {
            coli_stats_expert(s, layer, e, &row);
            ns += row.load_ns;
        }
    return ns;
}

/* Returns the bytes of all of it, whatever fitted. */
static size_t write_all(const colibri_t *s, char *bytes, size_t capacity) {
    text_t t = {bytes, capacity, 0};
    colibri_stats_t stats;
    coli_stats_read(s, &stats);
    put_info(&t, &stats);
    put_totals(&t, &stats);
    put_histogram(&t, "infer_duration_seconds", "Duration of calls of infer.", stats.infer_histogram, stats.infer_ns);
    put_histogram(&t, "expert_read_duration_seconds", "Time from asking for an expert to having it.", stats.read_histogram,
                  all_load_ns(s));
    put_experts(&t, s);
    return t.size;
}

colibri_status_t colibri_metrics(const colibri_t *ctx, char *text, size_t capacity, size_t *bytes) {
    if (!ctx || !bytes || (!text && capacity))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "%s: %s is NULL", __func__, !ctx ? "ctx" : !bytes ? "bytes" : "text");
    *bytes = write_all(ctx, text, capacity);
    if (*bytes <= capacity) return COLIBRI_OK;
    return coli_fail(COLIBRI_ERR_BUFFER_TOO_SMALL, "the metrics have %zu bytes, the buffer has %zu", *bytes, capacity);
}
