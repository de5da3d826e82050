/* structs.h: the one rule for public structs that begin with struct_size (see "Structs" in colibri.h), used by every public
 * function that takes one:
 *
 *   size < first            refused: no version of the struct was ever that small (an uninitialised struct, mostly)
 *   first <= size <= known  an older caller: fields it does not have are zero, which means the default
 *   size > known            a newer caller: accepted only if all it has beyond our struct is zero, else COLIBRI_ERR_VERSION
 *
 * `first` is the struct's size in the first release that had it, `known` its sizeof now. `name` is for messages. */
#ifndef COLI_STRUCTS_H
#define COLI_STRUCTS_H

#include "base/base.h"

/* Check a struct handed in (NULL is refused) and copy it into `copy` (`known` bytes, what is missing zeroed). `copy` may be
 * NULL to check alone: the first `first` bytes of `given` may then be used in place. On failure `copy` is untouched. */
colibri_status_t coli_struct_in(const void *given, size_t first, size_t known, const char *name, void *copy);

/* Check a struct to be filled by the same rule and copy min(struct_size, known) bytes of `filled` into it; the caller's
 * struct_size stays as it was. On failure nothing is written. */
colibri_status_t coli_struct_out(void *given, size_t first, size_t known, const char *name, const void *filled);

#endif
