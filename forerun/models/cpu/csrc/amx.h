/* Leave to use AMX's tiles, and their shapes. A piece of the files that use them. */
#pragma once
#include "vec.h"

#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ASK = 0x1023, TILE_DATA = 18 }; /* of arch_prctl: asked for once in a process */
enum { REFUSED = 1, GRANTED };

/* Whether the system lets this process use tiles. One answer, whatever thread asks first: rows are laid out by it. */
static int amx_granted(void) {
    static _Atomic int answer;
    int seen = atomic_load_explicit(&answer, memory_order_relaxed), none = 0;
    if (!seen) {
        seen = syscall(SYS_arch_prctl, ASK, TILE_DATA) ? REFUSED : GRANTED;
        if (!atomic_compare_exchange_strong(&answer, &none, seen)) seen = none;
    }
    return seen == GRANTED;
}

/* What `_tile_loadconfig` reads; a thread that has loaded it is dearer to switch until `_tile_release`. */
typedef struct { uint8_t palette, start, none[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } Tiles;

/* Compilers do not see that tiles are loaded from memory and stored to it. */
#define IN_MEMORY __asm__ volatile("" ::: "memory")
