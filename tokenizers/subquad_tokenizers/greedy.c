/*
 * Greedy longest match of tokens in bytes, as functions for Python. They are called without ctypes, which would take
 * longer than a short text.
 *
 * The trie of the tokens is a double array: the child of a node by a byte is node `base ^ byte`, if this node has that
 * byte as its label. No two nodes have the same base, so the label is enough. A node takes 4 bytes, and the trie of
 * 65,000 tokens stays in a cache of 512 KB.
 *
 * If no child continues a path, the path begins with a token, and the search goes on from the node of the rest of the
 * path. If that rest is no path itself, the node is a link: it has no children, only the next token of the rest. So
 * every byte is read once, and every failure gives a token: time is linear for all tokens and all texts.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Python's stable ABI. Its headers are missing on many machines with a compiler. */
typedef struct object object;
typedef ptrdiff_t ssize;
typedef object *function(object *, object *);
struct method {
    const char *name;
    function *call;
    int flags;
    const char *doc;
};
enum { ONE_ARGUMENT = 8 };
extern object *PyExc_ValueError;
void Py_IncRef(object *);
void Py_DecRef(object *);
int PyBytes_AsStringAndSize(object *, char **, ssize *);
object *PyCapsule_New(void *, const char *, void (*)(object *));
void *PyCapsule_GetPointer(object *, const char *);
object *PyCFunction_NewEx(struct method *, object *, object *);
object *PyErr_NoMemory(void);
void PyErr_SetString(object *, const char *);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
object *PyList_GetItem(object *, ssize);
object *PyList_New(ssize);
int PyList_SetItem(object *, ssize, object *);
ssize PyList_Size(object *);
void PyObject_GC_UnTrack(void *);
object *PyLong_FromSsize_t(ssize);
object *PyTuple_New(ssize);
int PyTuple_SetItem(object *, ssize, object *);
const char *PyUnicode_AsUTF8AndSize(object *, ssize *);

/* Offsets up to this place and width are kept: up to 4 MB. */
enum { PLACES = 8192, WIDTHS = 8 };
/* Up to this number of bytes the ids fit on the stack; with more, other threads run meanwhile. */
enum { SHORT = 2048 };
/* Free nodes that do not fit a node's children, until other nodes with several children need not try them again. */
enum { TRIES = 32 };

struct encoder {
    uint32_t *nodes; /* base << 8 | label */
    int32_t *gives;  /* by node: a token after which the search goes on from the root, or -1 - an index of `rests` */
    struct rest {
        int32_t id, node;
    } *rests;
    int32_t *begun;    /* by id: twice the number of characters that begin in a token, and 1 if it begins inside one */
    object **integers; /* Python's, from 0 on: a list of ids takes 8 bytes for each of them */
    object **pairs;    /* Python's, of places in a text: PLACES times WIDTHS, those that have been needed */
    ssize count;       /* of integers; ids begin with 1 */
};

/* A node while the trie is built. */
struct node {
    int32_t base, parent, id, rest;
    int32_t is_base; /* whether the number of this node is another node's base */
};
/* No node has such a parent. */
enum { FREE = -1, NONE = -2 };
/* The root. The nodes before it are the children of nodes without children: their labels never fit. */
enum { ROOT = 256 };

struct builder {
    struct node *nodes;
    int32_t capacity, size; /* all nodes from `size` on are free */
    int32_t first_free;     /* from where one node is looked for, */
    int32_t first_wide;     /* and several nodes */
};

struct token {
    const uint8_t *bytes;
    int32_t length, id;
};

/* The tokens of a path: they have the first `depth` bytes in common. */
struct range {
    int32_t node, low, high, depth;
};

static void release(struct encoder *e) {
    for (ssize i = 0; e->integers && i < e->count && e->integers[i]; i++)
        Py_DecRef(e->integers[i]);
    free(e->nodes);
    free(e->gives);
    free(e->rests);
    free(e->begun);
    for (ssize i = 0; e->pairs && i < PLACES * WIDTHS; i++)
        if (e->pairs[i])
            Py_DecRef(e->pairs[i]);
    free(e->integers);
    free(e->pairs);
    free(e);
}

static void release_capsule(object *capsule) { release(PyCapsule_GetPointer(capsule, NULL)); }

static int compare(const void *a, const void *b) {
    const struct token *x = a, *y = b;
    int32_t shorter = x->length < y->length ? x->length : y->length;
    int order = memcmp(x->bytes, y->bytes, shorter);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

/* The first free node from `node` on, or -1 if there is no memory. */
static int32_t next_free(struct builder *b, int32_t node) {
    for (;; node++) {
        if (node == b->capacity) {
            int32_t capacity = b->capacity ? 2 * b->capacity : 1 << 16;
            struct node *nodes = capacity <= 1 << 24 ? realloc(b->nodes, capacity * sizeof *nodes) : NULL;
            if (!nodes)
                return -1;
            for (int32_t i = b->capacity; i < capacity; i++)
                nodes[i] = (struct node){.parent = FREE};
            b->nodes = nodes, b->capacity = capacity;
        }
        if (b->nodes[node].parent == FREE)
            return node;
    }
}

static void take(struct builder *b, int32_t node, int32_t parent) {
    b->nodes[node].parent = parent;
    if (node >= b->size)
        b->size = (node | 255) + 1;
}

/* Gives a node children by `count` different bytes. 0 if there is no memory. */
static int place(struct builder *b, int32_t parent, const uint8_t *bytes, int count) {
    int32_t *first = count == 1 ? &b->first_free : &b->first_wide;
    int32_t at = *first = next_free(b, *first), base = 0;
    for (int tries = 0; at >= 0; at = next_free(b, at + 1)) {
        base = at ^ bytes[0];
        int fits = !b->nodes[base].is_base;
        for (int i = 1; i < count && fits; i++)
            fits = b->nodes[base ^ bytes[i]].parent == FREE;
        if (fits)
            break;
        if (++tries == TRIES)
            *first = at, tries = 0;
    }
    if (at < 0)
        return 0;
    b->nodes[parent].base = base;
    b->nodes[base].is_base = 1;
    for (int i = 0; i < count; i++)
        take(b, base ^ bytes[i], parent);
    return 1;
}

/*
 * What a child by a byte gives if no token ends there: the tokens of the parent's path, then of its rest with the
 * byte. Only nodes nearer to the root are read. 0 if there is no memory.
 */
static int fail_as_parent(struct builder *b, int32_t parent, int32_t child, uint8_t byte) {
    int32_t at = parent, last = child;
    for (;;) {
        b->nodes[last].id = b->nodes[at].id;
        at = b->nodes[at].rest;
        int32_t next = b->nodes[at].base ^ byte;
        if (b->nodes[next].parent == at) {
            b->nodes[last].rest = next;
            return 1;
        }
        int32_t link = b->first_free = next_free(b, b->first_free);
        if (link < 0)
            return 0;
        take(b, link, NONE);
        b->nodes[last].rest = link;
        last = link;
    }
}

/* Builds the trie of tokens, sorted and all different. 0 if there is no memory. */
static int build(struct builder *b, const struct token *tokens, int32_t count) {
    ssize bytes = 1;
    for (int32_t i = 0; i < count; i++)
        bytes += tokens[i].length;
    struct range *queue = malloc(bytes * sizeof *queue);
    if (!queue || next_free(b, 0) < 0) {
        free(queue);
        return 0;
    }
    for (int32_t i = 0; i <= ROOT; i++)
        take(b, i, NONE);
    queue[0] = (struct range){ROOT, 0, count, 0};
    int built = 1;
    /* Level by level, because a node needs those nearer to the root. */
    for (ssize head = 0, tail = 1; head < tail && built; head++) {
        struct range range = queue[head];
        int32_t low = range.low + (tokens[range.low].length == range.depth), children = 0;
        uint8_t edges[256];
        ssize first = tail;
        for (int32_t i = low; i < range.high; i++) {
            uint8_t byte = tokens[i].bytes[range.depth];
            if (!children || byte != edges[children - 1]) {
                edges[children++] = byte;
                queue[tail++] = (struct range){0, i, i, range.depth + 1};
            }
            queue[tail - 1].high = i + 1;
        }
        built = !children || place(b, range.node, edges, children);
        for (int i = 0; i < children && built; i++) {
            const struct token *token = &tokens[queue[first + i].low];
            int32_t child = queue[first + i].node = b->nodes[range.node].base ^ edges[i];
            if (token->length == range.depth + 1)
                b->nodes[child].id = token->id, b->nodes[child].rest = ROOT;
            else
                built = fail_as_parent(b, range.node, child, edges[i]);
        }
    }
    free(queue);
    return built;
}

/* Writes the trie as `encode` reads it. 0 if there is no memory. */
static int pack(struct encoder *e, const struct builder *b) {
    int32_t rests = 0;
    for (int32_t i = 0; i < b->size; i++)
        rests += b->nodes[i].rest > ROOT;
    e->nodes = malloc(b->size * sizeof *e->nodes);
    e->gives = malloc(b->size * sizeof *e->gives);
    e->rests = malloc((rests + 1) * sizeof *e->rests);
    if (!e->nodes || !e->gives || !e->rests)
        return 0;
    rests = 0;
    for (int32_t i = 0; i < b->size; i++) {
        const struct node *node = &b->nodes[i];
        int32_t label = i < ROOT ? i ^ 1 : 0;
        if (node->parent >= 0)
            label = b->nodes[node->parent].base ^ i;
        else
            /* A label with which it is no child. Among 256 numbers there are at most as many bases as children. */
            while (i >= ROOT && b->nodes[i ^ label].is_base)
                label++;
        e->nodes[i] = (uint32_t)node->base << 8 | label;
        e->gives[i] = node->id;
        if (node->rest > ROOT) {
            e->rests[rests] = (struct rest){node->id, node->rest};
            e->gives[i] = -1 - rests++;
        }
    }
    return 1;
}

/* The ids of `size` bytes, at most as many as bytes, and their number. */
static ssize encode(const struct encoder *e, const uint8_t *bytes, ssize size, int32_t *ids) {
    const uint32_t *nodes = e->nodes;
    const int32_t *gives = e->gives;
    const struct rest *rests = e->rests;
    const uint32_t root = nodes[ROOT];
    ssize count = 0, i = 0;
    uint32_t at = ROOT, node = root;
    for (;;) {
        /* Down the trie. */
        for (; i < size; i++) {
            uint32_t next = (node >> 8) ^ bytes[i], child = nodes[next];
            if ((uint8_t)child != bytes[i])
                break;
            at = next, node = child;
        }
        if (at == ROOT) /* which has a child for every byte */
            return count;
        int32_t given = gives[at];
        if (given >= 0) {
            ids[count++] = given;
            at = ROOT, node = root;
        } else {
            ids[count++] = rests[-1 - given].id;
            at = rests[-1 - given].node, node = nodes[at];
        }
    }
}

static object *integer(const struct encoder *e, ssize value) {
    if (value >= e->count)
        return PyLong_FromSsize_t(value);
    Py_IncRef(e->integers[value]);
    return e->integers[value];
}

static object *list_ids(const struct encoder *e, const int32_t *ids, ssize count) {
    object *list = PyList_New(count);
    for (ssize i = 0; list && i < count; i++)
        PyList_SetItem(list, i, integer(e, ids[i]));
    return list;
}

/* The pair of two integers. Short ones near the beginning of a text are kept for the next text. */
static object *pair(const struct encoder *e, ssize first, ssize last) {
    object **kept = NULL;
    if (last <= PLACES && last - first <= WIDTHS) {
        kept = &e->pairs[first * WIDTHS + last - first - 1];
        if (*kept) {
            Py_IncRef(*kept);
            return *kept;
        }
    }
    object *made = PyTuple_New(2), *a = integer(e, first), *b = integer(e, last);
    if (!made || !a || !b) {
        if (a)
            Py_DecRef(a);
        if (b)
            Py_DecRef(b);
        if (made)
            Py_DecRef(made);
        return NULL;
    }
    PyTuple_SetItem(made, 0, a);
    PyTuple_SetItem(made, 1, b);
    PyObject_GC_UnTrack(made); /* as the garbage collector would do: it only holds integers */
    if (kept) {
        Py_IncRef(made);
        *kept = made;
    }
    return made;
}

/* The first character of every token and the one after its last. A part of a character counts as the character. */
static object *list_offsets(const struct encoder *e, const int32_t *ids, ssize count) {
    object *list = PyList_New(count), *last = NULL;
    ssize place = 0;
    for (ssize i = 0; list && i < count; i++) {
        int32_t begun = e->begun[ids[i]];
        if (begun == 1 && last) /* another part of the character before */
            Py_IncRef(last);
        else if (!(last = pair(e, place - (begun & 1), place + begun / 2))) {
            Py_DecRef(list);
            return NULL;
        }
        place += begun / 2;
        PyList_SetItem(list, i, last);
        if (begun > 2) /* several characters: a part of the last one is another place */
            last = NULL;
    }
    return list;
}

/* The ids of bytes as a list, or with `offsets` a pair of lists. */
static object *lists(const struct encoder *e, const char *bytes, ssize size, int offsets) {
    int32_t few[SHORT], *ids = few;
    ssize count;
    if (size <= SHORT)
        count = encode(e, (const uint8_t *)bytes, size, ids);
    else {
        ids = malloc(size * sizeof *ids); /* what is not written to takes no memory */
        if (!ids)
            return PyErr_NoMemory();
        void *thread = PyEval_SaveThread();
        count = encode(e, (const uint8_t *)bytes, size, ids);
        PyEval_RestoreThread(thread);
    }
    object *result = list_ids(e, ids, count);
    if (result && offsets) {
        object *list = result, *pairs = list_offsets(e, ids, count);
        result = pairs ? PyTuple_New(2) : NULL;
        if (result) {
            PyTuple_SetItem(result, 0, list);
            PyTuple_SetItem(result, 1, pairs);
        } else {
            Py_DecRef(list);
            if (pairs)
                Py_DecRef(pairs);
        }
    }
    if (ids != few)
        free(ids);
    return result;
}

static object *encode_bytes(object *capsule, object *data) {
    char *bytes;
    ssize size;
    if (PyBytes_AsStringAndSize(data, &bytes, &size))
        return NULL;
    return lists(PyCapsule_GetPointer(capsule, NULL), bytes, size, 0);
}

static object *encode_text(object *capsule, object *text) {
    ssize size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    return bytes ? lists(PyCapsule_GetPointer(capsule, NULL), bytes, size, 0) : NULL;
}

static object *encode_with_offsets(object *capsule, object *text) {
    ssize size;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, &size);
    return bytes ? lists(PyCapsule_GetPointer(capsule, NULL), bytes, size, 1) : NULL;
}

static struct method METHODS[] = {
    {"encode_bytes", encode_bytes, ONE_ARGUMENT, "The ids of bytes."},
    {"encode_text", encode_text, ONE_ARGUMENT, "The ids of a text."},
    {"encode_with_offsets", encode_with_offsets, ONE_ARGUMENT, "The ids of a text, and the places of its tokens."},
};
enum { COUNT = sizeof METHODS / sizeof *METHODS };

/* The encoder of a list of tokens, whose ids begin with 1. NULL with an exception if there is none. */
static struct encoder *make(object *list) {
    ssize count = PyList_Size(list);
    if (count < 0)
        return NULL;
    struct encoder *e = calloc(1, sizeof *e);
    struct token *tokens = malloc((count + 1) * sizeof *tokens);
    if (e) {
        e->count = count + 1;
        e->begun = calloc(e->count, sizeof *e->begun);
        e->integers = calloc(e->count, sizeof *e->integers);
        e->pairs = calloc(PLACES * WIDTHS, sizeof *e->pairs);
    }
    if (!e || !tokens || !e->begun || !e->integers || !e->pairs)
        goto no_memory;
    int single[256] = {0};
    for (ssize i = 0; i <= count; i++)
        if (!(e->integers[i] = PyLong_FromSsize_t(i)))
            goto failed;
    for (ssize id = 1; id <= count; id++) {
        char *bytes;
        ssize size;
        if (PyBytes_AsStringAndSize(PyList_GetItem(list, id - 1), &bytes, &size))
            goto failed;
        if (size < 1 || size > 1 << 24 || count > 1 << 24) {
            PyErr_SetString(PyExc_ValueError, "a token is empty, or there are more or longer ones than 2**24");
            goto failed;
        }
        tokens[id - 1] = (struct token){(const uint8_t *)bytes, (int32_t)size, (int32_t)id};
        single[(uint8_t)bytes[0]] |= size == 1;
        for (ssize i = 0; i < size; i++)
            e->begun[id] += 2 * ((bytes[i] & 0xC0) != 0x80);
        e->begun[id] += (bytes[0] & 0xC0) == 0x80;
    }
    for (int byte = 0; byte < 256; byte++)
        if (!single[byte]) {
            PyErr_SetString(PyExc_ValueError, "every byte must be a token");
            goto failed;
        }
    qsort(tokens, count, sizeof *tokens, compare);
    for (ssize i = 1; i < count; i++)
        if (!compare(&tokens[i - 1], &tokens[i])) {
            PyErr_SetString(PyExc_ValueError, "a token occurs twice");
            goto failed;
        }
    struct builder b = {.first_free = ROOT, .first_wide = ROOT};
    int built = build(&b, tokens, (int32_t)count) && pack(e, &b);
    free(b.nodes);
    if (!built)
        goto no_memory;
    free(tokens);
    return e;
no_memory:
    PyErr_NoMemory();
failed:
    free(tokens);
    if (e)
        release(e);
    return NULL;
}

/* The functions of `METHODS` for a list of tokens, as a tuple. Each of them keeps the encoder alive. */
object *subquad_greedy(object *tokens) {
    struct encoder *e = make(tokens);
    if (!e)
        return NULL;
    object *capsule = PyCapsule_New(e, NULL, release_capsule);
    if (!capsule) {
        release(e);
        return NULL;
    }
    object *functions = PyTuple_New(COUNT);
    for (int i = 0; functions && i < COUNT; i++) {
        object *one = PyCFunction_NewEx(&METHODS[i], capsule, NULL);
        if (one)
            PyTuple_SetItem(functions, i, one);
        else {
            Py_DecRef(functions);
            functions = NULL;
        }
    }
    Py_DecRef(capsule);
    return functions;
}
