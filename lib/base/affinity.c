/* affinity.c: see affinity.h. */
#include "base/affinity.h"

#include "base/os.h"
#include "base/status.h"

#define MAX_CPU 8192

typedef struct cpu_list {
    int32_t *cpus; /* [COLI_MAX_THREADS] */
    uint32_t count;
} cpu_list_t;

static bool read_cpu(const char **text, int32_t *cpu) {
    if (**text < '0' || **text > '9') return false;
    for (*cpu = 0; **text >= '0' && **text <= '9'; (*text)++) {
        *cpu = *cpu * 10 + (**text - '0');
        if (*cpu >= 10 * MAX_CPU) return false; /* not a number that any machine has */
    }
    return true;
}

static bool add(cpu_list_t *list, int32_t cpu) {
    for (uint32_t i = 0; i < list->count; i++)
        if (list->cpus[i] == cpu) return false;
    if (list->count == COLI_MAX_THREADS) return true; /* more than there can be threads: the rest has no use */
    list->cpus[list->count++] = cpu;
    return true;
}

/* "0,2,4-7": true if it is that, every CPU once. */
static bool read_list(const char *text, cpu_list_t *list) {
    for (;; text++) {
        int32_t first, last;
        if (!read_cpu(&text, &first)) return false;
        last = first;
        if (*text == '-') {
            text++;
            if (!read_cpu(&text, &last) || last < first) return false;
        }
        for (int32_t cpu = first; cpu <= last; cpu++)
            if (!add(list, cpu)) return false;
        if (*text == '\0') return true;
        if (*text != ',') return false;
    }
}

/* All of the list may be used by this process. Not inlined: its 32 KB of stack are for those who name CPUs. */
__attribute__((noinline)) static colibri_status_t check_allowed(const cpu_list_t *list) {
    int32_t allowed[MAX_CPU];
    int count = COLI_MIN(coli_os_cpus(false, allowed, MAX_CPU), MAX_CPU);
    for (uint32_t i = 0; i < list->count; i++) {
        bool found = false;
        for (int j = 0; j < count && !found; j++) found = allowed[j] == list->cpus[i];
        if (!found)
            return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                             "config.cpu_affinity names CPU %d, which this process may not use (it has %d of the machine's)",
                             (int)list->cpus[i], count);
    }
    return COLIBRI_OK;
}

colibri_status_t coli_affinity(const char *text, uint32_t *num_threads, bool *pinned, int32_t cpus[COLI_MAX_THREADS]) {
    cpu_list_t list = {cpus, 0};
    *pinned = text != NULL && strcmp(text, "none") != 0;
    if (!*pinned) return COLIBRI_OK;
    if (coli_os_cpus(false, NULL, 0) == 0)
        return coli_fail(COLIBRI_ERR_UNSUPPORTED, "config.cpu_affinity: this system ties no threads to CPUs; leave it NULL");
    bool everywhere = strcmp(text, "auto") == 0;
    if (everywhere)
        list.count = (uint32_t)COLI_MIN(coli_os_cpus(true, cpus, COLI_MAX_THREADS), COLI_MAX_THREADS);
    else if (!read_list(text, &list))
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT,
                         "config.cpu_affinity is \"%.*s\", allowed are none, auto, or a list of different CPUs as 0,2,4-7",
                         coli_fitting(text, 64), text);
    colibri_status_t status = check_allowed(&list);
    if (status) return status;
    if (*num_threads == 0)
        *num_threads = everywhere ? (uint32_t)COLI_MIN(coli_os_num_cores(), (int)list.count) : list.count;
    if (*num_threads > list.count)
        return coli_fail(COLIBRI_ERR_INVALID_ARGUMENT, "config.cpu_affinity \"%.*s\" has room for %u of %u threads",
                         coli_fitting(text, 64), text, (unsigned)list.count, (unsigned)*num_threads);
    return COLIBRI_OK;
}
