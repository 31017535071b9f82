// The k rows sampled, mixed with the k next ones by comparing their scores, and the gradient of that; see 70_sampling.
#include "tiles.h"

/* [sizes] */
enum { SETS, SAMPLED, CHANNELS, THREADS };

/* [factors] */
// u and v of a set, infinite where padded, so that q is zero there.
static inline void factors(const REAL *top, int64_t k, double tau, REAL *u, REAL *v) {
    for (int64_t a = 0; a < padded(k) + TILE; a++) {
        u[a] = a < k ? exp((top[a] - top[k - 1]) / tau) : INFINITY;
        v[a] = a < k ? exp((top[k - 1] - top[k + a]) / tau) : INFINITY;
    }
}

// q of some rows of I, and the sums of each.
static inline void compare(const REAL *u, const REAL *v, int64_t rows, int64_t k_all, REAL *q, REAL *sums) {
    for (int64_t r = 0; r < rows; r++) {
        vec total = {0};
        for (int64_t j = 0; j < k_all; j += LANES) total += *at(q + r * k_all + j) = 1 / (1 + u[r] * *at(v + j));
        sums[r] = added(total);
    }
}

/* [mix] */
int mix(const REAL *rows, const REAL *top, REAL *out, double tau, const int64_t *s) {
    int64_t k = s[SAMPLED], c = s[CHANNELS], k_all = padded(k), c_all = padded(c);
    int64_t size = k * c_all + 2 * (k_all + TILE) + TILE * (k_all + c_all);
    REAL *memory = malloc(s[THREADS] * size * sizeof(REAL));
    if (!memory) return OUT_OF_MEMORY;
    #pragma omp parallel num_threads(s[THREADS])
    {
        uint64_t mode = flush_subnormals();
        REAL *others = memory + omp_get_thread_num() * size;
        REAL *u = others + k * c_all, *v = u + k_all + TILE, *q = v + k_all + TILE, *mean = q + TILE * k_all, sums[TILE];
        #pragma omp for
        for (int64_t b = 0; b < s[SETS]; b++) {
            factors(top + 2 * b * k, k, tau, u, v);
            place(rows + (2 * b + 1) * k * c, c, k, c, (REAL)1 / k, others, k, c_all);
            for (int64_t a = 0; a < k; a += TILE) {
                int64_t n = least(k - a, TILE), n_all = in_blocks(n);
                compare(u + a, v, n_all, k_all, q, sums);
                product(q, k_all, 1, others, c_all, mean, c_all, n_all, c_all, k, 0);
                for (int64_t r = 0; r < n; r++) {
                    const REAL *own = rows + (2 * b * k + a + r) * c;
                    REAL *to = out + (b * k + a + r) * c, share = 1 - sums[r] / k;
                    for (int64_t j = 0; j < c; j++) to[j] = share * own[j] + mean[r * c_all + j];
                }
            }
        }
        restore_subnormals(mode);
    }
    free(memory);
    return 0;
}

/* [slopes] */
// Sum of the slopes e of a row of I, from its comparisons q and h.x_J in `e`; they are added to those of J.
static inline REAL slopes(const REAL *q, const REAL *e, REAL own, int64_t k_all, REAL *to_others) {
    vec total = {0};
    for (int64_t j = 0; j < k_all; j += LANES) {
        vec share = *at(q + j), slope = (own - *at(e + j)) * share * (1 - share);
        total += slope, *at(to_others + j) += slope;
    }
    return added(total);
}

/* [unmix] */
int unmix(const REAL *grad, const REAL *rows, const REAL *top, REAL *to_rows, REAL *to_top, double tau, const int64_t *s) {
    int64_t k = s[SAMPLED], c = s[CHANNELS], k_all = padded(k), c_all = padded(c);
    int64_t size = c * k_all + k_all * c_all + k_all + 2 * (k_all + TILE) + TILE * (2 * k_all + c_all);
    REAL *memory = malloc(s[THREADS] * size * sizeof(REAL));
    if (!memory) return OUT_OF_MEMORY;
    #pragma omp parallel num_threads(s[THREADS])
    {
        uint64_t mode = flush_subnormals();
        REAL *others = memory + omp_get_thread_num() * size, *to_others = others + c * k_all;
        REAL *to_next = to_others + k_all * c_all, *u = to_next + k_all, *v = u + k_all + TILE;
        REAL *q = v + k_all + TILE, *e = q + TILE * k_all, *h = e + TILE * k_all;
        #pragma omp for
        for (int64_t b = 0; b < s[SETS]; b++) {
            REAL sums[TILE], *to_first = to_top + 2 * b * k, over = 1 / (k * tau);
            factors(top + 2 * b * k, k, tau, u, v);
            place_columns(rows + (2 * b + 1) * k * c, c, k, c, others, k_all);
            memset(to_others, 0, k_all * (c_all + 1) * sizeof(REAL));  // and `to_next`, which lies behind
            for (int64_t a = 0; a < k; a += TILE) {
                int64_t n = least(k - a, TILE), n_all = in_blocks(n);
                compare(u + a, v, n_all, k_all, q, sums);
                place(grad + (b * k + a) * c, c, n, c, 1, h, n_all, c_all);
                if (to_rows) product(q, 1, k_all, h, c_all, to_others, c_all, k_all, c_all, n_all, 1);
                product(h, c_all, 1, others, k_all, e, k_all, n_all, k_all, c, 0);
                for (int64_t r = 0; r < n; r++) {
                    int64_t i = 2 * b * k + a + r;
                    REAL own = 0;
                    #pragma omp simd reduction(+ : own)
                    for (int64_t j = 0; j < c; j++) own += h[r * c_all + j] * rows[i * c + j];
                    to_first[a + r] = over * slopes(q + r * k_all, e + r * k_all, own, k_all, to_next);
                    if (to_rows) place(h + r * c_all, c_all, 1, c, 1 - sums[r] / k, to_rows + i * c, 1, c);
                }
            }
            for (int64_t j = 0; j < k; j++) to_first[k + j] = -over * to_next[j];
            if (to_rows) place(to_others, c_all, k, c, (REAL)1 / k, to_rows + (2 * b + 1) * k * c, k, c);
        }
        restore_subnormals(mode);
    }
    free(memory);
    return 0;
}
