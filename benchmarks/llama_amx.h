/*
 * Before every file of llama.cpp: up to GCC 12, `_tile_loadconfig` claims to read 8 bytes of a configuration of 64, so
 * the compiler drops the stores to the rest, and the instruction fails. Here all of them are seen to be read.
 */

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline void load_whole_tile_config(const void *config)
{
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}
#define _tile_loadconfig load_whole_tile_config
#endif
