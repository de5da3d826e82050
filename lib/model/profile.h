/* profile.h: how often each expert is used, in a small file of its own: written after one run, read before the next.
 *
 *   bytes 0-31, little-endian: magic "COLP", u32 version (1), u32 num_layers, u32 num_experts, u32 checksum of the model's
 *   header and directory (header.checksum), u32 CRC-32 of what follows, u64 zero; then u32 [num_layers][num_experts]: the
 *   share of the layer's tokens that chose the expert, times 2^24. */
#ifndef COLI_PROFILE_H
#define COLI_PROFILE_H

#include "model/residency.h"

/* Into r's usage; STREAM: the most used experts are in the cache after that. NOT_FOUND, IO, FORMAT (no profile, or not a whole
 * one), VERSION, INVALID_ARGUMENT (of another model), CHECKSUM (damaged). Temporary memory: malloc. */
colibri_status_t coli_profile_load(coli_residency_t *r, const char *path);
/* Written beside `path` and renamed. IO, OUT_OF_MEMORY; on failure the old file stays. */
colibri_status_t coli_profile_save(const coli_residency_t *r, const char *path);

#endif
