/*
 * Products of a few rows on a CPU, which take as long as reading the weight from memory. Sums are float32's, whatever
 * the dtype. Compiled by `native.py` for the CPU that it runs on; gcc and clang turn the vectors below into those of
 * the CPU.
 */

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

/* Copies rows in float32 to rows of whole vectors, padded with zeros. */
INLINE void widen(int dtype, const void *x, ptrdiff_t rows, ptrdiff_t width, float *out, ptrdiff_t padded)
{
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t i = 0; i < padded; i += LANES) {
            floats part = i + LANES <= width ? load(dtype, x, row * width + i)
                                             : load_part(dtype, x, row * width + i, width - i);
            memcpy(out + row * padded + i, &part, sizeof part);
        }
}

/* A thread takes so many outputs at a time. */
#define PART 64

/*
 * One row of the weight times ROWS rows of x; the sums are PART numbers apart. It reads the weight from its beginning
 * to its end, without leaps, which is what memory does fastest.
 */
INLINE void dot_products(
    int dtype, int ROWS, int STEPS, const float *x, ptrdiff_t padded, const char *weight, ptrdiff_t width, float *out)
{
    floats sums[4][4] = {{{0}}};
    ptrdiff_t i = 0;
    for (; i + STEPS * LANES <= width; i += STEPS * LANES)
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++) {
            floats w = load(dtype, weight, i + s * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                sums[r][s] += w * load(FLOAT32, x + r * padded, i + s * LANES);
        }
    for (; i < width; i += LANES) {
        floats w = i + LANES <= width ? load(dtype, weight, i) : load_part(dtype, weight, i, width - i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            sums[r][0] += w * load(FLOAT32, x + r * padded, i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
        for (int s = 1; s < STEPS; s++)
            sums[r][0] += sums[r][s];
        out[r * PART] = sum_of(sums[r][0]);
    }
}

struct product {
    int dtype;
    ptrdiff_t rows, outputs, width, padded, next;
    const float *x;
    const char *weight, *bias;
    char *out;
};

/* Outputs `from` to `to`, at most PART, of ROWS rows. */
INLINE void part(int dtype, int ROWS, const struct product *p, ptrdiff_t row, ptrdiff_t from, ptrdiff_t to)
{
    float sums[4 * PART];
    for (ptrdiff_t o = from; o < to; o++)
        dot_products(dtype, ROWS, ROWS == 4 ? 2 : 4, p->x + row * p->padded, p->padded,
                     p->weight + o * p->width * size_of(dtype), p->width, sums + o - from);
    for (int r = 0; r < ROWS; r++)
        for (ptrdiff_t o = from; o < to; o += LANES) {
            ptrdiff_t count = smaller(LANES, to - o);
            floats y = load(FLOAT32, sums + r * PART, o - from);
            if (p->bias)
                y += count == LANES ? load(dtype, p->bias, o) : load_part(dtype, p->bias, o, count);
            store(dtype, p->out, (row + r) * p->outputs + o, y, count);
        }
}

INLINE void parts(int dtype, struct product *p)
{
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, PART, __ATOMIC_RELAXED), row = 0;
        if (from >= p->outputs)
            return;
        ptrdiff_t to = smaller(from + PART, p->outputs);
        for (; row + 4 <= p->rows; row += 4)
            part(dtype, 4, p, row, from, to);
        for (; row + 2 <= p->rows; row += 2)
            part(dtype, 2, p, row, from, to);
        if (row < p->rows)
            part(dtype, 1, p, row, from, to);
    }
}

static void work(void *data)
{
    struct product *p = data;
    switch (p->dtype) {
    case FLOAT32: parts(FLOAT32, p); break;
    case BFLOAT16: parts(BFLOAT16, p); break;
    case FLOAT16: parts(FLOAT16, p); break;
    }
}

/* GOMP_parallel of the OpenMP that torch has loaded: so both have the same threads. */
typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/*
 * out (rows, outputs) = x (rows, width) times weight (outputs, width), transposed, plus bias (outputs) or NULL. All of
 * one dtype, and contiguous. Returns 0, or 1 if there is no memory.
 */
int subquad_linear(
    int dtype, const void *x, const void *weight, const void *bias, void *out, ptrdiff_t rows, ptrdiff_t outputs,
    ptrdiff_t width, unsigned threads, parallel run)
{
    ptrdiff_t padded = (width + LANES - 1) / LANES * LANES;
    float *wide = malloc(sizeof *wide * rows * padded);
    if (!wide)
        return 1;
    widen(dtype, x, rows, width, wide, padded);
    struct product p = {dtype, rows, outputs, width, padded, 0, wide, weight, bias, out};
    if (threads > 1 && run)
        run(work, &p, threads, 0);
    else
        work(&p);
    free(wide);
    return 0;
}

INLINE void columns(
    int dtype, const char *x, const char *y, char *out, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t outputs)
{
    floats sums[16];
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t from = 0; from < outputs; from += 16 * LANES) {
            ptrdiff_t count = smaller(16 * LANES, outputs - from), whole = count / LANES, rest = count % LANES;
            for (int v = 0; v < 16; v++)
                sums[v] = (floats){0};
            for (ptrdiff_t k = 0; k < width; k++) {
                floats factor = (floats){0} + load_part(dtype, x, row * width + k, 1)[0];
                for (ptrdiff_t v = 0; v < whole; v++)
                    sums[v] += factor * load(dtype, y, k * outputs + from + v * LANES);
                if (rest)
                    sums[whole] += factor * load_part(dtype, y, k * outputs + from + whole * LANES, rest);
            }
            for (ptrdiff_t v = 0; v * LANES < count; v++)
                store(dtype, out, row * outputs + from + v * LANES, sums[v], smaller(LANES, count - v * LANES));
        }
}

/*
 * out (batches, rows, outputs) = x (batches, rows, width) times y (batches, width, outputs). All of one dtype, and
 * contiguous.
 */
void subquad_matmul(
    int dtype, const char *x, const char *y, char *out, ptrdiff_t batches, ptrdiff_t rows, ptrdiff_t width,
    ptrdiff_t outputs)
{
    for (ptrdiff_t b = 0; b < batches; b++, x += rows * width * size_of(dtype), y += width * outputs * size_of(dtype),
                   out += rows * outputs * size_of(dtype))
        switch (dtype) {
        case FLOAT32: columns(FLOAT32, x, y, out, rows, width, outputs); break;
        case BFLOAT16: columns(BFLOAT16, x, y, out, rows, width, outputs); break;
        case FLOAT16: columns(FLOAT16, x, y, out, rows, width, outputs); break;
        }
}

/* Whether the CPU converts float16 to float32. */
int subquad_has_float16(void)
{
#if defined(__aarch64__) || LANES == 16 || defined(__F16C__)
    return 1;
#else
    return 0;
#endif
}
