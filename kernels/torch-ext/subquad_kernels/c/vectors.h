/*
 * Vectors of float32 numbers, as wide as the CPU has them, and how numbers of other dtypes become such vectors. gcc and
 * clang turn the types below into the vectors of the CPU.
 */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* As in native.py. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float quads __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#if defined(__aarch64__)
typedef _Float16 numbers16 __attribute__((vector_size(2 * LANES)));
#endif

/* The compiler does not see what comes out of it: so it does not contract a product and a sum. */
#if defined(__aarch64__)
#define OPAQUE(x) __asm__("" : "+w"(x))
#else
#define OPAQUE(x) __asm__("" : "+x"(x))
#endif

INLINE ptrdiff_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* The vector that begins at that element, in float32. */
INLINE floats load(int dtype, const void *from, ptrdiff_t at)
{
    floats out;
    if (dtype == FLOAT32) {
        memcpy(&out, (const char *)from + 4 * at, sizeof out);
        return out;
    }
    halves bits;
    memcpy(&bits, (const char *)from + 2 * at, sizeof bits);
    if (dtype == BFLOAT16)
#if LANES == 16
        return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
        return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
        return (floats)(__builtin_convertvector(bits, words) << 16);
#endif
#if defined(__aarch64__)
    return __builtin_convertvector((numbers16)bits, floats);
#elif LANES == 16
    return (floats)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps((__m128i)bits);
#else
    return out = (floats){0}; /* native.py does not ask for it */
#endif
}

/* The same of the last elements, and zeros. */
INLINE floats load_part(int dtype, const void *from, ptrdiff_t at, ptrdiff_t count)
{
    char part[4 * LANES] = {0};
    memcpy(part, (const char *)from + size_of(dtype) * at, size_of(dtype) * count);
    return load(dtype, part, 0);
}

/* Writes the first elements, rounded to the nearest number of the dtype. */
INLINE void store(int dtype, void *to, ptrdiff_t at, floats x, ptrdiff_t count)
{
    char *here = (char *)to + size_of(dtype) * at;
    if (dtype == FLOAT32) {
        memcpy(here, &x, 4 * count);
        return;
    }
    halves bits;
    if (dtype == BFLOAT16) {
        words all = (words)x;
        words rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
        words nan = (words)(x != x);
        bits = __builtin_convertvector((rounded & ~nan) | (((all >> 16) | 0x40) & nan), halves);
    } else {
#if defined(__aarch64__)
        bits = (halves)__builtin_convertvector(x, numbers16);
#elif LANES == 16
        bits = (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
        bits = (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
        return;
#endif
    }
    memcpy(here, &bits, 2 * count);
}

INLINE float sum_of(floats x)
{
    quads part[LANES / 4];
    memcpy(part, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++)
        part[0] += part[i];
    return (part[0][0] + part[0][1]) + (part[0][2] + part[0][3]);
}

/* A vector with that number in every lane. */
INLINE floats all(float x) { return (floats){0} + x; }

/* x where the bits of the condition are set, otherwise y. */
INLINE floats where(words condition, floats x, floats y)
{
    return (floats)((condition & (words)x) | (~condition & (words)y));
}

/*
 * exp(x) - 1 is (1 + fraction) * power - 1, where the power of two leaves a remainder of at most log(2) / 2 in absolute
 * value, for which eight terms of the series give every bit. x must be between -87 and 88.
 */
INLINE void exponential(floats x, floats *fraction, floats *power)
{
    floats moved = x * 1.44269504f + 12582912.f; /* where floats are whole numbers */
    floats n = moved - 12582912.f;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f; /* log(2), in two parts */
    floats p = all(1.f / 5040) * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    *fraction = r + r * r * p;
    *power = (floats)(((words)moved - 0x4b400000 + 127) << 23);
}

/* Very small results are 0, very large ones 2e38. NaN stays. */
INLINE floats exp_of(floats x)
{
    floats fraction, power;
    exponential(where((words)(x > 88.f), all(88.f), where((words)(x < -87.f), all(-87.f), x)), &fraction, &power);
    return where((words)(x < -87.f), all(0.f), fraction * power + power);
}

INLINE floats sigmoid_of(floats x) { return 1.f / (1.f + exp_of(-x)); }

INLINE floats tanh_of(floats x)
{
    floats fraction, power, y = 2.f * where((words)(x > 10.f), all(10.f), where((words)(x < -10.f), all(-10.f), x));
    exponential(y, &fraction, &power);
    floats minus_one = fraction * power + (power - 1.f); /* exact for small x */
    return minus_one / (minus_one + 2.f);
}

/* GOMP_parallel of the OpenMP that torch has loaded: so both have the same threads. */
typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Lets each of so many threads do a work, or this one if there is one or no OpenMP. */
INLINE void on_threads(void (*work)(void *), void *data, unsigned threads, parallel run)
{
    if (threads > 1 && run)
        run(work, data, threads, 0);
    else
        work(data);
}
