/*
 * Products with weights of 8 and 4 bits on a CPU. The rows that they multiply are rounded to integers, whose products
 * have exact sums. Compiled by `native.py`.
 */

#include "products.c"

/* Numbers from which on all threads round rows. */
#define FOR_THREADS (1 << 18)

/*
 * Weights of 8 bits.
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
/* Not the function of the compiler: gcc copies its sums from register to register, which takes half of the time. */
INLINE sums add(sums s, numbers w, numbers x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(w), "v"(x));
    return s;
}
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
INLINE sums add(sums s, numbers w, numbers x)
{
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(s) : "x"(w), "x"(x)); /* as above */
    return s;
}
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
    int failed;
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

/* As [dot_products]; OUTPUTS is 4 for one row of x, otherwise 1. */
INLINE void int8_dot_products(
    int ROWS, int OUTPUTS, int STEPS, const integer *x, ptrdiff_t padded, const int8_t *weight, ptrdiff_t width,
    int32_t *out)
{
    sums s[4][4], all[4]; /* of each row of x, or of each output */
    ptrdiff_t i = 0, ahead = OUTPUTS > 1 ? 4 * OUTPUTS * width : ALONE;
    memset(s, 0, sizeof s);
    for (; i + STEPS * STEP <= width; i += STEPS * STEP)
#pragma GCC unroll 4
        for (int k = 0; k < STEPS; k++)
#pragma GCC unroll 4
            for (int o = 0; o < OUTPUTS; o++) {
                const int8_t *here = weight + o * width + i + k * STEP;
                ask_for(here + ahead);
                numbers w = weights(here);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++)
                    s[r + o][k] = add(s[r + o][k], w, integers(x + r * padded + i + k * STEP));
            }
    for (; i < width; i += STEP)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
            int8_t last[STEP] = {0};
            memcpy(last, weight + o * width + i, smaller(STEP, width - i));
            numbers w = weights(last);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                s[r + o][0] = add(s[r + o][0], w, integers(x + r * padded + i));
        }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++)
        all[n] = (sums)((lanes)s[n][0] + (lanes)s[n][1] + (lanes)s[n][2] + (lanes)s[n][3]);
    integers4 found = totals(all);
    if (OUTPUTS > 1)
        memcpy(out, &found, sizeof found);
    else
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            out[r * PART] = found[r];
}

/* Outputs `from` to `to`, at most PART, of ROWS rows. */
INLINE void int8_part(int ROWS, const struct int8_product *p, ptrdiff_t row, ptrdiff_t from, ptrdiff_t to)
{
    int32_t sum[4 * PART];
    const integer *x = p->x + row * p->padded;
    ptrdiff_t at = from, OUTPUTS = ROWS == 1 ? 4 : 1;
    for (; at + OUTPUTS <= to; at += OUTPUTS)
        int8_dot_products(ROWS, OUTPUTS, ROWS * OUTPUTS == 4 ? 2 : 4, x, p->padded, p->weight + at * p->width, p->width,
                          sum + at - from);
    for (; at < to; at++)
        int8_dot_products(ROWS, 1, 4, x, p->padded, p->weight + at * p->width, p->width, sum + at - from);
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

typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));

/* The bits of the largest absolute value of a row; infinity and NaN have the largest. */
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

/* The scale of a row from these bits, and in `inverse` what its numbers are multiplied by. */
INLINE float scale_of(uint32_t bits, int largest, float *inverse)
{
    float scale;
    memcpy(&scale, &bits, sizeof bits);
    scale /= largest;
    *inverse = 1.f / (scale < 1.17549435e-38f ? 1.17549435e-38f : scale); /* the smallest normal number */
    return scale;
}

/* Numbers times `inverse`, rounded as floats are where they are whole numbers: halves go to the even one. */
INLINE words rounded_part(floats part, float inverse)
{
    floats scaled = part * inverse;
    OPAQUE(scaled); /* rounded, as in torch, before the sum */
    return (words)(scaled + 12582912.f) - 0x4b400000;
}

/* The low bytes of numbers. (gcc 12 takes 30 instructions for a conversion of its vectors.) */
INLINE bytes bytes_of(words x)
{
#if LANES == 16
    return (bytes)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    int64_t found = _mm_cvtsi128_si64(_mm_packs_epi16(pairs, pairs));
    return (bytes)found;
#else
    return __builtin_convertvector((whole)x, bytes);
#endif
}

/*
 * Many rows: rounded and scaled by all threads. `padded` is the width of a row of integers, of which the last are zeros.
 */
struct many_rows {
    ptrdiff_t rows, width, padded, next;
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
            int8_t *out = p->rounded + row * p->padded;
            uint32_t bits = largest_bits(x, p->width);
            float inverse;
            p->row_scale[row] = scale_of(bits, p->largest, &inverse);
            for (ptrdiff_t i = 0; i < p->width; i += LANES) {
                ptrdiff_t count = smaller(LANES, p->width - i);
                floats part = count == LANES ? load(FLOAT32, x, i) : load_part(FLOAT32, x, i, count);
                bytes found = {0};
                if (bits < 0x7f800000)
                    found = bytes_of(rounded_part(part, inverse));
                if (count == LANES)
                    memcpy(out + i, &found, LANES);
                else
                    memcpy(out + i, &found, count);
            }
            memset(out + p->width, 0, p->padded - p->width);
        }
}

static void round_rows(struct many_rows p, unsigned threads, parallel run)
{
    on_threads(rounding_work, &p, threads, run);
}

/* Rounds rows of x (rows, width) to integers up to `largest`. */
void subquad_round_rows(
    const float *x, int8_t *rounded, float *row_scale, ptrdiff_t rows, ptrdiff_t width, int largest,
    unsigned threads, parallel run)
{
    round_rows((struct many_rows){rows, width, width, 0, largest, x, NULL, rounded, row_scale, NULL}, threads, run);
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
    struct many_rows p = {rows, width, width, 0, 0, NULL, scale, NULL, row_scale, sums};
    on_threads(scaling_work, &p, threads, run);
}

/* The sums of GROUP integers at a time, of which there are `count` groups. */
#define GROUP 32

static void sums_of_groups(const int8_t *x, ptrdiff_t count, int32_t *out)
{
    for (ptrdiff_t g = 0; g < count; g++) {
        int32_t sum = 0;
        for (int i = 0; i < GROUP; i++)
            sum += x[g * GROUP + i];
        out[g] = sum;
    }
}

/* The sum of integers, whose number is a multiple of GROUP. */
INLINE int32_t sum_of_row(const int8_t *x, ptrdiff_t count)
{
    int32_t sum = 0, of_group;
    for (ptrdiff_t i = 0; i < count; i += GROUP) {
        sums_of_groups(x + i, 1, &of_group);
        sum += of_group;
    }
    return sum;
}

/* Four numbers of x, as one of 32 bits. */
INLINE int32_t four_of(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return four;
}

#if STEP == 64 && LANES == 16
/*
 * More rows than a few, with 8 bits. A vector has four numbers of each of STRIP outputs, and is multiplied by four
 * numbers of a row of x, so that no sums within a vector are needed. The weight is brought into this order in the
 * cache, two strips at a time.
 */
#define STRIPS_FROM 5 /* rows */

/* Rows of a weight in the order of a strip; there are zeros for outputs that it does not have. */
static void make_strip(const int8_t *weight, ptrdiff_t outputs, ptrdiff_t width, __m512i *strip)
{
    for (ptrdiff_t i = 0; i < width; i += STEP, strip += 16) {
        ptrdiff_t count = smaller(STEP, width - i);
        __mmask64 mask = ~0ull >> (STEP - count);
        __m512i v[16];
#pragma GCC unroll 16
        for (int o = 0; o < 16; o++) {
            const int8_t *from = weight + o * width + i;
            v[o] = o < outputs ? _mm512_maskz_loadu_epi8(mask, from) : _mm512_setzero_si512();
            v[o] = _mm512_xor_si512(v[o], _mm512_set1_epi8(-128));
            __builtin_prefetch(from + 16 * width, 0, 2); /* the next strip */
        }
        transpose(v);
        for (int o = 0; o < 16; o++)
            strip[o] = v[o];
    }
}

/* ROWS rows of x times two strips, from an output on. */
INLINE void two_strips(int ROWS, const struct int8_product *p, ptrdiff_t row, ptrdiff_t from, const __m512i *strips)
{
    ptrdiff_t steps = p->padded / 4;
    const integer *x = p->x + row * p->padded;
    __m512i s[2][8];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        s[0][r] = s[1][r] = _mm512_setzero_si512();
    for (ptrdiff_t k = 0; k < steps; k++) {
        __m512i w = strips[k], w2 = strips[steps + k];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __m512i four = _mm512_set1_epi32(four_of(x + r * p->padded + 4 * k));
            s[0][r] = add(s[0][r], w, four);
            s[1][r] = add(s[1][r], w2, four);
        }
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        ptrdiff_t o = from + n * STRIP, count = smaller(STRIP, p->outputs - o);
        if (count <= 0)
            return;
        floats scale = count == STRIP ? load(FLOAT32, p->scale, o) : load_part(FLOAT32, p->scale, o, count);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            floats sum = __builtin_convertvector((whole)s[n][r] - p->offsets[row + r], floats);
            sum = sum * scale * p->row_scale[row + r];
            if (count == STRIP)
                store(FLOAT32, p->out, (row + r) * p->outputs + o, sum, STRIP);
            else
                store(FLOAT32, p->out, (row + r) * p->outputs + o, sum, count);
        }
    }
}

static void strips_work(void *data)
{
    struct int8_product *p = data;
    __m512i *strips = aligned_alloc(64, 2 * STRIP * p->padded);
    if (!strips) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, 2 * STRIP, __ATOMIC_RELAXED), row = 0;
        if (from >= p->outputs)
            break;
        for (int n = 0; n < 2; n++)
            make_strip(p->weight + (from + n * STRIP) * p->width, p->outputs - from - n * STRIP, p->width,
                       strips + n * p->padded / 4);
        for (; row + 8 <= p->rows; row += 8)
            two_strips(8, p, row, from, strips);
        for (; row + 4 <= p->rows; row += 4)
            two_strips(4, p, row, from, strips);
        for (; row < p->rows; row++)
            two_strips(1, p, row, from, strips);
    }
    free(strips);
}
#endif

/* The number of rows up to which [subquad_int8_linear] is faster than torch. */
ptrdiff_t subquad_int8_rows(void)
{
#ifdef STRIPS_FROM
    return 256;
#else
    return 16;
#endif
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
    int8_t *rounded = aligned_alloc(64, rows * padded);
    integer *wide = sizeof(integer) == 1 ? NULL : aligned_alloc(64, rows * padded * sizeof *wide);
    float *row_scale = malloc(rows * sizeof *row_scale);
    int32_t *offsets = malloc(rows * sizeof *offsets);
    struct int8_product p = {rows, outputs, width, padded, 0, wide ? wide : (integer *)rounded, offsets, row_scale,
                             scale, weight, out, 0};
    if (!rounded || !row_scale || !offsets || (sizeof(integer) > 1 && !wide))
        p.failed = 1;
    else {
        struct many_rows r = {rows, width, padded, 0, largest, x, NULL, rounded, row_scale, NULL};
        round_rows(r, rows * width >= FOR_THREADS ? threads : 1, run);
        for (ptrdiff_t i = 0; i < rows; i++)
            offsets[i] = OFFSET ? OFFSET * sum_of_row(rounded + i * padded, padded) : 0;
        if (wide)
            for (ptrdiff_t i = 0; i < rows * padded; i += 64)
                for (int k = 0; k < 64; k++)
                    wide[i + k] = rounded[i + k];
        void (*work)(void *) = int8_work;
#ifdef STRIPS_FROM
        if (rows >= STRIPS_FROM)
            work = strips_work;
#endif
        on_threads(work, &p, threads, run);
    }
    free(rounded);
    free(wide);
    free(row_scale);
    free(offsets);
    return p.failed;
}

/*
 * Weights of 4 bits, in groups of GROUP inputs. A strip has STRIP outputs and all inputs. Of each group it has 256
 * bytes, in the order (4, STRIP, 4): byte (b, o, i) has in its low half the number of output o and of input 4 b + i of
 * the group, in its high half input 16 + 4 b + i. 8 is added to the numbers, which are from -8 to 7. The scales
 * of a strip, in bfloat16, are in the order (groups, STRIP).
 */
#define PARTS (STRIP / LANES) /* vectors of a strip */

struct int4_product {
    ptrdiff_t rows, outputs, width, next;
    const int8_t *x;
    const int32_t *offsets; /* what the sums of each row and group are too large by, negative */
    const float *row_scale;
    const uint8_t *weight;
    const char *scale;
    float *out;
    int failed;
};

/* A group's sums of STRIP outputs and ROWS rows, which are `width` integers apart. */
INLINE void int4_sums(
    int ROWS, const int8_t *x, ptrdiff_t width, const int32_t *offsets, ptrdiff_t groups, const uint8_t *block,
    whole out[8][PARTS])
{
#if STEP == 64 && LANES == 16
    __m512i n[8], low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int b = 0; b < 4; b++) {
        __m512i both = _mm512_loadu_si512(block + 64 * b);
        n[b] = _mm512_and_si512(both, low);
        n[b + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        __m512i sum = _mm512_set1_epi32(offsets[r * groups]);
#pragma GCC unroll 8
        for (int b = 0; b < 8; b++)
            sum = add(sum, n[b], _mm512_set1_epi32(four_of(x + r * width + 4 * b)));
        out[r][0] = (whole)sum;
    }
#elif defined(__AVX2__)
    __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i n[8];
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(block + 64 * b + 32 * half));
            n[b] = _mm256_and_si256(both, low);
            n[b + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const int8_t *here = x + r * width;
            __m256i sum = _mm256_set1_epi32(offsets[r * groups]);
#ifdef __AVXVNNI__
#pragma GCC unroll 8
            for (int b = 0; b < 8; b++)
                sum = add(sum, n[b], _mm256_set1_epi32(four_of(here + 4 * b)));
#else
            /* In 16 bits: 16 products, of at most 15 * 128, fit. */
            __m256i pairs = _mm256_maddubs_epi16(n[0], _mm256_set1_epi32(four_of(here)));
#pragma GCC unroll 7
            for (int b = 1; b < 8; b++)
                pairs = _mm256_add_epi16(pairs,
                                         _mm256_maddubs_epi16(n[b], _mm256_set1_epi32(four_of(here + 4 * b))));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
            memcpy((char *)out[r] + 32 * half, &sum, sizeof sum);
        }
    }
#else
    for (int r = 0; r < ROWS; r++) {
        int32_t sums[STRIP];
        for (int o = 0; o < STRIP; o++) {
            sums[o] = offsets[r * groups];
            for (int b = 0; b < 4; b++)
                for (int i = 0; i < 4; i++) {
                    uint8_t both = block[64 * b + 4 * o + i];
                    sums[o] += (both & 15) * x[r * width + 4 * b + i] + (both >> 4) * x[r * width + 16 + 4 * b + i];
                }
        }
        memcpy(out[r], sums, sizeof sums);
    }
#endif
}

/* ROWS rows of x times a strip. */
INLINE void int4_strip(int ROWS, const struct int4_product *p, ptrdiff_t row, ptrdiff_t strip)
{
    ptrdiff_t groups = p->width / GROUP;
    const uint8_t *weight = p->weight + strip * groups * (GROUP * STRIP / 2);
    const char *scale = p->scale + strip * groups * STRIP * 2;
    floats sums[8][PARTS] = {{{0}}};
    for (ptrdiff_t g = 0; g < groups; g++) {
        const uint8_t *block = weight + g * (GROUP * STRIP / 2);
        whole found[8][PARTS];
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++)
            __builtin_prefetch(block + 64 * b + 4096, 0, 2);
        __builtin_prefetch(scale + g * STRIP * 2 + 512, 0, 2);
        int4_sums(ROWS, p->x + row * p->width + g * GROUP, p->width, p->offsets + row * groups + g, groups, block,
                  found);
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++) {
            floats factor = load(BFLOAT16, scale, g * STRIP + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                sums[r][v] += __builtin_convertvector(found[r][v], floats) * factor;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; v++)
            store(FLOAT32, p->out, (row + r) * p->outputs + strip * STRIP + v * LANES,
                  sums[r][v] * p->row_scale[row + r], LANES);
}

static void int4_work(void *data)
{
    struct int4_product *p = data;
    ptrdiff_t strips = p->outputs / STRIP;
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, 4, __ATOMIC_RELAXED), row = 0;
        if (from >= strips)
            return;
        ptrdiff_t to = smaller(from + 4, strips);
        for (; row + 8 <= p->rows; row += 8)
            for (ptrdiff_t s = from; s < to; s++)
                int4_strip(8, p, row, s);
        for (; row + 4 <= p->rows; row += 4)
            for (ptrdiff_t s = from; s < to; s++)
                int4_strip(4, p, row, s);
        for (; row < p->rows; row++)
            for (ptrdiff_t s = from; s < to; s++)
                int4_strip(1, p, row, s);
    }
}

#if STEP == 64 && LANES == 16
/*
 * More rows than a few: the numbers of two strips are brought into bytes once, in the cache, and each number of x is
 * read for both.
 */
#define TWO_STRIPS_FROM 6 /* rows */

static void unpack_strip(const uint8_t *weight, ptrdiff_t groups, __m512i *strip)
{
    __m512i low = _mm512_set1_epi8(15);
    for (ptrdiff_t g = 0; g < groups; g++, weight += GROUP * STRIP / 2, strip += 8)
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
            __m512i both = _mm512_loadu_si512(weight + 64 * b);
            strip[b] = _mm512_and_si512(both, low);
            strip[b + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
}

/* ROWS rows of x times two strips. */
INLINE void int4_two_strips(int ROWS, const struct int4_product *p, ptrdiff_t row, ptrdiff_t strip, const __m512i *strips)
{
    ptrdiff_t groups = p->width / GROUP;
    const int8_t *x = p->x + row * p->width;
    const char *scale = p->scale + strip * groups * STRIP * 2;
    floats sums[6][2] = {{{0}}};
    for (ptrdiff_t g = 0; g < groups; g++, strips += 8, x += GROUP) {
        __m512i found[6][2];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
            found[r][0] = found[r][1] = _mm512_set1_epi32(p->offsets[(row + r) * groups + g]);
#pragma GCC unroll 8
        for (int b = 0; b < 8; b++) {
            __m512i w = strips[b], w2 = strips[8 * groups + b];
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                __m512i four = _mm512_set1_epi32(four_of(x + r * p->width + 4 * b));
                found[r][0] = add(found[r][0], w, four);
                found[r][1] = add(found[r][1], w2, four);
            }
        }
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            floats factor = load(BFLOAT16, scale, (n * groups + g) * STRIP);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++)
                sums[r][n] += __builtin_convertvector((whole)found[r][n], floats) * factor;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++)
            store(FLOAT32, p->out, (row + r) * p->outputs + (strip + n) * STRIP, sums[r][n] * p->row_scale[row + r],
                  STRIP);
}

static void two_strips_work(void *data)
{
    struct int4_product *p = data;
    ptrdiff_t groups = p->width / GROUP, number = p->outputs / STRIP;
    __m512i *strips = aligned_alloc(64, 2 * STRIP * p->width);
    if (!strips) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, 2, __ATOMIC_RELAXED), row = 0;
        if (from >= number)
            break;
        if (from + 1 == number) {
            for (; row < p->rows; row++)
                int4_strip(1, p, row, from);
            break;
        }
        for (int n = 0; n < 2; n++)
            unpack_strip(p->weight + (from + n) * groups * (GROUP * STRIP / 2), groups, strips + n * 8 * groups);
        for (; row + 6 <= p->rows; row += 6)
            int4_two_strips(6, p, row, from, strips);
        for (; row + 2 <= p->rows; row += 2)
            int4_two_strips(2, p, row, from, strips);
        for (; row < p->rows; row++)
            int4_two_strips(1, p, row, from, strips);
    }
    free(strips);
}
#endif

/*
 * out (rows, outputs) = x (rows, width), rounded to 8-bit integers, times a weight of 4 bits (outputs, width), which is
 * laid out as above, transposed. outputs is a multiple of STRIP and width of GROUP. Returns 0, or 1 if there is no memory.
 */
int subquad_int4_linear(
    const float *x, const uint8_t *weight, const void *scale, float *out, ptrdiff_t rows, ptrdiff_t outputs,
    ptrdiff_t width, unsigned threads, parallel run)
{
    ptrdiff_t groups = width / GROUP;
    int8_t *rounded = malloc(rows * width);
    float *row_scale = malloc(rows * sizeof *row_scale);
    int32_t *offsets = malloc(rows * groups * sizeof *offsets);
    int failed = !rounded || !row_scale || !offsets;
    if (!failed) {
        struct many_rows r = {rows, width, width, 0, 127, x, NULL, rounded, row_scale, NULL};
        round_rows(r, rows * width >= FOR_THREADS ? threads : 1, run);
        sums_of_groups(rounded, rows * groups, offsets);
        for (ptrdiff_t i = 0; i < rows * groups; i++)
            offsets[i] *= -8;
        struct int4_product p = {rows, outputs, width, 0, rounded, offsets, row_scale, weight, scale, out, 0};
        void (*work)(void *) = int4_work;
#ifdef TWO_STRIPS_FROM
        if (rows >= TWO_STRIPS_FROM)
            work = two_strips_work;
#endif
        on_threads(work, &p, threads, run);
        failed = p.failed;
    }
    free(rounded);
    free(row_scale);
    free(offsets);
    return failed;
}
