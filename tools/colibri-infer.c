/* colibri-infer.c: text from a .colibri file in one executable, through the public header alone.
 *
 * Flow: arguments -> model -> prompt's tokens -> session -> prefill of all slots -> one token per live slot and round, until
 * each slot has its end token or --max-tokens. With one slot the text goes out as it comes, in whole characters; with more,
 * each slot's text is kept and they are printed one after another at the end.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli_common.h"

typedef struct text_t {
    char *bytes;
    size_t size, capacity;
} text_t;

typedef struct slot_t {
    colibri_stream_t stream;
    text_t text;       /* with several slots: what it wrote */
    int32_t next;      /* the token to run in the next round */
    int32_t made;      /* new tokens, without the end token */
    int live;
} slot_t;

typedef struct run_t {
    const cli_args_t *args;
    colibri_model_t *model;
    colibri_model_info_t info;
    colibri_t *session;
    int32_t *prompt; /* [prompt_count] */
    size_t prompt_count;
    slot_t *slots;    /* [num_slots] */
    int32_t *batch;   /* [num_slots * prompt_count]: packed tokens of one call */
    int32_t *lengths; /* [num_slots] */
    int32_t num_slots;
    int64_t max_tokens; /* new ones for each slot */
    text_t piece; /* of one token */
    double prompt_seconds, decode_seconds;
} run_t;

/* ---- Text ----------------------------------------------------------------------------------------------------------- */

/* Room for `more` bytes after what is there. */
static int text_reserve(text_t *text, size_t more) {
    if (text->capacity - text->size >= more) return CLI_OK;
    size_t capacity = text->size + more + text->capacity / 2 + 64;
    char *bytes = capacity > more ? realloc(text->bytes, capacity) : NULL;
    if (bytes == NULL) return cli_fail(CLI_INFER, "no memory for %zu bytes of text", capacity);
    text->bytes = bytes;
    text->capacity = capacity;
    return CLI_OK;
}

static int text_append(text_t *text, const char *bytes, size_t size) {
    int status = text_reserve(text, size);
    if (status != CLI_OK) return status;
    if (size) memcpy(text->bytes + text->size, bytes, size);
    text->size += size;
    return CLI_OK;
}

static int read_stream(FILE *file, const char *name, text_t *text) {
    for (;;) {
        int status = text_reserve(text, 65536);
        if (status != CLI_OK) return status;
        size_t got = fread(text->bytes + text->size, 1, 65536, file);
        text->size += got;
        if (ferror(file)) return cli_fail(CLI_INFER, "cannot read %s: %s", name, strerror(errno));
        if (got == 0) return CLI_OK;
    }
}

static int read_prompt(const cli_args_t *args, text_t *text) {
    if (args->prompt != NULL && args->prompt_file != NULL)
        return cli_usage(CLI_INFER, "give either --prompt or --prompt-file, not both");
    if (args->prompt != NULL) return text_append(text, args->prompt, strlen(args->prompt));
    if (args->prompt_file == NULL) return cli_usage(CLI_INFER, "--prompt is missing; see --help");
    if (strcmp(args->prompt_file, "-") == 0) return read_stream(stdin, "stdin", text);
    FILE *file = fopen(args->prompt_file, "rb");
    if (file == NULL) return cli_fail(CLI_INFER, "cannot open %s: %s", args->prompt_file, strerror(errno));
    int status = read_stream(file, args->prompt_file, text);
    fclose(file);
    return status;
}

static int tokenize_prompt(run_t *run, const text_t *text) {
    const uint32_t flags = COLIBRI_TOKENIZE_ADD_SPECIAL | COLIBRI_TOKENIZE_PARSE_SPECIAL;
    const char *bytes = text->size ? text->bytes : "";
    size_t capacity = text->size + 16;
    for (;;) {
        run->prompt = capacity <= SIZE_MAX / sizeof(int32_t) ? malloc(capacity * sizeof(int32_t)) : NULL;
        if (run->prompt == NULL) return cli_fail(CLI_INFER, "no memory for the %zu tokens of the prompt", capacity);
        colibri_status_t status =
            colibri_tokenize(run->model, bytes, text->size, flags, run->prompt, capacity, &run->prompt_count);
        if (status == COLIBRI_OK) break;
        if (status != COLIBRI_ERR_BUFFER_TOO_SMALL || run->prompt_count <= capacity) return cli_library_error(CLI_INFER);
        free(run->prompt);
        capacity = run->prompt_count;
    }
    if (run->prompt_count == 0) return cli_fail(CLI_INFER, "the prompt is empty: it gives no token");
    return CLI_OK;
}

/* ---- Setting up ----------------------------------------------------------------------------------------------------- */

/* Decide how many tokens are made and how many a slot must hold: the last new one need not enter the cache. */
static int slot_room(run_t *run, int32_t *room) {
    const cli_args_t *args = run->args;
    if (run->prompt_count > INT32_MAX / 2) return cli_fail(CLI_INFER, "a prompt of %zu tokens is too long", run->prompt_count);
    int64_t prompt = (int64_t)run->prompt_count, left = args->max_seq_len - prompt + 1; /* of --max-seq-len */
    run->max_tokens = args->max_tokens ? args->max_tokens : 128;
    if (!args->max_tokens && args->max_seq_len && left > 0 && left < run->max_tokens) run->max_tokens = left;
    int64_t need = prompt + run->max_tokens - 1;
    if (need > INT32_MAX) return cli_fail(CLI_INFER, "%lld tokens are more than a slot can hold", (long long)need);
    if (args->max_seq_len && need > args->max_seq_len)
        return cli_fail(CLI_INFER, "%lld tokens of the prompt and %lld new ones need --max-seq-len %lld or more",
                        (long long)prompt, (long long)run->max_tokens, (long long)need);
    *room = (int32_t)(args->max_seq_len ? args->max_seq_len : need);
    return CLI_OK;
}

static int open_session(run_t *run) {
    colibri_config_t config;
    int status = cli_config(CLI_INFER, run->args, run->model, &config);
    if (status == CLI_OK) status = slot_room(run, &config.max_seq_len);
    if (status != CLI_OK) return status;
    config.max_batch_size = run->num_slots;
    run->session = colibri_init(&config);
    return run->session != NULL ? CLI_OK : cli_library_error(CLI_INFER);
}

static int make_slots(run_t *run) {
    size_t slots = (size_t)run->num_slots; /* <= 4096 */
    run->slots = calloc(slots, sizeof *run->slots);
    run->lengths = calloc(slots, sizeof *run->lengths);
    if (run->prompt_count <= SIZE_MAX / sizeof(int32_t) / slots)
        run->batch = malloc(slots * run->prompt_count * sizeof(int32_t));
    if (run->slots == NULL || run->lengths == NULL || run->batch == NULL)
        return cli_fail(CLI_INFER, "no memory for %d slots", run->num_slots);
    for (size_t i = 0; i < slots; i++) {
        run->slots[i].stream = (colibri_stream_t)COLIBRI_STREAM_INIT;
        run->slots[i].live = 1;
    }
    return CLI_OK;
}

/* ---- Running -------------------------------------------------------------------------------------------------------- */

/* Run what is in batch and lengths. */
static int infer(run_t *run) {
    if (colibri_set_input(run->session, run->batch, run->lengths, run->num_slots) != COLIBRI_OK ||
        colibri_infer(run->session) != COLIBRI_OK)
        return cli_library_error(CLI_INFER);
    return CLI_OK;
}

static int prefill(run_t *run) {
    double begin = cli_seconds();
    for (int32_t i = 0; i < run->num_slots; i++) {
        memcpy(run->batch + (size_t)i * run->prompt_count, run->prompt, run->prompt_count * sizeof(int32_t));
        run->lengths[i] = (int32_t)run->prompt_count;
    }
    int status = infer(run);
    run->prompt_seconds = cli_seconds() - begin;
    return status;
}

/* The characters that a token of a slot completes (-1: those that waited): to stdout, or kept if there are several slots. */
static int emit(run_t *run, slot_t *slot, int32_t token) {
    size_t size = 0;
    int status = text_reserve(&run->piece, 64);
    while (status == CLI_OK) {
        colibri_status_t result =
            colibri_stream_token(run->model, &slot->stream, token, run->piece.bytes, run->piece.capacity, &size);
        if (result == COLIBRI_OK) break;
        if (result != COLIBRI_ERR_BUFFER_TOO_SMALL || size <= run->piece.capacity) return cli_library_error(CLI_INFER);
        status = text_reserve(&run->piece, size);
    }
    if (status != CLI_OK || size == 0) return status;
    if (run->num_slots > 1) return text_append(&slot->text, run->piece.bytes, size);
    fwrite(run->piece.bytes, 1, size, stdout);
    return cli_flush(CLI_INFER);
}

static int is_end(const run_t *run, int32_t token) {
    for (int32_t i = 0; i < run->info.num_eos; i++)
        if (run->info.eos_token[i] == token) return 1;
    return 0;
}

/* Choose a live slot's next token and write it; the slot dies at its end token or when it has made enough. */
static int advance(run_t *run, int32_t index) {
    const cli_args_t *args = run->args;
    slot_t *slot = &run->slots[index];
    colibri_sampling_t sampling = COLIBRI_SAMPLING_INIT;
    sampling.temperature = (float)args->temperature;
    sampling.top_k = (int32_t)args->sample_top_k;
    sampling.top_p = (float)args->top_p;
    sampling.min_p = (float)args->min_p;
    sampling.repetition_penalty = (float)args->repetition_penalty;
    sampling.seed = args->seed + (uint64_t)index;
    if (colibri_sample(run->session, index, &sampling, &slot->next) != COLIBRI_OK) return cli_library_error(CLI_INFER);
    int ended = is_end(run, slot->next);
    int status = CLI_OK;
    if (!ended) {
        slot->made++;
        status = emit(run, slot, slot->next);
    }
    if (ended || slot->made >= run->max_tokens) {
        slot->live = 0;
        if (status == CLI_OK) status = emit(run, slot, -1);
    }
    return status;
}

/* One token for every live slot. *live: how many are left. */
static int round_of_slots(run_t *run, int32_t *live) {
    int status = CLI_OK;
    int32_t packed = 0;
    for (int32_t i = 0; i < run->num_slots && status == CLI_OK; i++) {
        slot_t *slot = &run->slots[i];
        if (slot->live) status = advance(run, i);
        run->lengths[i] = slot->live;
        if (slot->live) run->batch[packed++] = slot->next;
    }
    *live = packed;
    return status;
}

static int generate(run_t *run) {
    double begin = cli_seconds();
    int32_t live = 0;
    int status = round_of_slots(run, &live);
    while (status == CLI_OK && live > 0) {
        status = infer(run);
        if (status == CLI_OK) status = round_of_slots(run, &live);
    }
    run->decode_seconds = cli_seconds() - begin;
    return status;
}

/* ---- Reports -------------------------------------------------------------------------------------------------------- */

static int print_texts(const run_t *run) {
    for (int32_t i = 0; i < run->num_slots; i++) {
        const slot_t *slot = &run->slots[i];
        if (run->num_slots > 1) {
            printf("%s--- slot %d, seed %llu ---\n", i ? "\n" : "", i, (unsigned long long)(run->args->seed + (uint64_t)i));
            if (slot->text.size) fwrite(slot->text.bytes, 1, slot->text.size, stdout);
        }
        putchar('\n');
    }
    return cli_flush(CLI_INFER);
}

static void report_speed(const run_t *run) {
    size_t prompt = run->prompt_count * (size_t)run->num_slots, made = 0;
    for (int32_t i = 0; i < run->num_slots; i++) made += (size_t)run->slots[i].made;
    fprintf(stderr, "prompt: %zu tokens, %.1f tokens/s; generation: %zu tokens, %.1f tokens/s\n", prompt,
            cli_rate((double)prompt, run->prompt_seconds), made, cli_rate((double)made, run->decode_seconds));
}

static void report_layer(const run_t *run, int32_t layer, colibri_expert_stats_t *rows) {
    const double ms = 1e-6, mb = 1e-6;
    if (colibri_expert_stats(run->session, layer, rows, (size_t)run->info.num_experts) != COLIBRI_OK) return; /* dense */
    for (int32_t e = 0; e < run->info.num_experts; e++) {
        const colibri_expert_stats_t *row = &rows[e];
        fprintf(stderr, "%5d %6d %9llu %8llu %8llu %9.3f %10.3f %11.3f %10.3f  %s", layer, e, (unsigned long long)row->tokens,
                (unsigned long long)row->hits, (unsigned long long)row->misses, mb * (double)row->bytes_read,
                ms * (double)row->load_ns, ms * (double)row->compute_ns, ms * (double)row->merge_ns,
                cli_place_name(row->place));
        if (row->node >= 0) fprintf(stderr, ":%d", row->node);
        fputc('\n', stderr);
    }
}

static int report_verbose(const run_t *run) {
    const double ms = 1e-6;
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    if (colibri_stats(run->session, &stats) != COLIBRI_OK) return cli_library_error(CLI_INFER);
    fprintf(stderr, "%d threads, %s; workspace %.1f MB, of it %.1f MB KV cache; CPU: %s\n", stats.num_threads,
            colibri_isa_name((colibri_isa_t)stats.isa), 1e-6 * (double)stats.workspace_bytes,
            1e-6 * (double)stats.kv_bytes, colibri_cpu_info());
    cli_print_residency(stderr, &stats);
    fprintf(stderr, "ms: attention %.3f, router %.3f, experts %.3f, head %.3f, all %.3f\n", ms * (double)stats.attention_ns,
            ms * (double)stats.router_ns, ms * (double)stats.experts_ns, ms * (double)stats.head_ns,
            ms * (double)stats.infer_ns);
    if (run->info.num_experts <= 0) return CLI_OK;
    colibri_expert_stats_t *rows = calloc((size_t)run->info.num_experts, sizeof *rows);
    if (rows == NULL) return cli_fail(CLI_INFER, "no memory for the table of experts");
    fprintf(stderr, "layer expert    tokens     hits   misses   MB read    load ms  compute ms   merge ms  place%s\n",
            stats.numa_nodes > 0 ? ":node" : "");
    for (int32_t layer = 0; layer < run->info.num_layers; layer++) report_layer(run, layer, rows);
    free(rows);
    return CLI_OK;
}

static int write_metrics(const run_t *run) {
    char *text = NULL;
    size_t size = 0, capacity = 0;
    colibri_status_t status;
    while ((status = colibri_metrics(run->session, text, capacity, &size)) == COLIBRI_ERR_BUFFER_TOO_SMALL) {
        free(text); /* again, with some room: reads ahead may still add to the figures */
        capacity = size + 4096;
        text = malloc(capacity);
        if (text == NULL) return cli_fail(CLI_INFER, "no memory for %zu bytes of metrics", capacity);
    }
    int result = status != COLIBRI_OK ? cli_library_error(CLI_INFER)
                                      : cli_write_file(CLI_INFER, run->args->metrics, text, size);
    free(text);
    return result;
}

/* What --verbose, --metrics and --save-profile ask for. */
static int report(const run_t *run) {
    const cli_args_t *args = run->args;
    report_speed(run);
    int status = args->verbose ? report_verbose(run) : CLI_OK;
    /* One that fails does not take the other with it. */
    if (args->metrics != NULL && write_metrics(run) != CLI_OK) status = CLI_FAILED;
    if (args->save_profile != NULL && colibri_save_profile(run->session, args->save_profile) != COLIBRI_OK)
        status = cli_library_error(CLI_INFER);
    return status;
}

/* ---- The whole ------------------------------------------------------------------------------------------------------ */

static int run_all(run_t *run, text_t *prompt) {
    if (run->args->metrics != NULL && strcmp(run->args->metrics, "-") == 0)
        return cli_usage(CLI_INFER, "--metrics takes a file: the text goes to stdout");
    int status = read_prompt(run->args, prompt);
    if (status != CLI_OK) return status;
    if (colibri_model_open(run->args->model, &run->model) != COLIBRI_OK) return cli_library_error(CLI_INFER);
    if (colibri_model_info(run->model, &run->info) != COLIBRI_OK) return cli_library_error(CLI_INFER);
    status = tokenize_prompt(run, prompt);
    if (status == CLI_OK) status = open_session(run);
    if (status == CLI_OK) status = make_slots(run);
    if (status == CLI_OK) status = prefill(run);
    if (status == CLI_OK) status = generate(run);
    if (status == CLI_OK) status = print_texts(run);
    return status == CLI_OK ? report(run) : status;
}

static void release(run_t *run) {
    for (int32_t i = 0; run->slots != NULL && i < run->num_slots; i++) free(run->slots[i].text.bytes);
    free(run->slots);
    free(run->batch);
    free(run->lengths);
    free(run->prompt);
    free(run->piece.bytes);
    colibri_free(run->session);
    colibri_model_close(run->model);
}

int main(int argc, char **argv) {
    cli_args_t args;
    int status = cli_parse(CLI_INFER, argc, argv, &args);
    if (status != CLI_OK || cli_answer(CLI_INFER, &args, &status)) return status;
    run_t run = {.args = &args, .info = COLIBRI_MODEL_INFO_INIT, .num_slots = (int32_t)args.max_batch_size};
    text_t prompt = {0};
    status = run_all(&run, &prompt);
    release(&run);
    free(prompt.bytes);
    return status;
}
