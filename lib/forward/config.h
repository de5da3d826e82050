/* config.h: a colibri_config_t becomes options. */
#ifndef COLI_CONFIG_H
#define COLI_CONFIG_H

#include "forward/session.h"

/* Everything of a config that can be checked and decided. *c: a copy of the whole struct; *model: the given one, retained, or
 * the one at model_path, opened (either is the caller's to release); *options: no defaults left. On failure there is nothing to
 * release. */
colibri_status_t coli_config_resolve(const colibri_config_t *given, colibri_config_t *c, colibri_model_t **model,
                                     coli_options_t *options);

#endif
