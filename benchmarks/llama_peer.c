/*
 * What llama_peer.py asks of llama.cpp, with arguments that ctypes can pass: the structures of llama.h change from
 * version to version, and a C compiler knows them.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

struct peer {
    struct llama_model *model;
    struct llama_context *context;
    int vocabulary;
};

static void print_errors(enum ggml_log_level level, const char *text, void *unused)
{
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

/* Writes a file whose weights have a type of `enum llama_ftype`. Returns 0 if it worked. */
int peer_quantize(const char *from, const char *to, int type, int threads)
{
    struct llama_model_quantize_params how = llama_model_quantize_default_params();
    how.ftype = type;
    how.nthread = threads;
    llama_log_set(print_errors, NULL);
    return (int)llama_model_quantize(from, to, &how);
}

void peer_close(struct peer *peer)
{
    if (peer && peer->context)
        llama_free(peer->context);
    if (peer && peer->model)
        llama_model_free(peer->model);
    free(peer);
}

/* A model for at most `rows` texts at a time. NULL if it cannot be loaded. */
struct peer *peer_open(const char *path, int rows, int threads)
{
    struct peer *peer = calloc(1, sizeof *peer);
    struct llama_context_params how = llama_context_default_params();
    if (!peer)
        return NULL;
    llama_log_set(print_errors, NULL);
    llama_backend_init();
    peer->model = llama_model_load_from_file(path, llama_model_default_params());
    if (peer->model) {
        how.n_seq_max = rows;
        how.n_ctx = 8192 * rows; /* nothing is kept for each token */
        how.n_threads = how.n_threads_batch = threads;
        how.no_perf = true;
        peer->context = llama_init_from_model(peer->model, how);
    }
    if (!peer->context) {
        peer_close(peer);
        return NULL;
    }
    peer->vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(peer->model));
    return peer;
}

/* The number of logits of a token. */
int peer_vocabulary(const struct peer *peer)
{
    return peer->vocabulary;
}

/* Lets the next tokens begin new texts. */
void peer_forget(struct peer *peer)
{
    llama_memory_clear(llama_get_memory(peer->context), true);
}

/*
 * Reads the next `length` tokens of each of `rows` texts, ids (rows, length). What comes after the last token of each
 * is written to logits (rows, vocabulary). Returns 0 if it worked.
 */
int peer_read(struct peer *peer, const int32_t *ids, int rows, int length, float *logits)
{
    struct llama_batch batch = llama_batch_init(rows * length, 0, 1);
    llama_pos *positions = batch.pos;
    int failed;
    batch.n_tokens = rows * length;
    for (int n = 0; n < batch.n_tokens; n++) {
        batch.token[n] = ids[n];
        batch.n_seq_id[n] = 1;
        batch.seq_id[n][0] = n / length;
        batch.logits[n] = n % length == length - 1;
    }
    batch.pos = NULL; /* llama.cpp counts them */
    failed = llama_decode(peer->context, batch);
    for (int row = 0; row < rows && !failed; row++) {
        const float *found = llama_get_logits_ith(peer->context, row * length + length - 1);
        memcpy(logits + (size_t)row * peer->vocabulary, found, sizeof *found * peer->vocabulary);
    }
    batch.pos = positions;
    llama_batch_free(batch);
    return failed;
}

/* The instructions that it was compiled for. */
const char *peer_system(void)
{
    return llama_print_system_info();
}
