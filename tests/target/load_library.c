/* load_library.c: a host that knows nothing but a shared library's file, for machines where no Python is at hand.
 *
 *     load_library LIBRARY                 loads it and prints its version
 *     load_library LIBRARY MODEL PROMPT    also the ids of the prompt and of eight tokens more, chosen greedily
 *
 * tests/python/test_wheels.py takes the library out of a wheel and compares the line with what Python says here. */
#include <colibri.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { PROMPT_MAX = 64, MORE = 8 };

static void *library;

/* The function's address as a pointer to what the header declares under this name. */
#define CALL(name) ((__typeof__(&name))find(#name))

static void *find(const char *name)
{
    static char missing[1];
    void *address = dlsym(library, name);
    if (!address) fprintf(stderr, "%s is not in the library\n", name);
    return address ? address : missing; /* calling it ends the program, as it should */
}

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, CALL(colibri_last_error)());
    return 1;
}

static int generate(colibri_t *session, const char *prompt)
{
    int32_t tokens[PROMPT_MAX], length;
    size_t count = 0;
    colibri_sampling_t greedy = COLIBRI_SAMPLING_INIT;
    const colibri_model_t *model = CALL(colibri_model)(session);
    if (CALL(colibri_tokenize)(model, prompt, strlen(prompt), COLIBRI_TOKENIZE_ADD_SPECIAL, tokens, PROMPT_MAX, &count)) {
        return failed("colibri_tokenize");
    }
    for (size_t i = 0; i < count; i++) printf(" %d", (int)tokens[i]);
    length = (int32_t)count;
    for (int i = 0; i < MORE; i++) {
        if (CALL(colibri_set_input)(session, tokens, &length, 1)) return failed("colibri_set_input");
        if (CALL(colibri_infer)(session)) return failed("colibri_infer");
        if (CALL(colibri_sample)(session, 0, &greedy, &tokens[0])) return failed("colibri_sample");
        printf(" %d", (int)tokens[0]);
        length = 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    colibri_config_t config = COLIBRI_CONFIG_INIT;
    if (argc != 2 && argc != 4) return fprintf(stderr, "load_library LIBRARY [MODEL PROMPT]\n"), 2;
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    printf("%s", CALL(colibri_version)());
    int status = 0;
    if (argc == 4) {
        config.model_path = argv[2];
        config.max_seq_len = 128;
        config.num_threads = 2;
        colibri_t *session = CALL(colibri_init)(&config);
        if (!session) return failed("colibri_init");
        status = generate(session, argv[3]);
        CALL(colibri_free)(session);
    }
    printf("\n");
    if (dlclose(library)) status = 1;
    return status;
}
