/* cli_common.c: options, errors, files and clock of the command-line tools; see cli_common.h. */
#include "cli_common.h"

#include <errno.h>
#include <float.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#    include <fcntl.h>
#    include <io.h>
#    include <process.h>
#    include <windows.h>
#    define getpid _getpid
#else
#    include <sys/stat.h>
#    include <unistd.h>
#endif

typedef enum { OPT_FLAG, OPT_TEXT, OPT_INT, OPT_UINT64, OPT_SIZE, OPT_REAL } cli_kind_t;

typedef struct cli_option_t {
    const char *name, *value_name; /* value_name NULL: a flag */
    cli_kind_t kind;
    int tools;     /* CLI_* bits */
    size_t offset; /* of its member in cli_args_t: int, const char *, int64_t, uint64_t or double by kind */
    double low, high;
    const char *help;
} cli_option_t;

#define BOTH_TOOLS (CLI_INFER | CLI_BENCH)
#define AT(member) offsetof(cli_args_t, member)

static const cli_option_t options[] = {
    {"--model", "M", OPT_TEXT, BOTH_TOOLS, AT(model), 0, 0, "the .colibri file"},
    {"--limits", NULL, OPT_FLAG, CLI_BENCH, AT(limits), 0, 0, "measure the machine's own limits, without a model"},
    {"--buffer-mb", "N", OPT_INT, CLI_BENCH, AT(buffer_mb), 1, 1 << 20, "that --limits reads [1024, if memory is there]"},
    {"--prompt", "P", OPT_TEXT, CLI_INFER, AT(prompt), 0, 0, "the text to continue"},
    {"--prompt-file", "F", OPT_TEXT, CLI_INFER, AT(prompt_file), 0, 0, "read it from a file instead; - is stdin"},
    {"--max-tokens", "N", OPT_INT, CLI_INFER, AT(max_tokens), 1, INT32_MAX, "new tokens at most [128, or what fits]"},
    {"--prompt-tokens", "N", OPT_INT, CLI_BENCH, AT(prompt_tokens), 1, 1 << 24, "tokens of the prompt [512]"},
    {"--gen-tokens", "N", OPT_INT, CLI_BENCH, AT(gen_tokens), 1, 1 << 24, "tokens run one by one [64]"},
    {"--repeat", "R", OPT_INT, CLI_BENCH, AT(repeat), 1, 10000, "rounds; the best one counts [3; --limits: 7]"},
    {"--temperature", "T", OPT_REAL, CLI_INFER, AT(temperature), 0, FLT_MAX, "0: always the likeliest token [0]"},
    {"--sample-top-k", "N", OPT_INT, CLI_INFER, AT(sample_top_k), 0, INT32_MAX, "draw among the N likeliest, 0: all [0]"},
    {"--top-p", "P", OPT_REAL, CLI_INFER, AT(top_p), 0, 1, "draw among the likeliest tokens of this probability [1]"},
    {"--min-p", "P", OPT_REAL, CLI_INFER, AT(min_p), 0, 1, "drop tokens less likely than P times the likeliest [0]"},
    {"--repetition-penalty", "R", OPT_REAL, CLI_INFER, AT(repetition_penalty), 0, FLT_MAX, "of tokens there, 1: none [1]"},
    {"--seed", "S", OPT_UINT64, CLI_INFER, AT(seed), 0, 0, "of the draws; slot i draws with S + i [0]"},
    {"--max-batch-size", "B", OPT_INT, CLI_INFER, AT(max_batch_size), 1, 4096, "continue the prompt B times at once [1]"},
    {"--max-seq-len", "N", OPT_INT, CLI_INFER, AT(max_seq_len), 1, INT32_MAX, "room in tokens [what this prompt needs]"},
    {"--top-k", "K", OPT_INT, BOTH_TOOLS, AT(top_k), 1, INT32_MAX, "experts per token (not of sampling) [the model's]"},
    {"--threads", "T", OPT_INT, BOTH_TOOLS, AT(threads), 0, 256, "0: one per physical core [0]"},
    {"--affinity", "A", OPT_TEXT, BOTH_TOOLS, AT(affinity), 0, 0, "tie threads to CPUs: none, auto, or as 0,2,4-7 [none]"},
    {"--isa", "I", OPT_TEXT, BOTH_TOOLS, AT(isa), 0, 0, "force an instruction set: ref, avx2, avx512 ... [the best]"},
    {"--kv-dtype", "D", OPT_TEXT, BOTH_TOOLS, AT(kv_dtype), 0, 0, "KV cache: f32, f16, q8 [f32 for f32 files, else f16]"},
    {"--activation-bits", "N", OPT_INT, BOTH_TOOLS, AT(activation_bits), 8, 16, "8 or 16 [8 in routed experts, else 16]"},
    {"--max-chunk-tokens", "N", OPT_INT, BOTH_TOOLS, AT(max_chunk_tokens), 1, 1 << 20, "computed together [512]"},
    {"--residency", "R", OPT_TEXT, BOTH_TOOLS, AT(residency), 0, 0, "where weights live: map, lock, huge, stream [map]"},
    {"--expert-cache-size", "N", OPT_SIZE, BOTH_TOOLS, AT(expert_cache_size), 1 << 20, 0,
     "stream: experts in memory, or bytes as 512M, 4GiB [a quarter]"},
    {"--hugepage-size", "S", OPT_SIZE, BOTH_TOOLS, AT(hugepage_size), 0, 0, "huge: 2M or 1G [2M]"},
    {"--numa-policy", "P", OPT_TEXT, BOTH_TOOLS, AT(numa_policy), 0, 0, "none, interleave, or layers:node,... [none]"},
    {"--expert-profile", "F", OPT_TEXT, BOTH_TOOLS, AT(expert_profile), 0, 0, "a file of --save-profile: what is used most"},
    {"--guard-mapping", NULL, OPT_FLAG, BOTH_TOOLS, AT(guard_mapping), 0, 0, "a model file cut short is an error, no signal"},
    {"--load-balancing-strategy", "S", OPT_TEXT, BOTH_TOOLS, AT(load_balancing), 0, 0,
     "none, soft_capacity, hard_capacity: changes results [none]"},
    {"--capacity-factor", "F", OPT_REAL, BOTH_TOOLS, AT(capacity_factor), 0, 1024, "of load balancing [1.25]"},
    {"--save-profile", "F", OPT_TEXT, CLI_INFER, AT(save_profile), 0, 0, "at the end, write how often experts were used"},
    {"--metrics", "F", OPT_TEXT, CLI_INFER, AT(metrics), 0, 0, "at the end, write the figures as Prometheus text"},
    {"--verbose", NULL, OPT_FLAG, CLI_INFER, AT(verbose), 0, 0, "time of every layer and expert, on stderr"},
    {"--json", NULL, OPT_FLAG, CLI_BENCH, AT(json), 0, 0, "print one JSON object"},
    {"--version", NULL, OPT_FLAG, BOTH_TOOLS, AT(version), 0, 0, "print the version and the build"},
    {"--help", NULL, OPT_FLAG, BOTH_TOOLS, AT(help), 0, 0, "print this text"},
};
enum { NUM_OPTIONS = sizeof options / sizeof options[0] };

static const char *tool_name(int tool) {
    return tool == CLI_INFER ? "colibri-infer" : "colibri-bench";
}

/* ---- Errors --------------------------------------------------------------------------------------------------------- */

static void error_line(int tool, const char *format, va_list values) {
    fflush(stdout); /* what was written before comes first; its own failure is the smaller matter now */
    fprintf(stderr, "%s: error: ", tool_name(tool));
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
}

int cli_fail(int tool, const char *format, ...) {
    va_list values;
    va_start(values, format);
    error_line(tool, format, values);
    va_end(values);
    return CLI_FAILED;
}

int cli_usage(int tool, const char *format, ...) {
    va_list values;
    va_start(values, format);
    error_line(tool, format, values);
    va_end(values);
    return CLI_USAGE;
}

int cli_library_error(int tool) {
    return cli_fail(tool, "%s", colibri_last_error());
}

int cli_flush(int tool) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return CLI_OK;
    return cli_fail(tool, "cannot write the output: %s", strerror(errno));
}

/* ---- Options -------------------------------------------------------------------------------------------------------- */

/* The option that an argument names, up to a '=', or NULL. */
static const cli_option_t *find_option(int tool, const char *argument) {
    size_t length = strcspn(argument, "=");
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const cli_option_t *o = &options[i];
        if ((o->tools & tool) && strlen(o->name) == length && memcmp(o->name, argument, length) == 0) return o;
    }
    return NULL;
}

/* Digits alone, after a sign if there may be one. */
static int is_whole_number(const char *text, int sign) {
    if (sign && (*text == '-' || *text == '+')) text++;
    return *text && text[strspn(text, "0123456789")] == '\0';
}

static int parse_int(int tool, const cli_option_t *o, const char *text, int64_t *value) {
    if (!is_whole_number(text, 1)) return cli_usage(tool, "%s takes a whole number, not '%s'", o->name, text);
    errno = 0;
    long long number = strtoll(text, NULL, 10);
    if (errno == ERANGE || (double)number < o->low || (double)number > o->high)
        return cli_usage(tool, "%s is %s; it must be between %.0f and %.0f", o->name, text, o->low, o->high);
    *value = number;
    return CLI_OK;
}

static int parse_uint64(int tool, const cli_option_t *o, const char *text, uint64_t *value) {
    if (!is_whole_number(text, 0)) return cli_usage(tool, "%s takes a whole number of 0 or more, not '%s'", o->name, text);
    errno = 0;
    unsigned long long number = strtoull(text, NULL, 10);
    if (errno == ERANGE || number > UINT64_MAX) return cli_usage(tool, "%s is %s, more than 64 bits hold", o->name, text);
    *value = number;
    return CLI_OK;
}

/* A number as the config has it, or bytes: with K, M, G, KiB, MiB, GiB, and then at least `low`. */
static int parse_size(int tool, const cli_option_t *o, const char *text, uint64_t *value) {
    static const char units[] = "KMG";
    size_t digits = strspn(text, "0123456789");
    const char *unit = text[digits] ? strchr(units, text[digits]) : NULL, *rest = text + digits + (unit != NULL);
    if (digits == 0 || (*rest && (unit == NULL || strcmp(rest, "iB") != 0)))
        return cli_usage(tool, "%s takes a whole number, or one with K, M, G, KiB, MiB or GiB, not '%s'", o->name, text);
    errno = 0;
    unsigned shift = unit != NULL ? 10 * (unsigned)(unit - units + 1) : 0;
    unsigned long long number = strtoull(text, NULL, 10);
    if (errno == ERANGE || number > UINT64_MAX >> shift)
        return cli_usage(tool, "%s is %s, more than 64 bits hold", o->name, text);
    *value = number << shift;
    if (unit != NULL && (double)*value < o->low)
        return cli_usage(tool, "%s is %s; a size in bytes must be at least %.0f", o->name, text, o->low);
    return CLI_OK;
}

static int parse_real(int tool, const cli_option_t *o, const char *text, double *value) {
    char *end = NULL;
    int plain = *text && text[strspn(text, "0123456789+-.eE")] == '\0'; /* no white space, hexadecimal, "nan" */
    double number = plain ? strtod(text, &end) : 0;
    if (!plain || end == text || *end) return cli_usage(tool, "%s takes a number, not '%s'", o->name, text);
    if (!(number >= o->low && number <= o->high)) /* also refuses NaN and infinity */
        return cli_usage(tool, "%s is %s; it must be between %g and %g", o->name, text, o->low, o->high);
    *value = number;
    return CLI_OK;
}

static int store(int tool, const cli_option_t *o, const char *text, cli_args_t *args) {
    void *member = (char *)args + o->offset;
    switch (o->kind) {
    case OPT_FLAG: *(int *)member = 1; return CLI_OK;
    case OPT_TEXT: *(const char **)member = text; return CLI_OK;
    case OPT_INT: return parse_int(tool, o, text, member);
    case OPT_UINT64: return parse_uint64(tool, o, text, member);
    case OPT_SIZE: return parse_size(tool, o, text, member);
    case OPT_REAL: return parse_real(tool, o, text, member);
    }
    return CLI_OK;
}

#ifdef _WIN32
/* Arguments come in the system's code page; the library wants UTF-8. What cannot be converted stays as it is. */
static void arguments_to_utf8(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int n = MultiByteToWideChar(CP_ACP, 0, argv[i], -1, NULL, 0);
        wchar_t *wide = n > 0 ? malloc((size_t)n * sizeof *wide) : NULL;
        if (wide == NULL) continue;
        MultiByteToWideChar(CP_ACP, 0, argv[i], -1, wide, n);
        int bytes = WideCharToMultiByte(CP_UTF8, 0, wide, -1, NULL, 0, NULL, NULL);
        char *text = bytes > 0 ? malloc((size_t)bytes) : NULL; /* lives as long as the process, as argv does */
        if (text != NULL && WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, bytes, NULL, NULL) > 0) argv[i] = text;
        free(wide);
    }
    SetConsoleOutputCP(CP_UTF8);
    _setmode(_fileno(stdout), _O_BINARY);
}
#else
static void arguments_to_utf8(int argc, char **argv) {
    (void)argc;
    (void)argv;
}
#endif

/* May the option stand beside --limits? */
static int belongs_to_limits(const cli_option_t *o) {
    static const char *const names[] = {"--limits", "--buffer-mb", "--repeat", "--threads", "--json", "--version", "--help"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(o->name, names[i]) == 0) return 1;
    return 0;
}

int cli_parse(int tool, int argc, char **argv, cli_args_t *args) {
    const char *other = NULL;
    int of_limits = 1;
    *args = (cli_args_t){.max_batch_size = 1, .prompt_tokens = 512, .gen_tokens = 64};
    arguments_to_utf8(argc, argv);
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i], *equals = strchr(argument, '=');
        if (strncmp(argument, "--", 2) != 0) return cli_usage(tool, "'%s' is no option; see --help", argument);
        const cli_option_t *o = find_option(tool, argument);
        if (o == NULL) return cli_usage(tool, "unknown option '%s'; see --help", argument);
        const char *value = equals != NULL ? equals + 1 : NULL;
        if (o->value_name == NULL && value != NULL) return cli_usage(tool, "%s takes no value", o->name);
        if (o->value_name != NULL && value == NULL) {
            if (++i == argc) return cli_usage(tool, "%s needs a value", o->name);
            value = argv[i];
        }
        int status = store(tool, o, value, args);
        if (status != CLI_OK) return status;
        if (!belongs_to_limits(o)) of_limits = 0, other = o->name;
    }
    if (args->help || args->version) return CLI_OK;
    if (args->limits && !of_limits) return cli_usage(tool, "--limits measures the machine: it takes no %s", other);
    if (args->buffer_mb != 0 && !args->limits) return cli_usage(tool, "--buffer-mb is an option of --limits");
    if (args->model == NULL && !args->limits) return cli_usage(tool, "--model is missing; see --help");
    return CLI_OK;
}

static void print_help(int tool) {
    const char *purpose = tool == CLI_INFER ? "Continues a text with a Mixture-of-Experts language model."
                                            : "Measures prefill and decode speed of a model, with pseudo-random tokens.";
    printf("Usage: %s --model M %s[options]\n", tool_name(tool), tool == CLI_INFER ? "--prompt P " : "");
    if (tool == CLI_BENCH) printf("       %s --limits [--threads T] [--buffer-mb N] [--repeat R] [--json]\n", tool_name(tool));
    printf("%s\n\n", purpose);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const cli_option_t *o = &options[i];
        if (!(o->tools & tool)) continue;
        int width = printf("  %s%s%s", o->name, o->value_name ? " " : "", o->value_name ? o->value_name : "");
        printf("%*s%s\n", width < 30 ? 30 - width : 1, "", o->help);
    }
    printf("\nExit status: 0 done, 1 failed, 2 wrong usage.\n");
}

int cli_answer(int tool, const cli_args_t *args, int *status) {
    if (!args->help && !args->version) return 0;
    if (args->help) {
        print_help(tool);
    } else {
        printf("%s %s\n%s\n", tool_name(tool), colibri_version(), colibri_build_info());
    }
    *status = cli_flush(tool);
    return 1;
}

static void log_line(int level, const char *message, void *user_data) {
    const cli_args_t *args = user_data;
    int warning = level == COLIBRI_LOG_WARNING;
    if (warning || args->verbose) fprintf(stderr, "%s: %s\n", warning ? "warning" : "info", message);
}

enum { MOST_NAMES = 4 };
typedef const char *names_t[MOST_NAMES]; /* the rest NULL */
static const names_t kv_dtypes = {"f32", "f16", "q8"};
static const names_t residencies = {"map", "lock", "huge", "stream"};
static const names_t strategies = {"none", "soft_capacity", "hard_capacity"};

/* The place of an option's value among its names, from 0. CLI_USAGE after a line if it is none. No value: unchanged. */
static int choose(int tool, const char *option, const char *value, const names_t names, int32_t *choice) {
    char known[96] = "";
    if (value == NULL) return CLI_OK;
    for (int32_t i = 0; i < MOST_NAMES && names[i] != NULL; i++) {
        if (strcmp(value, names[i]) == 0) return *choice = i, CLI_OK;
        if (i) strcat(known, ", ");
        strcat(known, names[i]);
    }
    return cli_usage(tool, "%s is '%s'; known are %s", option, value, known);
}

int cli_config(int tool, const cli_args_t *args, colibri_model_t *model, colibri_config_t *config) {
    int32_t kv = -1, residency = COLIBRI_RESIDENCY_DEFAULT - COLIBRI_RESIDENCY_MAP;
    *config = (colibri_config_t)COLIBRI_CONFIG_INIT;
    config->model = model;
    config->num_threads = (int32_t)args->threads;
    config->top_k = (int32_t)args->top_k;
    config->activation_bits = (int32_t)args->activation_bits;
    config->max_chunk_tokens = (int32_t)args->max_chunk_tokens;
    config->cpu_affinity = args->affinity;
    config->expert_cache_size = args->expert_cache_size;
    config->hugepage_size = args->hugepage_size;
    config->numa_policy = args->numa_policy;
    config->capacity_factor = (float)args->capacity_factor;
    config->expert_profile = args->expert_profile;
    config->guard_mapping = args->guard_mapping;
    config->log = log_line;
    config->log_user_data = (void *)args;
    if (args->isa != NULL) config->isa = colibri_isa_from_name(args->isa);
    if (config->isa < 0) return cli_usage(tool, "--isa is '%s'; known are ref, avx2, avx512, amx, neon", args->isa);
    int status = choose(tool, "--kv-dtype", args->kv_dtype, kv_dtypes, &kv);
    if (status == CLI_OK) status = choose(tool, "--residency", args->residency, residencies, &residency);
    if (status == CLI_OK)
        status = choose(tool, "--load-balancing-strategy", args->load_balancing, strategies, &config->load_balancing_strategy);
    config->kv_dtype = kv < 0 ? 0 : kv == 0 ? COLIBRI_DTYPE_F32 : kv == 1 ? COLIBRI_DTYPE_F16 : COLIBRI_DTYPE_Q8;
    config->residency = residency + COLIBRI_RESIDENCY_MAP;
    return status;
}

/* ---- Files ---------------------------------------------------------------------------------------------------------- */

/* fopen and rename take UTF-8 everywhere but on Windows, and rename replaces files everywhere but there. */
#ifdef _WIN32
static wchar_t *wide_path(const char *path) {
    int n = MultiByteToWideChar(CP_UTF8, 0, path, -1, NULL, 0);
    wchar_t *wide = n > 0 ? malloc((size_t)n * sizeof *wide) : NULL;
    if (wide != NULL) MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, n);
    return wide;
}

static FILE *open_file(const char *path) {
    wchar_t *wide = wide_path(path);
    FILE *file = wide != NULL ? _wfopen(wide, L"wb") : NULL;
    free(wide);
    return file;
}

static int replace_file(const char *from, const char *to) {
    wchar_t *wide_from = wide_path(from), *wide_to = wide_path(to);
    int moved = wide_from != NULL && wide_to != NULL && MoveFileExW(wide_from, wide_to, MOVEFILE_REPLACE_EXISTING);
    free(wide_from);
    free(wide_to);
    if (!moved) errno = EACCES;
    return moved;
}

static void remove_file(const char *path) {
    wchar_t *wide = wide_path(path);
    if (wide != NULL) _wremove(wide);
    free(wide);
}

static int is_special(const char *path) { return (void)path, 0; }
#else
static FILE *open_file(const char *path) { return fopen(path, "wb"); }
static int replace_file(const char *from, const char *to) { return rename(from, to) == 0; }
static void remove_file(const char *path) { remove(path); }

/* A link, a device, a pipe: nothing to put a new file in place of. */
static int is_special(const char *path) {
    struct stat about;
    return lstat(path, &about) == 0 && !S_ISREG(about.st_mode);
}
#endif

int cli_write_file(int tool, const char *path, const char *bytes, size_t size) {
    size_t room = strlen(path) + 32;
    int special = is_special(path);
    char *beside = malloc(room);
    if (beside == NULL) return cli_fail(tool, "no memory to write %s", path);
    if (special) memcpy(beside, path, room - 31);
    else snprintf(beside, room, "%s.%ld.tmp", path, (long)getpid());
    FILE *file = open_file(beside);
    int good = file != NULL && fwrite(bytes, 1, size, file) == size;
    if (file != NULL) good = fclose(file) == 0 && good; /* its own failure counts: the last bytes are written here */
    if (good && !special) good = replace_file(beside, path);
    int status = good ? CLI_OK : cli_fail(tool, "cannot write %s: %s", path, strerror(errno));
    if (!good && !special && file != NULL) remove_file(beside);
    free(beside);
    return status;
}

/* ---- Reports -------------------------------------------------------------------------------------------------------- */

const char *cli_residency_name(int32_t residency) {
    int32_t i = residency - COLIBRI_RESIDENCY_MAP;
    return i >= 0 && i < COLIBRI_RESIDENCY_COUNT_ - 1 ? residencies[i] : "?";
}

const char *cli_place_name(int32_t place) {
    static const char *const names[] = {"disk", "mapped", "locked", "memory", "cached", "pinned"};
    return place >= 0 && place <= COLIBRI_PLACE_PINNED ? names[place] : "?";
}

static void print_cache(FILE *to, const colibri_stats_t *s) {
    const double mb = 1e-6;
    fprintf(to, "cache: %llu experts, %llu pinned; %llu hits, %llu misses, hit rate %.1f %%; %llu hits ahead\n",
            (unsigned long long)s->cache_experts, (unsigned long long)s->cache_pinned, (unsigned long long)s->cache_hits,
            (unsigned long long)s->cache_misses, cli_percent(s->cache_hits, s->cache_hits + s->cache_misses),
            (unsigned long long)s->cache_hits_ahead);
    fprintf(to, "look-ahead: %.1f %% of %llu expected experts were chosen; the same as for the last token: %.1f %%\n",
            cli_percent(s->ahead_correct, s->ahead_predicted), (unsigned long long)s->ahead_predicted,
            cli_percent(s->repeat_correct, s->ahead_predicted));
    fprintf(to, "read: %.1f MB, of it %.1f MB ahead; threads waited %.3f ms\n", mb * (double)s->read_bytes,
            mb * (double)s->read_bytes_ahead, 1e-6 * (double)s->read_wait_ns);
}

void cli_print_residency(FILE *to, const colibri_stats_t *s) {
    const double mb = 1e-6;
    fprintf(to, "residency: %s", cli_residency_name(s->residency));
    if (s->hugepage_size)
        fprintf(to, ", %.1f MB on %s pages of %llu MiB", mb * (double)s->hugepage_bytes,
                s->hugepage_pool ? "reserved huge" : "transparent huge", (unsigned long long)(s->hugepage_size >> 20));
    else
        fprintf(to, ", ordinary pages");
    if (s->direct_io) fprintf(to, ", reads bypass the page cache");
    if (s->memory_short) fprintf(to, ", the model is larger than memory");
    if (s->guarded) fprintf(to, ", guarded");
    if (s->numa_nodes > 0) fprintf(to, ", memory nodes: %d", s->numa_nodes);
    fputc('\n', to);
    if (s->cache_experts) print_cache(to, s);
    if (s->capacity_moved || s->capacity_dropped)
        fprintf(to, "capacity: %llu token-expert pairs moved, %llu dropped\n", (unsigned long long)s->capacity_moved,
                (unsigned long long)s->capacity_dropped);
}

/* ---- Clock ---------------------------------------------------------------------------------------------------------- */

double cli_seconds(void) {
#ifdef _WIN32
    LARGE_INTEGER now, frequency;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return (double)now.QuadPart / (double)frequency.QuadPart;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
}

double cli_rate(double amount, double seconds) {
    return seconds > 0 ? amount / seconds : 0;
}

double cli_percent(uint64_t part, uint64_t whole) {
    return whole ? 100 * (double)part / (double)whole : 0;
}
