#include "tiles.h"

/* [squared distances] */
// HEIGHT rows and `breadth` vectors of sums over t of (A(i, t) - B(t, j))^2.
INLINE void distance_block(const REAL *a, int64_t a_step, const REAL *b, int64_t b_step, REAL *c, int64_t depth,
                           int breadth) {
    vec sum[HEIGHT][BREADTH];
    #pragma GCC unroll 8
    for (int r = 0; r < HEIGHT; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) sum[r][v] = (vec){0};
    for (int64_t t = 0; t < depth; t++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) {
            vec right = *at(b + t * b_step + v * LANES);
            #pragma GCC unroll 8
            for (int r = 0; r < HEIGHT; r++) {
                vec gap = a[r * a_step + t] - right;
                sum[r][v] += gap * gap;
            }
        }
    #pragma GCC unroll 8
    for (int r = 0; r < HEIGHT; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) *at(c + r * b_step + v * LANES) = sum[r][v];
}

static inline void squared_distances(const REAL *a, int64_t a_step, const REAL *b, int64_t b_step, REAL *c,
                                     int64_t rows, int64_t depth) {
    int64_t j = 0;
    for (; j + BREADTH * LANES <= b_step; j += BREADTH * LANES)
        for (int64_t i = 0; i < rows; i += HEIGHT)
            distance_block(a + i * a_step, a_step, b + j, b_step, c + i * b_step + j, depth, BREADTH);
    for (; j < b_step; j += LANES)
        for (int64_t i = 0; i < rows; i += HEIGHT)
            distance_block(a + i * a_step, a_step, b + j, b_step, c + i * b_step + j, depth, 1);
}

/* [weighted differences] */
enum { HALF = HEIGHT / 2 };

// HALF rows and `breadth` vectors of C(i) = sum over t of A(i, t) (B(t) - X(i)), or C += that; B, X and C are as wide.
INLINE void difference_block(const REAL *a, int64_t down, int64_t along, const REAL *b, const REAL *x, REAL *c,
                             int64_t width, int64_t depth, int breadth, int add) {
    vec sum[HALF][BREADTH], own[HALF][BREADTH];
    #pragma GCC unroll 4
    for (int r = 0; r < HALF; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) {
            sum[r][v] = add ? *at(c + r * width + v * LANES) : (vec){0};
            own[r][v] = *at(x + r * width + v * LANES);
        }
    for (int64_t t = 0; t < depth; t++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) {
            vec right = *at(b + t * width + v * LANES);
            #pragma GCC unroll 4
            for (int r = 0; r < HALF; r++) sum[r][v] += a[r * down + t * along] * (right - own[r][v]);
        }
    #pragma GCC unroll 4
    for (int r = 0; r < HALF; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) *at(c + r * width + v * LANES) = sum[r][v];
}

static inline void weighted_differences(const REAL *a, int64_t down, int64_t along, const REAL *b, const REAL *x,
                                        REAL *c, int64_t width, int64_t rows, int64_t depth, int add) {
    int64_t j = 0;
    for (; j + BREADTH * LANES <= width; j += BREADTH * LANES)
        for (int64_t i = 0; i < rows; i += HALF)
            difference_block(a + i * down, down, along, b + j, x + i * width + j, c + i * width + j, width, depth,
                             BREADTH, add);
    for (; j < width; j += LANES)
        for (int64_t i = 0; i < rows; i += HALF)
            difference_block(a + i * down, down, along, b + j, x + i * width + j, c + i * width + j, width, depth, 1,
                             add);
}

/* [rows] */
enum { TABLES, ROWS, POINTS, BLOCK, WIDTH, VALUES, TOGETHER, UNION, THREADS };
enum { AHEAD = 8 };

INLINE void prefetch(const REAL *x, int64_t width) {
    for (int64_t c = 0; c < width; c += 64 / sizeof(REAL)) __builtin_prefetch(x + c);
}

// Rows of x by number, padded; whether all is finite.
static inline int copy_sorted(const REAL *x, int64_t width, const int64_t *order, int64_t rows, REAL *to, int64_t all) {
    REAL sum = 0;
    for (int64_t i = 0; i < rows; i++, to += all) {
        if (i + AHEAD < rows) prefetch(x + order[i + AHEAD] * width, width);
        place(x + order[i] * width, width, 1, width, 1, to, 1, all);
        for (int64_t c = 0; c < width; c++) sum += to[c];
    }
    return isfinite(sum);
}

// Padded rows, copied from where `slots` say, or added to where they say.
static inline void gather(const REAL *x, const int64_t *slots, int64_t rows, REAL *to, int64_t all) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < all; c += LANES) *at(to + i * all + c) = *at(x + slots[i] * all + c);
}
static inline void add_to(const REAL *from, const int64_t *slots, int64_t rows, REAL *x, int64_t all, int first) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < all; c += LANES) {
            vec *to = at(x + slots[i] * all + c);
            if (first) *to = *at(from + i * all + c);
            else *to += *at(from + i * all + c);
        }
}

/* [heads] */
// Some heads at a time: rows in the order of the first table, which makes its blocks contiguous and brings the points
// of the other tables' blocks near each other.
typedef struct {
    int64_t n, d, e, d_all, e_all, blocks;                  // points, widths, the same padded
    REAL *q, *k, *v, *grad, *sum_q, *sum_k, *sum_v, *dots;  // rows, what is added up for them
    REAL *denominator;                                      // of a row
    double *nearest;
    REAL *block_q, *block_k, *memory;                       // union: number of the block in every table; of the threads
    int64_t *place_q, *place_k;                             // of a point
} heads;

static inline int64_t thread_size(const int64_t *s) {
    return workspace_size(s[BLOCK], s[WIDTH], s[VALUES]) + (4 + s[TABLES]) * padded(s[BLOCK]);
}

static inline heads make_heads(const int64_t *s) {
    heads h = {.n = s[POINTS], .d = s[WIDTH], .e = s[VALUES], .d_all = padded(s[WIDTH]), .e_all = padded(s[VALUES])};
    int64_t all = s[TOGETHER] * h.n;
    int64_t numbers = all * (4 * h.d_all + 4 * h.e_all + 2 + (s[UNION] ? 2 * s[TABLES] : 0));
    REAL *next = h.memory = malloc((numbers + s[THREADS] * thread_size(s)) * sizeof(REAL) + 3 * all * sizeof(int64_t));
    if (!next) return h;
    next += s[THREADS] * thread_size(s);
    h.blocks = (h.n + s[BLOCK] - 1) / s[BLOCK];
    h.place_q = (int64_t *)next, h.place_k = h.place_q + all, h.nearest = (double *)(h.place_k + all);
    next = (REAL *)(h.nearest + all);
    h.q = cut(&next, all * h.d_all), h.k = cut(&next, all * h.d_all), h.v = cut(&next, all * h.e_all);
    h.sum_v = cut(&next, all * h.e_all), h.sum_q = cut(&next, all * h.d_all), h.sum_k = cut(&next, all * h.d_all);
    h.grad = cut(&next, all * h.e_all), h.dots = cut(&next, all);
    h.denominator = cut(&next, all);
    h.block_q = cut(&next, s[UNION] ? all * s[TABLES] : 0), h.block_k = next;
    return h;
}

/* [workspaces] */
typedef struct { workspace x; int64_t *slots; REAL *numbers_k; } work;

static inline work thread_work(const heads *h, const int64_t *s) {
    REAL *next = h->memory + omp_get_thread_num() * thread_size(s);
    work w = {.x = made(next, s[BLOCK], h->d, h->e)};
    next += workspace_size(s[BLOCK], h->d, h->e);
    w.slots = (int64_t *)cut(&next, 4 * padded(s[BLOCK])), w.numbers_k = next;
    return w;
}

/* [blocks] */
typedef struct { int64_t head, at, m; const int64_t *order_q, *order_k; } span;  // a block: its points, m of them

static inline span block_of(int64_t item, int64_t table, int64_t from, const heads *h, const int64_t *order_q,
                            const int64_t *order_k, const int64_t *count, const int64_t *s) {
    int64_t head = item / h->blocks, start = item % h->blocks * s[BLOCK], real = count ? count[from + head] : h->n;
    int64_t first = (table * s[ROWS] + from + head) * h->n + start;
    int64_t m = real > start ? least(real - start, s[BLOCK]) : 0;
    return (span){head, head * h->n + start, m, order_q + first, order_k + first};
}

// Where the points of a block are.
static inline void find_rows(const heads *h, span b, int64_t table, const int64_t *order, const int64_t *place,
                             int64_t *slots) {
    for (int64_t i = 0; i < b.m; i++) slots[i] = table ? place[b.head * h->n + order[i]] : b.at + i;
}

// Rows of a block into the order of the first table; whether all is finite.
static inline int sort_block(const heads *h, span b, const REAL *q, const REAL *k, const REAL *v) {
    int64_t first = b.head * h->n;
    for (int64_t i = 0; i < b.m; i++)
        h->place_q[first + b.order_q[i]] = b.at + i, h->place_k[first + b.order_k[i]] = b.at + i;
    return copy_sorted(q + first * h->d, h->d, b.order_q, b.m, h->q + b.at * h->d_all, h->d_all)
         & copy_sorted(k + first * h->d, h->d, b.order_k, b.m, h->k + b.at * h->d_all, h->d_all)
         & copy_sorted(v + first * h->e, h->e, b.order_k, b.m, h->v + b.at * h->e_all, h->e_all);
}

/* [meetings] */
// Keys and values of a block, and where they have been: the number of tables that count for that.
static inline int64_t gather_block(const heads *h, const workspace *x, span b, int64_t table, int64_t *of_k,
                                   int64_t *of_q, REAL *numbers_k, const int64_t *s) {
    int64_t d = h->d_all, m = padded(b.m), earlier = s[UNION] ? table : 0;
    find_rows(h, b, table, b.order_k, h->place_k, of_k), find_rows(h, b, table, b.order_q, h->place_q, of_q);
    gather(h->k, of_k, b.m, x->keys, d), gather(h->v, of_k, b.m, x->values, h->e_all);
    memset(x->keys + b.m * d, 0, (m - b.m) * d * sizeof(REAL));
    place_columns(x->keys, d, b.m, h->d, x->keys_t, m);
    for (int64_t t = 0; t < earlier; t++)
        for (int64_t j = 0; j < b.m; j++) numbers_k[t * m + j] = h->block_k[t * s[TOGETHER] * h->n + of_k[j]];
    return earlier;
}

// Number of the block of every point in every table; the threads share the work.
static inline void number_blocks(const heads *h, int64_t items, int64_t from, const int64_t *order_q,
                                 const int64_t *order_k, const int64_t *count, const int64_t *s) {
    #pragma omp for
    for (int64_t item = 0; item < items * s[TABLES]; item++) {
        int64_t table = item / items, number = item % items % h->blocks, all = s[TOGETHER] * h->n;
        span b = block_of(item % items, table, from, h, order_q, order_k, count, s);
        for (int64_t i = 0; i < b.m; i++) {
            h->block_q[table * all + h->place_q[b.head * h->n + b.order_q[i]]] = number;
            h->block_k[table * all + h->place_k[b.head * h->n + b.order_k[i]]] = number;
        }
    }
}

/* [weights] */
// Padding, and pairs that met in an earlier table, are infinitely far.
static inline void hide_pairs(const heads *h, REAL *gap, const int64_t *slots, int64_t rows, int64_t m,
                              const REAL *numbers_k, int64_t tables, int64_t all) {
    const int64_t m_all = padded(m);
    const vec far = INFINITY - (vec){0};
    for (int64_t r = 0; r < rows; r++, gap += m_all) {
        for (int64_t j = m; j < m_all; j++) gap[j] = INFINITY;
        for (int64_t t = 0; t < tables; t++)
            for (int64_t j = 0; j < m_all; j += LANES) {
                ints same = *at(numbers_k + t * m_all + j) == h->block_q[t * all + slots[r]];
                *at(gap + j) = (vec)(((ints)far & same) | ((ints)*at(gap + j) & ~same));
            }
    }
}

static inline REAL row_minimum(const REAL *gap, int64_t width) {
    vec top = -*at(gap);
    for (int64_t j = LANES; j < width; j += LANES) top = larger(top, -*at(gap + j));
    REAL most = top[0];
    for (int lane = 1; lane < LANES; lane++) most = top[lane] > most ? top[lane] : most;
    return -most;
}

// Weights exp((nearest - gap) / 2) in place of squared distances; their sum. Below e^-60 they are 0: that is lost
// beside the 1 of the nearest key, and keeps products with them, here and outside, from becoming subnormal.
static inline REAL exponentiate(REAL *gap, REAL nearest, int64_t width) {
    const vec lowest = -60 - (vec){0};
    vec total = {0};
    for (int64_t j = 0; j < width; j += LANES) {
        vec x = (nearest - *at(gap + j)) * (REAL)0.5;
        vec p = (vec)((ints)exponential(x) & ~(x < lowest));
        total += *at(gap + j) = p;
    }
    return added(total);
}

/* [far rows] */
// From this squared distance to the nearest key on, a row of float takes its gaps in double.
enum { FAR = 128 };

static inline int is_far(double nearest) { return FLOAT && nearest > FAR && nearest < INFINITY; }

// Squared distances of a query to LANES keys in double.
INLINE void exact_distances(const REAL *q, const REAL *keys_t, int64_t depth, int64_t m_all, double *sum) {
    for (int lane = 0; lane < LANES; lane++) sum[lane] = 0;
    for (int64_t t = 0; t < depth; t++)
        for (int lane = 0; lane < LANES; lane++) {
            double apart = (double)q[t] - keys_t[t * m_all + lane];
            sum[lane] += apart * apart;
        }
}

// The least of them over all keys whose gap is not infinite.
static inline double exact_minimum(const REAL *q, const REAL *keys_t, int64_t depth, const REAL *gap, int64_t m_all) {
    double least = INFINITY, sum[LANES];
    for (int64_t j = 0; j < m_all; j += LANES) {
        exact_distances(q, keys_t + j, depth, m_all, sum);
        for (int lane = 0; lane < LANES; lane++)
            if (gap[j + lane] < INFINITY && sum[lane] < least) least = sum[lane];
    }
    return least;
}

// Weights of a query in place of its squared distances, as `exponentiate`.
static inline REAL weigh(const REAL *q, const REAL *keys_t, int64_t depth, REAL *gap, double nearest, int64_t m_all) {
    if (!is_far(nearest)) return exponentiate(gap, nearest, m_all);
    for (int64_t j = 0; j < m_all; j += LANES) {
        double sum[LANES];
        exact_distances(q, keys_t + j, depth, m_all, sum);
        for (int lane = 0; lane < LANES; lane++)
            if (gap[j + lane] < INFINITY) gap[j + lane] = sum[lane] - nearest;
    }
    return exponentiate(gap, 0, m_all);
}

/* [block forward] */
static inline void attend_block(const heads *h, const workspace *x, span b, int64_t table, int64_t *slots,
                                REAL *numbers_k, const int64_t *s) {
    int64_t d = h->d_all, e = h->e_all, m = padded(b.m), all = s[TOGETHER] * h->n, *of_q = slots + s[BLOCK];
    int64_t earlier = gather_block(h, x, b, table, slots, of_q, numbers_k, s);
    for (int64_t i = 0; i < b.m; i += TILE) {
        int64_t n = least(b.m - i, TILE), rows = in_blocks(n), *rows_q = of_q + i;
        gather(h->q, rows_q, n, x->q, d);
        squared_distances(x->q, d, x->keys_t, m, x->p, rows, h->d);
        hide_pairs(h, x->p, rows_q, n, b.m, numbers_k, earlier, all);
        REAL rescale[TILE];
        for (int64_t r = 0; r < n; r++) {
            double old = table ? h->nearest[rows_q[r]] : INFINITY, now = row_minimum(x->p + r * m, m);
            if (is_far(now)) now = exact_minimum(x->q + r * d, x->keys_t, h->d, x->p + r * m, m);
            h->nearest[rows_q[r]] = now = old < now ? old : now;
            rescale[r] = table ? exp((now - old) / 2) : 0;
            REAL sum = weigh(x->q + r * d, x->keys_t, h->d, x->p + r * m, now, m), before = table ? h->denominator[rows_q[r]] : 0;
            h->denominator[rows_q[r]] = rescale[r] * before + sum;
        }
        product(x->p, m, 1, x->values, e, x->out, e, rows, e, b.m, 0);
        for (int64_t r = 0; r < n; r++) {
            REAL *to = h->sum_v + rows_q[r] * e, *from = x->out + r * e;
            for (int64_t c = 0; c < e; c += LANES)
                if (table) *at(to + c) = rescale[r] * *at(to + c) + *at(from + c);
                else *at(to + c) = *at(from + c);
        }
    }
}

// Quotients, and the rows back to where they belong.
static inline void normalise_block(const heads *h, span b, REAL *out, double *nearest, REAL *denominator, REAL floor) {
    for (int64_t i = 0; i < b.m; i++) {
        int64_t row = b.at + i, point = b.head * h->n + b.order_q[i];
        nearest[point] = h->nearest[row];
        denominator[point] = h->denominator[row] + (floor ? floor * exp(h->nearest[row] / 2) : 0);
        place(h->sum_v + row * h->e_all, 0, 1, h->e, 1 / denominator[point], out + point * h->e, 1, h->e);
    }
}

/* [forward] */
int forward(const REAL *q, const REAL *k, const REAL *v, const int64_t *order_q, const int64_t *order_k,
            const int64_t *count, REAL *out, REAL *denominator, double *nearest, double floor, const int64_t *s) {
    heads h = make_heads(s);
    if (!h.memory) return OUT_OF_MEMORY;
    int finite = 1;
    #pragma omp parallel num_threads(s[THREADS]) reduction(& : finite)
    {
        uint64_t mode = flush_subnormals();
        work w = thread_work(&h, s);
        int64_t n = h.n;
        for (int64_t from = 0; from < s[ROWS]; from += s[TOGETHER]) {
            int64_t items = least(s[TOGETHER], s[ROWS] - from) * h.blocks, at = from * n;
            #pragma omp for
            for (int64_t i = 0; i < items; i++)
                finite &= sort_block(&h, block_of(i, 0, from, &h, order_q, order_k, count, s), q + at * h.d,
                                     k + at * h.d, v + at * h.e);
            if (s[UNION]) number_blocks(&h, items, from, order_q, order_k, count, s);
            for (int64_t table = 0; table < s[TABLES]; table++) {
                #pragma omp for
                for (int64_t i = 0; i < items; i++)
                    attend_block(&h, &w.x, block_of(i, table, from, &h, order_q, order_k, count, s), table, w.slots,
                                 w.numbers_k, s);
            }
            #pragma omp for
            for (int64_t i = 0; i < items; i++)
                normalise_block(&h, block_of(i, 0, from, &h, order_q, order_k, count, s), out + at * h.e, nearest + at,
                                denominator + at, floor);
        }
        restore_subnormals(mode);
    }
    free(h.memory);
    return !finite;
}

/* [sorted gradients] */
// Gradients of the output into the order of the first table, divided by the denominators; and times the output.
static inline void sort_gradients(const heads *h, span b, const REAL *grad, const REAL *out, const double *nearest,
                                  const REAL *denominator) {
    for (int64_t i = 0; i < b.m; i++) {
        int64_t row = b.at + i, point = b.head * h->n + b.order_q[i];
        REAL *to = h->grad + row * h->e_all, dot = 0;
        place(grad + point * h->e, 0, 1, h->e, 1 / denominator[point], to, 1, h->e_all);
        #pragma omp simd reduction(+ : dot)
        for (int64_t c = 0; c < h->e; c++) dot += to[c] * out[point * h->e + c];
        h->dots[row] = dot, h->nearest[row] = nearest[point];
    }
}

static inline void copy_back(const REAL *from, int64_t all, const int64_t *order, int64_t rows, REAL *x,
                             int64_t width) {
    for (int64_t i = 0; i < rows; i++) place(from + i * all, all, 1, width, 1, x + order[i] * width, 1, width);
}

/* [block backward] */
static inline void differentiate_block(const heads *h, const workspace *x, span b, int64_t table, int64_t *slots,
                                       REAL *numbers_k, const int64_t *s) {
    int64_t d = h->d_all, e = h->e_all, m = padded(b.m), all = s[TOGETHER] * h->n, *of_q = slots + s[BLOCK];
    int64_t earlier = gather_block(h, x, b, table, slots, of_q, numbers_k, s);
    place_columns(x->values, e, b.m, h->e, x->values_t, m);
    for (int64_t i = 0; i < b.m; i += TILE) {
        int64_t n = least(b.m - i, TILE), rows = in_blocks(n), *rows_q = of_q + i;
        gather(h->q, rows_q, n, x->q, d), gather(h->grad, rows_q, n, x->out, e);
        squared_distances(x->q, d, x->keys_t, m, x->p, rows, h->d);
        hide_pairs(h, x->p, rows_q, n, b.m, numbers_k, earlier, all);
        product(x->out, e, 1, x->values_t, m, x->u, m, rows, m, h->e, 0);
        for (int64_t r = 0; r < n; r++) {
            REAL *p = x->p + r * m, *u = x->u + r * m, mean = h->dots[rows_q[r]];
            weigh(x->q + r * d, x->keys_t, h->d, p, h->nearest[rows_q[r]], m);
            for (int64_t j = 0; j < m; j += LANES) *at(u + j) = *at(p + j) * (*at(u + j) - mean);
        }
        memset(x->u + n * m, 0, (rows - n) * m * sizeof(REAL));
        product(x->p, 1, m, x->out, e, x->to_values, e, m, e, n, i > 0);
        weighted_differences(x->u, 1, m, x->q, x->keys, x->to_keys, d, m, n, i > 0);
        weighted_differences(x->u, m, 1, x->keys, x->q, x->to_q, d, rows, b.m, 0);
        add_to(x->to_q, rows_q, n, h->sum_q, d, !table);
    }
    add_to(x->to_keys, slots, b.m, h->sum_k, d, !table), add_to(x->to_values, slots, b.m, h->sum_v, e, !table);
}

/* [backward] */
int backward(const REAL *grad, const REAL *q, const REAL *k, const REAL *v, const int64_t *order_q,
             const int64_t *order_k, const int64_t *count, const REAL *out, const REAL *denominator, const double *nearest,
             REAL *to_q, REAL *to_k, REAL *to_v, const int64_t *s) {
    heads h = make_heads(s);
    if (!h.memory) return OUT_OF_MEMORY;
    #pragma omp parallel num_threads(s[THREADS])
    {
        uint64_t mode = flush_subnormals();
        work w = thread_work(&h, s);
        int64_t n = h.n;
        for (int64_t from = 0; from < s[ROWS]; from += s[TOGETHER]) {
            int64_t items = least(s[TOGETHER], s[ROWS] - from) * h.blocks, at = from * n;
            #pragma omp for
            for (int64_t i = 0; i < items; i++) {
                span b = block_of(i, 0, from, &h, order_q, order_k, count, s);
                sort_block(&h, b, q + at * h.d, k + at * h.d, v + at * h.e);
                sort_gradients(&h, b, grad + at * h.e, out + at * h.e, nearest + at, denominator + at);
            }
            if (s[UNION]) number_blocks(&h, items, from, order_q, order_k, count, s);
            for (int64_t table = 0; table < s[TABLES]; table++) {
                #pragma omp for
                for (int64_t i = 0; i < items; i++)
                    differentiate_block(&h, &w.x, block_of(i, table, from, &h, order_q, order_k, count, s), table, w.slots,
                                        w.numbers_k, s);
            }
            #pragma omp for
            for (int64_t i = 0; i < items; i++) {
                span b = block_of(i, 0, from, &h, order_q, order_k, count, s);
                int64_t first = at + b.head * n;
                copy_back(h.sum_q + b.at * h.d_all, h.d_all, b.order_q, b.m, to_q + first * h.d, h.d);
                copy_back(h.sum_k + b.at * h.d_all, h.d_all, b.order_k, b.m, to_k + first * h.d, h.d);
                copy_back(h.sum_v + b.at * h.e_all, h.e_all, b.order_k, b.m, to_v + first * h.e, h.e);
            }
        }
        restore_subnormals(mode);
    }
    free(h.memory);
    return 0;
}

/* [permutations] */
int permutations(const int64_t *order, const int64_t *s) {
    int64_t n = s[POINTS], bad = 0;
    char *memory = malloc(s[THREADS] * n);
    if (!memory) return OUT_OF_MEMORY;
    #pragma omp parallel for num_threads(s[THREADS]) reduction(| : bad)
    for (int64_t r = 0; r < s[TABLES] * s[ROWS]; r++) {
        char *seen = memset(memory + omp_get_thread_num() * n, 0, n);
        for (int64_t i = r * n; i < (r + 1) * n && !bad; i++)
            if (order[i] < 0 || order[i] >= n || seen[order[i]]++) bad = 1;
    }
    free(memory);
    return bad;
}
