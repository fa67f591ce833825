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
 * Asks for a part of a weight that is read next. The CPU does so by itself, but not beyond a page of memory, and it
 * begins anew with every weight.
 */
INLINE void ask_for(const void *here) { __builtin_prefetch(here, 0, 2); }

/* How far ahead, in bytes, rows of a weight are asked for that are read one after another. */
#define ALONE 4096

/*
 * As many rows of a weight are read side by side. For one row of x and 16 bits that is faster than to read them one after
 * another, in float32 it is not.
 */
INLINE int side_by_side(int dtype, int ROWS) { return ROWS == 1 && dtype != FLOAT32 ? 4 : 1; }

/*
 * OUTPUTS rows of the weight times ROWS rows of x; the sums of a row of x are PART numbers apart. The rows of the weight
 * that come next are asked for.
 */
INLINE void dot_products(
    int dtype, int ROWS, int OUTPUTS, int STEPS, const float *x, ptrdiff_t padded, const char *weight, ptrdiff_t width,
    float *out)
{
    floats sums[4][4][4] = {{{{0}}}};
    ptrdiff_t i = 0, row = width * size_of(dtype), ahead = OUTPUTS > 1 ? OUTPUTS * row : ALONE;
    for (; i + STEPS * LANES <= width; i += STEPS * LANES)
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++)
#pragma GCC unroll 4
            for (int o = 0; o < OUTPUTS; o++) {
                ask_for(weight + o * row + (i + s * LANES) * size_of(dtype) + ahead);
                floats w = load(dtype, weight + o * row, i + s * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++)
                    sums[r][o][s] += w * load(FLOAT32, x + r * padded, i + s * LANES);
            }
    for (; i < width; i += LANES)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
            const char *here = weight + o * row;
            floats w = i + LANES <= width ? load(dtype, here, i) : load_part(dtype, here, i, width - i);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                sums[r][o][0] += w * load(FLOAT32, x + r * padded, i);
        }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
#pragma GCC unroll 4
            for (int s = 1; s < STEPS; s++)
                sums[r][o][0] += sums[r][o][s];
            out[r * PART + o] = sum_of(sums[r][o][0]);
        }
}

struct product {
    int dtype, out_dtype; /* of the weight and the bias, and of the result */
    ptrdiff_t rows, outputs, width, padded, next;
    const float *x;
    const char *weight, *bias;
    char *out;
    int failed;
};

/* Outputs `from` to `to`, at most PART, of ROWS rows. */
INLINE void part(int dtype, int ROWS, const struct product *p, ptrdiff_t row, ptrdiff_t from, ptrdiff_t to)
{
    float sums[4 * PART];
    const float *x = p->x + row * p->padded;
    const char *weight = p->weight + from * p->width * size_of(dtype);
    ptrdiff_t o = 0, row_bytes = p->width * size_of(dtype), OUTPUTS = side_by_side(dtype, ROWS);
    for (; o + OUTPUTS <= to - from; o += OUTPUTS)
        dot_products(dtype, ROWS, OUTPUTS, ROWS * OUTPUTS == 4 ? 2 : 4, x, p->padded, weight + o * row_bytes, p->width,
                     sums + o);
    for (; o < to - from; o++)
        dot_products(dtype, ROWS, 1, 4, x, p->padded, weight + o * row_bytes, p->width, sums + o);
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

#define STRIP 16 /* outputs that are computed together, one in each lane of a vector or of several */

#if LANES == 16
/*
 * More rows than a few. A vector has a number of each of STRIP outputs, and is multiplied by one number of a row of x, so
 * that no sums within a vector are needed. The weight is brought into this order in the cache, two strips at a time.
 */
#define MANY_FROM 9 /* rows */

/* Transposes a matrix of 16 x 16 words of 32 bits. */
INLINE void transpose(__m512i v[16])
{
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + k + 2]);
            b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + k + 2]);
        }
    for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88), odd = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
        v[c] = _mm512_shuffle_i32x4(even, even2, 0x88);
        v[c + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        v[c + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        v[c + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
}

/* Rows of a weight in the order of a strip, in float32; there are zeros for outputs that it does not have. */
INLINE void make_float_strip(
    int dtype, const char *weight, ptrdiff_t from, ptrdiff_t outputs, ptrdiff_t width, __m512i *strip)
{
    for (ptrdiff_t i = 0; i < width; i += LANES, strip += LANES) {
        __m512i v[16];
#pragma GCC unroll 16
        for (int o = 0; o < 16; o++) {
            ptrdiff_t at = (from + o) * width + i;
            floats row = all(0.f);
            if (from + o < outputs)
                row = i + LANES <= width ? load(dtype, weight, at) : load_part(dtype, weight, at, width - i);
            v[o] = (__m512i)row;
        }
        transpose(v);
        for (int o = 0; o < 16; o++)
            strip[o] = v[o];
    }
}

/* ROWS rows of x times two strips, from an output on. */
INLINE void two_float_strips(
    int dtype, int ROWS, const struct product *p, ptrdiff_t row, ptrdiff_t from, const floats *strips)
{
    const float *x = p->x + row * p->padded;
    floats s[2][8];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        s[0][r] = s[1][r] = all(0.f);
    for (ptrdiff_t k = 0; k < p->padded; k++) {
        floats w = strips[k], w2 = strips[p->padded + k];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            s[0][r] += w * x[r * p->padded + k];
            s[1][r] += w2 * x[r * p->padded + k];
        }
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        ptrdiff_t o = from + n * STRIP, count = smaller(STRIP, p->outputs - o);
        if (count <= 0)
            return;
        floats bias = p->bias ? load_part(dtype, p->bias, o, count) : all(0.f);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            if (count == STRIP)
                store(p->out_dtype, p->out, (row + r) * p->outputs + o, s[n][r] + bias, STRIP);
            else
                store(p->out_dtype, p->out, (row + r) * p->outputs + o, s[n][r] + bias, count);
        }
    }
}

INLINE void float_strips(int dtype, struct product *p, __m512i *strips)
{
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, 2 * STRIP, __ATOMIC_RELAXED), row = 0;
        if (from >= p->outputs)
            return;
        for (int n = 0; n < 2; n++)
            make_float_strip(dtype, p->weight, from + n * STRIP, p->outputs, p->width, strips + n * p->padded);
        for (; row + 8 <= p->rows; row += 8)
            two_float_strips(dtype, 8, p, row, from, (const floats *)strips);
        for (; row + 4 <= p->rows; row += 4)
            two_float_strips(dtype, 4, p, row, from, (const floats *)strips);
        for (; row < p->rows; row++)
            two_float_strips(dtype, 1, p, row, from, (const floats *)strips);
    }
}

static void float_strips_work(void *data)
{
    struct product *p = data;
    __m512i *strips = aligned_alloc(64, 2 * STRIP * p->padded * sizeof(float));
    if (!strips) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    switch (p->dtype) {
    case FLOAT32: float_strips(FLOAT32, p, strips); break;
    case BFLOAT16: float_strips(BFLOAT16, p, strips); break;
    case FLOAT16: float_strips(FLOAT16, p, strips); break;
    }
    free(strips);
}
#endif

/* The number of rows up to which [subquad_linear] is meant to be called. */
ptrdiff_t subquad_linear_rows(void)
{
#ifdef MANY_FROM
    return 128;
#else
    return 8;
#endif
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
    struct product p = {dtype, dtype, rows, outputs, width, padded, 0, wide, weight, bias, out, 0};
    void (*work)(void *) = product_work;
#ifdef MANY_FROM
    if (rows >= MANY_FROM)
        work = float_strips_work;
#endif
    on_threads(work, &p, threads, run);
    free(wide);
    return p.failed;
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

/* Whether the CPU converts float16 to float32. */
int subquad_has_float16(void)
{
#if defined(__aarch64__) || LANES == 16 || defined(__F16C__)
    return 1;
#else
    return 0;
#endif
}
