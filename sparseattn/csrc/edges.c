#include "kernel.h"

/* [philox] */
// Philox4x32-10 (Salmon et al. 2011): words that are a function of key, stream and number alone.
enum { LANES = 16, WORDS = 2 * LANES };

typedef struct {
    uint64_t key, stream, block, words[WORDS];
    int used;
} random_words;

static void refill(random_words *s) {
    uint32_t x0[LANES], x1[LANES], x2[LANES], x3[LANES], k0 = (uint32_t)s->key, k1 = (uint32_t)(s->key >> 32);
    for (int l = 0; l < LANES; l++) {
        uint64_t number = s->block + (uint64_t)l;
        x0[l] = (uint32_t)number, x1[l] = (uint32_t)(number >> 32);
        x2[l] = (uint32_t)s->stream, x3[l] = (uint32_t)(s->stream >> 32);
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            uint64_t p = (uint64_t)0xD2511F53u * x0[l], r = (uint64_t)0xCD9E8D57u * x2[l];
            x0[l] = (uint32_t)(r >> 32) ^ x1[l] ^ k0, x1[l] = (uint32_t)r;
            x2[l] = (uint32_t)(p >> 32) ^ x3[l] ^ k1, x3[l] = (uint32_t)p;
        }
    }
    for (int l = 0; l < LANES; l++) {
        s->words[2 * l] = x0[l] | (uint64_t)x1[l] << 32;
        s->words[2 * l + 1] = x2[l] | (uint64_t)x3[l] << 32;
    }
    s->block += LANES, s->used = 0;
}

static inline uint64_t word(random_words *s) {
    if (s->used == WORDS)
        refill(s);
    return s->words[s->used++];
}

/* [exponential] */
// In (0, 1].
static inline double uniform(uint64_t word) {
    return (double)(int64_t)((word >> 11) + 1) * 0x1p-53;
}

// -log(u) by the series of atanh, to 1e-15; the C library's does not run in vectors.
static inline double exponential(uint64_t word) {
    union { double real; uint64_t bits; } x = {uniform(word)};
    uint64_t half = (x.bits >> 51 & 1);                   // from 3/2 on a mantissa counts as below 1
    double exponent = (double)(int64_t)((x.bits >> 52) + half) - 1023;
    x.bits = (x.bits & 0xFFFFFFFFFFFFFull) | (0x3FFull - half) << 52;
    double s = (x.real - 1) / (x.real + 1), q = s * s, sum = 1. / 19;
    sum = sum * q + 1. / 17, sum = sum * q + 1. / 15, sum = sum * q + 1. / 13, sum = sum * q + 1. / 11;
    sum = sum * q + 1. / 9, sum = sum * q + 1. / 7, sum = sum * q + 1. / 5, sum = sum * q + 1. / 3;
    return -(exponent * 0.693147180559945309417 + 2 * s * (sum * q + 1));
}

/* [cell] */
// One of `count` numbers, and what is left of the word as a fraction of 2^64.
static inline int64_t cell(random_words *s, int64_t count, uint64_t *fraction) {
    unsigned __int128 product = (unsigned __int128)word(s) * (uint64_t)count;
    *fraction = (uint64_t)product;
    return (int64_t)(product >> 64);
}

/* [tables] */
// Alias tables. The upper half of a cell is the share that is its own, the lower half the number of the other. Light cells
// are filled, from first to last, by what the heavy ones, from first to last, have above the mean.
static inline int64_t packed(double share, int64_t other) {
    uint64_t upper = share < 1 ? (uint64_t)(share * 0x1p32) : 0xFFFFFFFFu;
    return (int64_t)(upper << 32 | (uint64_t)other);
}

static void table(const REAL *weight, int64_t m, double mean, int64_t *cells) {
    int64_t light = 0, heavy = 0, next;
    for (int64_t j = 0; j < m; j++)
        cells[j] = packed(1, j);
    for (; light < m && (double)weight[light] > mean; light++) {}
    for (; heavy < m && (double)weight[heavy] <= mean; heavy++) {}
    double rest = heavy < m ? (double)weight[heavy] : 0;
    while (heavy < m && (light < m || rest <= mean)) {
        if (rest > mean) {
            cells[light] = packed((double)weight[light] / mean, heavy);
            rest -= mean - (double)weight[light];
            for (light++; light < m && (double)weight[light] > mean; light++) {}
        } else {
            for (next = heavy + 1; next < m && (double)weight[next] <= mean; next++) {}
            if (next == m)
                break;
            cells[heavy] = packed(rest / mean, next);
            rest += (double)weight[next] - mean;
            heavy = next;
        }
    }
}

int tables(const REAL *weights, const int64_t *where, const double *sums, int64_t *cells, int64_t count, int64_t m,
           int64_t threads) {
    (void)threads;  // without OpenMP
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t t = 0; t < count; t++)
        table(weights + where[t] * m, m, sums[where[t]] / (double)m, cells + t * m);
    return 0;
}

/* [model] */
enum { COUNTS, SIMPLE, BERNOULLI };

static inline double chance(double rate, int64_t law) {
    return law == BERNOULLI ? rate : -expm1(-rate);
}

static inline double dot(const REAL *a, const REAL *b, int64_t k) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t v = 0; v < k; v++)
        sum += a[v] * b[v];
    return (double)sum;
}

// Points that the rows of a block met, as bits; in `index` a bit for each word that is not 0; how often, if that counts; and
// for one row the points, those still open, and their draws.
enum { ROWS = 64, EVENTS = 512 };

typedef struct {
    uint64_t *words, *index;
    int32_t *times, *found, *open;
    double *draws;
    int64_t stride, index_stride;
} points;

typedef struct {
    const REAL *a, *z, *weights;
    const double *sums, *tops, *factors;
    const int64_t *which, *cells;
    int64_t rows, m, k, law;
} model;

/* [targets] */
// Some events of one cluster, of rows `of`: a target for each, from the alias table, or at random until it is accepted.
// What is read at random is asked for first, so that many reads are on their way at a time.
static void targets(random_words *s, const REAL *weight, double top, const int64_t *cells, int64_t m, int32_t *of, int count, points *seen) {
    uint64_t fraction[EVENTS + WORDS], found;
    int64_t at[EVENTS + WORDS];
    for (int left = 0; count; count = left, left = 0) {
        for (int e = 0; e < count; e++) {
            at[e] = cell(s, m, fraction + e);
            __builtin_prefetch(cells ? (const void *)(cells + at[e]) : (const void *)(weight + at[e]));
        }
        for (int e = 0; e < count; e++) {
            int64_t r = of[e], j = at[e];
            if (cells) {
                int64_t own = -(int64_t)(fraction[e] >> 32 < (uint64_t)cells[j] >> 32);
                j = (j & own) | (cells[j] & 0xFFFFFFFF & ~own);  // no branch: half would be mispredicted
                found = 1;
            } else {
                found = (double)(int64_t)(fraction[e] >> 1) * 0x1p-63 * top < (double)weight[j];
            }
            seen->words[r * seen->stride + (j >> 6)] |= found << (j & 63);
            seen->index[r * seen->index_stride + (j >> 12)] |= found << (j >> 6 & 63);
            if (seen->times)
                seen->times[r * m + j] += (int32_t)found;
            of[left] = (int32_t)r;
            left += !found;
        }
    }
}

/* [events] */
// A Poisson process along the rows of a block, cluster after cluster, `factors` times as fast as the rates say.
static void events(random_words *s, random_words *gaps, const model *g, points *seen) {
    double times[WORDS], ends[ROWS], at = 0, end = 0;
    int32_t of[EVENTS + WORDS];
    int e = WORDS, count = 0;
    for (int64_t v = 0; v < g->k; v++) {
        for (int64_t r = 0; r < g->rows; r++)
            ends[r] = end += g->factors[r] * (double)g->a[r * g->k + v] * g->sums[v];
        for (int64_t r = 0; r < g->rows;) {
            if (e == WORDS) {
                refill(gaps);
#pragma omp simd
                for (e = 0; e < WORDS; e++)
                    times[e] = exponential(gaps->words[e]);
                for (e = 0; e < WORDS; e++)
                    times[e] = at += times[e];
                e = 0;
            }
            while (e < WORDS && r < g->rows) {  // which of the two is next? no branch depends on it
                int before = times[e] < ends[r];
                of[count] = (int32_t)r;
                count += before, e += before, r += !before;
            }
            if (count > EVENTS || r == g->rows) {
                const int64_t *cells = g->which[v] < 0 ? NULL : g->cells + g->which[v] * g->m;
                targets(s, g->weights + v * g->m, g->tops[v], cells, g->m, of, count, seen), count = 0;
            }
        }
    }
}

/* [collect] */
// The points that row r met, in order, as often as counted; they are cleared.
static int64_t gather(int64_t r, points *seen) {
    uint64_t *words = seen->words + r * seen->stride, *index = seen->index + r * seen->index_stride;
    int64_t count = 0;
    for (int64_t i = 0; i < seen->index_stride; i++)
        for (; index[i]; index[i] &= index[i] - 1) {
            int64_t w = i << 6 | __builtin_ctzll(index[i]);
            for (; words[w]; words[w] &= words[w] - 1)
                seen->found[count++] = (int32_t)(w << 6 | __builtin_ctzll(words[w]));
        }
    return count;
}

/* [thin] */
// Of the points found, those that stay: of rates `factor` times too large, each with probability p / (1 - exp(-factor p)).
// That is at least 1 / factor, so that p is needed for few of them.
static void thin(random_words *s, const model *g, int64_t r, points *seen, int64_t count) {
    double factor = g->factors[r];
    int64_t open = 0;
    for (int64_t e = 0; e < count; e++) {
        double u = uniform(word(s));
        if (u * factor >= 1) {
            seen->open[open] = (int32_t)e, seen->draws[open++] = u;
            for (int64_t v = 0; v < g->k; v += 64 / (int64_t)sizeof(REAL))
                __builtin_prefetch(g->z + seen->found[e] * g->k + v);
        }
    }
    for (int64_t e = 0; e < open; e++) {
        int32_t *j = seen->found + seen->open[e];
        double p = dot(g->a + r * g->k, g->z + *j * g->k, g->k);
        *j = seen->draws[e] * -expm1(-factor * p) < p ? *j : -1;
    }
}

/* [rows] */
// The targets of row r; how many there are may exceed the space.
static int64_t collect(random_words *s, const model *g, int64_t r, points *seen, int32_t *out, int64_t space) {
    int64_t found = gather(r, seen), count = 0;
    if (g->law == BERNOULLI)
        thin(s, g, r, seen, found);
    for (int64_t e = 0; e < found; e++) {
        int32_t j = seen->found[e], times = j >= 0;
        if (g->law == COUNTS)
            times = seen->times[r * g->m + j], seen->times[r * g->m + j] = 0;
        for (; times; times--, count++)
            if (count < space)
                out[count] = j;
    }
    return count;
}

// One draw for every pair of row r; products only where the bounds leave it open.
static int64_t pairs(random_words *s, const model *g, int64_t r, const double *bounds, int32_t *out, int64_t space) {
    int64_t count = 0;
    for (int64_t j = 0; j < g->m && bounds[1] > 0; j++) {
        double u = uniform(word(s));
        if (u > bounds[1] || (u > bounds[0] && u > chance(dot(g->a + r * g->k, g->z + j * g->k, g->k), g->law)))
            continue;
        if (count < space)
            out[count] = (int32_t)j;
        count++;
    }
    return count;
}

/* [draw] */
// Targets of every row (graph, source), from `starts` on.
int draw(const REAL *a, const REAL *z, const REAL *weights, const double *sums, const double *tops, const int64_t *which,
         const int64_t *cells, const double *factors, const double *bounds, const int64_t *starts, int32_t *out,
         int64_t *counts, int64_t seed, const int64_t *sizes) {
    int64_t graphs = sizes[0], n = sizes[1], m = sizes[2], k = sizes[3], law = sizes[4], threads = sizes[5];
    int64_t rows = (1 << 18) / m < 1 ? 1 : (1 << 18) / m > ROWS ? ROWS : (1 << 18) / m, blocks = (n + rows - 1) / rows;
    int failed = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) reduction(min : failed)
    {
        uint64_t mode = flush_subnormals();
        points seen = {.stride = (m + 63) >> 6, .index_stride = (m + 4095) >> 12};
        seen.words = calloc((size_t)(rows * seen.stride), 8), seen.index = calloc((size_t)(rows * seen.index_stride), 8);
        seen.times = law == COUNTS ? calloc((size_t)(rows * m), 4) : NULL;
        seen.found = malloc((size_t)m * 4), seen.open = malloc((size_t)m * 4), seen.draws = malloc((size_t)m * 8);
        int there = seen.words && seen.index && seen.found && seen.open && seen.draws && (seen.times || law != COUNTS);
        failed = there ? 0 : OUT_OF_MEMORY;
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < graphs * blocks; b++) {
            int64_t graph = b / blocks, from = b % blocks * rows, first = graph * n + from;
            model g = {a + first * k, z + graph * m * k, weights + graph * m * k, sums + graph * k, tops + graph * k, factors + first,
                       which + graph * k, cells, from + rows < n ? rows : n - from, m, k, law};
            random_words s = {.key = (uint64_t)seed, .stream = (uint64_t)b, .used = WORDS}, gaps = s;
            gaps.block = 1ull << 63;
            if (failed)
                continue;
            events(&s, &gaps, &g, &seen);
            for (int64_t r = 0; r < g.rows; r++) {
                int64_t at = starts[first + r], space = starts[first + r + 1] - at;
                counts[first + r] = g.factors[r] > 0 ? collect(&s, &g, r, &seen, out + at, space)
                                                     : pairs(&s, &g, r, bounds + 2 * (first + r), out + at, space);
            }
        }
        free(seen.words), free(seen.index), free(seen.times), free(seen.found), free(seen.open), free(seen.draws);
        restore_subnormals(mode);
    }
    return failed;
}

/* [list] */
// The rows as a list of (graph, source, target), one after the other; `graph` may be missing.
int listed(const int32_t *from, const int64_t *starts, const int64_t *ends, int64_t *graph, int64_t *source,
           int64_t *target, int64_t rows, int64_t n, int64_t threads) {
    (void)threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 64)
    for (int64_t row = 0; row < rows; row++) {
        int64_t start = row ? ends[row - 1] : 0, count = ends[row] - start;
        for (int64_t e = 0; e < count; e++)
            target[start + e] = from[starts[row] + e];
        for (int64_t e = 0; e < count; e++)
            source[start + e] = row % n;
        for (int64_t e = 0; graph && e < count; e++)
            graph[start + e] = row / n;
    }
    return 0;
}
