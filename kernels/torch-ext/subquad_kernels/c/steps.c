/*
 * One token of the recurrences, and of what stands around them, on a CPU: for a few rows, where torch's functions take
 * longer to be called than to compute. Everything is computed in float32. It includes the products, so that the compiler
 * sees both. Compiled by `native.py`.
 */

#include <math.h>

#include "integers.c"

/* The largest size of a head, and the most slots of one. */
#define MOST 256
#define MOST_SLOTS 1024

/* `count` numbers, a multiple of LANES, in float32. */
static void read(int dtype, const void *from, ptrdiff_t at, ptrdiff_t count, float *to)
{
    for (ptrdiff_t i = 0; i < count; i += LANES)
        store(FLOAT32, to, i, load(dtype, from, at + i), LANES);
}

/* So much of a row that is computed at a time. */
INLINE floats load_some(int dtype, const void *from, ptrdiff_t at, ptrdiff_t count)
{
    return count == LANES ? load(dtype, from, at) : load_part(dtype, from, at, count);
}

INLINE float dot(const float *x, const float *y, ptrdiff_t count)
{
    floats sum = all(0.f);
    for (ptrdiff_t i = 0; i < count; i += LANES)
        sum += load(FLOAT32, x, i) * load(FLOAT32, y, i);
    return sum_of(sum);
}

/* LayerNorm of x (count), a multiple of LANES: times weight, plus bias, which begin at `at`. */
static void normalise(
    int dtype, float *x, ptrdiff_t count, const void *weight, const void *bias, ptrdiff_t at, float eps)
{
    floats sum = all(0.f), squares = all(0.f);
    for (ptrdiff_t i = 0; i < count; i += LANES)
        sum += load(FLOAT32, x, i);
    floats mean = all(sum_of(sum) / count);
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        floats centred = load(FLOAT32, x, i) - mean;
        squares += centred * centred;
    }
    floats scale = all(1.f / sqrtf(sum_of(squares) / count + eps));
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        floats centred = (load(FLOAT32, x, i) - mean) * scale;
        store(FLOAT32, x, i, centred * load(dtype, weight, at + i) + load(dtype, bias, at + i), LANES);
    }
}

/* One token of several rows, each of which has a state per head. Head n = row * heads + head is one piece of work. */
struct step {
    int dtype, of_bonus; /* of the token, and of the bonus */
    ptrdiff_t rows, heads, keys, values, next;
    /* (rows, heads, keys) or (rows, heads, values); log_w may be (heads, keys). */
    const void *r, *k, *v, *kappa, *a;
    const float *log_w;
    int static_decay;
    const void *bonus; /* (heads, keys) */
    /* The states before and after the token, which may be the same. NULL means zeros. */
    const float *state;
    float *new_state;
    /* Row n has state indices[n] of so many, or state n if it is NULL; they are so many numbers apart. */
    const int64_t *indices;
    ptrdiff_t states, apart;
    float *out; /* (rows, heads, values) */
};

/* The number of the first element of a head's state, of so many elements, in a pool of them or one for each row. */
INLINE ptrdiff_t place_of(ptrdiff_t n, ptrdiff_t heads, const int64_t *indices, ptrdiff_t apart, ptrdiff_t size)
{
    ptrdiff_t row = n / heads, head = n % heads;
    return (indices ? indices[row] : row) * apart + head * size;
}

/* Whether some index is outside the pool. */
static int is_outside(const int64_t *indices, ptrdiff_t rows, ptrdiff_t states)
{
    for (ptrdiff_t row = 0; indices && row < rows; row++)
        if (indices[row] < 0 || indices[row] >= states)
            return 1;
    return 0;
}

INLINE ptrdiff_t state_of(const struct step *p, ptrdiff_t n)
{
    return place_of(n, p->heads, p->indices, p->apart, p->keys * p->values);
}

/*
 * VECTORS vectors of values, from value `from` on: out = r S, S = diag(w) S + kᵀ v. S (keys, values) is zero if
 * `state` is NULL.
 */
INLINE void wkv_part(
    int VECTORS, const float *r, const float *k, const float *w, const float *v, const float *state, float *new_state,
    ptrdiff_t keys, ptrdiff_t values, ptrdiff_t from, float *out)
{
    floats sum[4], value[4];
    for (int j = 0; j < VECTORS; j++) {
        sum[j] = all(0.f);
        value[j] = load(FLOAT32, v, from + j * LANES);
    }
    for (ptrdiff_t i = 0; i < keys; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            ptrdiff_t at = i * values + from + j * LANES;
            floats s = state ? load(FLOAT32, state, at) : all(0.f);
            sum[j] += r[i] * s;
            store(FLOAT32, new_state, at, w[i] * s + k[i] * value[j], LANES);
        }
    for (int j = 0; j < VECTORS; j++)
        store(FLOAT32, out, from + j * LANES, sum[j], LANES);
}

static void wkv_head(const struct step *p, ptrdiff_t n)
{
    float r[MOST], k[MOST], w[MOST], u[MOST], v[MOST], *out = p->out + n * p->values;
    int dtype = p->dtype;
    ptrdiff_t keys = p->keys, values = p->values, head = n % p->heads, at = state_of(p, n);
    read(dtype, p->r, n * keys, keys, r);
    read(dtype, p->k, n * keys, keys, k);
    read(dtype, p->v, n * values, values, v);
    read(p->of_bonus, p->bonus, head * keys, keys, u);
    for (ptrdiff_t i = 0; i < keys; i += LANES) {
        store(FLOAT32, w, i, exp_of(load(FLOAT32, p->log_w, (p->static_decay ? head : n) * keys + i)), LANES);
        store(FLOAT32, u, i, load(FLOAT32, u, i) * load(FLOAT32, k, i), LANES);
    }
    const float *state = p->state ? p->state + at : NULL;
    ptrdiff_t from = 0;
    for (; from + 4 * LANES <= values; from += 4 * LANES)
        wkv_part(4, r, k, w, v, state, p->new_state + at, keys, values, from, out);
    for (; from < values; from += LANES)
        wkv_part(1, r, k, w, v, state, p->new_state + at, keys, values, from, out);
    float bonus = dot(r, u, keys);
    for (ptrdiff_t i = 0; i < values; i++)
        out[i] += bonus * v[i];
}

/* S = S (diag(w) - kappa (a kappa)ᵀ) + v kᵀ, out = S r; S (values, keys) is zero if p->state is NULL. */
static void delta_wkv_head(const struct step *p, ptrdiff_t n)
{
    float r[MOST], k[MOST], w[MOST], kappa[MOST], replaced[MOST], v[MOST];
    int dtype = p->dtype;
    ptrdiff_t keys = p->keys, values = p->values, at = state_of(p, n);
    read(dtype, p->r, n * keys, keys, r);
    read(dtype, p->k, n * keys, keys, k);
    read(dtype, p->v, n * values, values, v);
    read(dtype, p->kappa, n * keys, keys, kappa);
    for (ptrdiff_t i = 0; i < keys; i += LANES) {
        store(FLOAT32, w, i, exp_of(load(FLOAT32, p->log_w, n * keys + i)), LANES);
        store(FLOAT32, replaced, i, load(dtype, p->a, n * keys + i) * load(FLOAT32, kappa, i), LANES);
    }
    for (ptrdiff_t value = 0; value < values; value++) {
        const float *s = p->state ? p->state + at + value * keys : NULL;
        float *after = p->new_state + at + value * keys;
        floats removed = all(0.f), sum = all(0.f);
        /* Zeros are multiplied as well: so NaN in one of the factors stays. */
        for (ptrdiff_t i = 0; i < keys; i += LANES)
            removed += (s ? load(FLOAT32, s, i) : all(0.f)) * load(FLOAT32, kappa, i);
        removed = all(sum_of(removed));
        for (ptrdiff_t i = 0; i < keys; i += LANES) {
            floats before = s ? load(FLOAT32, s, i) : all(0.f);
            floats x = v[value] * load(FLOAT32, k, i);
            x += before * load(FLOAT32, w, i) - removed * load(FLOAT32, replaced, i);
            store(FLOAT32, after, i, x, LANES);
            sum += x * load(FLOAT32, r, i);
        }
        p->out[n * values + value] = sum_of(sum);
    }
}

static void heads_work(void *data)
{
    struct step *p = data;
    ptrdiff_t n;
    while ((n = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->rows * p->heads)
        if (p->kappa)
            delta_wkv_head(p, n);
        else
            wkv_head(p, n);
}

/*
 * One token, of `wkv` if kappa is NULL, otherwise of `delta_wkv`. Returns 0, or 1 if there is no state of an index.
 */
int subquad_step(struct step *p, unsigned threads, parallel run)
{
    if (is_outside(p->indices, p->rows, p->states))
        return 1;
    on_threads(heads_work, p, threads, run);
    return 0;
}

/*
 * out = (LayerNorm(x) * weight + bias + added) * gate, or * SiLU(gate); x, added, gate and out are (rows, heads, size),
 * weight and bias (heads, size). The norm is of each head; added may be NULL, and out may be x.
 */
void subquad_group_norm_gate(
    int dtype, int of_weights, const float *x, const void *gate, const void *weight, const void *bias, float eps,
    const float *added, int silu, void *out, ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t size)
{
    float y[MOST];
    for (ptrdiff_t n = 0; n < rows * heads; n++) {
        read(FLOAT32, x, n * size, size, y);
        normalise(of_weights, y, size, weight, bias, n % heads * size, eps);
        for (ptrdiff_t at = n * size, i = 0; i < size; i += LANES) {
            floats g = load(dtype, gate, at + i), z = load(FLOAT32, y, i);
            z += added ? load(FLOAT32, added, at + i) : all(0.f);
            store(dtype, out, at + i, silu ? z * g * sigmoid_of(g) : z * g, LANES);
        }
    }
}

/* One token of the slot memory of several rows, as above. The states change in place. */
struct slot_step {
    int dtype; /* of q, k, v and out */
    ptrdiff_t rows, heads, slots, keys, values, next;
    const void *q, *k, *v; /* (rows, heads, keys) or (rows, heads, values) */
    const float *log_f;    /* (rows, heads, slots) */
    float *state;          /* (slots, keys + values) of each head */
    const int64_t *indices;
    ptrdiff_t states, apart;
    char *out;
};

/* old + share (x - old), of `count` elements. It is x itself if the share is 1. */
INLINE void write_slot(float *old, const float *x, float share, ptrdiff_t count)
{
    if (share == 1.f)
        memcpy(old, x, count * sizeof *x);
    else
        for (ptrdiff_t i = 0; i < count; i += LANES) {
            floats before = load(FLOAT32, old, i);
            store(FLOAT32, old, i, before + share * (load(FLOAT32, x, i) - before), LANES);
        }
}

/* Keys first, then values, so that each is read from memory once. A slot that the token does not write to stays. */
static void slots_of_head(const struct slot_step *p, ptrdiff_t n)
{
    float q[MOST], k[MOST], v[MOST], out[MOST], share[MOST_SLOTS], score[MOST_SLOTS];
    int dtype = p->dtype;
    ptrdiff_t slots = p->slots, keys = p->keys, values = p->values, size = keys + values;
    float *state = p->state + place_of(n, p->heads, p->indices, p->apart, slots * size);
    read(dtype, p->q, n * keys, keys, q);
    read(dtype, p->k, n * keys, keys, k);
    read(dtype, p->v, n * values, values, v);
    for (ptrdiff_t i = 0; i < slots; i += LANES) { /* 1 - exp(log_f), exact for small numbers */
        ptrdiff_t count = smaller(LANES, slots - i);
        floats x = load_some(FLOAT32, p->log_f, n * slots + i, count), fraction, power;
        exponential(where((words)(x < -87.f), all(-87.f), x), &fraction, &power);
        store(FLOAT32, share, i, -(fraction * power + (power - 1.f)), count);
    }
    float top = -INFINITY, total = 0.f;
    for (ptrdiff_t slot = 0; slot < slots; slot++) {
        float *row = state + slot * size;
        if (share[slot] != 0.f)
            write_slot(row, k, share[slot], keys);
        score[slot] = dot(row, q, keys);
        top = score[slot] > top ? score[slot] : top;
    }
    for (ptrdiff_t i = 0; i < slots; i += LANES) {
        ptrdiff_t count = smaller(LANES, slots - i);
        store(FLOAT32, score, i, exp_of(load_some(FLOAT32, score, i, count) - top), count);
    }
    for (ptrdiff_t i = 0; i < values; i += LANES)
        store(FLOAT32, out, i, all(0.f), LANES);
    for (ptrdiff_t slot = 0; slot < slots; slot++) {
        float *row = state + slot * size + keys;
        if (share[slot] != 0.f)
            write_slot(row, v, share[slot], values);
        total += score[slot];
        for (ptrdiff_t i = 0; i < values; i += LANES)
            store(FLOAT32, out, i, load(FLOAT32, out, i) + score[slot] * load(FLOAT32, row, i), LANES);
    }
    for (ptrdiff_t i = 0; i < values; i += LANES)
        store(dtype, p->out, n * values + i, load(FLOAT32, out, i) / total, LANES);
}

static void slots_work(void *data)
{
    struct slot_step *p = data;
    ptrdiff_t n;
    while ((n = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->rows * p->heads)
        slots_of_head(p, n);
}

/* Returns 0, or 1 if there is no state of an index. */
int subquad_slot_step(struct slot_step *p, unsigned threads, parallel run)
{
    if (is_outside(p->indices, p->rows, p->states))
        return 1;
    on_threads(slots_work, p, threads, run);
    return 0;
}

/*
 * out (number, rows, width) = x + (before - x) * (mu (number, width) + offset (number, rows, width)); x and before are
 * (rows, width). before and offset may be NULL. mu may have another dtype than the others.
 */
void subquad_token_shift(
    int dtype, int of_mu, const char *x, const char *before, const char *mu, const char *offset, char *out,
    ptrdiff_t number, ptrdiff_t rows, ptrdiff_t width)
{
    for (ptrdiff_t n = 0; n < number; n++)
        for (ptrdiff_t row = 0; row < rows; row++)
            for (ptrdiff_t i = 0; i < width; i += LANES) {
                ptrdiff_t count = smaller(LANES, width - i), at = row * width + i;
                floats token = load_some(dtype, x, at, count), delta = -token;
                floats m = load_some(of_mu, mu, n * width + i, count);
                if (before)
                    delta += load_some(dtype, before, at, count);
                if (offset)
                    m += load_some(dtype, offset, n * rows * width + at, count);
                store(dtype, out, n * rows * width + at, token + delta * m, count);
            }
}

/*
 * removed = k * scale, divided by its length; written = k * (1 + (a - 1) * mix). k, a, removed and written are
 * (rows, heads, size), and written may be k; scale and mix are (heads, size).
 */
void subquad_delta_keys(
    int dtype, int of_weights, const void *k, const void *a, const void *scale, const void *mix, void *removed,
    void *written, ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t size)
{
    float kappa[MOST];
    for (ptrdiff_t n = 0; n < rows * heads; n++) {
        ptrdiff_t head = n % heads;
        for (ptrdiff_t i = 0; i < size; i += LANES) {
            floats key = load(dtype, k, n * size + i), m = load(of_weights, mix, head * size + i);
            store(FLOAT32, kappa, i, key * load(of_weights, scale, head * size + i), LANES);
            store(dtype, written, n * size + i, key * (1.f - m + load(dtype, a, n * size + i) * m), LANES);
        }
        float length = sqrtf(dot(kappa, kappa, size));
        floats factor = all(1.f / (length < 1e-12f ? 1e-12f : length));
        for (ptrdiff_t i = 0; i < size; i += LANES)
            store(dtype, removed, n * size + i, load(FLOAT32, kappa, i) * factor, LANES);
    }
}
