/* cli_common.c: options, errors and clock of the command-line tools; see cli_common.h. */
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
#    include <windows.h>
#endif

typedef enum { OPT_FLAG, OPT_TEXT, OPT_INT, OPT_UINT64, OPT_REAL } cli_kind_t;

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
        printf("%*s%s\n", width < 27 ? 27 - width : 1, "", o->help);
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

static int32_t kv_dtype_of(const char *name) {
    if (strcmp(name, "f32") == 0) return COLIBRI_DTYPE_F32;
    if (strcmp(name, "f16") == 0) return COLIBRI_DTYPE_F16;
    return strcmp(name, "q8") == 0 ? COLIBRI_DTYPE_Q8 : 0;
}

int cli_config(int tool, const cli_args_t *args, colibri_model_t *model, colibri_config_t *config) {
    *config = (colibri_config_t)COLIBRI_CONFIG_INIT;
    config->model = model;
    config->num_threads = (int32_t)args->threads;
    config->top_k = (int32_t)args->top_k;
    config->activation_bits = (int32_t)args->activation_bits;
    config->max_chunk_tokens = (int32_t)args->max_chunk_tokens;
    config->cpu_affinity = args->affinity;
    if (args->isa != NULL) config->isa = colibri_isa_from_name(args->isa);
    if (config->isa < 0) return cli_usage(tool, "--isa is '%s'; known are ref, avx2, avx512, amx, neon", args->isa);
    if (args->kv_dtype == NULL) return CLI_OK;
    config->kv_dtype = kv_dtype_of(args->kv_dtype);
    if (config->kv_dtype > 0) return CLI_OK;
    return cli_usage(tool, "--kv-dtype is '%s'; known are f32, f16, q8", args->kv_dtype);
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
