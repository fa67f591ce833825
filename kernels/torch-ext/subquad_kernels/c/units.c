/*
 * Products of one row with a copy of a weight by unit: the numbers of an input are beside each other, and those of
 * inputs that are zero are not read. After the square of a ReLU most inputs are zero.
 */

#include "steps.c"

/* A weight (outputs, inputs), in a dtype or, with scales, in 8 or 4 bits as in integers.c. */
struct matrix {
    const void *weight, *scale;
    ptrdiff_t outputs, inputs;
    int bits; /* 0 if it has no scales */
};

/* Formats of a copy besides the dtypes. */
enum { INT8 = FLOAT16 + 1, INT4 };

INLINE int format_of(const struct matrix *m, int dtype) { return m->bits == 8 ? INT8 : m->bits == 4 ? INT4 : dtype; }

/*
 * A copy is (inputs, outputs) in the numbers of the weight. In 4 bits a group of inputs has its numbers and then its
 * scales (outputs) in bfloat16. Of WIDE outputs, byte k of 32 has output k in its low half and 32 + k in its high half.
 */
#define WIDE 64
INLINE ptrdiff_t unit_bytes(int format, ptrdiff_t outputs)
{
    return format == INT4 ? outputs / 2 : format == INT8 ? outputs : outputs * size_of(format);
}

#define GROUP_BYTES(outputs) ((outputs) / 2 * GROUP + (outputs) * 2)

INLINE ptrdiff_t place_of_unit(int format, ptrdiff_t outputs, ptrdiff_t unit)
{
    ptrdiff_t bytes = unit_bytes(format, outputs);
    return format == INT4 ? unit / GROUP * GROUP_BYTES(outputs) + unit % GROUP * bytes : unit * bytes;
}

/* The size of a copy in bytes. */
ptrdiff_t subquad_bytes_by_unit(const struct matrix *m, int dtype)
{
    return place_of_unit(format_of(m, dtype), m->outputs, m->inputs);
}

struct copying {
    const struct matrix *m;
    int format, failed;
    char *to;
    ptrdiff_t next;
};

INLINE int is_finite(int dtype, const void *x, ptrdiff_t count)
{
    words found = {0};
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        floats part = load(dtype, x, i);
        found |= (words)(part - part != 0.f);
    }
    for (int lane = 0; lane < LANES; lane++)
        if (found[lane])
            return 0;
    return 1;
}

/* WIDE outputs, in squares that a cache holds. */
INLINE int copy_squares(int format, int SIZE, const struct copying *p, ptrdiff_t from)
{
    const struct matrix *m = p->m;
    char lines[WIDE][WIDE * SIZE];
    int good = 1;
    for (ptrdiff_t i = 0; i < m->inputs; i += WIDE) {
        ptrdiff_t inputs = smaller(WIDE, m->inputs - i);
        for (int o = 0; o < WIDE; o++) {
            memcpy(lines[o], (const char *)m->weight + ((from + o) * m->inputs + i) * SIZE, inputs * SIZE);
            if (format != INT8)
                good &= is_finite(format, lines[o], inputs);
        }
        for (ptrdiff_t k = 0; k < inputs; k++) {
            char *unit = p->to + ((i + k) * m->outputs + from) * SIZE;
            for (int o = 0; o < WIDE; o++)
                memcpy(unit + o * SIZE, lines[o] + k * SIZE, SIZE);
        }
    }
    return good;
}

static int copy_groups(const struct copying *p, ptrdiff_t from)
{
    const struct matrix *m = p->m;
    ptrdiff_t groups = m->inputs / GROUP, bytes = unit_bytes(INT4, m->outputs), strip = groups * (GROUP * STRIP / 2);
    int good = 1;
    for (ptrdiff_t g = 0; g < groups; g++) {
        const uint8_t *block = (const uint8_t *)m->weight + (from / STRIP * groups + g) * (GROUP * STRIP / 2);
        char *group = p->to + g * GROUP_BYTES(m->outputs), *scales = group + GROUP * bytes + from * 2;
        for (ptrdiff_t s = 0; s < WIDE / STRIP; s++)
            memcpy(scales + s * STRIP * 2, (const char *)m->scale + ((from / STRIP + s) * groups + g) * STRIP * 2,
                   STRIP * 2);
        good &= is_finite(BFLOAT16, scales, WIDE);
        for (int i = 0; i < GROUP; i++)
            for (int o = 0; o < WIDE / 2; o++) {
                const uint8_t *here = block + o / STRIP * strip + i % 16 / 4 * 64 + o % STRIP * 4 + i % 4;
                int low = *here >> i / 16 * 4 & 15, high = here[2 * strip] >> i / 16 * 4 & 15;
                group[i * bytes + from / 2 + o] = low | high << 4;
            }
    }
    return good;
}

static void copying_work(void *data)
{
    struct copying *p = data;
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, WIDE, __ATOMIC_RELAXED);
        if (from >= p->m->outputs)
            return;
        int good = 0;
        switch (p->format) {
        case FLOAT32: good = copy_squares(FLOAT32, 4, p, from); break;
        case BFLOAT16: good = copy_squares(BFLOAT16, 2, p, from); break;
        case FLOAT16: good = copy_squares(FLOAT16, 2, p, from); break;
        case INT8: good = copy_squares(INT8, 1, p, from); break;
        case INT4: good = copy_groups(p, from); break;
        }
        if (!good)
            __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
    }
}

/*
 * Copies a weight, whose outputs are a multiple of WIDE. Returns 0, or 1 if it has numbers that are not finite, which
 * times zero are not zero.
 */
int subquad_copy_by_unit(const struct matrix *m, int dtype, void *to, unsigned threads, parallel run)
{
    struct copying p = {m, format_of(m, dtype), 0, to, 0};
    on_threads(copying_work, &p, threads, run);
    return p.failed;
}

/* Units that are added at a time: sums are read and written as often. */
#define TOGETHER 8

struct unit_sums {
    int format;
    ptrdiff_t outputs, count, part, next;
    const int32_t *units; /* `count`, in batches of TOGETHER, which are of one group each if the weight has 4 bits */
    const float *x;       /* what each of them is multiplied by */
    const char *copy;
    float *out;
};

/* Vector v of WIDE numbers of a unit, from output o on. */
INLINE floats numbers_of_unit(int format, const char *unit, ptrdiff_t o, int v)
{
    ptrdiff_t at = v * LANES;
    if (format < INT8)
        return load(format, unit, o + at);
    const char *here = format == INT8 ? unit + o + at : unit + o / 2 + at % (WIDE / 2);
    whole found;
#if LANES == 16
    found = (whole)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)here));
#else
    bytes part;
    memcpy(&part, here, sizeof part);
#if defined(__AVX2__)
    found = (whole)_mm256_cvtepi8_epi32(_mm_set1_epi64x((int64_t)part));
#else
    found = __builtin_convertvector(part, whole);
#endif
#endif
    if (format == INT4)
        found = (found >> at / (WIDE / 2) * 4 & 15) - 8;
    return __builtin_convertvector(found, floats);
}

/*
 * Adds up WIDE numbers of a batch of units, from output o on, times x. With AVX-512 the sixteen products of a unit of 4
 * bits are looked up. The sums of a batch fit in 16 bits.
 */
INLINE void sums_of_batch(
    int format, const char *unit[TOGETHER], const float *x, ptrdiff_t o, floats sums[WIDE / LANES])
{
#if LANES == 16
    if (format == INT4) {
        static const int16_t numbers[32] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7,
                                            -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        __m512i low = _mm512_setzero_si512(), high = low;
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; i++) {
            __m512i products = _mm512_mullo_epi16(_mm512_set1_epi16(x[i]), _mm512_loadu_si512(numbers));
            __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(unit[i] + o / 2)));
            low = _mm512_add_epi16(low, _mm512_permutexvar_epi16(both, products));
            high = _mm512_add_epi16(high, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), products));
        }
        __m512i both[2] = {low, high};
        for (int v = 0; v < WIDE / LANES; v++) {
            __m256i found;
            memcpy(&found, (const char *)both + v * sizeof found, sizeof found);
            sums[v] = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(found));
        }
        return;
    }
#endif
#pragma GCC unroll 8
    for (int i = 0; i < TOGETHER; i++)
#pragma GCC unroll 16
        for (int v = 0; v < WIDE / LANES; v++)
            sums[v] += x[i] * numbers_of_unit(format, unit[i], o, v);
}

INLINE const char *scales_of_unit(const struct unit_sums *p, ptrdiff_t unit)
{
    return p->copy + (unit / GROUP + 1) * GROUP_BYTES(p->outputs) - p->outputs * 2;
}

/* Adds a batch of units. Asks for those of the next one, because the CPU does not expect them. */
INLINE void add_units(int format, const struct unit_sums *p, ptrdiff_t batch, ptrdiff_t from, ptrdiff_t to)
{
    const char *unit[TOGETHER], *soon[TOGETHER], *scale = NULL, *soon_scale = NULL;
    ptrdiff_t next = batch + TOGETHER < p->count ? batch + TOGETHER : batch;
    float x[TOGETHER], *out = p->out;
    for (int i = 0; i < TOGETHER; i++) {
        x[i] = p->x[batch + i];
        unit[i] = p->copy + place_of_unit(format, p->outputs, p->units[batch + i]);
        soon[i] = p->copy + place_of_unit(format, p->outputs, p->units[next + i]);
    }
    if (format == INT4) {
        scale = scales_of_unit(p, p->units[batch]);
        soon_scale = scales_of_unit(p, p->units[next]);
    }
    for (ptrdiff_t o = from; o < to; o += WIDE) {
        floats sums[WIDE / LANES] = {{0}};
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; i++)
            for (ptrdiff_t at = unit_bytes(format, o); at < unit_bytes(format, o + WIDE); at += 64)
                __builtin_prefetch(soon[i] + at, 0, 2);
        for (int at = 0; format == INT4 && at < WIDE; at += 32)
            __builtin_prefetch(soon_scale + (o + at) * 2, 0, 2);
        sums_of_batch(format, unit, x, o, sums);
#pragma GCC unroll 16
        for (int v = 0; v < WIDE / LANES; v++) {
            ptrdiff_t at = o + v * LANES;
            if (format == INT4)
                sums[v] *= load(BFLOAT16, scale, at);
            store(FLOAT32, out, at, load(FLOAT32, out, at) + sums[v], LANES);
        }
    }
}

INLINE void add_all_units(int format, struct unit_sums *p)
{
    for (;;) {
        ptrdiff_t from = __atomic_fetch_add(&p->next, p->part, __ATOMIC_RELAXED);
        if (from >= p->outputs)
            return;
        ptrdiff_t to = smaller(from + p->part, p->outputs);
        memset(p->out + from, 0, (to - from) * sizeof(float));
        for (ptrdiff_t batch = 0; batch < p->count; batch += TOGETHER)
            add_units(format, p, batch, from, to);
    }
}

static void units_work(void *data)
{
    struct unit_sums *p = data;
    switch (p->format) {
    case FLOAT32: add_all_units(FLOAT32, p); break;
    case BFLOAT16: add_all_units(BFLOAT16, p); break;
    case FLOAT16: add_all_units(FLOAT16, p); break;
    case INT8: add_all_units(INT8, p); break;
    case INT4: add_all_units(INT4, p); break;
    }
}

/*
 * out (outputs) = x (inputs) times a weight that has a copy, transposed; with scales, x is rounded to integers up to
 * `largest`. Returns 0, 1 if there is no memory, or -1 if too many inputs are not zero, so that the weight is faster.
 */
static int multiply_by_unit(
    const struct matrix *m, int dtype, const void *copy, const float *x, float *out, int largest, unsigned threads,
    parallel run)
{
    int format = format_of(m, dtype);
    ptrdiff_t most = m->inputs + (m->inputs / GROUP + 1) * TOGETHER, count = 0, found = 0;
    ptrdiff_t part = ((m->outputs + threads - 1) / threads + 63) / 64 * 64;
    int32_t *units = malloc(most * sizeof *units + most * sizeof(float) + m->inputs);
    if (!units)
        return 1;
    float *chosen = (float *)(units + most), row_scale = 1.f;
    int8_t *rounded = (int8_t *)(chosen + most);
    if (m->bits) {
        struct many_rows r = {1, m->inputs, m->inputs, 0, largest, x, NULL, rounded, &row_scale, NULL};
        rounding_work(&r);
    }
    for (ptrdiff_t i = 0; i < m->inputs; i++) {
        float here = m->bits ? rounded[i] : x[i];
        if (format == INT4 && i % GROUP == 0)
            for (; count % TOGETHER; count++)
                units[count] = units[count - 1], chosen[count] = 0.f;
        units[count] = i;
        chosen[count] = here;
        count += here != 0.f; /* NaN is not zero */
        found += here != 0.f;
    }
    for (; count % TOGETHER; count++)
        units[count] = units[count - 1], chosen[count] = 0.f;
    int dense = found > m->inputs * (m->bits ? 3 : 6) / 8;
    if (!dense) {
        struct unit_sums p = {format, m->outputs, count, part, 0, units, chosen, copy, out};
        on_threads(units_work, &p, threads, run);
        for (ptrdiff_t o = 0; m->bits && o < m->outputs; o += LANES) {
            floats scale = m->bits == 8 ? load(FLOAT32, m->scale, o) : all(1.f);
            store(FLOAT32, out, o, load(FLOAT32, out, o) * scale * row_scale, LANES);
        }
    }
    free(units);
    return dense ? -1 : 0;
}
