#pragma once
#include <stdint.h>
typedef void (*Task)(void *arg, int64_t chunk);
void pool_run(Task task, void *arg, int64_t chunks); /* all chunks, in any order, on this thread and the pool's */
