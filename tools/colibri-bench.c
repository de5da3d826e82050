/* colibri-bench.c: prefill and decode speed of a .colibri file, through the public header alone; with --limits, the
 * machine's own (limits.c).
 *
 * A round is a prompt of pseudo-random tokens, the same on every machine, and then single tokens, each chosen greedily and
 * thrown away. The best round gives the speeds; the times of single tokens are of all rounds.
 */
#include <math.h>
#include <stdlib.h>

#include "cli_common.h"
#include "limits.h"

typedef struct bench_t {
    const cli_args_t *args;
    colibri_model_t *model;
    colibri_t *session;
    int32_t *tokens;   /* [prompt_tokens + gen_tokens] */
    double *times;     /* [repeat * gen_tokens] seconds */
    size_t num_times;
    double prefill_seconds, decode_seconds; /* of the best round */
    uint64_t weight_bytes;                  /* of one round's decoding */
} bench_t;

/* Ids below vocab: the top bits of a linear congruential generator. */
static void fill_tokens(int32_t *tokens, size_t n, int32_t vocab) {
    uint64_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = (int32_t)((state >> 33) % (uint64_t)vocab);
    }
}

static int prepare(bench_t *bench) {
    const cli_args_t *args = bench->args;
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    if (colibri_model_open(args->model, &bench->model) != COLIBRI_OK) return cli_library_error(CLI_BENCH);
    if (colibri_model_info(bench->model, &info) != COLIBRI_OK) return cli_library_error(CLI_BENCH);
    colibri_config_t config;
    int status = cli_config(CLI_BENCH, args, bench->model, &config);
    if (status != CLI_OK) return status;
    size_t count = (size_t)(args->prompt_tokens + args->gen_tokens);
    config.max_seq_len = (int32_t)count; /* both are at most 2^24 */
    bench->session = colibri_init(&config);
    if (bench->session == NULL) return cli_library_error(CLI_BENCH);
    bench->tokens = malloc(count * sizeof *bench->tokens);
    bench->times = calloc((size_t)args->repeat, (size_t)args->gen_tokens * sizeof *bench->times);
    if (bench->tokens == NULL || bench->times == NULL) return cli_fail(CLI_BENCH, "no memory for %zu tokens", count);
    fill_tokens(bench->tokens, count, info.vocab_size);
    return CLI_OK;
}

/* Append n tokens and choose the next one. */
static int step(bench_t *bench, const int32_t *tokens, int32_t n) {
    int32_t next;
    if (colibri_set_input(bench->session, tokens, &n, 1) != COLIBRI_OK || colibri_infer(bench->session) != COLIBRI_OK ||
        colibri_sample(bench->session, 0, NULL, &next) != COLIBRI_OK)
        return cli_library_error(CLI_BENCH);
    return CLI_OK;
}

static int decode(bench_t *bench) {
    const cli_args_t *args = bench->args;
    double begin = cli_seconds(), before = begin;
    for (int64_t i = 0; i < args->gen_tokens; i++) {
        int status = step(bench, bench->tokens + args->prompt_tokens + i, 1);
        if (status != CLI_OK) return status;
        double now = cli_seconds();
        bench->times[bench->num_times++] = now - before;
        before = now;
    }
    bench->decode_seconds = fmin(bench->decode_seconds, before - begin);
    return CLI_OK;
}

static int one_round(bench_t *bench) {
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    if (colibri_reset(bench->session) != COLIBRI_OK) return cli_library_error(CLI_BENCH);
    double begin = cli_seconds();
    int status = step(bench, bench->tokens, (int32_t)bench->args->prompt_tokens);
    if (status != CLI_OK) return status;
    bench->prefill_seconds = fmin(bench->prefill_seconds, cli_seconds() - begin);
    colibri_stats_reset(bench->session);
    status = decode(bench);
    if (status != CLI_OK) return status;
    if (colibri_stats(bench->session, &stats) != COLIBRI_OK) return cli_library_error(CLI_BENCH);
    bench->weight_bytes = stats.weight_bytes;
    return CLI_OK;
}

/* ---- Report --------------------------------------------------------------------------------------------------------- */

static int compare_times(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Milliseconds that at least `percent` % of the (sorted) times do not exceed. */
static double percentile_ms(const bench_t *bench, double percent) {
    double rank = ceil((double)bench->num_times * percent / 100);
    return 1e3 * bench->times[rank < 1 ? 0 : (size_t)rank - 1];
}

/* A JSON string. Control characters are escaped; other bytes pass, the path being UTF-8. */
static void print_json_string(const char *text) {
    putchar('"');
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            printf("\\%c", c);
        } else if (c < 0x20) {
            printf("\\u%04x", c);
        } else {
            putchar(c);
        }
    }
    putchar('"');
}

/* A share from 0 to 1, or null of nothing. */
static void print_json_share(const char *name, uint64_t part, uint64_t whole) {
    if (whole) printf("\"%s\": %.6f, ", name, (double)part / (double)whole);
    else printf("\"%s\": null, ", name);
}

/* Where the weights were, and what the cache did while the last round decoded. */
static void print_json_residency(const colibri_stats_t *s) {
    typedef unsigned long long number;
    static const char *const truth[] = {"false", "true"};
    printf("\"residency\": \"%s\", \"hugepage_size\": %llu, \"hugepage_bytes\": %llu, \"hugepage_pool\": %s, ",
           cli_residency_name(s->residency), (number)s->hugepage_size, (number)s->hugepage_bytes, truth[s->hugepage_pool != 0]);
    printf("\"direct_io\": %s, \"numa_nodes\": %d, \"memory_short\": %s, ", truth[s->direct_io != 0], s->numa_nodes,
           truth[s->memory_short != 0]);
    printf("\"cache\": {\"experts\": %llu, \"pinned\": %llu, \"hits\": %llu, \"misses\": %llu, \"hits_ahead\": %llu, ",
           (number)s->cache_experts, (number)s->cache_pinned, (number)s->cache_hits, (number)s->cache_misses,
           (number)s->cache_hits_ahead);
    print_json_share("hit_rate", s->cache_hits, s->cache_hits + s->cache_misses);
    print_json_share("ahead_accuracy", s->ahead_correct, s->ahead_predicted);
    print_json_share("repeat_accuracy", s->repeat_correct, s->ahead_predicted);
    printf("\"read_bytes\": %llu, \"read_bytes_ahead\": %llu, \"read_wait_ns\": %llu}, ", (number)s->read_bytes,
           (number)s->read_bytes_ahead, (number)s->read_wait_ns);
}

static void print_json(const bench_t *bench, const colibri_stats_t *stats) {
    const cli_args_t *args = bench->args;
    double per_token = (double)(bench->weight_bytes / (uint64_t)args->gen_tokens);
    printf("{\"model\": ");
    print_json_string(args->model);
    printf(", \"prompt_tokens\": %lld, \"gen_tokens\": %lld, \"repeat\": %lld, \"num_threads\": %d, \"isa\": \"%s\", ",
           (long long)args->prompt_tokens, (long long)args->gen_tokens, (long long)args->repeat, stats->num_threads,
           colibri_isa_name((colibri_isa_t)stats->isa));
    printf("\"prefill_tokens_per_s\": %.3f, \"decode_tokens_per_s\": %.3f, ",
           cli_rate((double)args->prompt_tokens, bench->prefill_seconds),
           cli_rate((double)args->gen_tokens, bench->decode_seconds));
    printf("\"decode_ms\": {\"p50\": %.4f, \"p90\": %.4f, \"p99\": %.4f, \"max\": %.4f}, ", percentile_ms(bench, 50),
           percentile_ms(bench, 90), percentile_ms(bench, 99), percentile_ms(bench, 100));
    print_json_residency(stats);
    printf("\"weight_bytes_per_token\": %.0f, \"weight_gb_per_s\": %.3f}\n", per_token,
           1e-9 * cli_rate((double)bench->weight_bytes, bench->decode_seconds));
}

static void print_text(const bench_t *bench, const colibri_stats_t *stats) {
    const cli_args_t *args = bench->args;
    printf("%s: %d threads, %s\n", args->model, stats->num_threads, colibri_isa_name((colibri_isa_t)stats->isa));
    printf("prefill  %lld tokens: %.1f tokens/s\n", (long long)args->prompt_tokens,
           cli_rate((double)args->prompt_tokens, bench->prefill_seconds));
    printf("decode   %lld tokens: %.1f tokens/s; ms per token: p50 %.3f, p90 %.3f, p99 %.3f, max %.3f\n",
           (long long)args->gen_tokens, cli_rate((double)args->gen_tokens, bench->decode_seconds), percentile_ms(bench, 50),
           percentile_ms(bench, 90), percentile_ms(bench, 99), percentile_ms(bench, 100));
    printf("weights  %.3f MB read per decoded token, %.2f GB/s\n",
           1e-6 * (double)(bench->weight_bytes / (uint64_t)args->gen_tokens),
           1e-9 * cli_rate((double)bench->weight_bytes, bench->decode_seconds));
    cli_print_residency(stdout, stats);
}

static int report(bench_t *bench) {
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    if (colibri_stats(bench->session, &stats) != COLIBRI_OK) return cli_library_error(CLI_BENCH);
    qsort(bench->times, bench->num_times, sizeof *bench->times, compare_times);
    if (bench->args->json) {
        print_json(bench, &stats);
    } else {
        print_text(bench, &stats);
    }
    return cli_flush(CLI_BENCH);
}

int main(int argc, char **argv) {
    cli_args_t args;
    int status = cli_parse(CLI_BENCH, argc, argv, &args);
    if (status != CLI_OK || cli_answer(CLI_BENCH, &args, &status)) return status;
    if (args.limits) return limits_run(&args);
    if (args.repeat == 0) args.repeat = 3;
    bench_t bench = {.args = &args, .prefill_seconds = INFINITY, .decode_seconds = INFINITY};
    status = prepare(&bench);
    for (int64_t i = 0; i < args.repeat && status == CLI_OK; i++) status = one_round(&bench);
    if (status == CLI_OK) status = report(&bench);
    free(bench.tokens);
    free(bench.times);
    colibri_free(bench.session);
    colibri_model_close(bench.model);
    return status;
}
