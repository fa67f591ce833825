/*
 * One token of all blocks of RWKV on a CPU: token shifts, products, recurrences, norms and feed-forward networks in one
 * call. What comes in and goes out has the dtype of the weights, but for the state of the recurrence and, with weights in
 * float16, the residual stream, which are float32. Between them everything is float32. Compiled by `native.py`.
 */

#include "units.c"

/* As in fused_blocks.py. */
#define MOST_RANKS 1024

/* Two weights through `rank` channels, and what is added. There are none if `up` is NULL; base may be NULL. */
struct offset {
    const void *down, *up, *base;
    ptrdiff_t rank;
};

struct states;

/* A call for one token of each row. */
struct call {
    unsigned threads;
    parallel run;
    ptrdiff_t rows;
    void *x; /* the residual stream (rows, width), which becomes the output of the last block */
    void *v_first; /* (rows, inner): the values of the first block of Goose, which that block writes */
    const struct states *states;
};

/* Of one block in a call. */
struct states {
    /* The last normalised token before, NULL for zeros, and this one; of both token shifts. */
    const void *before, *before_ffn;
    void *after, *after_ffn;
    const float *state; /* NULL for zeros */
    float *new_state;
    const void *by_unit; /* a copy of the last weight of the feed-forward network, which one row reads; NULL if none */
    const void *cores; /* (rows, rank, rank), between the two weights of a factor on the hidden units */
};

/* What the blocks have in common, and what is the same for every product. */
struct block {
    int dtype; /* of the states of token shifts, and of the weights that are not integers */
    int stream; /* the dtype of the residual stream */
    int largest; /* to which 8-bit products round what they multiply */
    ptrdiff_t width, inner, heads, middle; /* middle is the width of the feed-forward network */
    const void *ln1, *ln1_bias, *ln2, *ln2_bias, *ln_x, *ln_x_bias;
    float eps, eps_x;
    const void *bonus;
};

/* Numbers of float32 that a block computes with, one after another. */
struct scratch {
    float *next;
};

static float *take(struct scratch *s, ptrdiff_t count)
{
    float *taken = s->next;
    s->next += padded_to(count);
    return taken;
}

/* out (rows, outputs) = x (rows, inputs) times the weight, transposed. Returns 0, or 1 if there is no memory. */
static int multiply(
    const struct call *c, const struct block *b, const struct matrix *m, const float *x, float *out)
{
    unsigned threads = m->outputs * m->inputs >= 1 << 18 ? c->threads : 1;
    if (m->bits == 4)
        return subquad_int4_linear(x, m->weight, m->scale, out, c->rows, m->outputs, m->inputs, threads, c->run);
    if (m->bits == 8)
        return subquad_int8_linear(x, m->weight, m->scale, out, c->rows, m->outputs, m->inputs, b->largest, threads,
                                   c->run);
    struct product p = {b->dtype, FLOAT32, c->rows, m->outputs, m->inputs, m->inputs, 0, x, m->weight, NULL,
                        (char *)out};
    if (threads > 1)
        c->run(product_work, &p, threads, 0);
    else
        product_work(&p);
    return 0;
}

/* The same of hidden units of a feed-forward network, after the square of the ReLU. */
static int multiply_units(
    const struct call *c, const struct block *b, const struct states *of, const struct matrix *m, const float *x,
    float *out)
{
    if (of->by_unit && c->rows == 1) {
        unsigned threads = m->outputs * m->inputs >= 1 << 18 ? c->threads : 1;
        int failed = multiply_by_unit(m, b->dtype, of->by_unit, x, out, m->bits == 4 ? 127 : b->largest, threads, c->run);
        if (failed >= 0)
            return failed;
    }
    return multiply(c, b, m, x, out);
}

/*
 * out (rows, outputs) = scale * outer(base + inner(x (rows, width) times down) times up), as in low_rank.py. `low` has room
 * for MOST_RANKS. With cores (rows, rank, rank), each row is also multiplied by its own before `inner`, and twice the room
 * is needed.
 */
static void add_rank(
    const struct call *c, const struct block *b, const struct offset *o, const float *x, ptrdiff_t outputs, int inner, int outer,
    float scale, const char *cores, float *low, float *out)
{
    float *first = cores ? low + MOST_RANKS : low;
    for (ptrdiff_t row = 0; row < c->rows; row++, out += outputs) {
        columns(b->dtype, x + row * b->width, o->down, first, b->width, o->rank);
        if (cores)
            columns(b->dtype, first, cores + row * o->rank * o->rank * size_of(b->dtype), low, o->rank, o->rank);
        activate(inner, low, o->rank);
        columns(b->dtype, low, o->up, out, o->rank, outputs);
        if (o->base)
            for (ptrdiff_t i = 0; i < outputs; i += LANES)
                store(FLOAT32, out, i, load(FLOAT32, out, i) + load(b->dtype, o->base, i), LANES);
        activate(outer, out, outputs);
        for (ptrdiff_t i = 0; i < outputs; i++)
            out[i] *= scale;
    }
}

/* LayerNorm of the rows of x; the result is also written to `kept`, in the dtype of the block. */
static void normalise_rows(
    const struct call *c, const struct block *b, const float *x, const void *weight, const void *bias, float *out, char *kept)
{
    memcpy(out, x, c->rows * b->width * sizeof *out);
    for (ptrdiff_t row = 0; row < c->rows; row++)
        normalise(b->dtype, out + row * b->width, b->width, weight, bias, 0, b->eps);
    narrow(b->dtype, out, kept, c->rows * b->width);
}

/*
 * out (rows, width) = x + (before - x) * (mu (width) + offset (rows, width)), or with `of_token` 1 - mu in place of mu.
 * offset may be NULL.
 */
static void shift(
    const struct call *c, const struct block *b, const float *x, const void *before, const void *mu, const float *offset,
    int of_token, float *out)
{
    for (ptrdiff_t row = 0; row < c->rows; row++)
        for (ptrdiff_t i = 0; i < b->width; i += LANES) {
            ptrdiff_t at = row * b->width + i;
            floats token = load(FLOAT32, x, at), delta = -token, m = load(b->dtype, mu, i);
            if (before)
                delta += load(b->dtype, before, at);
            if (of_token)
                m = 1.f - m;
            if (offset)
                m += load(FLOAT32, offset, at);
            store(FLOAT32, out, at, token + delta * m, LANES);
        }
}

static void add_to(float *x, const float *y, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES)
        store(FLOAT32, x, i, load(FLOAT32, x, i) + load(FLOAT32, y, i), LANES);
}

/* x becomes the square of its ReLU, times a factor (count), which may be NULL. */
static void square_of_relu(float *x, const float *factor, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        floats y = load(FLOAT32, x, i);
        y = where((words)(y < 0.f), all(0.f), y); /* NaN stays */
        store(FLOAT32, x, i, factor ? y * y * load(FLOAT32, factor, i) : y * y, LANES);
    }
}

/* The recurrence of a token in float32. */
static void recur(const struct call *c, const struct block *b, const struct states *of, struct step *s)
{
    s->dtype = FLOAT32;
    s->of_bonus = b->dtype;
    s->rows = c->rows;
    s->heads = b->heads;
    s->keys = s->values = b->inner / b->heads;
    s->bonus = b->bonus;
    s->state = of->state;
    s->new_state = of->new_state;
    s->apart = b->inner * s->keys;
    subquad_step(s, c->rows * s->apart >= 1 << 18 ? c->threads : 1, c->run);
}

/* The norm of the heads and the gate. */
static void gate_heads(
    const struct call *c, const struct block *b, float *out, const float *gate, const float *added, int silu)
{
    subquad_group_norm_gate(FLOAT32, b->dtype, out, gate, b->ln_x, b->ln_x_bias, b->eps_x, added, silu, out, c->rows,
                            b->heads, b->inner / b->heads);
}

/* out = (r . (bonus * k)) v for each head; out may be r. */
static void write_bonus(
    const struct call *c, const struct block *b, const float *r, const float *k, const float *v, float *out)
{
    ptrdiff_t size = b->inner / b->heads;
    for (ptrdiff_t n = 0; n < c->rows * b->heads; n++) {
        floats sum = all(0.f);
        for (ptrdiff_t at = n * size; at < (n + 1) * size; at += LANES)
            sum += load(FLOAT32, r, at) * load(FLOAT32, k, at) * load(b->dtype, b->bonus, at % b->inner);
        sum = all(sum_of(sum));
        for (ptrdiff_t at = n * size; at < (n + 1) * size; at += LANES)
            store(FLOAT32, out, at, sum * load(FLOAT32, v, at), LANES);
    }
}

/* A block of Eagle (RWKV-5) or Finch (RWKV-6). */
struct wkv_block {
    struct block common;
    /* Of receptance, key, value, gate and decay (which may be NULL); of_token if they weigh the token itself. */
    const void *mu[5], *mu_x;
    int of_token;
    /* The shift has five maps, of decay, key, value, receptance and gate. A decay without maps is the same for all tokens. */
    struct offset shift, decay;
    struct matrix receptance, key, value, gate, output;
    const void *mu_ffn_key, *mu_ffn_receptance;
    struct matrix ffn_key, ffn_receptance, ffn_value;
};

static int wkv_block(const struct call *c, const struct wkv_block *p, const struct states *of, struct scratch s)
{
    static const int map_of[5] = {3, 1, 2, 4, 0};
    const struct block *b = &p->common;
    int dtype = b->dtype;
    ptrdiff_t size = c->rows * b->width, inner = c->rows * b->inner;
    float *x = take(&s, size), *normed = take(&s, size), *mixed = take(&s, size), *low = take(&s, MOST_RANKS);
    float *offsets = take(&s, 5 * size), *r = take(&s, inner), *k = take(&s, inner), *v = take(&s, inner);
    float *g = take(&s, inner), *w = take(&s, inner), *out = take(&s, inner);
    float *middle = take(&s, c->rows * b->middle);
    const struct matrix *into[4] = {&p->receptance, &p->key, &p->value, &p->gate};
    float *heads[4] = {r, k, v, g};

    widen(b->stream, c->x, 1, size, x, size);
    normalise_rows(c, b, x, b->ln1, b->ln1_bias, normed, of->after);
    if (p->shift.up) {
        shift(c, b, normed, of->before, p->mu_x, NULL, p->of_token, mixed);
        for (ptrdiff_t row = 0; row < c->rows; row++) {
            columns(dtype, mixed + row * b->width, p->shift.down, low, b->width, 5 * p->shift.rank);
            activate(TANH, low, 5 * p->shift.rank);
            for (ptrdiff_t n = 0; n < 5; n++)
                columns(dtype, low + n * p->shift.rank,
                        (const char *)p->shift.up + n * p->shift.rank * b->width * size_of(dtype),
                        offsets + n * size + row * b->width, p->shift.rank, b->width);
        }
    }
    for (int n = 0; n < 4; n++) {
        shift(c, b, normed, of->before, p->mu[n], p->shift.up ? offsets + map_of[n] * size : NULL, p->of_token,
              mixed);
        if (multiply(c, b, into[n], mixed, heads[n]))
            return 1;
    }
    if (p->decay.up) {
        shift(c, b, normed, of->before, p->mu[4], p->shift.up ? offsets : NULL, p->of_token, mixed);
        add_rank(c, b, &p->decay, mixed, b->inner, TANH, EXP, -1.f, NULL, low, w);
    } else
        for (ptrdiff_t i = 0; i < b->inner; i += LANES)
            store(FLOAT32, w, i, -exp_of(load(dtype, p->decay.base, i)), LANES);
    struct step step = {.r = r, .k = k, .v = v, .log_w = w, .static_decay = !p->decay.up, .out = out};
    recur(c, b, of, &step);
    gate_heads(c, b, out, g, NULL, 1);
    if (multiply(c, b, &p->output, out, mixed))
        return 1;
    add_to(x, mixed, size);

    normalise_rows(c, b, x, b->ln2, b->ln2_bias, normed, of->after_ffn);
    shift(c, b, normed, of->before_ffn, p->mu_ffn_key, NULL, p->of_token, mixed);
    if (multiply(c, b, &p->ffn_key, mixed, middle))
        return 1;
    square_of_relu(middle, NULL, c->rows * b->middle);
    float *gate = offsets, *values = offsets + size;
    if (multiply_units(c, b, of, &p->ffn_value, middle, values))
        return 1;
    shift(c, b, normed, of->before_ffn, p->mu_ffn_receptance, NULL, p->of_token, mixed);
    if (multiply(c, b, &p->ffn_receptance, mixed, gate))
        return 1;
    activate(SIGMOID, gate, size);
    for (ptrdiff_t i = 0; i < size; i += LANES)
        store(FLOAT32, x, i, load(FLOAT32, x, i) + load(FLOAT32, gate, i) * load(FLOAT32, values, i), LANES);
    narrow(b->stream, x, c->x, size);
    return 0;
}

/* A block of Goose (RWKV-7), or of Goose with DeepEmbed (RWKV-7a). */
struct delta_block {
    struct block common;
    const void *mu_r, *mu_w, *mu_k, *mu_v, *mu_a, *mu_g;
    struct offset decay, rate, mix, gate; /* there is no mix in the first block */
    struct offset factor; /* on the hidden units of the feed-forward network, with DeepEmbed */
    const void *k_k, *k_a;
    struct matrix receptance, key, value, output;
    const void *mu_ffn_key;
    struct matrix ffn_key, ffn_value;
};

static int delta_block(
    const struct call *c, const struct delta_block *p, const struct states *of, struct scratch s)
{
    const struct block *b = &p->common;
    int dtype = b->dtype;
    ptrdiff_t size = c->rows * b->width, inner = c->rows * b->inner;
    float *x = take(&s, size), *normed = take(&s, size), *mixed = take(&s, size), *low = take(&s, 2 * MOST_RANKS);
    float *r = take(&s, inner), *k = take(&s, inner), *v = take(&s, inner), *g = take(&s, inner);
    float *w = take(&s, inner), *a = take(&s, inner), *mix = take(&s, inner), *out = take(&s, inner);
    float *middle = take(&s, c->rows * b->middle), *factor = p->factor.up ? take(&s, c->rows * b->middle) : NULL;

    widen(b->stream, c->x, 1, size, x, size);
    normalise_rows(c, b, x, b->ln1, b->ln1_bias, normed, of->after);
    shift(c, b, normed, of->before, p->mu_r, NULL, 0, mixed);
    if (multiply(c, b, &p->receptance, mixed, r))
        return 1;
    shift(c, b, normed, of->before, p->mu_k, NULL, 0, mixed);
    if (multiply(c, b, &p->key, mixed, k))
        return 1;
    shift(c, b, normed, of->before, p->mu_v, NULL, 0, mixed);
    if (multiply(c, b, &p->value, mixed, v))
        return 1;
    if (p->mix.up) {
        add_rank(c, b, &p->mix, mixed, b->inner, NOTHING, SIGMOID, 1.f, NULL, low, mix);
        for (ptrdiff_t i = 0; i < inner; i += LANES) {
            floats value = load(FLOAT32, v, i);
            store(FLOAT32, v, i, value + (load(dtype, c->v_first, i) - value) * load(FLOAT32, mix, i), LANES);
        }
    } else
        narrow(dtype, v, c->v_first, inner);
    shift(c, b, normed, of->before, p->mu_w, NULL, 0, mixed);
    add_rank(c, b, &p->decay, mixed, b->inner, TANH, SIGMOID, -0.60653066f, NULL, low, w); /* -exp(-1/2) */
    shift(c, b, normed, of->before, p->mu_a, NULL, 0, mixed);
    add_rank(c, b, &p->rate, mixed, b->inner, NOTHING, SIGMOID, 1.f, NULL, low, a);
    shift(c, b, normed, of->before, p->mu_g, NULL, 0, mixed);
    add_rank(c, b, &p->gate, mixed, b->inner, SIGMOID, NOTHING, 1.f, NULL, low, g);
    float *kappa = mix;
    subquad_delta_keys(FLOAT32, dtype, k, a, p->k_k, p->k_a, kappa, k, c->rows, b->heads, b->inner / b->heads);
    struct step step = {.r = r, .k = k, .v = v, .kappa = kappa, .a = a, .log_w = w, .out = out};
    recur(c, b, of, &step);
    write_bonus(c, b, r, k, v, r);
    gate_heads(c, b, out, g, r, 0);
    if (multiply(c, b, &p->output, out, mixed))
        return 1;
    add_to(x, mixed, size);

    normalise_rows(c, b, x, b->ln2, b->ln2_bias, normed, of->after_ffn);
    shift(c, b, normed, of->before_ffn, p->mu_ffn_key, NULL, 0, mixed);
    if (multiply(c, b, &p->ffn_key, mixed, middle))
        return 1;
    if (factor) /* of the token itself, not of the one before */
        add_rank(c, b, &p->factor, normed, b->middle, NOTHING, NOTHING, 1.f, of->cores, low, factor);
    square_of_relu(middle, factor, c->rows * b->middle);
    if (multiply_units(c, b, of, &p->ffn_value, middle, mixed))
        return 1;
    add_to(x, mixed, size);
    narrow(b->stream, x, c->x, size);
    return 0;
}

/* Room for all that a block computes. The sizes are multiples of LANES, so that nothing is added to them. */
static struct scratch room(const struct call *c, const struct block *b)
{
    ptrdiff_t numbers = c->rows * (9 * b->width + 8 * b->inner + 2 * b->middle) + 2 * MOST_RANKS;
    return (struct scratch){malloc(numbers * sizeof(float))};
}

/* Both return 0, or 1 if there is no memory. The blocks have the same sizes. */
int subquad_wkv_blocks(const struct wkv_block *blocks, ptrdiff_t count, const struct call *c)
{
    struct scratch s = room(c, &blocks->common);
    int failed = !s.next;
    for (ptrdiff_t n = 0; n < count && !failed; n++)
        failed = wkv_block(c, blocks + n, c->states + n, s);
    free(s.next);
    return failed;
}

int subquad_delta_blocks(const struct delta_block *blocks, ptrdiff_t count, const struct call *c)
{
    struct scratch s = room(c, &blocks->common);
    int failed = !s.next;
    for (ptrdiff_t n = 0; n < count && !failed; n++)
        failed = delta_block(c, blocks + n, c->states + n, s);
    free(s.next);
    return failed;
}
