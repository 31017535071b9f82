#include "kernel.h"

/* [distance] */
int distance(const REAL *x, const REAL *y, double *sum, int64_t n, int64_t threads) {
    double total = 0;
    #pragma omp parallel for simd num_threads(threads) reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += fabs((double)x[i] - y[i]);
    *sum = total;
    return 0;
}
