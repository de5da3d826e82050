/* forward.h: the forward pass over whatever set_input left in the slots. */
#ifndef COLI_FORWARD_H
#define COLI_FORWARD_H

#include "forward/session.h"

/* Run all pending tokens through the model in chunks. Fills b.final_hidden, b.slot_failed and, unless outputs are HIDDEN, the
 * logits of every active slot. COLIBRI_ERR_CANCELLED or _IO (with a sentence): nothing of use is there. Slots' lengths are the
 * caller's to commit. */
colibri_status_t coli_forward(colibri_t *session);

/* Logits [n][vocab] of final_hidden rows first ... first + n - 1 into out (unpadded rows). Returns false if cancelled. */
bool coli_head_rows(colibri_t *session, uint32_t first, uint32_t n, float *out);

/* Was colibri_cancel called? Takes the request. */
bool coli_take_cancel(colibri_t *session);

#endif
