/* test_metrics.c: colibri_metrics writes exactly as much as there is room for, and says how much that would be; the histogram
 * of durations has a place for every one. */
#include <stdlib.h>
#include <unistd.h>

#include "base/histogram.h"
#include "check.h"
#include "make_file.h"

static char path[64];

static colibri_t *start(void) {
    make_spec_t spec = MAKE_SPEC_TINY;
    size_t size;
    uint8_t *file = make_model_file(&spec, &size);
    CHECK(file && write_model_file(path, file, size));
    free(file);
    colibri_config_t c = COLIBRI_CONFIG_INIT;
    c.model_path = path;
    c.max_seq_len = 32;
    c.num_threads = 1;
    colibri_t *s = colibri_init(&c);
    CHECK(s != NULL);
    return s;
}

static void run(colibri_t *s, int32_t n) {
    int32_t tokens[32];
    for (int32_t i = 0; i < n; i++) tokens[i] = i % 7;
    CHECK_EQ(colibri_set_input(s, tokens, &n, 1), COLIBRI_OK);
    CHECK_EQ(colibri_infer(s), COLIBRI_OK);
}

/* Whatever the room: nothing after it is touched, what fits is the beginning, the size is that of all of it. */
static void test_room(const colibri_t *s) {
    size_t size = 0, bytes = 0;
    CHECK_EQ(colibri_metrics(s, NULL, 0, &size), COLIBRI_ERR_BUFFER_TOO_SMALL);
    CHECK(size > 5000 && strstr(colibri_last_error(), "the buffer has 0"));
    char *whole = malloc(size), *part = malloc(size + 8);
    CHECK_EQ(colibri_metrics(s, whole, size, &bytes), COLIBRI_OK);
    CHECK_EQ(bytes, size);
    CHECK(whole[size - 1] == '\n');
    for (size_t room = 0; room <= size + 8; room += room < 300 || room > size - 20 ? 1 : 97) {
        memset(part, 0x55, size + 8);
        bytes = 0;
        CHECK_EQ(colibri_metrics(s, part, room, &bytes), room < size ? COLIBRI_ERR_BUFFER_TOO_SMALL : COLIBRI_OK);
        CHECK_EQ(bytes, size);
        size_t written = room < size ? room : size;
        CHECK(memcmp(part, whole, written) == 0);
        for (size_t i = written; i < size + 8 && i < written + 64; i++) CHECK_EQ(part[i], 0x55);
    }
    free(whole);
    free(part);
}

/* The text, zero-terminated. */
static char *text_of(const colibri_t *s) {
    size_t size = 0;
    colibri_metrics(s, NULL, 0, &size);
    char *text = malloc(size + 1);
    CHECK_EQ(colibri_metrics(s, text, size, &size), COLIBRI_OK);
    text[size] = '\0';
    return text;
}

static void test_text(colibri_t *s) {
    colibri_stats_reset(s);
    run(s, 5);
    run(s, 1);
    run(s, 1);
    char *text = text_of(s);
    CHECK(strstr(text, "\ncolibri_tokens_total{phase=\"prompt\"} 5\ncolibri_tokens_total{phase=\"decode\"} 2\n"));
    CHECK(strstr(text, "\ncolibri_infer_duration_seconds_bucket{le=\"+Inf\"} 3\n"));
    CHECK(strstr(text, "\ncolibri_infer_duration_seconds_bucket{le=\"0.000001\"} 0\n"));
    CHECK(strstr(text, "\ncolibri_infer_duration_seconds_bucket{le=\"67.108864\"} 3\n"));
    CHECK(strstr(text, "\ncolibri_infer_duration_seconds_count 3\n# HELP "));
    CHECK(strstr(text, "\ncolibri_build_info{version=\"" COLIBRI_VERSION_STRING "\",isa=\""));
    free(text);
    colibri_stats_reset(s);
    text = text_of(s);
    CHECK(strstr(text, "\ncolibri_tokens_total{phase=\"prompt\"} 0\n"));
    CHECK(strstr(text, "\ncolibri_infer_duration_seconds_sum 0\ncolibri_infer_duration_seconds_count 0\n"));
    free(text);
}

static void test_refused(const colibri_t *s) {
    size_t bytes = 7;
    char text[8];
    CHECK_EQ(colibri_metrics(NULL, text, sizeof text, &bytes), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_metrics(s, NULL, 1, &bytes), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(colibri_metrics(s, text, sizeof text, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
    CHECK_EQ(bytes, 7);
}

static void test_histogram(void) {
    static const struct { uint64_t ns; uint32_t bucket; } cases[] = {
        {0, 0}, {1000, 0}, {1001, 1}, {2000, 1}, {2001, 2}, {4000, 2}, {1000000, 10}, {1024000, 10}, {1024001, 11},
        {67108864000u, 26}, {67108864001u, 27}, {UINT64_MAX, 27},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t histogram[COLIBRI_HISTOGRAM] = {0};
        coli_histogram_add(histogram, cases[i].ns);
        for (uint32_t b = 0; b < COLIBRI_HISTOGRAM; b++) CHECK_EQ(histogram[b], b == cases[i].bucket);
    }
}

int main(void) {
    snprintf(path, sizeof path, "metrics-%ld.colibri", (long)getpid());
    colibri_t *s = start();
    if (s) {
        run(s, 20);
        test_room(s);
        test_text(s);
        test_refused(s);
    }
    colibri_free(s);
    test_histogram();
    remove(path);
    return check_report();
}
