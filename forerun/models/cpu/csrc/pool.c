/* A pool of threads that takes chunks of work one by one, spins for a bounded time and then sleeps.
 *
 * Nothing waits for a thread that has not begun: a running thread takes the next chunk, so a core that another program
 * keeps busy costs that core's share and not every barrier. Where a thread is late with a chunk that it has begun, the
 * pool does without the others for a while. One caller at a time has the pool; others run their chunks themselves.
 */
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SLOTS 8 /* jobs that a late thread may still read */
#define SPIN_NS 200000 /* an idle thread looks for work this long before it sleeps; the gaps of a step are shorter */
#define LATE_NS 300000 /* waiting this long for a chunk that another thread has begun means that its core is taken */
#define ALONE_NS 50000000 /* so long the caller then works alone */

typedef struct { Task task; void *arg; int64_t chunks; } Job;
static Job jobs[SLOTS];
static _Atomic uint64_t ticket;  /* generation << 32 | next chunk */
static _Atomic uint32_t generation; /* what sleeping threads wait on */
static _Atomic int64_t finished;
static _Atomic int sleeping, wanted; /* threads beside the caller */
static int started;
static int64_t alone_until, late_ns, late_count, runs;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER, calling = PTHREAD_MUTEX_INITIALIZER;
static pid_t owner;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static inline void relax(void) { __builtin_ia32_pause(); }

static void work(uint32_t gen) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
        if ((uint32_t)(seen >> 32) != gen) return;
        Job *job = jobs + gen % SLOTS;
        if ((int64_t)(uint32_t)seen >= job->chunks) return;
        if (!atomic_compare_exchange_weak_explicit(&ticket, &seen, seen + 1, memory_order_acq_rel, memory_order_acquire)) continue;
        job->task(job->arg, (uint32_t)seen);
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
        work(gen);
    }
    return 0;
}

/* Threads that products run on, the caller's included; more are started when they are first wanted. */
void fr_set_threads(int threads) {
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_lock(&starting);
    if (owner != getpid()) owner = getpid(), started = 0; /* a forked child has none of the threads */
    for (; started < threads - 1; started++) {
        pthread_t id;
        pthread_attr_t attr;
        pthread_attr_init(&attr);
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&id, &attr, thread_main, (void *)(intptr_t)started)) break;
    }
    atomic_store(&wanted, threads - 1 < started ? threads - 1 : started);
    pthread_mutex_unlock(&starting);
}

static void run_together(Task task, void *arg, int64_t chunks) {
    alone_until = 0;
    uint32_t gen = atomic_load_explicit(&generation, memory_order_relaxed) + 1;
    jobs[gen % SLOTS] = (Job){task, arg, chunks};
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    atomic_store_explicit(&ticket, (uint64_t)gen << 32, memory_order_release);
    atomic_store_explicit(&generation, gen, memory_order_seq_cst);
    if (atomic_load(&sleeping)) syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
    work(gen);
    if (atomic_load_explicit(&finished, memory_order_acquire) == chunks) return;
    int64_t start = now_ns();
    for (int i = 0; atomic_load_explicit(&finished, memory_order_acquire) < chunks; i++) {
        relax();
        if (i % 256 == 255 && now_ns() - start > LATE_NS) { /* its core is taken: let it have this one */
            while (atomic_load_explicit(&finished, memory_order_acquire) < chunks) sched_yield();
            int64_t end = now_ns();
            late_ns += end - start, late_count++;
            alone_until = end + ALONE_NS;
            return;
        }
    }
}

void pool_run(Task task, void *arg, int64_t chunks) {
    int others = atomic_load_explicit(&wanted, memory_order_relaxed);
    if (chunks <= 1 || !others || pthread_mutex_trylock(&calling)) {
        for (int64_t i = 0; i < chunks; i++) task(arg, i);
        return;
    }
    runs++;
    if (alone_until && now_ns() < alone_until)
        for (int64_t i = 0; i < chunks; i++) task(arg, i);
    else
        run_together(task, arg, chunks);
    pthread_mutex_unlock(&calling);
}

/* Jobs, jobs that waited for a late thread, nanoseconds of those waits. */
void fr_pool_stats(int64_t *out) { out[0] = runs, out[1] = late_count, out[2] = late_ns; }
