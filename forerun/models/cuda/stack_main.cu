// The kernel itself: set-up, the order of the steps, and the end.

__device__ __forceinline__ Layer layer_of(const Params& p, int i) {
    const u64* at = p.layers + i * 9;
    return {(const u16*)at[0], (const u16*)at[1], (const u16*)at[2], (const u16*)at[3], (const u16*)at[4],
            (const u16*)at[5], (const u16*)at[6], (u16*)at[7], (u16*)at[8]};
}

__device__ __forceinline__ void fetch_all(const Params& p, Ring ring) {
    int start = 0;
    for (int i = 0; i < LAYERS; i++) {
        Layer layer = layer_of(p, i);
        fetch<QKV>(layer.qkv, ring, start);
        fetch<O>(layer.o, ring, start);
        fetch<GATE_UP>(layer.gate_up, ring, start);
        fetch<DOWN>(layer.down, ring, start);
    }
    fetch<HEAD>(p.head, ring, start);
}

__device__ __forceinline__ void find_sequences(const Params& p, Sequences& q) {
    int t = threadIdx.x;
    if (t < p.rows) q.position[t] = p.positions[t], q.slot[t] = p.slots[t], q.limit[t] = p.seen[t];
    if (t <= p.seqs) q.start[t] = p.starts[t];
    meet();
    if (t < p.seqs) {
        int high = 0;
        q.old[t] = q.start[t] < q.start[t + 1] ? q.limit[q.start[t]] - 1 : 0;
        for (int i = q.start[t]; i < q.start[t + 1]; i++) high = max(high, q.limit[i]);
        q.high[t] = high;
        q.lanes[t] = min(LANES, (high + KEYS - 1) / KEYS);
        q.tiles[t] = ((q.start[t + 1] - q.start[t]) * GROUP + 15) / 16;
    }
    meet();
    if (t == 0) {
        q.first_unit[0] = 0;
        for (int s = 0; s < p.seqs; s++) q.first_unit[s + 1] = q.first_unit[s] + KV_HEADS * q.tiles[s] * q.lanes[s];
    }
    meet();
}

// The likeliest token: of this program's rows of the head first, then, by the last program to end, of all.
__device__ __forceinline__ void choose(const Params& p, Best best, int* flag) {
    int token = threadIdx.x / 8, r = threadIdx.x % 8;
    for (int far = 4; far; far /= 2) {
        float value = __shfl_xor_sync(~0u, best.value, far);
        int at = __shfl_xor_sync(~0u, best.at, far);
        best.see(value, at);
    }
    if (threadIdx.x < 128 && r == 0) {
        p.top[blockIdx.x * TOKENS + token] = best.value;
        p.top_at[blockIdx.x * TOKENS + token] = best.at;
    }
    meet();
    if (threadIdx.x == 0) {
        *flag = count_up(p.meeting + 1) == gridDim.x - 1;
    }
    meet();
    if (!*flag) return;
    if (threadIdx.x < 128) {
        best = {-INF, 0x7fffffff};
        for (int i = r; i < gridDim.x; i += 8)
            best.see(load_fresh_float(p.top + i * TOKENS + token), __float_as_int(load_fresh_float((const float*)p.top_at + i * TOKENS + token)));
        for (int far = 4; far; far /= 2) {
            float value = __shfl_xor_sync(~0u, best.value, far);
            int at = __shfl_xor_sync(~0u, best.at, far);
            best.see(value, at);
        }
        if (r == 0 && token < p.rows) p.greedy[token] = best.at < VOCAB ? best.at : 0;
    }
    if (threadIdx.x == 0) p.meeting[0] = p.meeting[1] = 0;
}

__device__ __forceinline__ void compute_all(const Params& p, Ring ring, Shared& sh, unsigned char* room) {
    u32 x = shared_address(room), target = 0;
    int start = 0, turn = 0;
    Best best = {-INF, 0x7fffffff};
    find_sequences(p, sh.seqs);
    keep_embeddings(p, layer_of(p, 0).attn_norm);
    int all = 0;
    Share mine(sh.seqs.first_unit[p.seqs], all);
    Attention attention = {p, sh.seqs, *(AttendShared*)room, mine.end};
    attention.first.number = mine.first;
    if (mine.first < mine.end) attention.first = find_unit(sh.seqs, mine.first);
    attention.find_pages(sh.seqs);
    all_programs_meet(p.meeting, target);
    for (int i = 0; i < LAYERS; i++) {
        Layer layer = layer_of(p, i);
        const u16* next_norm = i + 1 < LAYERS ? layer_of(p, i + 1).attn_norm : p.final_norm;
        product<QKV>(p, layer, ring, sh, x, p.y, 0, start, turn, best);
        attention.begin(layer);
        all_programs_meet(p.meeting, target);
        attention.run(layer, sh.flags);
        all_programs_meet(p.meeting, target);
        product<O>(p, layer, ring, sh, x, p.attended, 0, start, turn, best);
        all_programs_meet(p.meeting, target);
        product<GATE_UP>(p, layer, ring, sh, x, p.y, 0, start, turn, best);
        if (threadIdx.x < HIDDEN / 64) prefetch(next_norm + threadIdx.x * 64);
        all_programs_meet(p.meeting, target);
        product<DOWN>(p, layer, ring, sh, x, p.gated, next_norm, start, turn, best);
        all_programs_meet(p.meeting, target);
    }
    product<HEAD>(p, layer_of(p, 0), ring, sh, x, p.y, 0, start, turn, best);
    choose(p, best, sh.flags);
}

extern "C" __global__ void __launch_bounds__((WARPS + PRODUCERS) * 32, 1) decode(const Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& sh = *(Shared*)memory;
    unsigned char* room = memory + (sizeof(Shared) + 127) / 128 * 128;  // activations, or attention's tiles
    u32 bars = shared_address(sh.barriers);
    Ring ring = {shared_address(room) + ROOM_BYTES, bars, bars + STAGES * 8, 0, 0};
    if (threadIdx.x < STAGES) {
        barrier_init(ring.full + threadIdx.x * 8, PRODUCERS * 32);
        barrier_init(ring.empty + threadIdx.x * 8, WARPS);
    }
    __syncthreads();
    if (threadIdx.x >= THREADS)
        fetch_all(p, ring);
    else
        compute_all(p, ring, sh, room);
}
