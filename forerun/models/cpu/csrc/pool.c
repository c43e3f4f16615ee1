/* A pool of threads that takes chunks of work one by one, spins for a bounded time and then sleeps.
 *
 * Built for cores that other programs use too. Nothing waits for a thread that has not begun: a running thread takes
 * the next chunk. Where a thread has begun a chunk and lost its core, the caller computes that chunk again: results
 * lie in a buffer of the thread's own until it commits them, and a chunk that was taken away is never committed. So a
 * late thread reads memory after a call has ended: weights and scratch must outlive it (`fr_quiesce`).
 * One caller at a time has the pool; others run their chunks themselves.
 */
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define MAX_CALLERS 64
#define SPIN_NS 200000  /* an idle thread looks for work this long before it sleeps; the gaps of a step are shorter */
#define MIN_WAIT_NS 10000 /* the caller waits at least so long for a chunk that another thread has begun */

enum { FREE, CLAIMED, COMMITTING, TAKEN }; /* what a thread's chunk is; claim = generation << 34 | chunk << 2 | state */
typedef struct { _Atomic uint64_t claim; _Atomic int busy; char pad[48]; } Slot;

static Slot slots[MAX_THREADS];
#define JOBS 4 /* a late thread may still read the job before the current one */
static Job jobs[JOBS];
static _Alignas(16) char args[JOBS][MAX_ARG_BYTES];
static _Atomic uint64_t ticket;     /* generation << 32 | next chunk */
static _Atomic uint32_t generation; /* what sleeping threads wait on */
static _Atomic int64_t finished;
static _Atomic int sleeping, wanted; /* threads beside the caller */
static int started;
static int64_t runs, stolen, waited_ns;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER, calling = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t forking = PTHREAD_ONCE_INIT;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static inline void relax(void) {
#ifdef __aarch64__
    __asm__ volatile("isb"); /* most cores do not pause at "yield" */
#else
    __builtin_ia32_pause();
#endif
}

/* Memory of the calling thread for the results of a chunk. */
static void *own_buffer(size_t bytes) {
    static __thread char *buffer;
    static __thread size_t size;
    if (bytes > size) {
        free(buffer);
        size = 0;
        if (posix_memalign((void **)&buffer, 64, bytes)) abort();
        size = bytes;
    }
    return buffer;
}

static void run_alone(const Job *job) {
    void *buffer = job->commit ? own_buffer(job->buffer_bytes) : 0;
    for (int64_t i = 0; i < job->chunks; i++) {
        job->compute(job->arg, i, buffer);
        if (job->commit) job->commit(job->arg, i, buffer);
    }
}

/* The next chunk of a generation, or -1. */
static int64_t next_chunk(uint32_t gen, int64_t chunks) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
        if ((uint32_t)(seen >> 32) != gen || (int64_t)(uint32_t)seen >= chunks) return -1;
        if (atomic_compare_exchange_weak_explicit(&ticket, &seen, seen + 1, memory_order_acq_rel, memory_order_acquire))
            return (uint32_t)seen;
    }
}

/* A pool thread's part of a generation. Until a chunk is claimed the generation cannot end, so the job can be read. */
static void help(Slot *slot, uint32_t gen) {
    char arg[MAX_ARG_BYTES] __attribute__((aligned(16)));
    Job job;
    int copied = 0;
    for (;;) {
        uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
        if ((uint32_t)(seen >> 32) != gen) return;
        const Job *shared = jobs + gen % JOBS; /* written anew only when the ticket has moved on */
        if ((int64_t)(uint32_t)seen >= shared->chunks) return;
        if (!atomic_compare_exchange_weak_explicit(&ticket, &seen, seen + 1, memory_order_acq_rel, memory_order_acquire)) continue;
        int64_t chunk = (uint32_t)seen;
        if (!copied) job = *shared, memcpy(arg, args[gen % JOBS], job.arg_bytes), copied = 1;
        if (!job.commit) {
            job.compute(arg, chunk, 0);
            atomic_fetch_add_explicit(&finished, 1, memory_order_release);
            continue;
        }
        uint64_t claim = (uint64_t)gen << 34 | (uint64_t)chunk << 2;
        void *buffer = own_buffer(job.buffer_bytes);
        atomic_store_explicit(&slot->claim, claim | CLAIMED, memory_order_release);
        job.compute(arg, chunk, buffer);
        uint64_t expected = claim | CLAIMED;
        if (!atomic_compare_exchange_strong(&slot->claim, &expected, claim | COMMITTING)) return; /* taken: nothing is left */
        job.commit(arg, chunk, buffer);
        atomic_fetch_add_explicit(&finished, 1, memory_order_release);
    }
}

static void *thread_main(void *number) {
    int me = (int)(intptr_t)number;
    uint32_t gen = atomic_load(&generation);
    for (;;) {
        int64_t until = 0;
        uint32_t next;
        for (int i = 0; (next = atomic_load_explicit(&generation, memory_order_acquire)) == gen || me >= atomic_load(&wanted); i++) {
            if (next != gen) gen = next; /* not needed for this one */
            if (i % 64 == 0) {
                int64_t now = now_ns();
                if (!until) until = now + SPIN_NS;
                if (now > until) {
                    atomic_fetch_add(&sleeping, 1);
                    syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, gen, 0, 0, 0);
                    atomic_fetch_sub(&sleeping, 1);
                    until = 0;
                }
            }
            relax();
        }
        gen = next;
        atomic_store(&slots[me].busy, 1);
        help(slots + me, gen);
        atomic_store(&slots[me].busy, 0);
    }
    return 0;
}

/* A forked child has none of the threads. */
static void forked(void) {
    started = 0;
    atomic_store(&wanted, 0);
    atomic_store(&sleeping, 0);
    memset(slots, 0, sizeof slots);
    pthread_mutex_init(&starting, 0), pthread_mutex_init(&calling, 0);
}
static void watch_forks(void) { pthread_atfork(0, 0, forked); }

/* Threads that products run on, the caller's included; more are started when they are first wanted. */
void fr_set_threads(int threads) {
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_once(&forking, watch_forks);
    pthread_mutex_lock(&starting);
    for (; started < threads - 1; started++) {
        pthread_t id;
        pthread_attr_t attr;
        pthread_attr_init(&attr);
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attr, 4 << 20);
        if (pthread_create(&id, &attr, thread_main, (void *)(intptr_t)started)) break;
    }
    atomic_store(&wanted, threads - 1 < started ? threads - 1 : started);
    pthread_mutex_unlock(&starting);
}

/* Wait until no thread reads what an ended call was given. */
void fr_quiesce(void) {
    for (int i = 0; i < started; i++)
        while (atomic_load(&slots[i].busy)) sched_yield();
}

/* Compute what late threads have begun; those that are just committing are waited for. */
static void take_over(const Job *job, uint32_t gen, int others, void *buffer) {
    for (int i = 0; i < others; i++) {
        uint64_t claim = atomic_load_explicit(&slots[i].claim, memory_order_acquire);
        if ((claim & 3) != CLAIMED || (uint32_t)(claim >> 34) != (gen & 0x3fffffff)) continue;
        if (!atomic_compare_exchange_strong(&slots[i].claim, &claim, (claim & ~(uint64_t)3) | TAKEN)) continue;
        int64_t chunk = (uint32_t)(claim >> 2);
        job->compute(job->arg, chunk, buffer);
        job->commit(job->arg, chunk, buffer);
        atomic_fetch_add_explicit(&finished, 1, memory_order_release);
        stolen++;
    }
}

static void run_together(const Job *job, int others) {
    uint32_t gen = atomic_load_explicit(&generation, memory_order_relaxed) + 1;
    jobs[gen % JOBS] = *job;
    memcpy(args[gen % JOBS], job->arg, job->arg_bytes);
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    atomic_store_explicit(&ticket, (uint64_t)gen << 32, memory_order_seq_cst);
    atomic_store_explicit(&generation, gen, memory_order_seq_cst);
    if (atomic_load(&sleeping)) syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
    void *buffer = job->commit ? own_buffer(job->buffer_bytes) : 0;
    int64_t begin = now_ns(), own = 0, chunk;
    for (; (chunk = next_chunk(gen, job->chunks)) >= 0; own++) {
        job->compute(job->arg, chunk, buffer);
        if (job->commit) job->commit(job->arg, chunk, buffer);
    }
    atomic_fetch_add_explicit(&finished, own, memory_order_release);
    if (atomic_load_explicit(&finished, memory_order_acquire) == job->chunks) return;
    int64_t start = now_ns(), patience = own ? 2 * (start - begin) / own : 0, until = start + patience + MIN_WAIT_NS;
    for (int i = 1; atomic_load_explicit(&finished, memory_order_acquire) < job->chunks; i++) {
        relax();
        if (i % 32 || now_ns() < until) continue;
        if (job->commit) take_over(job, gen, others, buffer);
        sched_yield();
    }
    waited_ns += now_ns() - start;
}

int pool_threads(void) { return atomic_load_explicit(&wanted, memory_order_relaxed) + 1; }

void pool_run(const Job *job) {
    int others = atomic_load_explicit(&wanted, memory_order_relaxed);
    if (job->chunks <= 1 || !others || pthread_mutex_trylock(&calling)) {
        run_alone(job);
        return;
    }
    runs++;
    run_together(job, others);
    pthread_mutex_unlock(&calling);
}

/* Memory that late threads may read after a call: lent to one call at a time, never unmapped. */
static Arena arenas[MAX_CALLERS];
static pthread_mutex_t lending = PTHREAD_MUTEX_INITIALIZER;

void *arena_take(size_t bytes, Arena **out) {
    pthread_mutex_lock(&lending);
    Arena *best = 0;
    for (int i = 0; i < MAX_CALLERS; i++)
        if (!arenas[i].lent && (!best || arenas[i].bytes > best->bytes)) best = arenas + i;
    if (best) best->lent = 1;
    pthread_mutex_unlock(&lending);
    if (!best) abort(); /* MAX_CALLERS threads compute at a time */
    if (best->bytes < bytes) {
        size_t size = bytes * 2; /* the old piece stays mapped: all together at most twice the largest */
        if (posix_memalign(&best->memory, 4096, size)) abort();
        best->bytes = size;
    }
    *out = best;
    return best->memory;
}
void arena_give(Arena *arena) {
    pthread_mutex_lock(&lending);
    if (arena) arena->lent = 0;
    pthread_mutex_unlock(&lending);
}

/* Jobs, chunks that the caller computed for a late thread, nanoseconds it waited for others. */
void fr_pool_stats(int64_t *out) { out[0] = runs, out[1] = stolen, out[2] = waited_ns; }
