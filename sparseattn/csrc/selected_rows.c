// The rows of keys and values that have the highest scores, side by side, and gradients back to where they lie; see 71_attention.
// Numbers are compared and copied, not computed with, so subnormal ones stay what they are.
#include "kernel.h"

/* [sizes] */
// What `s` holds, in this order: clouds, heads, tokens, rows chosen; channels of keys and of values; whether keys and values
// lie point by point; supports of a head; threads.
enum { CLOUDS, HEADS, TOKENS, CHOSEN, WIDTH, VALUES, KEYS_BY_POINT, VALUES_BY_POINT, SUPPORTS, THREADS };
enum { FINE, NOT_FINITE, BAD_SCORES };     // what `choose` and `gather` found
enum { AHEAD = 8, LARGE = 1 << 14 };       // rows, numbers worth a second thread

static inline int64_t copied(const int64_t *s) { return s[CLOUDS] * s[HEADS] * s[CHOSEN] * (s[WIDTH] + s[VALUES]); }
static inline int64_t searched(const int64_t *s) { return s[CLOUDS] * s[HEADS] * (s[TOKENS] + s[SUPPORTS]); }

/* [rows] */
// Number of row i of a pair of cloud and head.
static int64_t number(int64_t i, int64_t pair, int64_t rows, int64_t by_point, const int64_t *s) {
    return by_point ? (pair / s[HEADS] * rows + i) * s[HEADS] + pair % s[HEADS] : pair * rows + i;
}

// Where row i is: among the tokens, or from TOKENS on among the supports of table `own`.
static REAL *row(REAL *x, REAL *supports, int64_t i, int64_t pair, int64_t own, int64_t width, int64_t by_point, const int64_t *s) {
    if (i >= s[TOKENS]) return supports + (own * s[SUPPORTS] + i - s[TOKENS]) * width;
    return x + number(i, pair, s[TOKENS], by_point, s) * width;
}

static void prefetch(const REAL *x, int64_t width) {
    for (int64_t c = 0; c < width; c += 64 / sizeof(REAL)) __builtin_prefetch(x + c);
}

// The sum of a row shows whether all of it is finite.
static REAL copy(REAL *to, const REAL *from, int64_t width) {
    REAL sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; c++) sum += to[c] = from[c];
    return sum;
}

/* [gather] */
static int gather_head(int64_t pair, REAL *k, REAL *v, REAL *own_k, REAL *own_v, const int64_t *index, REAL *out,
                       const int64_t *s) {
    int64_t m = s[CHOSEN], d = s[WIDTH], e = s[VALUES], head = pair % s[HEADS];
    int found = FINE;
    for (int64_t a = pair * m; a < (pair + 1) * m; a++) {
        if (a + AHEAD < (pair + 1) * m) {
            prefetch(row(k, own_k, index[a + AHEAD], pair, head, d, s[KEYS_BY_POINT], s), d);
            prefetch(row(v, own_v, index[a + AHEAD], pair, head, e, s[VALUES_BY_POINT], s), e);
        }
        REAL *to = out + a * (d + e), sum = copy(to, row(k, own_k, index[a], pair, head, d, s[KEYS_BY_POINT], s), d);
        sum += copy(to + d, row(v, own_v, index[a], pair, head, e, s[VALUES_BY_POINT], s), e);
        if (!isfinite(sum)) found = NOT_FINITE;
    }
    return found;
}

int gather(REAL *k, REAL *v, REAL *own_k, REAL *own_v, const int64_t *index, REAL *out, const int64_t *s) {
    int found = FINE;
    #pragma omp parallel for num_threads(s[THREADS]) if (copied(s) > LARGE) reduction(| : found)
    for (int64_t pair = 0; pair < s[CLOUDS] * s[HEADS]; pair++)
        found |= gather_head(pair, k, v, own_k, own_v, index, out, s);
    return found;
}

/* [scatter] */
int scatter(REAL *k, REAL *v, REAL *own_k, REAL *own_v, const int64_t *index, const REAL *grad, const int64_t *s) {
    int64_t m = s[CHOSEN], d = s[WIDTH], e = s[VALUES];
    #pragma omp parallel for num_threads(s[THREADS]) if (copied(s) > LARGE)
    for (int64_t pair = 0; pair < s[CLOUDS] * s[HEADS]; pair++)
        for (int64_t a = pair * m; a < (pair + 1) * m; a++) {
            copy(row(k, own_k, index[a], pair, pair, d, s[KEYS_BY_POINT], s), grad + a * (d + e), d);
            copy(row(v, own_v, index[a], pair, pair, e, s[VALUES_BY_POINT], s), grad + a * (d + e) + d, e);
        }
    return 0;
}

/* [keys] */
// A whole number for a score, in the order of the scores.
static uint64_t key(REAL score) {
    double wide = score;
    uint64_t u;
    memcpy(&u, &wide, sizeof u);
    return u >> 63 ? ~u : u | (uint64_t)1 << 63;
}

/* [best] */
// Numbers of the m highest of n scores, in rising order; of equal ones the first. `prefix`, where `mask` has ones: the
// digits of the m-th highest key that are known; `left`: how many of the keys that share them are wanted.
static int best(const REAL *scores, int64_t n, int64_t m, int64_t *index) {
    uint64_t prefix = 0, mask = 0;
    int64_t left = m, chosen = 0;
    int bad = 0;
    for (int shift = 53; mask != ~(uint64_t)0; shift = shift > 11 ? shift - 11 : 0) {
        int64_t count[2048] = {0}, digit = 2047;
        for (int64_t i = 0; i < n; i++) {
            uint64_t u = key(scores[i]);
            bad |= !(scores[i] < INFINITY);
            if ((u & mask) == prefix) count[u >> shift & 2047]++;
        }
        if (bad) return BAD_SCORES;
        while (count[digit] < left) left -= count[digit--];
        prefix |= (uint64_t)digit << shift, mask |= (uint64_t)2047 << shift;
        if (count[digit] == left) break;  // all that share these digits are wanted
    }
    for (int64_t i = 0; i < n; i++) {
        uint64_t u = key(scores[i]) & mask;
        if (u > prefix || (u == prefix && left-- > 0)) {
            if (scores[i] == -INFINITY) return BAD_SCORES;
            index[chosen++] = i;
        }
    }
    return FINE;
}

/* [choose] */
int choose(const REAL *scores, REAL *k, REAL *v, REAL *own_k, REAL *own_v, int64_t *index, REAL *rows, const int64_t *s) {
    int64_t all = s[TOKENS] + s[SUPPORTS], m = s[CHOSEN];
    int found = FINE;
    #pragma omp parallel for num_threads(s[THREADS]) if (copied(s) + searched(s) > LARGE) reduction(| : found)
    for (int64_t pair = 0; pair < s[CLOUDS] * s[HEADS]; pair++) {
        int bad = best(scores + pair * all, all, m, index + pair * m);
        found |= bad ? bad : gather_head(pair, k, v, own_k, own_v, index, rows, s);
    }
    return found;
}
