/* [real] */
// What a kernel is given: the number type of its tensors, and what a function returns that could not have its memory.
#ifndef REAL
#define REAL float
#endif
#ifndef OUT_OF_MEMORY
#define OUT_OF_MEMORY (-1)
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* [threads] */
#ifdef _OPENMP
int omp_get_thread_num(void);
#else
static inline int omp_get_thread_num(void) { return 0; }
#endif

/* [subnormals] */
// Numbers below the smallest normal one count as 0 in this thread, from `flush_subnormals` to `restore_subnormals`.
#if defined __SSE__
static inline uint64_t flush_subnormals(void) {
    uint64_t mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040);  // results, and operands
    return mode;
}
static inline void restore_subnormals(uint64_t mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined __aarch64__
static inline uint64_t flush_subnormals(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | 1 << 24));
    return mode;
}
static inline void restore_subnormals(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
static inline uint64_t flush_subnormals(void) { return 0; }
static inline void restore_subnormals(uint64_t mode) { (void)mode; }
#endif
