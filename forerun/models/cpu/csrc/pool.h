#pragma once
#include <stddef.h>
#include <stdint.h>

#define MAX_ARG_BYTES 512

/* Work in chunks. `compute` writes chunk results to the thread's own buffer and reads only memory that outlives the
 * call; `commit` copies them to where they belong. Without `commit`, `compute` writes them there itself (buffer null). */
typedef struct {
    void (*compute)(const void *arg, int64_t chunk, void *buffer);
    void (*commit)(const void *arg, int64_t chunk, const void *buffer);
    const void *arg; /* copied: at most MAX_ARG_BYTES */
    size_t arg_bytes, buffer_bytes;
    int64_t chunks;
} Job;
int pool_threads(void); /* that take chunks, the caller's included */
void pool_run(const Job *job); /* all chunks, in any order, on this thread and the pool's */

typedef struct { void *memory; size_t bytes; int lent; } Arena;
void *arena_take(size_t bytes, Arena **out);
void arena_give(Arena *arena);
