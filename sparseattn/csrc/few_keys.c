#include "tiles.h"

/* [softmax] */
// exp(x - max x) in place of n logits, zeros up to width; their sum.
static inline REAL weights(REAL *x, int64_t n, int64_t width) {
    for (int64_t j = n; j < width; j++) x[j] = -INFINITY;
    REAL most = largest(x, width);
    vec total = {0};
    for (int64_t j = 0; j < width; j += LANES) {
        vec p = exponential(*at(x + j) - most);
        total += *at(x + j) = p;  // of padding the smallest normal number, lost beside the 1 of the largest weight
    }
    for (int64_t j = n; j < width; j++) x[j] = 0;
    return added(total);
}

// Logits p become weights, gradients u by the weights become gradients by the logits.
static inline void softmax_backward(REAL *p, REAL *u, int64_t n, int64_t width) {
    REAL whole = 1 / weights(p, n, width);
    vec dots = {0};
    for (int64_t j = 0; j < width; j += LANES) dots += (*at(p + j) *= whole) * *at(u + j);
    REAL dot = added(dots);
    for (int64_t j = 0; j < width; j += LANES) *at(u + j) = *at(p + j) * (*at(u + j) - dot);
}

/* [heads] */
enum { PAIRS, HEADS, QUERIES, KEYS, WIDTH, VALUES, PIECES, BY_POINT, GRAD_BY_POINT, THREADS };

// Where the rows of a head begin in (b, h, n, width), or in (b, n, h, width), and how far apart they are.
static inline int64_t first(int64_t pair, int64_t width, int64_t by_point, const int64_t *s) {
    return (by_point ? pair / s[HEADS] * s[QUERIES] * s[HEADS] + pair % s[HEADS] : pair * s[QUERIES]) * width;
}
static inline int64_t apart(int64_t width, int64_t by_point, const int64_t *s) {
    return by_point ? s[HEADS] * width : width;
}

/* [forward] */
static inline int forward(const workspace *x, const REAL *q, int64_t q_step, REAL *out, int64_t out_step, int64_t n,
                          REAL scale) {
    int64_t rows = in_blocks(n), m = x->m_all, d = x->d_all, e = x->e_all;
    REAL sums[TILE];
    place(q, q_step, n, x->d, scale, x->q, rows, d);
    product(x->q, d, 1, x->keys_t, m, x->p, m, rows, m, x->d, 0);
    for (int64_t r = 0; r < rows; r++) sums[r] = weights(x->p + r * m, x->m, m);
    product(x->p, m, 1, x->values, e, x->out, e, rows, e, x->m, 0);
    vec total = {0};
    for (int64_t j = 0; j < n * e; j += LANES) total += *at(x->out + j);
    for (int64_t r = 0; r < n; r++) place(x->out + r * e, e, 1, x->e, 1 / sums[r], out + r * out_step, 1, x->e);
    return !isfinite(added(total));
}

int attend(const REAL *q, const REAL *rows, REAL *out, double scale, const int64_t *s) {
    int64_t d = s[WIDTH], e = s[VALUES], q_step = apart(d, s[BY_POINT], s), out_step = apart(e, s[BY_POINT], s);
    int64_t size = workspace_size(s[KEYS], d, e);
    int nonfinite = 0;
    REAL *memory = malloc(s[THREADS] * size * sizeof(REAL));
    if (!memory) return OUT_OF_MEMORY;
    #pragma omp parallel num_threads(s[THREADS]) reduction(| : nonfinite)
    {
        uint64_t mode = flush_subnormals();
        workspace x = made(memory + omp_get_thread_num() * size, s[KEYS], d, e);
        #pragma omp for
        for (int64_t piece = 0; piece < s[PAIRS] * s[PIECES]; piece++) {
            int64_t pair = piece / s[PIECES], part = piece % s[PIECES], end = s[QUERIES] * (part + 1) / s[PIECES];
            const REAL *row = rows + pair * x.m * (d + e), *from = q + first(pair, d, s[BY_POINT], s);
            place_columns(row, d + e, x.m, d, x.keys_t, x.m_all);
            place(row + d, d + e, x.m, e, 1, x.values, x.m, x.e_all);
            for (int64_t i = s[QUERIES] * part / s[PIECES]; i < end; i += TILE)
                nonfinite |= forward(&x, from + i * q_step, q_step, out + first(pair, e, s[BY_POINT], s) + i * out_step,
                                   out_step, least(end - i, TILE), scale);
        }
        restore_subnormals(mode);
    }
    free(memory);
    return nonfinite;
}

/* [tile backward] */
static inline void backward(const workspace *x, const REAL *q, int64_t q_step, const REAL *grad, int64_t grad_step,
                            REAL *to_q, int64_t n, REAL scale) {
    int64_t rows = in_blocks(n), m = x->m_all, d = x->d_all, e = x->e_all;
    place(q, q_step, n, x->d, scale, x->q, rows, d);
    place(grad, grad_step, n, x->e, 1, x->out, rows, e);
    product(x->q, d, 1, x->keys_t, m, x->p, m, rows, m, x->d, 0);
    product(x->out, e, 1, x->values_t, m, x->u, m, rows, m, x->e, 0);
    for (int64_t r = 0; r < rows; r++) softmax_backward(x->p + r * m, x->u + r * m, x->m, m);
    product(x->p, 1, m, x->out, e, x->to_values, e, m, e, rows, 1);
    product(x->u, 1, m, x->q, d, x->to_keys, d, m, d, rows, 1);
    product(x->u, m, 1, x->keys, d, x->to_q, d, rows, d, x->m, 0);
    for (int64_t r = 0; r < n; r++) place(x->to_q + r * d, d, 1, x->d, scale, to_q + r * q_step, 1, x->d);
}

/* [backward] */
int attend_backward(const REAL *grad, const REAL *q, const REAL *rows, REAL *to_q, REAL *to_rows, double scale,
                    const int64_t *s) {
    int64_t d = s[WIDTH], e = s[VALUES], q_step = apart(d, s[BY_POINT], s), grad_step = apart(e, s[GRAD_BY_POINT], s);
    int64_t size = workspace_size(s[KEYS], d, e);
    REAL *memory = malloc(s[THREADS] * size * sizeof(REAL));
    if (!memory) return OUT_OF_MEMORY;
    #pragma omp parallel num_threads(s[THREADS])
    {
        uint64_t mode = flush_subnormals();
        workspace x = made(memory + omp_get_thread_num() * size, s[KEYS], d, e);
        #pragma omp for
        for (int64_t piece = 0; piece < s[PAIRS] * s[PIECES]; piece++) {
            int64_t pair = piece / s[PIECES], part = piece % s[PIECES], end = s[QUERIES] * (part + 1) / s[PIECES];
            int64_t own = first(pair, d, s[BY_POINT], s);
            const REAL *row = rows + pair * x.m * (d + e), *from = grad + first(pair, e, s[GRAD_BY_POINT], s);
            REAL *to = to_rows + piece * x.m * (d + e);
            place_columns(row, d + e, x.m, d, x.keys_t, x.m_all);
            place_columns(row + d, d + e, x.m, e, x.values_t, x.m_all);
            place(row, d + e, x.m, d, 1, x.keys, x.m, x.d_all);
            memset(x.to_keys, 0, x.m_all * x.d_all * sizeof(REAL));
            memset(x.to_values, 0, x.m_all * x.e_all * sizeof(REAL));
            for (int64_t i = s[QUERIES] * part / s[PIECES]; i < end; i += TILE)
                backward(&x, q + own + i * q_step, q_step, from + i * grad_step, grad_step, to_q + own + i * q_step,
                         least(end - i, TILE), scale);
            for (int64_t j = 0; j < x.m; j++) {
                place(x.to_keys + j * x.d_all, x.d_all, 1, d, 1, to + j * (d + e), 1, d);
                place(x.to_values + j * x.e_all, x.e_all, 1, e, 1, to + j * (d + e) + d, 1, e);
            }
        }
        restore_subnormals(mode);
    }
    free(memory);
    return 0;
}
