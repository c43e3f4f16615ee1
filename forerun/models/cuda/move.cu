// K/V of some slots copied to other slots of the same cache, one program per cache. All is read before anything is
// written, since a target may be another's source. Compiled at run time without headers.

struct Params {
    const unsigned long long* caches;  // addresses
    int pieces, count;                 // 16-byte pieces of a slot; slots to move
    int source[MOST], target[MOST];
};

extern "C" __global__ void __launch_bounds__(THREADS) move(const Params p) {
    uint4* cache = (uint4*)p.caches[blockIdx.x];
    for (int piece = threadIdx.x % EACH; piece < p.pieces; piece += EACH) {
        uint4 held[MOST * EACH / THREADS];
#pragma unroll
        for (int n = 0; n < MOST * EACH / THREADS; n++) {
            int i = n * (THREADS / EACH) + threadIdx.x / EACH;
            if (i < p.count) held[n] = cache[(long long)p.source[i] * p.pieces + piece];
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < MOST * EACH / THREADS; n++) {
            int i = n * (THREADS / EACH) + threadIdx.x / EACH;
            if (i < p.count) cache[(long long)p.target[i] * p.pieces + piece] = held[n];
        }
    }
}
