/* limits.h: what the machine itself can do, measured by colibri-bench --limits: read bandwidth and multiply-add rates. */
#ifndef COLIBRI_LIMITS_H
#define COLIBRI_LIMITS_H

#include "cli_common.h"

/* Measure and print a table, or one JSON object with --json. Uses threads, repeat (rounds) and buffer_mb of the arguments.
 * CLI_OK, or CLI_FAILED after a line on stderr. */
int limits_run(const cli_args_t *args);

#endif
