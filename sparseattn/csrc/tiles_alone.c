// Functions around single loops of tiles.h, for tests.
#include "tiles.h"

/* [multiply] */
int multiply(const REAL *a, const REAL *b, REAL *c, const int64_t *s) {
    int64_t n = padded(s[0]), m = s[1], width = padded(s[2]);
    REAL *left = malloc((n * m + m * width + n * width) * sizeof(REAL)), *right = left + n * m, *out = right + m * width;
    if (!left) return OUT_OF_MEMORY;
    place(a, m, s[0], m, 1, left, n, m);
    place(b, s[2], m, s[2], 1, right, m, width);
    product(left, m, 1, right, width, out, width, n, width, m, 0);
    place(out, width, s[0], s[2], 1, c, s[0], s[2]);
    free(left);
    return 0;
}

/* [exponentials] */
int exponentials(const REAL *x, REAL *y, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) *at(y + i) = exponential(*at(x + i));
    return 0;
}
