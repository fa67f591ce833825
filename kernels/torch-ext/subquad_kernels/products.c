/*
 * Products of a few rows on a CPU, which take as long as reading the weight from memory. Sums are float32's, whatever
 * the dtype. Compiled by `native.py` for the CPU that it runs on.
 */

#include "vectors.h"

/* The width of a row that consists of whole vectors. */
INLINE ptrdiff_t padded_to(ptrdiff_t width) { return (width + LANES - 1) / LANES * LANES; }

/* Copies rows in float32 to rows of whole vectors, padded with zeros. */
static void widen(int dtype, const void *x, ptrdiff_t rows, ptrdiff_t width, float *out, ptrdiff_t padded)
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
 * Asks for the part of a weight that is read next. The CPU does so by itself, but not beyond a page of memory, and it
 * begins anew with every weight.
 */
INLINE void ask_ahead(const void *here) { __builtin_prefetch((const char *)here + 2048, 0, 2); }

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
            ask_ahead(weight + (i + s * LANES) * size_of(dtype));
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
    int dtype, out_dtype; /* of the weight and the bias, and of the result */
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
            store(p->out_dtype, p->out, (row + r) * p->outputs + o, y, count);
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

static void product_work(void *data)
{
    struct product *p = data;
    switch (p->dtype) {
    case FLOAT32: parts(FLOAT32, p); break;
    case BFLOAT16: parts(BFLOAT16, p); break;
    case FLOAT16: parts(FLOAT16, p); break;
    }
}

/*
 * out (rows, outputs) = x (rows, width) times weight (outputs, width), transposed, plus bias (outputs) or NULL. All of
 * one dtype, and contiguous. Returns 0, or 1 if there is no memory.
 */
int subquad_linear(
    int dtype, const void *x, const void *weight, const void *bias, void *out, ptrdiff_t rows, ptrdiff_t outputs,
    ptrdiff_t width, unsigned threads, parallel run)
{
    ptrdiff_t padded = padded_to(width);
    float *wide = malloc(sizeof *wide * rows * padded);
    if (!wide)
        return 1;
    widen(dtype, x, rows, width, wide, padded);
    struct product p = {dtype, dtype, rows, outputs, width, padded, 0, wide, weight, bias, out};
    if (threads > 1 && run)
        run(product_work, &p, threads, 0);
    else
        product_work(&p);
    free(wide);
    return 0;
}

/*
 * VECTORS vectors of the sums that begin at column `from`. Some of the rows of y that follow are asked for, because the
 * CPU does not expect parts of rows.
 */
INLINE void some_columns(
    int dtype, int VECTORS, const float *x, const char *y, ptrdiff_t width, ptrdiff_t outputs, ptrdiff_t from,
    floats *sums)
{
    ptrdiff_t next = smaller(8, width);
    for (int v = 0; v < VECTORS; v++)
        sums[v] = all(0.f);
    for (ptrdiff_t k = 0; k < width; k++) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            __builtin_prefetch(y + ((k + next) * outputs + from + v * LANES) * size_of(dtype), 0, 2);
            sums[v] += x[k] * load(dtype, y, k * outputs + from + v * LANES);
        }
    }
}

INLINE void all_columns(int dtype, const float *x, const char *y, float *out, ptrdiff_t width, ptrdiff_t outputs)
{
    floats sums[8];
    ptrdiff_t from = 0;
    for (; from + 8 * LANES <= outputs; from += 8 * LANES) {
        some_columns(dtype, 8, x, y, width, outputs, from, sums);
        memcpy(out + from, sums, sizeof sums);
    }
    for (; from + 2 * LANES <= outputs; from += 2 * LANES) {
        some_columns(dtype, 2, x, y, width, outputs, from, sums);
        memcpy(out + from, sums, 2 * sizeof *sums);
    }
    for (; from < outputs; from += LANES) {
        ptrdiff_t count = smaller(LANES, outputs - from);
        floats sum = all(0.f);
        for (ptrdiff_t k = 0; k < width; k++)
            sum += x[k] * load_part(dtype, y, k * outputs + from, count);
        store(FLOAT32, out, from, sum, count);
    }
}

/* out (outputs) = x (width) times y (width, outputs), of which only y is not in float32. */
static void columns(int dtype, const float *x, const void *y, float *out, ptrdiff_t width, ptrdiff_t outputs)
{
    switch (dtype) {
    case FLOAT32: all_columns(FLOAT32, x, y, out, width, outputs); break;
    case BFLOAT16: all_columns(BFLOAT16, x, y, out, width, outputs); break;
    case FLOAT16: all_columns(FLOAT16, x, y, out, width, outputs); break;
    }
}

/* Writes numbers in float32, of which there are `count`, in a dtype. */
static void narrow(int dtype, const float *x, char *out, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        ptrdiff_t part = smaller(LANES, count - i);
        store(dtype, out, i, part == LANES ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, part), part);
    }
}

/*
 * out (batches, rows, outputs) = x (batches, rows, width) times y (batches, width, outputs). All of one dtype, and
 * contiguous. Returns 0, or 1 if there is no memory.
 */
int subquad_matmul(
    int dtype, const char *x, const char *y, char *out, ptrdiff_t batches, ptrdiff_t rows, ptrdiff_t width,
    ptrdiff_t outputs)
{
    float *wide = malloc(sizeof *wide * (padded_to(width) + outputs)), *sums = wide + padded_to(width);
    if (!wide)
        return 1;
    for (ptrdiff_t b = 0; b < batches; b++, y += width * outputs * size_of(dtype))
        for (ptrdiff_t row = 0; row < rows; row++) {
            widen(dtype, x, 1, width, wide, padded_to(width));
            columns(dtype, wide, y, sums, width, outputs);
            narrow(dtype, sums, out, outputs);
            x += width * size_of(dtype);
            out += outputs * size_of(dtype);
        }
    free(wide);
    return 0;
}

/* As in low_rank.py. */
enum { NOTHING, TANH, SIGMOID, EXP };

static void activate(int function, float *x, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        ptrdiff_t part = smaller(LANES, count - i);
        floats y = load_part(FLOAT32, x, i, part);
        y = function == TANH ? tanh_of(y) : function == SIGMOID ? sigmoid_of(y) : function == EXP ? exp_of(y) : y;
        store(FLOAT32, x, i, y, part);
    }
}

struct low_rank {
    int dtype, out_dtype, inner, outer;
    float scale;
    ptrdiff_t rows, width, groups, rank, outputs;
    const char *x, *down, *up, *base;
    char *out;
};

static void low_rank(int dtype, const struct low_rank *p, float *wide, float *low, float *sums)
{
    ptrdiff_t ranks = p->groups * p->rank, outputs = p->outputs;
    for (ptrdiff_t row = 0; row < p->rows; row++) {
        widen(dtype, p->x + row * p->width * size_of(dtype), 1, p->width, wide, padded_to(p->width));
        columns(dtype, wide, p->down, low, p->width, ranks);
        activate(p->inner, low, ranks);
        for (ptrdiff_t g = 0; g < p->groups; g++) {
            const char *up = p->up + g * p->rank * outputs * size_of(dtype);
            columns(dtype, low + g * p->rank, up, sums, p->rank, outputs);
            if (p->base)
                for (ptrdiff_t i = 0; i < outputs; i += LANES) {
                    ptrdiff_t part = smaller(LANES, outputs - i);
                    store(FLOAT32, sums, i, load_part(FLOAT32, sums, i, part) + load_part(dtype, p->base, i, part),
                          part);
                }
            activate(p->outer, sums, outputs);
            for (ptrdiff_t i = 0; i < outputs; i++)
                sums[i] *= p->scale;
            narrow(p->out_dtype, sums, p->out + (g * p->rows + row) * outputs * size_of(p->out_dtype), outputs);
        }
    }
}

/*
 * out (groups, rows, outputs), in out_dtype = scale * outer(base (outputs) + inner(x (rows, width) times down
 * (width, groups * rank)) times up (groups, rank, outputs)). base may be NULL. The others are of one dtype, and
 * contiguous. Returns 0, or 1 if there is no memory.
 */
int subquad_low_rank(
    int dtype, int out_dtype, const void *x, const void *down, const void *up, const void *base, void *out,
    ptrdiff_t rows, ptrdiff_t width, ptrdiff_t groups, ptrdiff_t rank, ptrdiff_t outputs, int inner, int outer,
    float scale)
{
    ptrdiff_t padded = padded_to(width);
    float *wide = malloc(sizeof *wide * (padded + groups * rank + outputs)), *low = wide + padded;
    if (!wide)
        return 1;
    struct low_rank p = {dtype, out_dtype, inner, outer, scale, rows, width, groups, rank, outputs,
                         x, down, up, base, out};
    low_rank(dtype, &p, wide, low, low + groups * rank);
    free(wide);
    return 0;
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
            ask_ahead(weight + i + k * STEP);
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

/* The bits of the largest absolute value of a row; those of infinity and NaN are the largest. */
INLINE uint32_t largest_bits(const float *x, ptrdiff_t width)
{
    words most = {0};
    uint32_t bits = 0;
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        floats part = i + LANES <= width ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, width - i);
        words found = (words)part & 0x7fffffff, more = (words)(found > most);
        most = (found & more) | (most & ~more);
    }
    for (int lane = 0; lane < LANES; lane++)
        bits = most[lane] > bits ? most[lane] : bits;
    return bits;
}

/* The scale of a row from these bits, and in `step` what its numbers are divided by. */
INLINE float scale_of(uint32_t bits, int largest, float *step)
{
    float scale;
    memcpy(&scale, &bits, sizeof bits);
    scale /= largest;
    *step = scale < 1.17549435e-38f ? 1.17549435e-38f : scale; /* the smallest normal number */
    return scale;
}

/* Numbers divided by `step`, rounded as floats are where they are whole numbers: halves go to the even one. */
INLINE words rounded_part(floats part, float step)
{
    return (words)(part / step + 12582912.f) - 0x4b400000;
}

/* Rounds a row of x to integers up to `largest`, padded with zeros. Returns their sum. */
INLINE int32_t round_row(const float *x, ptrdiff_t width, ptrdiff_t padded, int largest, integer *out, float *scale)
{
    uint32_t bits = largest_bits(x, width);
    float step;
    *scale = scale_of(bits, largest, &step);
    memset(out, 0, padded * sizeof *out);
    if (bits >= 0x7f800000)
        return 0;
    int32_t sum = 0;
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        floats part = i + LANES <= width ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, width - i);
        words rounded = rounded_part(part, step);
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

/* What stands before and behind a product of many rows that torch computes. */

typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));

struct many_rows {
    ptrdiff_t rows, width, next;
    int largest;
    const float *x, *scale;
    int8_t *rounded;
    float *row_scale;
    void *sums; /* integers, and then float32 */
};

/* The next rows of a thread, in `from` and `to`. Returns 0 if there are none. */
static int more_rows(struct many_rows *p, ptrdiff_t *from, ptrdiff_t *to)
{
    *from = __atomic_fetch_add(&p->next, 16, __ATOMIC_RELAXED);
    *to = smaller(*from + 16, p->rows);
    return *from < p->rows;
}

static void rounding_work(void *data)
{
    struct many_rows *p = data;
    for (ptrdiff_t row, to; more_rows(p, &row, &to);)
        for (; row < to; row++) {
            const float *x = p->x + row * p->width;
            int8_t *out = p->rounded + row * p->width;
            uint32_t bits = largest_bits(x, p->width);
            float step;
            p->row_scale[row] = scale_of(bits, p->largest, &step);
            for (ptrdiff_t i = 0; i < p->width; i += LANES) {
                ptrdiff_t count = smaller(LANES, p->width - i);
                floats part = count == LANES ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, count);
                bytes found = {0};
                if (bits < 0x7f800000)
                    found = __builtin_convertvector((whole)rounded_part(part, step), bytes);
                if (count == LANES)
                    memcpy(out + i, &found, LANES);
                else
                    memcpy(out + i, &found, count);
            }
        }
}

/* Rounds rows of x (rows, width) to integers up to `largest`. */
void subquad_round_rows(
    const float *x, int8_t *rounded, float *row_scale, ptrdiff_t rows, ptrdiff_t width, int largest,
    unsigned threads, parallel run)
{
    struct many_rows p = {rows, width, 0, largest, x, NULL, rounded, row_scale, NULL};
    if (threads > 1 && run)
        run(rounding_work, &p, threads, 0);
    else
        rounding_work(&p);
}

INLINE void scale_part(char *sums, floats scale, float row_scale, ptrdiff_t count)
{
    whole found = {0};
    memcpy(&found, sums, count * sizeof(float));
    floats out = __builtin_convertvector(found, floats) * scale * row_scale;
    memcpy(sums, &out, count * sizeof(float));
}

static void scaling_work(void *data)
{
    struct many_rows *p = data;
    for (ptrdiff_t row, to; more_rows(p, &row, &to);)
        for (; row < to; row++) {
            char *sums = (char *)p->sums + row * p->width * sizeof(float);
            ptrdiff_t i = 0;
            for (; i + LANES <= p->width; i += LANES)
                scale_part(sums + i * sizeof(float), load(FLOAT32, p->scale, i), p->row_scale[row], LANES);
            if (i < p->width)
                scale_part(sums + i * sizeof(float), load_part(FLOAT32, p->scale, i, p->width - i),
                           p->row_scale[row], p->width - i);
        }
}

/* Multiplies integers, sums (rows, width), by the scales of the rows and scale (width): float32 takes their place. */
void subquad_scale_sums(
    void *sums, float *row_scale, const float *scale, ptrdiff_t rows, ptrdiff_t width, unsigned threads, parallel run)
{
    struct many_rows p = {rows, width, 0, 0, NULL, scale, NULL, row_scale, sums};
    if (threads > 1 && run)
        run(scaling_work, &p, threads, 0);
    else
        scaling_work(&p);
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
