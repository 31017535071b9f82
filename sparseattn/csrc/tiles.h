#include "kernel.h"

/* [vectors] */
#if defined __AVX512F__
#define WIDE 64
#elif defined __AVX__
#define WIDE 32
#else
#define WIDE 16
#endif
#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(WIDE), aligned(sizeof(REAL)), may_alias));
enum { LANES = WIDE / sizeof(REAL), HEIGHT = 8, BREADTH = WIDE == 64 ? 2 : 1, TILE = 32 };

INLINE vec *at(const REAL *x) { return (vec *)x; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
INLINE int64_t in_blocks(int64_t rows) { return (rows + HEIGHT - 1) / HEIGHT * HEIGHT; }

INLINE REAL added(vec x) {
    REAL sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

/* [product] */
// HEIGHT rows and `breadth` vectors of C = A B, or C += A B; A(i, t) is at a[i * down + t * along].
INLINE void block(const REAL *a, int64_t down, int64_t along, const REAL *b, int64_t b_step, REAL *c, int64_t c_step,
                  int64_t depth, int breadth, int add) {
    vec sum[HEIGHT][BREADTH];
    #pragma GCC unroll 8
    for (int r = 0; r < HEIGHT; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) sum[r][v] = add ? *at(c + r * c_step + v * LANES) : (vec){0};
    for (int64_t t = 0; t < depth; t++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) {
            vec right = *at(b + t * b_step + v * LANES);
            #pragma GCC unroll 8
            for (int r = 0; r < HEIGHT; r++) sum[r][v] += a[r * down + t * along] * right;
        }
    #pragma GCC unroll 8
    for (int r = 0; r < HEIGHT; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < breadth; v++) *at(c + r * c_step + v * LANES) = sum[r][v];
}

// Whole blocks of rows, whole vectors of columns.
static inline void product(const REAL *a, int64_t down, int64_t along, const REAL *b, int64_t b_step, REAL *c,
                           int64_t c_step, int64_t rows, int64_t columns, int64_t depth, int add) {
    int64_t j = 0;
    for (; j + BREADTH * LANES <= columns; j += BREADTH * LANES)
        for (int64_t i = 0; i < rows; i += HEIGHT)
            block(a + i * down, down, along, b + j, b_step, c + i * c_step + j, c_step, depth, BREADTH, add);
    for (; j < columns; j += LANES)
        for (int64_t i = 0; i < rows; i += HEIGHT)
            block(a + i * down, down, along, b + j, b_step, c + i * c_step + j, c_step, depth, 1, add);
}

/* [copies] */
static inline void place(const REAL *x, int64_t step, int64_t rows, int64_t width, REAL factor, REAL *to,
                         int64_t all_rows, int64_t all_width) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < width; c++) to[i * all_width + c] = factor * x[i * step + c];
        for (int64_t c = width; c < all_width; c++) to[i * all_width + c] = 0;
    }
    memset(to + rows * all_width, 0, (all_rows - rows) * all_width * sizeof(REAL));
}

static inline void place_columns(const REAL *x, int64_t step, int64_t rows, int64_t width, REAL *to, int64_t all_rows) {
    for (int64_t c = 0; c < width; c++) {
        for (int64_t i = 0; i < rows; i++) to[c * all_rows + i] = x[i * step + c];
        for (int64_t i = rows; i < all_rows; i++) to[c * all_rows + i] = 0;
    }
}

/* [exponential] */
enum { FLOAT = sizeof(REAL) == 4, DEGREE = FLOAT ? 7 : 13 };
typedef __typeof__((vec){0} < (vec){0}) ints;

INLINE vec larger(vec x, vec y) {
    ints first = x > y;
    return (vec)(((ints)x & first) | ((ints)y & ~first));
}

INLINE REAL largest(const REAL *x, int64_t width) {
    vec top = *at(x);
    for (int64_t j = LANES; j < width; j += LANES) top = larger(top, *at(x + j));
    REAL most = top[0];
    for (int lane = 1; lane < LANES; lane++) most = top[lane] > most ? top[lane] : most;
    return most;
}

INLINE vec exponential(vec x) {
    static const REAL over[] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320, 1. / 362880,
                                1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
    const REAL lowest = FLOAT ? -87 : -708, round = FLOAT ? 0x1.8p23 : 0x1.8p52;
    x = larger(lowest - (vec){0}, x);
    vec j = (x * (REAL)0x1.71547652b82fep0 + round) - round;
    vec r = x - j * (REAL)(FLOAT ? 0x1.63p-1 : 0x1.62e42feep-1);
    r -= j * (REAL)(FLOAT ? -0x1.bd0106p-13 : 0x1.a39ef35793c76p-33);
    vec sum = over[DEGREE] - (vec){0};
    #pragma GCC unroll 16
    for (int i = DEGREE; i-- > 0;) sum = sum * r + over[i];
    return sum * (vec)((__builtin_convertvector(j, ints) + (FLOAT ? 127 : 1023)) << (FLOAT ? 23 : 52));
}

/* [workspace] */
typedef struct {
    int64_t m, d, e, m_all, d_all, e_all;                           // keys, widths; padded
    REAL *keys, *keys_t, *to_keys, *values, *values_t, *to_values;  // of a block; _t: as columns
    REAL *q, *to_q, *out, *p, *u;                                   // of a tile; u: gradient by p
} workspace;

static inline REAL *cut(REAL **from, int64_t n) { return (*from += n) - n; }

static inline int64_t workspace_size(int64_t m, int64_t d, int64_t e) {
    return 3 * padded(m) * (padded(d) + padded(e)) + TILE * (2 * padded(d) + padded(e) + 2 * padded(m));
}

static inline workspace made(REAL *next, int64_t m, int64_t d, int64_t e) {
    workspace x = {.m = m, .d = d, .e = e, .m_all = padded(m), .d_all = padded(d), .e_all = padded(e)};
    int64_t k = x.m_all * x.d_all, v = x.m_all * x.e_all;
    x.keys = cut(&next, k), x.keys_t = cut(&next, k), x.to_keys = cut(&next, k);
    x.values = cut(&next, v), x.values_t = cut(&next, v), x.to_values = cut(&next, v);
    x.q = cut(&next, TILE * x.d_all), x.to_q = cut(&next, TILE * x.d_all), x.out = cut(&next, TILE * x.e_all);
    x.p = cut(&next, TILE * x.m_all), x.u = cut(&next, TILE * x.m_all);
    return x;
}

int vector_bytes(void) { return WIDE; }
