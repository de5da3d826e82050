/* firmware.c: the library without an operating system. A program for QEMU's board "virt" (one 64-bit ARM core, RAM, a UART, a
 * timer), made of a bare libcolibri.a (-Dthreads=false -Dfile_io=false), start.S and libc.c, and of nothing else: no kernel, no
 * system's C library, no thread-local storage. It continues a prompt with a model that lies in memory, as in flash, and
 * prints the text and a sum over all logits' bytes, which tests/python/test_firmware.py compares with what the same model
 * gives on the machine that runs the tests.
 *
 *     zig build firmware
 *     model=python/colibri/demo/demo.colibri
 *     qemu-system-aarch64 -M virt -cpu cortex-a53 -m 128M -nodefaults -display none -serial stdio \
 *         -kernel zig-out/tests/firmware.elf -device loader,file=$model,addr=0x44000000,force-raw=on \
 *         -semihosting-config enable=on,target=native,arg=firmware,arg=size=$(wc -c <$model)
 *
 * More arguments (each arg=...): tokens=32, isa=ref, fault=svc|undefined|null|deep (do what must be noticed), and last
 * prompt=Once upon a time. A larger model wants a larger -m, up to 3G. The exit status is 0, 1 (the library or the program says
 * no, in one sentence), or 2 (an exception: a system call, an instruction that this processor does not have, a bad address; 3:
 * another one while that is told).
 *
 * RAM with the demo model (7,892,096 bytes, left where it lies, as in flash), at most: program 400 KB (code and constants, and
 * 6 of variables), workspace 950 KB, heap 20 KB, stack 32 KB. Access that is not aligned must be
 * allowed: compilers take it for granted on this processor. */
#include "colibri.h"

#include "libc.h"

enum { EXIT_DONE = 0, EXIT_REFUSED = 1, EXIT_EXCEPTION = 2 };

#define MOST_TOKENS 1024

/* Addresses that link.ld chose. */
extern uint8_t image_begin[], image_end[], stack_begin[], stack_end[], arena_begin[], arena_end[], model_at[];

/* start.S */
uint64_t firmware_semihosting(uint64_t operation, const void *argument);
void firmware_system_call(void);
void firmware_undefined(void);
void firmware_null(void);
void firmware_deep(void);

static char command_line[1024];

/* ---- The board ----------------------------------------------------------------------------------------------------------- */

static void write_text(const char *text, size_t n) {
    volatile uint32_t *uart = (volatile uint32_t *)0x09000000; /* PL011 */
    for (size_t i = 0; i < n; i++) {
        while (uart[0x18 / 4] & 1u << 5) {} /* the queue is full */
        uart[0] = (uint8_t)text[i];
    }
}

__attribute__((format(printf, 1, 2))) static void print(const char *format, ...) {
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    write_text(text, strlen(text));
}

_Noreturn static void leave(uint64_t code) {
    uint64_t reason[2] = {0x20026, code}; /* ADP_Stopped_ApplicationExit */
    firmware_semihosting(0x20, reason);   /* SYS_EXIT_EXTENDED */
    for (;;) {}
}

static void read_command_line(void) {
    struct {
        char *text;
        uint64_t capacity;
    } line = {command_line, sizeof command_line};
    if (firmware_semihosting(0x15, &line) != 0) command_line[0] = '\0'; /* SYS_GET_CMDLINE */
}

/* What stands behind "name=" at the beginning of a word; NULL: nowhere. */
static const char *option(const char *name) {
    size_t n = strlen(name);
    for (const char *at = command_line; *at; at++) {
        size_t same = 0;
        while (same < n && at[same] == name[same]) same++;
        if (same == n && at[n] == '=' && (at == command_line || at[-1] == ' ')) return at + n + 1;
    }
    return NULL;
}

static uint64_t option_number(const char *name, uint64_t otherwise) {
    const char *at = option(name);
    if (!at) return otherwise;
    uint64_t value = 0;
    for (; *at >= '0' && *at <= '9'; at++) value = value * 10 + (uint64_t)(*at - '0');
    return value;
}

void firmware_trap(uint64_t vector, uint64_t esr, uint64_t elr, uint64_t far) {
    unsigned class = (unsigned)(esr >> 26 & 63);
    const char *what = class == 0x15   ? "a system call"
                       : class == 0    ? "an unknown instruction"
                       : class == 0x25 ? "access to a bad address"
                                       : "unexpected";
    print("\nexception: %s (vector %u, ESR %llx, ELR %llx, FAR %llx)\n", what, (unsigned)vector, (unsigned long long)esr,
          (unsigned long long)elr, (unsigned long long)far);
    leave(EXIT_EXCEPTION);
}

static void fault_if_asked(void) {
    const char *fault = option("fault");
    if (!fault) return;
    if (*fault == 's') firmware_system_call();
    if (*fault == 'u') firmware_undefined();
    if (*fault == 'n') firmware_null();
    if (*fault == 'd') firmware_deep();
    print("fault=%s did not fault\n", fault);
    leave(EXIT_REFUSED);
}

/* ---- The program --------------------------------------------------------------------------------------------------------- */

static void must(colibri_status_t status) {
    if (status == COLIBRI_OK) return;
    print("%s: %s\n", colibri_status_name(status), colibri_last_error());
    leave(EXIT_REFUSED);
}

/* The heap begins where the program ends; the workspace is taken from the arena's other end. Neither is zeros. */
static colibri_t *begin(int32_t most_tokens) {
    colibri_config_t config = COLIBRI_CONFIG_INIT;
    config.model_data = model_at;
    config.model_size = option_number("size", 0);
    config.max_seq_len = most_tokens;
    config.max_chunk_tokens = 16;
    if (option("isa") && *option("isa") == 'r') config.isa = COLIBRI_ISA_REF;
    size_t arena = (size_t)(arena_end - arena_begin);
    memset(arena_begin, 0xa5, arena);
    heap_init(arena_begin, arena / 2);
    must(colibri_workspace_size(&config, &config.workspace_size));
    if (config.workspace_size > arena / 2) {
        print("the workspace needs %zu bytes, there are %zu\n", config.workspace_size, arena / 2);
        leave(EXIT_REFUSED);
    }
    config.workspace = arena_end - (config.workspace_size + 63) / 64 * 64;
    colibri_t *ctx = colibri_init(&config);
    if (!ctx) must(colibri_last_status());
    must(colibri_model_verify(colibri_model(ctx)));
    return ctx;
}

static bool ends(const colibri_model_info_t *info, int32_t token) {
    for (int32_t i = 0; i < info->num_eos; i++)
        if (info->eos_token[i] == token) return true;
    return false;
}

/* FNV-1a, 64 bits */
static uint64_t add_to_sum(uint64_t sum, const void *data, size_t bytes) {
    const uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ at[i]) * 0x100000001b3u;
    return sum;
}

static void print_token(const colibri_model_t *model, colibri_stream_t *stream, int32_t token) {
    char text[256];
    size_t bytes = 0;
    must(colibri_stream_token(model, stream, token, text, sizeof text, &bytes));
    write_text(text, bytes);
}

/* Greedily, up to `most` new tokens. Prints the text between two lines of dashes, then the sum of the logits. */
static void generate(colibri_t *ctx, const colibri_model_info_t *info, const int32_t *prompt, int32_t length, int32_t most) {
    const colibri_model_t *model = colibri_model(ctx);
    colibri_stream_t stream = COLIBRI_STREAM_INIT;
    uint64_t sum = 0xcbf29ce484222325u;
    size_t bytes = (size_t)info->vocab_size * sizeof(float);
    float *logits = (float *)(((uintptr_t)malloc(bytes + 64) + 63) / 64 * 64);
    int32_t steps = 0, token = 0;
    print("----\n");
    for (int32_t n = length; steps < most; n = 1, prompt = &token) {
        must(colibri_set_input(ctx, prompt, &n, 1));
        must(colibri_infer(ctx));
        must(colibri_get_output(ctx, logits, bytes));
        must(colibri_sample(ctx, 0, NULL, &token));
        sum = add_to_sum(sum, logits, bytes), steps++;
        if (ends(info, token)) break;
        print_token(model, &stream, token);
    }
    print_token(model, &stream, -1);
    print("\n----\nlogits: %d x %d, FNV-1a %016llx\n", steps, info->vocab_size, (unsigned long long)sum);
}

static void print_figures(const colibri_t *ctx, const colibri_model_info_t *info) {
    colibri_stats_t stats = COLIBRI_STATS_INIT;
    must(colibri_stats(ctx, &stats));
    const uint64_t *deepest = (const uint64_t *)stack_begin;
    while ((const uint8_t *)deepest < stack_end && *deepest == 0) deepest++;
    print("kernels: %s, %s\n", colibri_isa_name((colibri_isa_t)stats.isa), colibri_cpu_info());
    print("time: %llu ns in infer\n", (unsigned long long)stats.infer_ns);
    print("memory: program %zu, workspace %llu, heap %zu, stack %zu, model %llu\n", (size_t)(image_end - image_begin),
          (unsigned long long)stats.workspace_bytes, heap_peak(), (size_t)(stack_end - (const uint8_t *)deepest),
          (unsigned long long)info->file_size);
}

_Noreturn void firmware_main(void) {
    static int32_t ids[MOST_TOKENS];
    colibri_model_info_t info = COLIBRI_MODEL_INFO_INIT;
    size_t length = 0;
    read_command_line();
    print("%s\n", colibri_build_info());
    fault_if_asked();
    int32_t most = (int32_t)option_number("tokens", 32);
    colibri_t *ctx = begin(most + 64);
    const colibri_model_t *model = colibri_model(ctx);
    const char *prompt = option("prompt") ? option("prompt") : "Once upon a time";
    must(colibri_model_info(model, &info));
    must(colibri_tokenize(model, prompt, strlen(prompt), COLIBRI_TOKENIZE_ADD_SPECIAL, ids, MOST_TOKENS, &length));
    generate(ctx, &info, ids, (int32_t)length, most);
    print_figures(ctx, &info);
    colibri_free(ctx);
    leave(EXIT_DONE);
}
