/* test_residency.c: the same bits wherever the weights live, for hosts' layers too; workspaces of exactly the size that was
 * told; sessions of different residency on one model at once; cancelling; statistics; profiles. What happens to files and
 * processes that fail: test_residency_failures.c. */
#include <signal.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "run_model.h"

/* 10: all of plain_spec's experts; 14: of rich_spec's 36. Look-ahead has room there, in 2 and 3 it has not. */
static const way_t ways[] = {{"map", MAP, 0}, {"lock", LOCK, 0}, {"huge", HUGE, 0}, {"stream 2", STREAM, 2},
                             {"stream 3", STREAM, 3}, {"stream 10", STREAM, 10}, {"stream 14", STREAM, 14},
                             {"stream all", STREAM, 1000}};
#define WAYS (sizeof ways / sizeof *ways)

static make_spec_t plain_spec(uint32_t dtype) {
    make_spec_t spec = MAKE_SPEC_TINY;
    spec.dtype = dtype;
    return spec;
}

static void write_only(const make_spec_t *spec) {
    size_t size;
    free(write_spec(spec, &size));
}

/* ---- the same bits ---- */

static void check_same_bits(const make_spec_t *spec, uint64_t *ahead) {
    static const struct { int32_t threads, slots, piece, chunk; } runs[] = {
        {1, 1, 1, 0}, {1, SLOTS, TOKENS, 0}, {2, SLOTS, 1, 0}, {2, SLOTS, 7, 5}, {4, 1, TOKENS, 0}, {4, SLOTS, 7, 0}};
    write_only(spec);
    float *right = right_logits();
    for (size_t w = 0; w < WAYS; w++)
        for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
            colibri_config_t c = config_of(&ways[w]);
            c.num_threads = runs[i].threads;
            c.outputs = (i + w) % 2 ? COLIBRI_OUTPUT_LAST : COLIBRI_OUTPUT_ALL;
            c.max_chunk_tokens = runs[i].chunk;
            c.guard_mapping = i == 2 && w < 2;
            colibri_t *s = start(&c);
            bool same = run_to(s, c.outputs, runs[i].slots, runs[i].piece, TOKENS, right, true);
            if (runs[i].piece > 1) same &= runs_right(s, c.outputs, SLOTS, 9, right); /* with what the cache holds by now */
            if (!same) fprintf(stderr, "%s, %d threads, pieces of %d\n", ways[w].name, c.num_threads, runs[i].piece);
            CHECK(same);
            colibri_stats_t stats = stats_of(s);
            CHECK(stats.residency == ways[w].residency || (ways[w].residency == LOCK && stats.residency == MAP));
            *ahead += stats.cache_hits_ahead;
            colibri_free(s);
        }
    free(right);
}

static void test_same_bits(void) {
    static const uint32_t dtypes[] = {COLIBRI_FILE_F32, COLIBRI_FILE_Q8, COLIBRI_FILE_Q4};
    uint64_t ahead = 0;
    for (int i = 0; i < 3; i++) {
        make_spec_t plain = plain_spec(dtypes[i]), rich = rich_spec(dtypes[i]);
        check_same_bits(&plain, &ahead);
        check_same_bits(&rich, &ahead);
    }
    CHECK(ahead > 0);
}

/* route_tokens and moe_forward of every layer, for so many rows. */
enum { ROWS = 40 };
typedef struct host {
    _Alignas(64) float in[ROWS * 72], out[ROWS * 72]; /* [ROWS][hidden] */
    float weights[ROWS * 3];
    int32_t ids[ROWS * 3];
} host_t;

static void host_layers(colibri_t *s, int32_t rows, host_t *h) { /* h: [4], one for each layer */
    for (int32_t layer = 0; layer < 4; layer++) {
        uint64_t random = 7;
        for (int i = 0; i < ROWS * 72; i++) h[layer].in[i] = make_random(&random);
        CHECK_EQ(colibri_moe_forward(s, layer, h[layer].in, rows, h[layer].out), COLIBRI_OK);
        if (layer) CHECK_EQ(colibri_route_tokens(s, layer, h[layer].in, rows, h[layer].ids, h[layer].weights), COLIBRI_OK);
    }
}

static void test_hosts(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_Q8);
    write_only(&spec);
    host_t *want = aligned_alloc(64, 4 * sizeof *want), *got = aligned_alloc(64, 4 * sizeof *got);
    for (int32_t rows = 1; rows <= ROWS; rows += 13)
        for (size_t w = 0; w < WAYS; w++) {
            colibri_config_t c = config_of(&ways[w]);
            c.max_chunk_tokens = 16;
            colibri_t *s = start(&c);
            memset(w ? got : want, 0, 4 * sizeof *want);
            host_layers(s, rows, w ? got : want);
            CHECK(w == 0 || memcmp(got, want, 4 * sizeof *want) == 0);
            colibri_free(s);
        }
    free(want);
    free(got);
}

/* ---- the workspace ---- */

#define CANARY 0xA5
static bool untouched(const uint8_t *from, const uint8_t *to) {
    for (; from < to; from++)
        if (*from != CANARY) return false;
    return true;
}

/* `room` bytes between two pages that nobody may touch. */
static void check_placed(colibri_config_t c, uint8_t *room, uint8_t *end, uint8_t *at, size_t need, float *right) {
    memset(room, CANARY, (size_t)(end - room));
    c.workspace = at;
    c.workspace_size = need - 1;
    CHECK(colibri_init(&c) == NULL);
    CHECK_EQ(colibri_last_status(), COLIBRI_ERR_WORKSPACE);
    CHECK(untouched(room, end));
    c.workspace_size = need;
    colibri_t *s = start(&c);
    CHECK(run_to(s, c.outputs, SLOTS, 7, TOKENS, right, true));
    CHECK_EQ(stats_of(s).workspace_bytes, need);
    colibri_free(s);
    CHECK(untouched(room, at) && untouched(at + need, end));
}

static void test_workspace(void) {
    static const size_t offsets[] = {0, 64, 1984, 4032};
    make_spec_t spec = rich_spec(COLIBRI_FILE_Q4);
    size_t page = (size_t)sysconf(_SC_PAGESIZE), need;
    write_only(&spec);
    float *right = right_logits();
    for (size_t w = 0; w < WAYS; w++) {
        colibri_config_t c = config_of(&ways[w]);
        c.num_threads = 1 + (int32_t)w % 3;
        CHECK_EQ(colibri_workspace_size(&c, &need), COLIBRI_OK);
        size_t room = (need + page - 1) / page * page + page;
        uint8_t *memory = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *begin = memory + page;
        CHECK(memory != MAP_FAILED && mprotect(begin, room, PROT_READ | PROT_WRITE) == 0);
        for (size_t i = 0; i < 4; i++) check_placed(c, begin, begin + room, begin + offsets[i], need, right);
        check_placed(c, begin, begin + room, begin + room - need, need, right);
        munmap(memory, room + 2 * page);
    }
    free(right);
}

/* ---- several at once ---- */

typedef struct life {
    colibri_model_t *model;
    float *right;
    size_t first;
} life_t;

static void *live(void *argument) {
    const life_t *life = argument;
    for (size_t i = 0; i < 2 * WAYS; i++) {
        colibri_config_t c = config_of(&ways[(life->first + i) % WAYS]);
        c.model_path = NULL;
        c.model = life->model;
        c.num_threads = 1 + (int32_t)i % 2;
        colibri_t *s = start(&c);
        CHECK(run_to(s, c.outputs, SLOTS, i % 2 ? 3 : TOKENS, TOKENS, life->right, true));
        colibri_free(s);
    }
    return NULL;
}

static void test_shared_model(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_Q8);
    write_only(&spec);
    life_t lives[2] = {{.right = right_logits()}};
    pthread_t thread;
    CHECK_EQ(colibri_model_open(path, &lives[0].model), COLIBRI_OK);
    lives[1] = lives[0];
    lives[1].first = 5;
    CHECK_EQ(pthread_create(&thread, NULL, live, &lives[1]), 0);
    live(&lives[0]);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    colibri_model_close(lives[0].model);
    free(lives[0].right);
}

static atomic_int cancelling;
static void *cancel(void *session) {
    for (unsigned i = 0; i < 100; i++) {
        usleep(50 + i * 370 % 4000);
        colibri_cancel(session);
    }
    cancelling = 0;
    return NULL;
}

static void test_cancel(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    write_only(&spec);
    float *right = right_logits();
    for (size_t w = 3; w < WAYS; w += 3) {
        colibri_config_t c = config_of(&ways[w]);
        c.outputs = COLIBRI_OUTPUT_LAST;
        colibri_t *s = start(&c);
        pthread_t thread;
        int32_t lengths[SLOTS], cancelled = 0;
        cancelling = 1;
        CHECK_EQ(pthread_create(&thread, NULL, cancel, s), 0);
        for (int round = 0; cancelling; round++) {
            CHECK_EQ(colibri_reset(s), COLIBRI_OK);
            while (hand_over(s, SLOTS, round % 5 + 1, TOKENS, lengths)) {
                int32_t before = colibri_slot_length(s, 0);
                colibri_status_t status = colibri_infer(s);
                CHECK(status == COLIBRI_OK || status == COLIBRI_ERR_CANCELLED);
                if (status) CHECK_EQ(colibri_slot_length(s, 0), before);
                else CHECK(rows_are(s, c.outputs, SLOTS, lengths, right, true));
                cancelled += status != COLIBRI_OK;
            }
        }
        CHECK_EQ(pthread_join(thread, NULL), 0);
        CHECK(cancelled > 0);
        colibri_set_input(s, (int32_t[]){1}, (int32_t[]){1}, 1);
        colibri_infer(s); /* takes a cancel that came too late */
        CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
        colibri_free(s);
    }
    free(right);
}

/* ---- statistics ---- */

static uint64_t sum_histogram(const uint64_t *histogram) {
    uint64_t sum = 0;
    for (int i = 0; i < COLIBRI_HISTOGRAM; i++) sum += histogram[i];
    return sum;
}

/* The rows of all layers, summed; place counts them by place. */
static colibri_expert_stats_t sum_rows(const colibri_t *s, uint64_t place[6]) {
    colibri_expert_stats_t rows[12], sum = {0};
    memset(place, 0, 6 * sizeof *place);
    for (int32_t layer = 1; layer < 4; layer++) {
        CHECK_EQ(colibri_expert_stats(s, layer, rows, 12), COLIBRI_OK);
        for (int e = 0; e < 12; e++) {
            CHECK_EQ(rows[e].hits + rows[e].misses, rows[e].calls);
            CHECK_EQ(rows[e].node, -1);
            CHECK((rows[e].bytes_read > 0) == (rows[e].load_ns > 0));
            CHECK(rows[e].place >= 0 && rows[e].place < 6);
            place[rows[e].place]++;
            sum.tokens += rows[e].tokens, sum.calls += rows[e].calls, sum.bytes_read += rows[e].bytes_read;
            sum.hits += rows[e].hits, sum.misses += rows[e].misses, sum.load_ns += rows[e].load_ns;
        }
    }
    return sum;
}

/* After `calls` calls with `tokens` tokens in all. */
static void check_sums(const colibri_t *s, const make_spec_t *spec, uint64_t calls, uint64_t tokens) {
    colibri_stats_t stats = stats_of(s);
    uint64_t place[6], page = stats.direct_io ? 4096 : 1;
    uint64_t expert = make_pad(make_mlp_bytes(spec->dtype, spec->inter, spec->hidden), page);
    colibri_expert_stats_t sum = sum_rows(s, place);
    CHECK_EQ(sum.tokens, tokens * 3 * spec->top_k);
    CHECK_EQ(stats.infer_calls, calls);
    CHECK_EQ(sum_histogram(stats.infer_histogram), calls);
    CHECK_EQ(stats.read_bytes, sum.bytes_read);
    CHECK_EQ(stats.read_bytes, sum_histogram(stats.read_histogram) * expert);
    bool stream = stats.residency == STREAM;
    CHECK_EQ(stats.cache_hits, stream ? sum.hits : 0);
    CHECK_EQ(stats.cache_misses, sum.misses);
    CHECK_EQ(stats.read_bytes - stats.read_bytes_ahead, sum.misses * expert);
    CHECK(stats.cache_hits_ahead <= stats.cache_hits && stats.read_bytes_ahead <= stats.read_bytes);
    CHECK(stats.ahead_correct <= stats.ahead_predicted && stats.repeat_correct <= stats.ahead_predicted);
    CHECK_EQ(stats.cache_pinned, place[COLIBRI_PLACE_PINNED]);
    CHECK(place[COLIBRI_PLACE_CACHED] + place[COLIBRI_PLACE_PINNED] <= stats.cache_experts);
    static const colibri_place_t places[] = {0, COLIBRI_PLACE_MAPPED, COLIBRI_PLACE_LOCKED, COLIBRI_PLACE_MEMORY};
    if (stream) CHECK_EQ(place[COLIBRI_PLACE_CACHED] + place[COLIBRI_PLACE_PINNED] + place[COLIBRI_PLACE_DISK], 36);
    else CHECK_EQ(place[places[stats.residency]], 36);
}

static void test_statistics(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    write_only(&spec);
    float *right = right_logits();
    for (size_t w = 0; w < WAYS; w++) {
        colibri_config_t c = config_of(&ways[w]);
        colibri_t *s = start(&c);
        bool stream = ways[w].residency == STREAM, ahead = stream && ways[w].cache >= 14;
        colibri_stats_t first = stats_of(s);
        CHECK_EQ(first.cache_experts, stream ? ways[w].cache < 36 ? ways[w].cache : 36 : 0);
        check_sums(s, &spec, 0, 0);
        CHECK(run_to(s, c.outputs, 1, 1, TOKENS, right, true));
        colibri_stats_t stats = stats_of(s);
        check_sums(s, &spec, TOKENS, TOKENS);
        CHECK_EQ(stats.decode_tokens, TOKENS);
        CHECK_EQ(stats.ahead_predicted, stream ? (TOKENS - 1) * 3 * 3 : 0); /* all but the first token, for three layers */
        CHECK((stats.ahead_correct > 0) == stream);
        if (ways[w].cache != 10) { /* where it begins is a matter of speed */
            CHECK((stats.read_bytes_ahead > 0) == ahead);
            CHECK((stats.cache_hits_ahead > 0) == ahead);
        }
        CHECK(!stream || (stats.cache_misses > 0 && stats.read_bytes > 0 && stats.read_wait_ns < stats.infer_ns * 2));
        CHECK_EQ(colibri_reset(s), COLIBRI_OK);
        CHECK(run_to(s, c.outputs, 1, 4, TOKENS, right, true)); /* looked ahead of, but no guess about single tokens */
        CHECK(run_to(s, c.outputs, SLOTS, TOKENS, TOKENS, right, true));
        check_sums(s, &spec, TOKENS + 6 + 1, 4 * TOKENS);
        CHECK_EQ(stats_of(s).ahead_predicted, stats.ahead_predicted);
        if (ways[w].cache == 1000) { /* everything was used and is there */
            colibri_stats_reset(s);
            check_sums(s, &spec, 0, 0);
            CHECK(runs_right(s, c.outputs, SLOTS, 7, right));
            CHECK_EQ(stats_of(s).cache_misses + stats_of(s).read_bytes, 0);
        }
        colibri_stats_reset(s);
        check_sums(s, &spec, 0, 0);
        colibri_free(s);
    }
    free(right);
}

/* One token over and over: its experts are used by all of the latest tokens, and pinned. */
static void test_pins(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_Q8);
    uint64_t place[6];
    write_only(&spec);
    colibri_config_t c = config_of(&(way_t){"stream 14", STREAM, 14});
    colibri_t *s = start(&c);
    CHECK_EQ(stats_of(s).cache_pinned, 0);
    for (int i = 0; i < 600; i++) {
        CHECK_EQ(colibri_reset(s), COLIBRI_OK);
        CHECK_EQ(colibri_set_input(s, (int32_t[]){5}, (int32_t[]){1}, 1), COLIBRI_OK);
        CHECK_EQ(colibri_infer(s), COLIBRI_OK);
    }
    CHECK_EQ(stats_of(s).cache_pinned, 3 * 3);
    CHECK_EQ(sum_rows(s, place).tokens, 600 * 3 * 3);
    CHECK_EQ(place[COLIBRI_PLACE_PINNED], 3 * 3);
    CHECK_EQ(stats_of(s).cache_misses, 3 * 3 - stats_of(s).cache_hits_ahead);
    colibri_free(s);
}

/* ---- profiles ---- */

static char profile[80];

static colibri_t *with_profile(uint64_t cache) {
    colibri_config_t c = config_of(&(way_t){"stream", STREAM, cache});
    c.expert_profile = profile;
    return colibri_init(&c);
}

static bool refused(colibri_status_t status) {
    colibri_t *s = with_profile(5);
    bool right = s == NULL && colibri_last_status() == status && strstr(colibri_last_error(), profile);
    if (!right) fprintf(stderr, "profile: %s\n", s ? "taken" : colibri_last_error());
    colibri_free(s);
    return right;
}

static void test_damaged_profiles(const uint8_t *bytes, size_t size) {
    uint8_t changed[2048];
    for (size_t i = 0; i < size; i++) { /* magic, version, model, sum, uses */
        memcpy(changed, bytes, size);
        changed[i] ^= 4;
        CHECK(write_model_file(profile, changed, size));
        CHECK(refused(i < 4    ? COLIBRI_ERR_FORMAT
                      : i < 8  ? COLIBRI_ERR_VERSION
                      : i < 20 ? COLIBRI_ERR_INVALID_ARGUMENT
                               : COLIBRI_ERR_CHECKSUM));
    }
    memcpy(changed, bytes, size);
    changed[size] = 0;
    for (size_t n = 0; n <= size + 1; n += n == 33 ? size - 34 : 1) { /* cut, empty, too long */
        if (n == size) continue;
        CHECK(write_model_file(profile, changed, n));
        CHECK(refused(COLIBRI_ERR_FORMAT));
    }
    remove(profile);
    CHECK(refused(COLIBRI_ERR_NOT_FOUND));
    CHECK_EQ(mkdir(profile, 0777), 0);
    CHECK(refused(COLIBRI_ERR_FORMAT));
    CHECK_EQ(rmdir(profile), 0);
}

static size_t read_profile(uint8_t *bytes, size_t most) {
    FILE *f = fopen(profile, "rb");
    CHECK(f != NULL);
    size_t size = f ? fread(bytes, 1, most, f) : 0;
    if (f) fclose(f);
    return size;
}

/* Whatever the first session's residency, the second one begins with its experts. */
static void check_warm(size_t w, float *right) {
    colibri_config_t c = config_of(&ways[w]);
    colibri_t *s = start(&c);
    CHECK(run_to(s, c.outputs, 1, 1, TOKENS, right, true));
    CHECK_EQ(colibri_save_profile(s, profile), COLIBRI_OK);
    colibri_free(s);
    s = with_profile(36);
    CHECK(s != NULL);
    CHECK_EQ(stats_of(s).read_bytes, 0); /* init's reads do not count */
    CHECK(run_to(s, c.outputs, 1, 1, TOKENS, right, true));
    CHECK_EQ(stats_of(s).cache_misses, 0); /* every expert used before is there */
    CHECK(stats_of(s).cache_hits > 0);
    colibri_free(s);
    s = with_profile(9);
    CHECK(s != NULL && run_to(s, c.outputs, 1, 1, 1, right, true));
    CHECK(stats_of(s).cache_hits > 0);
    CHECK(run_to(s, c.outputs, SLOTS, 7, TOKENS, right, true));
    colibri_free(s);
}

static void test_unwritable(const colibri_t *s) {
    uint8_t before[1024], after[1024];
    struct rlimit limit, none;
    size_t size = read_profile(before, sizeof before);
    CHECK(size > 16 && getrlimit(RLIMIT_FSIZE, &limit) == 0);
    none = (struct rlimit){16, limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &none), 0); /* cannot be ended */
    CHECK_EQ(colibri_save_profile(s, profile), COLIBRI_ERR_IO);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK(read_profile(after, sizeof after) == size && memcmp(before, after, size) == 0);
    remove(profile);
    CHECK_EQ(mkdir(profile, 0777), 0); /* cannot be replaced */
    CHECK_EQ(colibri_save_profile(s, profile), COLIBRI_ERR_IO);
    CHECK(strstr(colibri_last_error(), profile) != NULL);
    CHECK_EQ(rmdir(profile), 0);
    CHECK_EQ(symlink("/dev/null", profile), 0); /* stays a link, and what it leads to a device */
    CHECK_EQ(colibri_save_profile(s, profile), COLIBRI_OK);
    struct stat about;
    CHECK(lstat(profile, &about) == 0 && S_ISLNK(about.st_mode) && stat(profile, &about) == 0 && S_ISCHR(about.st_mode));
    remove(profile);
    CHECK_EQ(colibri_save_profile(s, "no/such/folder/profile"), COLIBRI_ERR_IO);
    CHECK_EQ(colibri_save_profile(s, NULL), COLIBRI_ERR_INVALID_ARGUMENT);
}

static void test_profile(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    uint8_t bytes[1024];
    snprintf(profile, sizeof profile, "%s.profile", path);
    write_only(&spec);
    float *right = right_logits();
    for (size_t w = 0; w < WAYS; w += 2) check_warm(w, right);
    size_t size = read_profile(bytes, sizeof bytes);
    CHECK_EQ(size, 32 + 4 * 4 * 12);
    spec.seed++; /* another model of the same shape */
    write_only(&spec);
    CHECK(refused(COLIBRI_ERR_INVALID_ARGUMENT));
    spec.seed--;
    spec.experts--; /* and of another */
    write_only(&spec);
    CHECK(refused(COLIBRI_ERR_INVALID_ARGUMENT));
    spec.experts++;
    write_only(&spec);
    test_damaged_profiles(bytes, size);
    CHECK(write_model_file(profile, bytes, size));
    colibri_t *s = with_profile(14);
    CHECK(s != NULL && run_to(s, COLIBRI_OUTPUT_ALL, SLOTS, 1, TOKENS, right, true));
    if (s) test_unwritable(s);
    colibri_free(s);
    remove(profile);
    free(right);
}

/* ---- configs ---- */

static colibri_status_t status_of(colibri_config_t c) {
    size_t bytes;
    colibri_status_t status = colibri_workspace_size(&c, &bytes);
    colibri_t *s = colibri_init(&c);
    CHECK_EQ(s ? COLIBRI_OK : colibri_last_status(), status);
    colibri_free(s);
    return status;
}

static void test_config(void) {
    make_spec_t spec = rich_spec(COLIBRI_FILE_F32);
    write_only(&spec);
    static const struct {
        int32_t residency;
        uint64_t cache, page;
        colibri_status_t status;
        int32_t got;
        uint64_t experts;
    } cases[] = {
        {0, 0, 0, COLIBRI_OK, MAP, 0}, {0, 7, 0, COLIBRI_OK, STREAM, 7}, {0, 0, 2 << 20, COLIBRI_OK, HUGE, 0},
        {STREAM, 0, 0, COLIBRI_OK, STREAM, 9}, {STREAM, 1048575, 0, COLIBRI_OK, STREAM, 36},
        {STREAM, 1048576, 0, COLIBRI_OK, STREAM, 11}, {STREAM, (uint64_t)-1, 0, COLIBRI_OK, STREAM, 36},
        {STREAM, 1, 0, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0}, {MAP, 5, 0, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0},
        {HUGE, 5, 0, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0}, {LOCK, 0, 2 << 20, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0},
        {0, 5, 2 << 20, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0}, {HUGE, 0, 4096, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0},
        {5, 0, 0, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0}, {-1, 0, 0, COLIBRI_ERR_INVALID_ARGUMENT, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        colibri_config_t c = config_of(&(way_t){"", cases[i].residency, cases[i].cache});
        c.hugepage_size = cases[i].page;
        CHECK_EQ(status_of(c), cases[i].status);
        if (cases[i].status) continue;
        colibri_t *s = start(&c);
        CHECK_EQ(stats_of(s).residency, cases[i].got);
        CHECK_EQ(stats_of(s).cache_experts, cases[i].experts);
        colibri_free(s);
    }
    spec.dense_layers = spec.layers;
    spec.shared = spec.shared_gate = 0;
    write_only(&spec);
    for (int32_t mode = MAP; mode <= STREAM; mode++)
        CHECK_EQ(status_of(config_of(&(way_t){"", mode, 0})), mode == STREAM ? COLIBRI_ERR_INVALID_ARGUMENT : COLIBRI_OK);
}

int main(void) {
    snprintf(path, sizeof path, "test_residency_%d.colibri", (int)getpid());
    test_same_bits();
    test_hosts();
    test_workspace();
    test_shared_model();
    test_cancel();
    test_statistics();
    test_pins();
    test_profile();
    test_config();
    remove(path);
    return check_report();
}
