// The kernel itself: set-up, the order of the steps, and the end. One launch runs one forward, or several: each step's
// likeliest tokens are then the next step's input, one for each sequence, and their K/V goes to the entries that follow.

__device__ __forceinline__ Layer layer_of(const Params& p, int i) {
    const u64* at = p.layers + i * 9;
    return {(const u16*)at[0], (const u16*)at[1], (const u16*)at[2], (const u16*)at[3], (const u16*)at[4],
            (const u16*)at[5], (const u16*)at[6], (u16*)at[7], (u16*)at[8]};
}

__device__ __forceinline__ void fetch_all(const Params& p, Ring ring, const Shared& sh) {
    int start = 0, steps = p.batch->steps;
    const volatile int* stop = steps > 1 ? &sh.stop : 0;
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i < LAYERS; i++) {
            Layer layer = layer_of(p, i);
            if (fetch<QKV>(p, layer.qkv, ring, start, stop) || fetch<O>(p, layer.o, ring, start, stop) ||
                fetch<GATE_UP>(p, layer.gate_up, ring, start, stop) || fetch<DOWN>(p, layer.down, ring, start, stop))
                return copies_done();
        }
        if (fetch<HEAD>(p, p.head, ring, start, stop)) return copies_done();
    }
}

// What the rows of each sequence see, cut into units of attention.
__device__ __forceinline__ void cut_sequences(Sequences& q) {
    int t = threadIdx.x;
    if (t < q.count) {
        int high = 0, tree = 0;
        q.old[t] = q.start[t] < q.start[t + 1] ? max(q.limit[q.start[t]] - 1, 0) : 0;
        for (int i = q.start[t]; i < q.start[t + 1]; i++) {
            high = max(high, q.limit[i] + __popcll(q.bits[i]));
            tree |= q.bits[i] != 0;
        }
        int rows = q.start[t + 1] - q.start[t];
        q.high[t] = high, q.tree[t] = tree;
        q.lanes[t] = min(LANES, (high + KEYS - 1) / KEYS);
        q.tiles[t] = tree ? rows * TOKEN_TILES : (rows * GROUP + 15) / 16;
    }
    meet();
    if (t == 0) {
        q.first_unit[0] = 0;
        for (int s = 0; s < q.count; s++) q.first_unit[s + 1] = q.first_unit[s] + KV_HEADS * q.tiles[s] * q.lanes[s];
    }
    meet();
}

__device__ __forceinline__ void find_sequences(const Params& p, Sequences& q) {
    const Batch& b = *p.batch;
    int t = threadIdx.x;
    if (t < b.rows) {
        q.token[t] = b.tokens[t] < 0 ? (int)p.chosen[-1 - b.tokens[t]] : b.tokens[t], q.position[t] = b.positions[t], q.slot[t] = b.slot_mapping[t];
        q.limit[t] = b.kv_lens[t], q.bits[t] = b.bits[t];
    }
    if (t <= b.seqs) q.start[t] = b.cu_seqlens[t];
    if (t == 0) q.rows = b.rows, q.count = b.seqs, q.page_stride = b.page_stride;
    meet();
    cut_sequences(q);
}

// After a step: the token chosen behind each sequence's last row is its only row now. A sequence without room stays
// where it is and keeps nothing; what is guessed for it from then on is worthless, and harmless.
__device__ __forceinline__ void follow(const Params& p, Sequences& q, int step) {
    int t = threadIdx.x, token = 0, position = 0, entry = 0, slot = -1;
    float path = -1.f;
    if (t < q.count) {
        int last = q.start[t + 1] - 1;
        token = q.token[last], position = q.position[last], entry = q.limit[last];
        if (entry < p.batch->room[t]) {
            path = (step ? q.path[t] : 1.f) * q.prob[last];
            slot = ((const int*)(p.batch + 1))[(i64)(entry / PAGE) * q.page_stride + t] * PAGE + entry % PAGE;
            position++, entry++;
        }
    }
    meet();
    if (t < q.count) {
        q.token[t] = token, q.position[t] = position, q.limit[t] = entry, q.slot[t] = slot, q.bits[t] = 0;
        q.path[t] = path;
    }
    if (t <= q.count) q.start[t] = t;
    meet();
    if (t == 0) {
        q.rows = q.count, q.going = 0;
        for (int s = 0; s < q.count; s++) q.going |= q.path[s] >= p.batch->least[step];
    }
    meet();
    cut_sequences(q);
}

// Nothing will be multiplied any more: let those that fetch weights see it, wherever they wait.
__device__ __forceinline__ void stop_fetching(const Ring& ring, Shared& sh) {
    if (threadIdx.x == 0) *(volatile int*)&sh.stop = 1;
    meet();
    if (threadIdx.x % 32 == 0)
        for (int stage = 0; stage < STAGES; stage++) barrier_arrive(ring.empty + stage * 8);
}

// The likeliest token of this program's rows of the head.
__device__ __forceinline__ void leave_best(const Params& p, Best best) {
    best.join();
    if (threadIdx.x < WORKERS && threadIdx.x % 8 == 0) {
        int at = blockIdx.x * TOKENS + threadIdx.x / 8;
        p.top[at] = best.value, p.top_sum[at] = best.sum, p.top_at[at] = best.at;
    }
}

// The likeliest of all: every program has left its own.
__device__ __forceinline__ void choose(const Params& p, Sequences& q, int step, bool tell) {
    int token = threadIdx.x / 8, r = threadIdx.x % 8;
    if (threadIdx.x >= WORKERS) return;
    Best best = {-INF, 0.f, 0x7fffffff};
    for (int i = r; i < gridDim.x; i += 8) {
        int at = i * TOKENS + token;
        best.see(load_fresh_float(p.top + at), load_fresh_float(p.top_sum + at),
                 __float_as_int(load_fresh_float((const float*)p.top_at + at)));
    }
    best.join();
    if (r || token >= q.rows) return;
    int chosen = best.at < VOCAB ? best.at : 0;
    q.token[token] = chosen, q.prob[token] = 1.f / best.sum;
    if (!tell) return;
    int at = (p.batch->out + step) * TOKENS + token;
    p.greedy[at] = chosen, p.probs[at] = q.prob[token], p.chosen[p.batch->chosen_at + token] = chosen;
}

// The last program to come here ends the launch, with the choice of the last step or without one.
__device__ __forceinline__ void end(const Params& p, Shared& sh, int step, bool chosen) {
    meet();
    if (threadIdx.x == 0) sh.flags[0] = count_up(p.meeting + 1) == gridDim.x - 1;
    meet();
    if (!sh.flags[0]) return;
    if (!chosen) choose(p, sh.seqs, step, true);
    if (threadIdx.x == 0) {
        if (chosen) p.greedy[(p.batch->out + step) * TOKENS] = -1;
        p.meeting[0] = p.meeting[1] = 0;
    }
}

#ifdef TAPS
// What comes into layer `depth`, if TAPS has its bit. All programs have met since the last sum into the residual stream,
// and meet again before the next one.
__device__ __forceinline__ void keep_states(const Params& p, const Sequences& q, int depth) {
    if (!(TAPS >> depth & 1ull)) return;
    int token = threadIdx.x / 8, r = threadIdx.x % 8;
    if (threadIdx.x >= WORKERS || token >= q.rows) return;
    const u16* x = p.x + (i64)token * HIDDEN + r;
    u16* to = p.states + ((i64)__popcll(TAPS & ((1ull << depth) - 1)) * TOKENS + token) * HIDDEN + r;
    for (int tile = blockIdx.x; tile < HIDDEN / 16; tile += gridDim.x) {
        to[tile * 16] = load_fresh_bf16(x + tile * 16);
        to[tile * 16 + 8] = load_fresh_bf16(x + tile * 16 + 8);
    }
}
#endif

__device__ __forceinline__ void compute_layers(const Params& p, Ring& ring, Shared& sh, const Attention& attention, u32 x, int& start, int& turn, u32& target) {
    Best none;
    for (int i = 0; i < LAYERS; i++) {
        Layer layer = layer_of(p, i);
        const u16* next_norm = i + 1 < LAYERS ? layer_of(p, i + 1).attn_norm : p.final_norm;
#ifdef TAPS
        keep_states(p, sh.seqs, i);
#endif
        product<QKV>(p, layer, ring, sh, x, p.y, 0, start, turn, none);
        attention.begin(layer);
        all_programs_meet(p.meeting, target);
        attention.run(layer, sh.flags);
        all_programs_meet(p.meeting, target);
        product<O>(p, layer, ring, sh, x, p.attended, 0, start, turn, none);
        all_programs_meet(p.meeting, target);
        product<GATE_UP>(p, layer, ring, sh, x, p.y, 0, start, turn, none);
        if (threadIdx.x < HIDDEN / 64) prefetch(next_norm + threadIdx.x * 64);
        all_programs_meet(p.meeting, target);
        product<DOWN>(p, layer, ring, sh, x, p.gated, next_norm, start, turn, none);
        all_programs_meet(p.meeting, target);
    }
#ifdef TAPS
    keep_states(p, sh.seqs, LAYERS);
#endif
}

__device__ __forceinline__ void compute_all(const Params& p, Ring ring, Shared& sh, unsigned char* room) {
    u32 x = shared_address(room), target = 0;
    int start = 0, turn = 0;
    find_sequences(p, sh.seqs);
    for (int step = 0, steps = p.batch->steps;;) {
        keep_embeddings(p, sh.seqs, layer_of(p, 0).attn_norm);
        int all = 0;
        Share mine(sh.seqs.first_unit[sh.seqs.count], all);
        Attention attention = {p, sh.seqs, *(AttendShared*)room, mine.end};
        attention.first.number = mine.first;
        if (mine.first < mine.end) attention.first = find_unit(sh.seqs, mine.first);
        attention.find_pages(sh.seqs);
        all_programs_meet(p.meeting, target);
        compute_layers(p, ring, sh, attention, x, start, turn, target);
        Best best = {-INF, 0.f, 0x7fffffff};
        product<HEAD>(p, layer_of(p, 0), ring, sh, x, p.y, 0, start, turn, best);
        leave_best(p, best);
        if (step + 1 == steps) return end(p, sh, step, false);
        all_programs_meet(p.meeting, target);
        choose(p, sh.seqs, step, blockIdx.x == 0);
        meet();
        follow(p, sh.seqs, step++);
        if (!sh.seqs.going) {
            stop_fetching(ring, sh);
            return end(p, sh, step, true);
        }
    }
}

extern "C" __global__ void __launch_bounds__((WARPS + PRODUCERS) * 32, 1) decode(const Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& sh = *(Shared*)memory;
    unsigned char* room = memory + (sizeof(Shared) + 127) / 128 * 128;  // activations, or attention's tiles
    u32 bars = shared_address(sh.barriers);
    Ring ring = {shared_address(room) + ROOM_BYTES, bars, bars + STAGES * 8, 0, 0};
    if (threadIdx.x == 0) sh.stop = 0;
    if (threadIdx.x < STAGES) {
        barrier_init(ring.full + threadIdx.x * 8, PRODUCERS * 32);
        barrier_init(ring.empty + threadIdx.x * 8, WARPS);
    }
    __syncthreads();
    if (threadIdx.x >= THREADS)
        fetch_all(p, ring, sh);
    else
        compute_all(p, ring, sh, room);
}
