/* check.h: the smallest test harness that says where and what failed. Each test program is one main() that returns check_report(). */
#ifndef CHECK_H
#define CHECK_H

#include <stdatomic.h>
#include <stdio.h>

static atomic_int check_failures, check_count; /* threads of a test may check too */

#define CHECK(condition) \
    (check_count++, (condition) ? (void)0 : (void)(check_failures++, fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition)))

#define CHECK_EQ(a, b)                                                                                                  \
    do {                                                                                                                \
        long long check_a = (long long)(a), check_b = (long long)(b);                                                   \
        check_count++;                                                                                                  \
        if (check_a != check_b) {                                                                                       \
            check_failures++;                                                                                           \
            fprintf(stderr, "%s:%d: %s is %lld, expected %s = %lld\n", __FILE__, __LINE__, #a, check_a, #b, check_b);   \
        }                                                                                                               \
    } while (0)

static inline int check_report(void) {
    fprintf(stderr, "%d checks, %d failed\n", (int)check_count, (int)check_failures);
    return check_failures != 0;
}

#endif
