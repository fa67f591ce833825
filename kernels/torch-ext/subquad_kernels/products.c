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

/*
 * 8-bit weights. Rows of x are rounded to integers, whose products have exact sums.
 *
 * sums: a vector of partial sums. numbers: what is multiplied at a time, STEP integers of a row of the weight or of x.
 * VNNI multiplies unsigned by signed numbers: 128 is added to the weight there, and 128 times the sum of a row of x
 * (OFFSET) is taken out again.
 */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define STEP 64
#define OFFSET 128
typedef int8_t integer;
typedef __m512i sums, numbers;
INLINE numbers weights(const int8_t *from)
{
    return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
}
INLINE numbers integers(const integer *from) { return _mm512_load_si512(from); }
INLINE sums add(sums s, numbers w, numbers x) { return _mm512_dpbusd_epi32(s, w, x); }
#elif defined(__AVXVNNI__)
#define STEP 32
#define OFFSET 128
typedef int8_t integer;
typedef __m256i sums, numbers;
INLINE numbers weights(const int8_t *from)
{
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)from), _mm256_set1_epi8(-128));
}
INLINE numbers integers(const integer *from) { return _mm256_load_si256((const __m256i *)from); }
INLINE sums add(sums s, numbers w, numbers x) { return _mm256_dpbusd_avx_epi32(s, w, x); }
#elif defined(__AVX2__)
#define STEP 16
#define OFFSET 0
typedef int16_t integer;
typedef __m256i sums, numbers;
INLINE numbers weights(const int8_t *from)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}
INLINE numbers integers(const integer *from) { return _mm256_load_si256((const __m256i *)from); }
INLINE sums add(sums s, numbers w, numbers x) { return _mm256_add_epi32(s, _mm256_madd_epi16(w, x)); }
#else
#define STEP 4
#define OFFSET 0
typedef int32_t integer;
typedef int32_t sums __attribute__((vector_size(16)));
typedef sums numbers;
INLINE numbers weights(const int8_t *from) { return (numbers){from[0], from[1], from[2], from[3]}; }
INLINE numbers integers(const integer *from) { return *(const numbers *)from; }
INLINE sums add(sums s, numbers w, numbers x) { return s + w * x; }
#endif

typedef int32_t integers4 __attribute__((vector_size(16)));
typedef int32_t lanes __attribute__((vector_size(sizeof(sums))));
typedef float floats4 __attribute__((vector_size(16)));

struct int8_product {
    ptrdiff_t rows, outputs, width, padded, next;
    const integer *x;
    const int32_t *offsets; /* what the sums of each row are too large by */
    const float *row_scale, *scale;
    const int8_t *weight;
    float *out;
};

/* The sums of four vectors. */
INLINE integers4 totals(const sums s[4])
{
#if STEP == 64
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]), _mm512_unpackhi_epi32(s[0], s[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]), _mm512_unpackhi_epi32(s[2], s[3]));
    __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return (integers4)_mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
#elif defined(__AVX2__)
    __m256i d = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    return (integers4)_mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
#else
    integers4 out;
    for (int i = 0; i < 4; i++)
        out[i] = s[i][0] + s[i][1] + s[i][2] + s[i][3];
    return out;
#endif
}

/* As [dot_products]: one row of the weight times ROWS rows of x; the sums are PART numbers apart. */
INLINE void int8_dot_products(
    int ROWS, int STEPS, const integer *x, ptrdiff_t padded, const int8_t *weight, ptrdiff_t width, int32_t *out)
{
    sums s[4][4], all[4];
    ptrdiff_t i = 0;
    memset(s, 0, sizeof s);
    for (; i + STEPS * STEP <= width; i += STEPS * STEP)
#pragma GCC unroll 4
        for (int k = 0; k < STEPS; k++) {
            numbers w = weights(weight + i + k * STEP);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                s[r][k] = add(s[r][k], w, integers(x + r * padded + i + k * STEP));
        }
    for (; i < width; i += STEP) {
        int8_t last[STEP] = {0};
        memcpy(last, weight + i, smaller(STEP, width - i));
        numbers w = weights(last);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            s[r][0] = add(s[r][0], w, integers(x + r * padded + i));
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        all[r] = (sums)((lanes)s[r][0] + (lanes)s[r][1] + (lanes)s[r][2] + (lanes)s[r][3]);
    integers4 found = totals(all);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
        out[r * PART] = found[r];
}

/* Outputs `from` to `to`, at most PART, of ROWS rows. */
INLINE void int8_part(int ROWS, const struct int8_product *p, ptrdiff_t row, ptrdiff_t from, ptrdiff_t to)
{
    int32_t sum[4 * PART];
    for (ptrdiff_t o = from; o < to; o++)
        int8_dot_products(ROWS, ROWS == 4 ? 2 : 4, p->x + row * p->padded, p->padded,
                          p->weight + o * p->width, p->width, sum + o - from);
    for (int r = 0; r < ROWS; r++)
        for (ptrdiff_t o = from; o < to; o += 4) {
            ptrdiff_t count = smaller(4, to - o);
            integers4 found;
            floats4 scale = {0};
            memcpy(&found, sum + r * PART + o - from, sizeof found);
            memcpy(&scale, p->scale + o, count * sizeof(float));
            floats4 out = __builtin_convertvector(found - p->offsets[row + r], floats4);
            out = out * scale * p->row_scale[row + r];
            memcpy(p->out + (row + r) * p->outputs + o, &out, count * sizeof(float));
        }
}

static void int8_work(void *data)
{
    struct int8_product *p = data;
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, PART, __ATOMIC_RELAXED);
        if (from >= p->outputs)
            return;
        ptrdiff_t to = smaller(from + PART, p->outputs);
        for (ptrdiff_t row = 0; row < p->rows; row += 4)
            switch (p->rows - row) {
            case 1: int8_part(1, p, row, from, to); break;
            case 2: int8_part(2, p, row, from, to); break;
            case 3: int8_part(3, p, row, from, to); break;
            default: int8_part(4, p, row, from, to);
            }
    }
}

/* Rounds a row of x to integers up to `largest`, padded with zeros. Returns their sum. */
INLINE int32_t round_row(const float *x, ptrdiff_t width, ptrdiff_t padded, int largest, integer *out, float *scale)
{
    words most = {0}; /* the bits of absolute values have the order of the numbers; infinity and NaN are last */
    ptrdiff_t i = 0;
    for (; i < width; i += LANES) {
        floats part = i + LANES <= width ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, width - i);
        words bits = (words)part & 0x7fffffff, more = (words)(bits > most);
        most = (bits & more) | (most & ~more);
    }
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits = most[lane] > bits ? most[lane] : bits;
    memcpy(scale, &bits, sizeof bits);
    *scale /= largest;
    memset(out, 0, padded * sizeof *out);
    if (bits >= 0x7f800000)
        return 0;
    float step = *scale < 1.17549435e-38f ? 1.17549435e-38f : *scale; /* the smallest normal number */
    int32_t sum = 0;
    for (i = 0; i < width; i += LANES) {
        floats part = i + LANES <= width ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, width - i);
        /* Where floats are whole numbers; halves go to the even one. */
        words rounded = (words)(part / step + 12582912.f) - 0x4b400000;
        for (int lane = 0; lane < smaller(LANES, width - i); lane++) {
            out[i + lane] = (integer)rounded[lane];
            sum += (int32_t)rounded[lane];
        }
    }
    return sum;
}

/*
 * out (rows, outputs) = x (rows, width), rounded to integers, times weight (outputs, width), transposed, times the
 * scales of the rows and scale (outputs). All are contiguous. Returns 0, or 1 if there is no memory.
 */
int subquad_int8_linear(
    const float *x, const int8_t *weight, const float *scale, float *out, ptrdiff_t rows, ptrdiff_t outputs,
    ptrdiff_t width, int largest, unsigned threads, parallel run)
{
    ptrdiff_t padded = (width + 63) / 64 * 64;
    integer *rounded = aligned_alloc(64, rows * padded * sizeof *rounded);
    float *row_scale = malloc(rows * sizeof *row_scale);
    int32_t *offsets = malloc(rows * sizeof *offsets);
    int failed = !rounded || !row_scale || !offsets;
    if (!failed) {
        for (ptrdiff_t r = 0; r < rows; r++)
            offsets[r] = OFFSET * round_row(x + r * width, width, padded, largest, rounded + r * padded, row_scale + r);
        struct int8_product p = {rows, outputs, width, padded, 0, rounded, offsets, row_scale, scale, weight, out};
        if (threads > 1 && run)
            run(int8_work, &p, threads, 0);
        else
            int8_work(&p);
    }
    free(rounded);
    free(row_scale);
    free(offsets);
    return failed;
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
