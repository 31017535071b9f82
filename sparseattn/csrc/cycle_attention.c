// Attention of each point to itself and to the next point of a cyclic order; see 51_attention.
#include "kernel.h"
#include <tgmath.h>

/* [sizes] */
// What `s` holds, in this order: clouds, heads, points; channels of keys and of values; whether rows lie point by point;
// orders of clouds and of heads (1: all the same); threads.
enum { CLOUDS, HEADS, POINTS, WIDTH, VALUES, BY_POINT, CLOUD_ORDERS, HEAD_ORDERS, THREADS };
enum { FINE, NOT_FINITE, NO_ORDER };                 // what `forward` found
enum { PIECE = 2048, AHEAD = 6, LARGE = 1 << 14 };   // places, places, numbers worth a second thread

/* [walk] */
// Places [from, to) of the order of a head of a cloud, whose first `real` points are on the cycle.
typedef struct { const int64_t *order; int64_t real, first, step, from, to; } walk;

static int64_t pieces(const int64_t *s) { return s[CLOUDS] * s[HEADS] * ((s[POINTS] + PIECE - 1) / PIECE); }

static walk piece(int64_t number, const int64_t *order, const int64_t *count, const int64_t *s) {
    int64_t n = s[POINTS], parts = (n + PIECE - 1) / PIECE, from = number % parts * PIECE;
    int64_t head = number / parts % s[HEADS], cloud = number / parts / s[HEADS];
    int64_t which = (s[CLOUD_ORDERS] > 1 ? cloud : 0) * s[HEAD_ORDERS] + (s[HEAD_ORDERS] > 1 ? head : 0);
    int64_t first = s[BY_POINT] ? cloud * n * s[HEADS] + head : (cloud * s[HEADS] + head) * n;
    return (walk){order + n * which, count ? count[cloud] : n, first, s[BY_POINT] ? s[HEADS] : 1, from,
                  from + PIECE < n ? from + PIECE : n};
}

static int64_t row(walk w, int64_t place) { return w.first + w.order[place] * w.step; }
static int64_t next(walk w, int64_t place) { return row(w, place + 1 < w.real ? place + 1 : 0); }
static int64_t previous(walk w, int64_t place) { return row(w, place ? place - 1 : w.real - 1); }
static int64_t ahead(walk w, int64_t place) { return row(w, place + AHEAD < w.real ? place + AHEAD : place); }

/* [rows] */
// x.(b - a)
static REAL product_with_difference(const REAL *x, const REAL *b, const REAL *a, int64_t d) {
    REAL sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; c++) sum += x[c] * (b[c] - a[c]);
    return sum;
}

static void prefetch(const REAL *x, int64_t d) {
    for (int64_t c = 0; c < d; c += 64 / sizeof(REAL)) __builtin_prefetch(x + c);
}

static void clear(REAL *x, int64_t d) { memset(x, 0, d * sizeof(REAL)); }

/* [order] */
// Whether every row of n numbers holds each of 0..n-1 once; `seen` has room for n bytes.
static int each_once(const int64_t *order, int64_t rows, int64_t n, char *seen) {
    int fine = 1;
    for (int64_t r = 0; fine && r < rows; r++) {
        memset(seen, 0, n);
        for (int64_t t = r * n; fine && t < (r + 1) * n; t++) {
            uint64_t i = order[t];
            fine = i < (uint64_t)n && !seen[i];
            if (fine) seen[i] = 1;
        }
    }
    return fine;
}

/* [forward] */
int forward(const REAL *q, const REAL *k, const REAL *v, const int64_t *order, const int64_t *count, REAL *out,
            REAL *share, const int64_t *s, double scale) {
    int64_t d = s[WIDTH], e = s[VALUES], number = pieces(s);
    int found = FINE;
    // `share` is not yet written: it serves as memory for the check
    if (!each_once(order, s[CLOUD_ORDERS] * s[HEAD_ORDERS], s[POINTS], (char *)share)) return NO_ORDER;
    #pragma omp parallel num_threads(s[THREADS]) if (number > 1 && s[POINTS] * number * d > LARGE) reduction(| : found)
    {
        uint64_t mode = flush_subnormals();
        #pragma omp for
        for (int64_t p = 0; p < number; p++) {
            walk w = piece(p, order, count, s);
            for (int64_t t = w.from; t < w.to; t++) {
                int64_t i = row(w, t);
                if (t >= w.real) { clear(out + i * e, e), share[i] = 0; continue; }
                int64_t j = next(w, t), far = ahead(w, t);
                prefetch(q + far * d, d), prefetch(k + far * d, d), prefetch(v + far * e, e);
                REAL score = product_with_difference(q + i * d, k + j * d, k + i * d, d) * (REAL)scale;
                REAL g = 1 / (1 + exp(-score)), sum = score;
                #pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < e; c++) sum += out[i * e + c] = v[i * e + c] + g * (v[j * e + c] - v[i * e + c]);
                share[i] = g;
                if (!isfinite(sum)) found |= NOT_FINITE;
            }
        }
        restore_subnormals(mode);
    }
    return found;
}

/* [slope] */
// Gradient by the score of row a, which attends to row b.
static REAL slope(const REAL *grad, const REAL *v, const REAL *share, int64_t a, int64_t b, int64_t e, REAL scale) {
    return product_with_difference(grad + a * e, v + b * e, v + a * e, e) * share[a] * (1 - share[a]) * scale;
}

/* [backward] */
int backward(const REAL *q, const REAL *k, const REAL *v, const int64_t *order, const int64_t *count, const REAL *share,
             const REAL *grad, REAL *to_q, REAL *to_k, REAL *to_v, const int64_t *s, double scale) {
    int64_t d = s[WIDTH], e = s[VALUES], number = pieces(s);
    #pragma omp parallel num_threads(s[THREADS]) if (number > 1 && s[POINTS] * number * d > LARGE)
    {
        uint64_t mode = flush_subnormals();
        #pragma omp for
        for (int64_t p = 0; p < number; p++) {
            walk w = piece(p, order, count, s);
            REAL slope_h = 0;  // kept from step to step; where a piece begins, it is computed
            for (int64_t t = w.from; t < w.to; t++) {
                int64_t i = row(w, t);
                if (t >= w.real) { clear(to_q + i * d, d), clear(to_k + i * d, d), clear(to_v + i * e, e); continue; }
                int64_t h = previous(w, t), j = next(w, t), far = ahead(w, t);
                prefetch(q + far * d, d), prefetch(k + far * d, d), prefetch(v + far * e, e), prefetch(grad + far * e, e);
                if (t == w.from) slope_h = slope(grad, v, share, h, i, e, scale);
                REAL slope_i = slope(grad, v, share, i, j, e, scale);
                #pragma omp simd
                for (int64_t c = 0; c < d; c++) {
                    to_q[i * d + c] = slope_i * (k[j * d + c] - k[i * d + c]);
                    to_k[i * d + c] = slope_h * q[h * d + c] - slope_i * q[i * d + c];
                }
                #pragma omp simd
                for (int64_t c = 0; c < e; c++) to_v[i * e + c] = (1 - share[i]) * grad[i * e + c] + share[h] * grad[h * e + c];
                slope_h = slope_i;
            }
        }
        restore_subnormals(mode);
    }
    return 0;
}
