/* life.h: birth and death of a session (session.h is its body). */
#ifndef COLI_LIFE_H
#define COLI_LIFE_H

#include "forward/kvcache.h"
#include "forward/session.h"

colibri_status_t coli_session_bytes(const colibri_config_t *config, size_t *bytes); /* colibri_workspace_size */
colibri_t *coli_session_create(const colibri_config_t *config);                     /* colibri_init */
void coli_session_destroy(colibri_t *session);                                      /* colibri_free */

#endif
