/* sampler.c: penalty, temperature, top-k, top-p (Holtzman et al., arXiv 1904.09751), min-p (arXiv 2407.01082), then one draw
 * whose random number is a function of (seed, position) alone. Candidates come from a heap, so only as much is sorted as is
 * kept. Same bits everywhere: coli_expf, and sums in one order. */
#include "forward/sampler.h"

#include "base/math.h"

int32_t coli_argmax(const float *logits, uint32_t n) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

/* SplitMix64's mixing function (Steele, Lea, Flood 2014), twice, over seed and position: uniform in [0, 1). */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static double uniform(uint64_t seed, uint64_t position) {
    uint64_t bits = mix(mix(seed + 0x9e3779b97f4a7c15u) + (position + 1) * 0x9e3779b97f4a7c15u);
    return (double)(bits >> 11) * 0x1p-53;
}

/* ---- candidates in descending order of value, ties to the lower id, produced one by one ---- */

/* ids[0 ... n - 1] is a max-heap; what was taken from it lies behind it, so the i-th best is ids[vocab - 1 - i]. */
typedef struct candidates {
    uint32_t *ids;
    const float *values; /* by id */
    float most;          /* the largest value */
    uint32_t n, vocab;
} candidates_t;

static bool before(const candidates_t *c, uint32_t a, uint32_t b) {
    return c->values[a] > c->values[b] || (c->values[a] == c->values[b] && a < b);
}

static void sift_down(candidates_t *c, uint32_t at) {
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= c->n) return;
        if (child + 1 < c->n && before(c, c->ids[child + 1], c->ids[child])) child++;
        if (!before(c, c->ids[child], c->ids[at])) return;
        uint32_t id = c->ids[at];
        c->ids[at] = c->ids[child];
        c->ids[child] = id;
        at = child;
    }
}

static void candidates_init(candidates_t *c) {
    for (uint32_t i = 0; i < c->vocab; i++) c->ids[i] = i;
    for (uint32_t i = c->vocab / 2; i-- > 0;) sift_down(c, i);
}

static uint32_t nth(candidates_t *c, uint32_t i) {
    while (c->vocab - c->n <= i) {
        uint32_t id = c->ids[0];
        c->ids[0] = c->ids[--c->n];
        c->ids[c->n] = id;
        sift_down(c, 0);
    }
    return c->ids[c->vocab - 1 - i];
}

static float weight(const candidates_t *c, uint32_t id) {
    return coli_expf(c->values[id] - c->most);
} /* relative to the best */

/* ---- sampling ---- */

/* values[id] = logit after penalty. A token that occurs twice in the slot is penalised once: it is computed
 * from the logit each time. */
static void penalise(const colibri_t *s, uint32_t slot, const colibri_sampling_t *o, float *values) {
    const float *logits = s->b.logits + (uint64_t)slot * s->vocab_stride;
    uint32_t vocab = s->weights->params->vocab_size;
    memcpy(values, logits, vocab * sizeof(float));
    if (o->repetition_penalty != 0 && o->repetition_penalty != 1)
        for (uint32_t i = 0; i < s->slots[slot].length; i++) {
            int32_t id = s->b.history[(uint64_t)slot * s->options.seq + i];
            values[id] = logits[id] > 0 ? logits[id] / o->repetition_penalty : logits[id] * o->repetition_penalty;
        }
}

static double total_weight(const candidates_t *c) {
    double sum = 0;
    for (uint32_t id = 0; id < c->vocab; id++) sum += weight(c, id);
    return sum;
}

/* Nothing is cut off: no sorting, draw in id order. */
static int32_t draw_all(const candidates_t *c, double u) {
    double target = u * total_weight(c), sum = 0;
    uint32_t last = 0;
    for (uint32_t id = 0; id < c->vocab; id++) {
        float w = weight(c, id);
        if (w > 0) last = id;
        if ((sum += w) > target) return (int32_t)id;
    }
    return (int32_t)last;
}

static int32_t draw_kept(candidates_t *c, const colibri_sampling_t *o, double u) {
    uint32_t limit = o->top_k > 0 ? COLI_MIN((uint32_t)o->top_k, c->vocab) : c->vocab, kept = 0;
    bool nucleus = o->top_p > 0 && o->top_p < 1;
    double all = 0, sum = 0;
    if (nucleus && limit == c->vocab) all = total_weight(c);
    else if (nucleus)
        for (uint32_t i = 0; i < limit; i++) all += weight(c, nth(c, i));
    while (kept < limit) {
        float w = weight(c, nth(c, kept));
        if (kept > 0 && w < o->min_p) break;
        sum += w;
        kept++;
        if (nucleus && sum >= (double)o->top_p * all) break;
    }
    double target = u * sum, run = 0;
    for (uint32_t i = 0; i < kept; i++)
        if ((run += weight(c, nth(c, i))) > target) return (int32_t)nth(c, i);
    return (int32_t)nth(c, 0);
}

int32_t coli_sample(const colibri_t *s, uint32_t slot, const colibri_sampling_t *o) {
    uint32_t vocab = s->weights->params->vocab_size;
    float *values = s->b.sample_values;
    penalise(s, slot, o, values);
    int32_t best = coli_argmax(values, vocab);
    if (o->temperature <= 0) return best;
    for (uint32_t i = 0; i < vocab; i++) values[i] /= o->temperature;
    if (values[best] - values[best] != 0) return best; /* infinite: so small a temperature or penalty leaves one choice */
    candidates_t c = {s->b.sample_ids, values, values[best], vocab, vocab};
    double u = uniform(o->seed, s->slots[slot].length);
    bool cut = (o->top_k > 0 && (uint32_t)o->top_k < vocab) || (o->top_p > 0 && o->top_p < 1) || o->min_p > 0;
    if (!cut) return draw_all(&c, u);
    candidates_init(&c);
    return draw_kept(&c, o, u);
}
