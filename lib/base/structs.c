/* structs.c: checks and copies of public structs that begin with struct_size; the rule stands in structs.h. */
#include "base/structs.h"

#include "base/status.h"

/* No struct of the API will come near this: a larger struct_size is garbage, and must not make us read that far. */
#define MAX_STRUCT_SIZE 65536u

static colibri_status_t check_size(const void *given, size_t first, size_t known, const char *name, uint32_t *size) {
    if (given == NULL) return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "%s is NULL; it must point to the struct", name);
    memcpy(size, given, sizeof *size);
    if (*size < first) {
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "%s.struct_size is %u, but the smallest version of this struct has %zu bytes; "
                         "initialise the struct with its _INIT macro", name, (unsigned)*size, first);
    }
    if (*size > MAX_STRUCT_SIZE) {
        return coli_fail(
            COLIBRI_ERR_INVALID_ARGUMENT,
            "%s.struct_size is %u, which no version of this struct has; initialise the struct with its _INIT macro", name,
            (unsigned)*size);
    }
    const uint8_t *bytes = given;
    for (size_t i = known; i < *size; i++) {
        if (bytes[i] != 0) {
            return coli_fail(COLIBRI_ERR_VERSION,
                             "%s has %u bytes and uses a field at byte %zu that this library (%s, %zu bytes) does not know; "
                             "use a newer library or leave the field zero",
                             name, (unsigned)*size, i, COLIBRI_VERSION_STRING, known);
        }
    }
    return COLIBRI_OK;
}

colibri_status_t coli_struct_in(const void *given, size_t first, size_t known, const char *name, void *copy) {
    uint32_t size;
    colibri_status_t status = check_size(given, first, known, name, &size);
    if (status != COLIBRI_OK || copy == NULL) return status;
    size_t n = COLI_MIN((size_t)size, known);
    memcpy(copy, given, n);
    memset((uint8_t *)copy + n, 0, known - n);
    return COLIBRI_OK;
}

colibri_status_t coli_struct_out(void *given, size_t first, size_t known, const char *name, const void *filled) {
    uint32_t size;
    colibri_status_t status = check_size(given, first, known, name, &size);
    if (status != COLIBRI_OK) return status;
    size_t n = COLI_MIN((size_t)size, known);
    memcpy((uint8_t *)given + sizeof size, (const uint8_t *)filled + sizeof size, n - sizeof size);
    return COLIBRI_OK;
}
