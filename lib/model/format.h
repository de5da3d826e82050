/* format.h: a file of untrusted bytes becomes a checked directory. Nothing above this file sees a raw offset that was not
 * checked here. */
#ifndef COLI_FORMAT_H
#define COLI_FORMAT_H

#include "base/base.h"
#include "base/os.h"

#define COLI_BYTES_ROLES 3 /* COLIBRI_ROLE_TOKENIZER, _CHAT_TEMPLATE, _METADATA */

typedef struct coli_directory {
    const uint8_t *file;               /* [file_size] the mapping, or memory: payloads of weights */
    uint64_t file_size;
    const colibri_file_header *header;
    const colibri_file_params *params;
    const colibri_file_layer *layers;  /* [num_layers] */
    const colibri_file_entry *entries; /* [num_entries], every (role, layer) once, payloads inside the file, sizes as rows, k,
                                          dtype and count demand */
    uint32_t num_entries;
    size_t bytes_size[COLI_BYTES_ROLES];
    const uint8_t *bytes[COLI_BYTES_ROLES]; /* their payloads; NULL: none */
    uint8_t *head, *texts;             /* copies that header to entries, and bytes, point into; NULL: they point into `file` */
} coli_directory_t;

/* Check everything that can be checked without reading weights: magic, version, sizes, checksum, params in range and
 * consistent with each other and the header, entries aligned, in range, not overlapping, no role unknown or missing.
 * `source` is the file that `data` [size] maps: header, directory, tokenizer and texts are read from it into memory of the
 * directory's own first, whatever happens to the file afterwards. NULL: `data` is memory that nobody changes, used as it lies.
 * `directory` stays untouched on failure. */
colibri_status_t coli_format_open(const uint8_t *data, uint64_t size, const coli_file_t *source, const char *path,
                                  coli_directory_t *directory);
void coli_format_close(coli_directory_t *directory); /* free the copies; harmless on zeros, twice, and without a source */
/* Read the payloads and compare checksums. */
colibri_status_t coli_format_verify(const coli_directory_t *directory, const char *path);

const colibri_file_entry *coli_format_find(const coli_directory_t *directory, uint32_t role, uint32_t layer); /* or NULL */
/* The payload of a role that is bytes, and its size; NULL and 0: the file has none. Valid until coli_format_close. */
const uint8_t *coli_format_bytes(const coli_directory_t *directory, uint32_t role, size_t *size);
const char *coli_role_name(uint32_t role); /* "experts"; NULL if unknown */

/* Bytes of tiles: see colibri_format.h. rows and k unpadded; arguments already validated (no overflow for k, rows < 2^31). */
uint64_t coli_matrix_bytes(uint32_t dtype, uint64_t rows, uint64_t k); /* with scales */
uint64_t coli_mlp_bytes(uint32_t dtype, uint32_t intermediate, uint32_t hidden);

/* coli_fail with "path: " before the sentence; of a long path its end. */
colibri_status_t coli_fail_file(colibri_status_t status, const char *path, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

uint32_t coli_crc32(uint32_t crc, const void *data, size_t bytes);

#endif
