/* histogram.h: durations counted by powers of two, as colibri_stats_t's histograms hold them. */
#ifndef COLI_HISTOGRAM_H
#define COLI_HISTOGRAM_H

#include "base/base.h"

/* Longest duration that bucket i takes: 2^i microseconds. The last bucket takes all longer ones. */
COLI_INLINE uint64_t coli_histogram_limit_ns(uint32_t i) { return (uint64_t)1000 << i; }

/* Count one duration. Who counts here adds the same nanoseconds to the sum that goes with the histogram (infer_ns; with
 * read_histogram the expert's load_ns): colibri_metrics shows the two as one. */
COLI_INLINE void coli_histogram_add(uint64_t histogram[COLIBRI_HISTOGRAM], uint64_t ns) {
    uint32_t i = 0;
    while (i < COLIBRI_HISTOGRAM - 1 && ns > coli_histogram_limit_ns(i)) i++;
    histogram[i]++;
}

#endif
