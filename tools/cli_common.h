/* cli_common.h: what colibri-infer and colibri-bench share: the table of options, error lines, files, the clock.
 *
 * The tools use nothing but the public header and the C library. Exit status: 0 done, 1 failed, 2 wrong usage; each failure
 * is one line on stderr.
 */
#ifndef COLIBRI_CLI_COMMON_H
#define COLIBRI_CLI_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "colibri.h"

enum { CLI_INFER = 1, CLI_BENCH = 2 }; /* which tool is running: a bit each */
enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

/* Values of all options; where zero is no legal value it says that the option was not given. */
typedef struct cli_args_t {
    const char *model, *prompt, *prompt_file, *isa, *affinity, *kv_dtype; /* UTF-8, of the process's arguments */
    const char *residency, *numa_policy, *load_balancing, *expert_profile, *save_profile, *metrics;
    uint64_t expert_cache_size, hugepage_size; /* as the config has them */
    int64_t activation_bits, max_chunk_tokens, max_tokens, max_seq_len, max_batch_size, threads, top_k;
    int64_t sample_top_k;
    uint64_t seed;
    double temperature, top_p, min_p, repetition_penalty, capacity_factor;
    int64_t prompt_tokens, gen_tokens, repeat, buffer_mb;
    int verbose, json, limits, guard_mapping, help, version;
} cli_args_t;

/* Read the arguments of `tool`. CLI_OK, or CLI_USAGE after one line on stderr. On Windows argv becomes UTF-8 in place. */
int cli_parse(int tool, int argc, char **argv, cli_args_t *args);
/* If --help or --version was given: print it, set *status and return 1. */
int cli_answer(int tool, const cli_args_t *args, int *status);

/* "NAME: error: ..." on stderr; both return what main is to return. */
int cli_fail(int tool, const char *format, ...) __attribute__((format(printf, 2, 3)));  /* CLI_FAILED */
int cli_usage(int tool, const char *format, ...) __attribute__((format(printf, 2, 3))); /* CLI_USAGE */
/* The library's latest error as such a line: CLI_FAILED. */
int cli_library_error(int tool);

/* Fill the part of a config that both tools share; its log goes to stderr, warnings always, the rest with --verbose. CLI_OK,
 * or CLI_USAGE for a name that is none. */
int cli_config(int tool, const cli_args_t *args, colibri_model_t *model, colibri_config_t *config);
/* Flush stdout and check it: CLI_OK, or CLI_FAILED after a line. */
int cli_flush(int tool);

/* Write a whole file, beside its place first and then renamed: on failure the old one stays. Links, devices and pipes are
 * written to as they are. CLI_OK, or CLI_FAILED. */
int cli_write_file(int tool, const char *path, const char *bytes, size_t size);

const char *cli_residency_name(int32_t residency); /* "map" ... as --residency takes them */
const char *cli_place_name(int32_t place);         /* of a colibri_place_t: "disk" ... */
/* Where the weights are, and what the cache of experts did: a few lines. */
void cli_print_residency(FILE *to, const colibri_stats_t *stats);

double cli_seconds(void);                      /* a clock that only goes forward */
double cli_rate(double amount, double seconds); /* per second, 0 if no time passed */
double cli_percent(uint64_t part, uint64_t whole); /* 0 of nothing */

#endif
