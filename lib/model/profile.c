/* profile.c: read and write how experts are used; see profile.h. */
#include "model/profile.h"

#include <stdlib.h>

#include "base/status.h"
#include "model/residency_use.h"

#define VERSION 1
#define ONE 16777216.0f /* a share of 1 */
#define TRUST 0.125f    /* what was, beside what is: a loaded share counts as if seen over so much of the window */
#define HEADER_WORDS 8

typedef struct profile_use {
    uint32_t share, key;
} profile_use_t;

static uint32_t num_keys(const coli_residency_t *r) {
    const colibri_file_params *p = r->model->directory.params;
    return p->num_layers * p->num_experts;
}

static void put_u32(uint8_t *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(value >> 8 * i);
}

static uint32_t get_u32(const uint8_t *from) {
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

/* The header of a profile of this model with these shares [keys], each 4 bytes; NULL: without their checksum. */
static void make_header(const coli_residency_t *r, const uint8_t *shares, uint8_t header[4 * HEADER_WORDS]) {
    const colibri_file_params *p = r->model->directory.params;
    const uint32_t words[HEADER_WORDS] = {0, VERSION, p->num_layers, p->num_experts, r->model->directory.header->checksum,
                                          shares ? coli_crc32(0, shares, 4 * (size_t)num_keys(r)) : 0};
    for (int i = 0; i < HEADER_WORDS; i++) put_u32(header + 4 * i, words[i]);
    memcpy(header, "COLP", 4);
}

/* ---- writing ---- */

colibri_status_t coli_profile_save(const coli_residency_t *r, const char *path) {
    size_t size = 4 * (HEADER_WORDS + (size_t)num_keys(r));
    uint8_t *bytes = malloc(size);
    if (!bytes) return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the profile of %u experts", (unsigned)num_keys(r));
    for (uint32_t key = 0; key < num_keys(r); key++)
        put_u32(bytes + 4 * (HEADER_WORDS + key), (uint32_t)(coli_usage_rate(r, key) * ONE));
    make_header(r, bytes + 4 * HEADER_WORDS, bytes);
    colibri_status_t status = coli_os_write_file(path, bytes, size);
    free(bytes);
    return status;
}

/* ---- reading ---- */

static colibri_status_t check(const coli_residency_t *r, const uint8_t *bytes, uint64_t got, const char *path) {
    uint8_t header[4 * HEADER_WORDS];
    if (got < sizeof header || memcmp(bytes, "COLP", 4) != 0)
        return coli_fail(COLIBRI_ERR_FORMAT, "'%.300s' is not a profile of experts", path);
    if (get_u32(bytes + 4) != VERSION)
        return coli_fail(COLIBRI_ERR_VERSION, "the profile '%.300s' has version %u, this library reads %d", path,
                         (unsigned)get_u32(bytes + 4), VERSION);
    uint64_t size = sizeof header + 4 * (uint64_t)num_keys(r);
    make_header(r, got == size ? bytes + sizeof header : NULL, header);
    if (memcmp(bytes + 8, header + 8, 12) != 0)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "the profile '%.300s' is of another model than %.150s", path,
                         r->model->path);
    if (got != size)
        return coli_fail(COLIBRI_ERR_FORMAT, "the profile '%.300s' is %s: remove it and save a new one", path,
                         got < size ? "cut short" : "too long");
    if (memcmp(bytes, header, sizeof header) != 0)
        return coli_fail(COLIBRI_ERR_CHECKSUM, "the profile '%.300s' is damaged: remove it and save a new one", path);
    return COLIBRI_OK;
}

static int less_used_first(const void *a, const void *b) {
    const profile_use_t *x = a, *y = b;
    if (x->share != y->share) return x->share < y->share ? -1 : 1;
    return x->key < y->key ? -1 : x->key > y->key; /* a total order: qsort gives the same everywhere */
}

/* Fill the cache with the most used experts, the very most last: it is the youngest then. */
static colibri_status_t warm(coli_residency_t *r, profile_use_t *uses, uint32_t n) {
    qsort(uses, n, sizeof *uses, less_used_first);
    uint32_t first = n > r->cache.num_slots ? n - r->cache.num_slots : 0;
    for (uint32_t i = first; i < n; i++)
        if (!coli_residency_fetch_ahead(r, uses[i].key)) break;
    return coli_residency_settle(r);
}

static colibri_status_t apply(coli_residency_t *r, const uint8_t *shares) {
    uint32_t experts = r->model->directory.params->num_experts, n = 0;
    profile_use_t *uses = malloc(((size_t)num_keys(r) + 1) * sizeof *uses);
    if (!uses) return coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the profile of %u experts", (unsigned)num_keys(r));
    for (uint32_t key = 0; key < num_keys(r); key++) {
        uint32_t share = COLI_MIN(get_u32(shares + 4 * (size_t)key), (uint32_t)ONE);
        coli_usage_set_rate(r, key, (float)share / ONE * TRUST);
        if (share && r->weights->layers[key / experts].is_moe) uses[n++] = (profile_use_t){share, key};
    }
    colibri_status_t status = r->mode == COLIBRI_RESIDENCY_STREAM ? warm(r, uses, n) : COLIBRI_OK;
    free(uses);
    return status;
}

colibri_status_t coli_profile_load(coli_residency_t *r, const char *path) {
    coli_file_t file;
    uint64_t most = 4 * (HEADER_WORDS + (uint64_t)num_keys(r)) + 1; /* one more shows that a file is too long */
    colibri_status_t status = coli_os_open(path, &file);
    if (status) return status;
    uint8_t *bytes = malloc((size_t)most);
    int64_t got = bytes ? coli_os_read(&file, bytes, most, 0) : 0;
    coli_os_close(&file);
    if (!bytes) status = coli_fail(COLIBRI_ERR_OUT_OF_MEMORY, "no memory for the profile of %u experts", (unsigned)num_keys(r));
    else if (got < 0)
        status = coli_fail(COLIBRI_ERR_IO, "cannot read the profile '%.300s': %s (errno %d)", path, coli_os_reason((int)-got),
                           (int)-got);
    else status = check(r, bytes, (uint64_t)got, path);
    if (!status) status = apply(r, bytes + 4 * HEADER_WORDS);
    free(bytes);
    return status;
}
