// What lies between the forwards of drafted steps that follow each other without the host: the draft model's rows, a tree
// out of what they say of the tokens to come, the target's rows, the accepted path, and where its K/V moves. All of it is
// little, so one thread does a sequence. Plain C behind stack_batch.cu: a test compiles it for a CPU, with one thread.
//
// MOST sequences of at most ROWS rows each in launches of TOKENS rows; CHILDREN ranked tokens of each drafted position;
// PAGE entries of a page; RING steps whose results the host may still read.

#ifdef __CUDACC_RTC__
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define EACH(i, count) for (int i = threadIdx.x; i < (count); i += blockDim.x)
#define NUMBER (blockIdx.x)
#define THREAD (threadIdx.x)
#define THREADS_HERE (blockDim.x)
#define ALL_READ __syncthreads()
#define INLINE __device__ __forceinline__
#else
typedef struct { u32 x, y, z, w; } uint4;
#define KERNEL void
#define EACH(i, count) for (int i = 0; i < (count); i++)
#define NUMBER block_number
#define THREAD 0
#define THREADS_HERE 1
#define ALL_READ
#define INLINE static inline
static int block_number;
#endif

// One sequence, as `_state` in drafted_steps.py lays it out before the first step.
typedef struct {
    int length;          // its tokens; the last one has no K/V of the target's yet
    int unread;          // of its last tokens, that the draft model has not run:
    int recent[ROWS];    // these
    int depth;           // positions that this step drafts
    int first;           // row of the draft model's launch that speaks of the first of them
    int nodes;           // of the tree
    int tokens[ROWS], parents[ROWS], depths[ROWS];
    int moves;           // accepted entries that are not where the answer continues:
    int source[ROWS], target[ROWS];  // their slots, and where they belong
} Sequence;

typedef struct {
    int seqs, rows, depth, nodes;  // sequences; rows, drafted positions and nodes of each at most
    int step;                      // steps since the first one
    Sequence each[MOST];
} State;

// The same fields in the same order are in drafted_steps.py.
typedef struct {
    State* state;
    struct Batch* draft;    // of the two models' launches; pages lie behind each
    struct Batch* verified;
    const int* pages;       // [MOST, 1 + MOST_PAGES] how many a sequence has, then these
    const double* ranked;   // [TOKENS, 2 * CHILDREN] likeliest tokens behind the draft model's rows, their probabilities
    const i64* chosen;      // the target's likeliest tokens behind its rows
    int* results;           // [RING, MOST, RESULT] in the host's memory: tokens that came, nodes, depth; these tokens
    const u64* caches;      // addresses of the target's K and V
    int pieces;             // of 16 bytes, of a slot of a cache
    int mask;               // token that stands for one to come
    int draft_chosen_at, chosen_at;  // where the models' launches leave their choice
    float least;            // probability of a path below which only a tree's first node is added
} Params;

#define RESULT (3 + ROWS)

INLINE int smaller(int a, int b) { return a < b ? a : b; }

INLINE int slot_of(const Params* p, int s, int entry) {
    const int* own = p->pages + s * (1 + MOST_PAGES);
    return entry / PAGE < own[0] ? own[1 + entry / PAGE] * PAGE + entry % PAGE : -1;
}

INLINE void begin_batch(const Params* p, struct Batch* b, int chosen_at) {
    int seqs = p->state->seqs, *tables = (int*)(b + 1);
    if (THREAD == 0) b->seqs = seqs, b->page_stride = seqs, b->steps = 1, b->out = 0, b->chosen_at = chosen_at;
    for (int s = 0; s < seqs; s++) {
        const int* own = p->pages + s * (1 + MOST_PAGES);
        EACH(page, own[0]) tables[page * seqs + s] = own[1 + page];
    }
}

INLINE void lay_row(const Params* p, struct Batch* b, int row, int s, int token, int position, int entry, int limit, u64 bits) {
    b->tokens[row] = token, b->positions[row] = position, b->slot_mapping[row] = slot_of(p, s, entry);
    b->kv_lens[row] = limit, b->bits[row] = bits;
}

INLINE int drafted_depth(const State* st, int s) {
    return smaller(st->depth, st->rows + 1 - st->each[s].unread);
}

// The draft model's batch: of each sequence the tokens it has not run, then masks.
KERNEL lay_draft(const Params p) {
    State* st = p.state;
    begin_batch(&p, p.draft, p.draft_chosen_at);
    EACH(s, st->seqs) {
        Sequence* q = st->each + s;
        int row = 0, begin = q->length - q->unread;
        for (int before = 0; before < s; before++) row += st->each[before].unread + drafted_depth(st, before) - 1;
        q->depth = drafted_depth(st, s), q->first = row + q->unread - 1;
        p.draft->cu_seqlens[s] = row;
        for (int i = 0; i < q->unread + q->depth - 1; i++, row++)
            lay_row(&p, p.draft, row, s, i < q->unread ? q->recent[i] : p.mask, begin + i, begin + i, begin + i + 1, 0);
        if (s == st->seqs - 1) p.draft->cu_seqlens[s + 1] = p.draft->rows = row;
    }
}

// The tree of a sequence: again and again the most probable of all paths that could be added (DDTree). Of two that are
// equally probable the one whose parent came first.
INLINE void grow(const Params* p, const State* st, Sequence* q) {
    float path[ROWS];  // of a node
    int next[ROWS];    // the rank of its next child, of the root at the end
    int most = smaller(st->nodes, st->rows - 1);
    q->nodes = 0, next[ROWS - 1] = 0;
    while (q->nodes < most) {
        int best = -2, token = 0, depth = 0;
        float highest = 0.f;
        for (int node = -1; node < q->nodes; node++) {
            int above = node < 0 ? 0 : q->depths[node], rank = next[node < 0 ? ROWS - 1 : node];
            if (above == q->depth || rank == CHILDREN) continue;
            const double* row = p->ranked + (i64)(q->first + above) * 2 * CHILDREN + rank;
            float prob = (node < 0 ? 1.f : path[node]) * (float)row[CHILDREN];
            if (prob > highest) highest = prob, best = node, token = (int)row[0], depth = above + 1;
        }
        if (best == -2 || (q->nodes && highest < p->least)) break;
        next[best < 0 ? ROWS - 1 : best]++;
        path[q->nodes] = highest, next[q->nodes] = 0;
        q->tokens[q->nodes] = token, q->parents[q->nodes] = best, q->depths[q->nodes] = depth;
        q->nodes++;
    }
}

// The trees, and the target's batch: of each sequence its last token, then the nodes.
KERNEL lay_tree(const Params p) {
    State* st = p.state;
    begin_batch(&p, p.verified, p.chosen_at);
    EACH(s, st->seqs) grow(&p, st, st->each + s);
    ALL_READ;
    EACH(s, st->seqs) {
        Sequence* q = st->each + s;
        int row = 0;
        u64 bits[ROWS];
        for (int before = 0; before < s; before++) row += 1 + st->each[before].nodes;
        p.verified->cu_seqlens[s] = row;
        lay_row(&p, p.verified, row++, s, q->recent[q->unread - 1], q->length - 1, q->length - 1, q->length, 0);
        for (int i = 0; i < q->nodes; i++, row++) {
            bits[i] = (q->parents[i] < 0 ? 0 : bits[q->parents[i]]) | (u64)1 << i;
            lay_row(&p, p.verified, row, s, q->tokens[i], q->length - 1 + q->depths[i], q->length + i, q->length, bits[i]);
        }
        if (s == st->seqs - 1) p.verified->cu_seqlens[s + 1] = p.verified->rows = row;
    }
}

// The path of each tree that the target chose itself, and the token behind it.
KERNEL accept(const Params p) {
    State* st = p.state;
    EACH(s, st->seqs) {
        Sequence* q = st->each + s;
        const i64* chosen = p.chosen + p.chosen_at + p.verified->cu_seqlens[s];
        int* result = p.results + (st->step % RING * MOST + s) * RESULT;
        int count = 0, node = -1, found;
        q->moves = 0;
        do {
            int token = (int)chosen[1 + node];
            result[3 + count] = q->recent[count] = token, count++;
            for (found = 0; found < q->nodes && (q->parents[found] != node || q->tokens[found] != token); found++) {}
            if (found < q->nodes && found != count - 1)
                q->source[q->moves] = slot_of(&p, s, q->length + found), q->target[q->moves++] = slot_of(&p, s, q->length + count - 1);
            node = found;
        } while (found < q->nodes);
        result[0] = count, result[1] = q->nodes, result[2] = q->depth;
        q->length += count, q->unread = count;
    }
    ALL_READ;
    if (THREAD == 0) st->step++;
}

// K/V of accepted entries to where the answer continues, one program for each cache. All of a sequence's are read before
// any is written: a target may be another's source.
KERNEL move_accepted(const Params p) {
    uint4* cache = (uint4*)p.caches[NUMBER];
    int piece = THREAD % p.pieces, group = THREAD / p.pieces, groups = THREADS_HERE / p.pieces;
    for (int s = 0; s < p.state->seqs; s++) {
        const Sequence* q = p.state->each + s;
        uint4 held[HELD];
        for (int n = 0, i = group; n < HELD; n++, i += groups)
            if (i < q->moves) held[n] = cache[(i64)q->source[i] * p.pieces + piece];
        ALL_READ;
        for (int n = 0, i = group; n < HELD; n++, i += groups)
            if (i < q->moves) cache[(i64)q->target[i] * p.pieces + piece] = held[n];
    }
}
