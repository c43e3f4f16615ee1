// The batch of one launch, which the host lays out or, for drafted steps, another kernel. Plain C, so that what lays it out
// can be compiled and tried on a CPU too.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What runs now, as the host lays it out (`layout` in packing.py). The pages of the sequences' entries lie behind it: page b
// of sequence s at b * page_stride + s.
struct Batch {
    int rows, seqs, page_stride, steps;
    int out, chosen_at;    // the row of `greedy` that the first step writes, and where its tokens go in `chosen`
    u64 bits[TOKENS];      // bit j: the row sees entry kv_lens + j, beside those before `kv_lens`
    int tokens[TOKENS];    // negative: what an earlier launch left at -1 - token of `chosen`
    int positions[TOKENS];
    int slot_mapping[TOKENS];     // where K/V goes; negative: nowhere
    int kv_lens[TOKENS];
    int room[TOKENS];      // entries of each sequence that have a page, and a position that the model knows
    int cu_seqlens[TOKENS + 1];
    float least[STEPS];    // a step follows only where a sequence's guesses so far are all right with this probability
};
