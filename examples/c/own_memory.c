/* own_memory.c: a session in the host's own memory: a static arena, as firmware and games have it. colibri_workspace_size says
 * how much a config needs; shorter sequences, smaller chunks and fewer threads need less. Tokens are chosen by colibri_sample,
 * and the text is made at the end, by colibri_detokenize.
 *
 *     cc own_memory.c $(pkg-config --cflags --libs colibri) -o own_memory
 *     ./own_memory model.colibri "Once upon a time" [tokens]
 */
#include <colibri.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES ((size_t)64 << 20)
#define MAX_TOKENS 512

static _Alignas(64) unsigned char arena[ARENA_BYTES];

static int failed(const char *what) {
    fprintf(stderr, "own_memory: %s: %s (%s)\n", what, colibri_last_error(), colibri_status_name(colibri_last_status()));
    return EXIT_FAILURE;
}

/* The longest sequences that fit the arena, halving from MAX_TOKENS. NULL: not even the shortest. */
static colibri_t *start(colibri_config_t *config) {
    size_t need = 0;
    for (config->max_seq_len = MAX_TOKENS; config->max_seq_len >= 64; config->max_seq_len /= 2) {
        if (colibri_workspace_size(config, &need)) return NULL;
        if (need <= sizeof arena) break;
    }
    config->workspace = arena;
    config->workspace_size = sizeof arena; /* COLIBRI_ERR_WORKSPACE if it does not fit after all */
    colibri_t *ctx = colibri_init(config);
    if (ctx) fprintf(stderr, "%zu of %zu bytes of the arena, %d tokens\n", need, sizeof arena, config->max_seq_len);
    return ctx;
}

static int is_end(const colibri_model_info_t *info, int32_t token) {
    for (int32_t i = 0; i < info->num_eos; i++)
        if (info->eos_token[i] == token) return 1;
    return 0;
}

/* tokens [MAX_TOKENS]: *count of them the prompt, then the continuation behind it too. */
static int generate(colibri_t *ctx, int32_t *tokens, size_t *count, size_t most) {
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    int32_t length = (int32_t)*count;
    if (colibri_model_info(colibri_model(ctx), &info)) return failed("model_info");
    for (size_t end = *count + most; *count < end && *count < MAX_TOKENS; length = 1) {
        int32_t next;
        if (colibri_set_input(ctx, tokens + *count - (size_t)length, &length, 1)) return failed("set_input");
        if (colibri_infer(ctx)) return failed("infer");
        if (colibri_sample(ctx, 0, NULL, &next)) return failed("sample");
        if (is_end(&info, next)) break;
        tokens[(*count)++] = next;
    }
    return EXIT_SUCCESS;
}

static int run(colibri_t *ctx, const char *prompt, size_t most) {
    static int32_t tokens[MAX_TOKENS];
    static char text[64 * MAX_TOKENS];
    size_t count, given, bytes;
    if (colibri_tokenize(colibri_model(ctx), prompt, strlen(prompt), COLIBRI_TOKENIZE_ADD_SPECIAL, tokens, MAX_TOKENS, &count))
        return failed("tokenize");
    given = count;
    if (generate(ctx, tokens, &count, most)) return EXIT_FAILURE;
    if (colibri_detokenize(colibri_model(ctx), tokens + given, count - given, 0, text, sizeof text, &bytes))
        return failed("detokenize");
    printf("%s%.*s\n", prompt, (int)bytes, text);
    return EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: own_memory MODEL PROMPT [TOKENS]\n");
        return 2;
    }
    colibri_config_t config = COLIBRI_CONFIG_INIT;
    config.model_path = argv[1];
    config.num_threads = 2;
    config.max_chunk_tokens = 32; /* prompts go through in pieces of 32: less scratch */
    colibri_t *ctx = start(&config);
    if (!ctx) return failed("init");
    int result = run(ctx, argv[2], argc > 3 ? strtoul(argv[3], NULL, 10) : 60);
    colibri_free(ctx); /* the arena is the host's again */
    return result;
}
