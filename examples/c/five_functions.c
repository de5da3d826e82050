/* five_functions.c: continues a prompt, greedily, with the five functions that a host cannot do without (init, set_input,
 * infer, get_output, free), and the tokenizer around them.
 *
 *     cc five_functions.c $(pkg-config --cflags --libs colibri) -o five_functions
 *     ./five_functions model.colibri "Once upon a time" [tokens]
 */
#include <colibri.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PROMPT 4096

static int failed(const char *what) {
    fprintf(stderr, "five_functions: %s: %s (%s)\n", what, colibri_last_error(), colibri_status_name(colibri_last_status()));
    return EXIT_FAILURE;
}

/* The index of the largest logit, the lowest one of equals. */
static int32_t most_likely(const float *logits, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static int is_end(const colibri_model_info_t *info, int32_t token) {
    for (int32_t i = 0; i < info->num_eos; i++)
        if (info->eos_token[i] == token) return 1;
    return 0;
}

static int print_token(const colibri_model_t *model, colibri_stream_t *stream, int32_t token) {
    char text[256];
    size_t bytes;
    if (colibri_stream_token(model, stream, token, text, sizeof text, &bytes)) return failed("stream_token");
    fwrite(text, 1, bytes, stdout);
    fflush(stdout);
    return EXIT_SUCCESS;
}

/* tokens[0 ... length - 1] is the prompt. logits [vocab_size] is aligned. */
static int generate(colibri_t *ctx, const colibri_model_info_t *info, int32_t *tokens, int32_t length, float *logits,
                    long most) {
    const colibri_model_t *model = colibri_model(ctx);
    colibri_stream_t stream = COLIBRI_STREAM_INIT;
    for (long i = 0; i < most; i++) {
        if (colibri_set_input(ctx, tokens, &length, 1)) return failed("set_input");
        if (colibri_infer(ctx)) return failed("infer");
        if (colibri_get_output(ctx, logits, (size_t)info->vocab_size * sizeof(float))) return failed("get_output");
        tokens[0] = most_likely(logits, info->vocab_size);
        length = 1; /* the slot remembers what came before */
        if (is_end(info, tokens[0])) break;
        if (print_token(model, &stream, tokens[0])) return EXIT_FAILURE;
    }
    return print_token(model, &stream, -1);
}

static int run(colibri_t *ctx, const char *prompt, long most) {
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    static int32_t tokens[MAX_PROMPT];
    size_t count;
    if (colibri_model_info(colibri_model(ctx), &info)) return failed("model_info");
    if (colibri_tokenize(colibri_model(ctx), prompt, strlen(prompt), COLIBRI_TOKENIZE_ADD_SPECIAL, tokens, MAX_PROMPT, &count))
        return failed("tokenize");
    unsigned char *memory = malloc((size_t)info.vocab_size * sizeof(float) + 63);
    if (!memory) {
        fprintf(stderr, "five_functions: no memory for logits\n");
        return EXIT_FAILURE;
    }
    float *logits = (float *)(memory + (64 - (uintptr_t)memory % 64) % 64); /* get_output wants 64-byte boundaries */
    fputs(prompt, stdout);
    int result = generate(ctx, &info, tokens, (int32_t)count, logits, most);
    putchar('\n');
    free(memory);
    return result;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: five_functions MODEL PROMPT [TOKENS]\n");
        return 2;
    }
    colibri_config_t config = COLIBRI_CONFIG_INIT;
    config.model_path = argv[1];
    colibri_t *ctx = colibri_init(&config);
    if (!ctx) return failed("init");
    int result = run(ctx, argv[2], argc > 3 ? strtol(argv[3], NULL, 10) : 60);
    colibri_free(ctx);
    return result;
}
