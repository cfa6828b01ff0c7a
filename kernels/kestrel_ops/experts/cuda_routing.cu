// Chooses the experts of each token, rounds tokens to float8, and lists pairs of a token and a choice by expert.
//
// A warp takes a token, whose choices are so many maxima over the warp. For each expert a bit says whether a token has
// chosen it: how many have before a token is then a count of bits, and lists need neither atomic sums nor sorting. Up to
// MOST_AT_ONCE tokens one program makes all lists, others round tokens meanwhile; for more, `choose_experts` is followed
// by `list_pairs`.
//
// Compiled with EXPERTS (at most 64), CHOICES (at most 32), COLUMNS (of a token, a multiple of 256), IS_DEPENDENT, IS_BF16,
// LOGIT and POSITION (their types; a logit of 16 bits has the type of the tokens).

typedef unsigned int uint32;
typedef unsigned long long uint64;

constexpr int WARPS = 32;           // of a program that makes all lists, and of those beside it
constexpr int TOKENS_AT_ONCE = 16;  // else, of a program: a warp for each
constexpr int LANES = 32;
constexpr int MOST_AT_ONCE = 64;
constexpr int PIECES = COLUMNS / (8 * LANES);  // of 16 bytes for each lane
constexpr float LARGEST = 448.0f;              // of float8
constexpr float SMALLEST_MAGNITUDE = 1e-12f;   // the scale of a row of zeros must not be 0
constexpr float LOWEST = -3.4028234663852886e38f;

static_assert(EXPERTS <= 64 && CHOICES <= LANES && CHOICES <= EXPERTS && COLUMNS % 256 == 0, "unsupported sizes");

__device__ void wait_for_previous() {
#if IS_DEPENDENT
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ float to_float(unsigned short bits) {
#if IS_BF16
    return __uint_as_float((uint32)bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ float to_float(float value) { return value; }

// Larger for larger logits, never 0; what is no number counts as the lowest.
__device__ uint32 key_of(const LOGIT* logits, int expert) {
    if (expert >= EXPERTS) return 0;
    const float value = to_float(logits[expert]);
    const uint32 bits = __float_as_uint(value > LOWEST ? value : LOWEST);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

__device__ float logit_of(uint32 key) { return __uint_as_float(key & 0x80000000 ? key & 0x7FFFFFFF : ~key); }

// The expert of the choice of this lane's number, and its share; every lane of a warp has the same token. Of equal
// logits those of lower experts come first.
__device__ int chosen(const LOGIT* logits, float& share) {
    const int lane = threadIdx.x % LANES;
    uint32 low = key_of(logits, lane), high = key_of(logits, lane + LANES), own = 0;
    int own_expert = 0;
#pragma unroll
    for (int choice = 0; choice < CHOICES; ++choice) {
        const uint32 best = __reduce_max_sync(~0u, low > high ? low : high);
        const uint32 in_low = __ballot_sync(~0u, low == best), in_high = __ballot_sync(~0u, high == best);
        const int expert = in_low ? __ffs(in_low) - 1 : LANES + __ffs(in_high) - 1;
        if (expert == lane) low = 0;
        if (expert == lane + LANES) high = 0;
        if (lane == choice) {
            own = best;
            own_expert = expert;
        }
    }
    const float highest = logit_of(__shfl_sync(~0u, own, 0));
    share = lane < CHOICES ? __expf(logit_of(own) - highest) : 0.0f;
    float sum = share;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    share /= sum;
    return own_expert;
}

// A token's row in float8 with its scale, by a warp.
__device__ void round_row(const unsigned short* row, unsigned char* out, float* scale_out) {
    const int lane = threadIdx.x % LANES;
    uint4 words[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) words[i] = ((const uint4*)row)[i * LANES + lane];
    float largest = SMALLEST_MAGNITUDE;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const uint32 own[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            largest = fmaxf(largest, fabsf(to_float((unsigned short)(own[j] & 0xFFFF))));
            largest = fmaxf(largest, fabsf(to_float((unsigned short)(own[j] >> 16))));
        }
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    }
    const float scale = largest / LARGEST;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const uint32 own[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
        unsigned short pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(pairs[j])
                : "f"(__fdividef(to_float((unsigned short)(own[j] >> 16)), scale)),
                  "f"(__fdividef(to_float((unsigned short)(own[j] & 0xFFFF)), scale)));
        }
        ((uint2*)out)[i * LANES + lane] = make_uint2(pairs[0] | (uint32)pairs[1] << 16, pairs[2] | (uint32)pairs[3] << 16);
    }
    if (lane == 0) *scale_out = scale;
}

__device__ bool is_present(const POSITION* positions, int token, int num_tokens) {
    return token < num_tokens && (positions == nullptr || positions[token] >= 0);
}

// Inclusive sums of the values of 64 experts, two of each lane of the first warp: those of experts `lane` and `lane + 32`.
__device__ void sum_up(int& low, int& high) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const int other_low = __shfl_up_sync(~0u, low, distance), other_high = __shfl_up_sync(~0u, high, distance);
        if (lane >= distance) {
            low += other_low;
            high += other_high;
        }
    }
    high += __shfl_sync(~0u, low, LANES - 1);
}

struct Starts {
    int totals[64];
    int places[65];  // of the first pair of each expert; at last, behind all
    int items[65];
};

// By the first warp, from the totals; an item has at most `block_tokens` pairs.
__device__ void find_starts(Starts& starts, int block_tokens) {
    const int lane = threadIdx.x % LANES;
    const int low = starts.totals[lane], high = starts.totals[lane + LANES];
    int places[2] = {low, high};
    int items[2] = {(low + block_tokens - 1) / block_tokens, (high + block_tokens - 1) / block_tokens};
    sum_up(places[0], places[1]);
    sum_up(items[0], items[1]);
    if (lane == 0) starts.places[0] = starts.items[0] = 0;
    starts.places[lane + 1] = places[0];
    starts.places[lane + LANES + 1] = places[1];
    starts.items[lane + 1] = items[0];
    starts.items[lane + LANES + 1] = items[1];
}

__device__ void store_item(int* items, int num_items, int item, int expert, int first, int count) {
    items[item] = expert;
    items[num_items + item] = first;
    items[2 * num_items + item] = count;
}

// All lists of at most MOST_AT_ONCE tokens, by the first program; the others round tokens.
extern "C" __global__ void __launch_bounds__(WARPS* LANES)
    route_few(const LOGIT* logits, const unsigned short* hidden, const POSITION* positions, int* pairs,
              int* items, float* weights, unsigned char* rows, float* row_scales, int num_tokens, int num_items,
              int block_tokens) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    __shared__ uint64 masks[64];
    __shared__ unsigned char ranks[MOST_AT_ONCE][64];
    __shared__ Starts starts;
    if (threadIdx.x < 64) masks[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous();
    if (blockIdx.x > 0) {
        const int token = (blockIdx.x - 1) * WARPS + warp;
        if (token < num_tokens) {
            round_row(hidden + (long long)token * COLUMNS, rows + (long long)token * COLUMNS, row_scales + token);
        }
        return;
    }
    for (int token = warp; token < num_tokens; token += WARPS) {
        float share;
        const int expert = chosen(logits + token * EXPERTS, share);
        const bool is_there = is_present(positions, token, num_tokens);
        if (lane < CHOICES) {
            weights[token * CHOICES + lane] = is_there ? share : 0.0f;
            ranks[token][expert] = lane;
            if (is_there) atomicOr(&masks[expert], 1ull << token);
        }
    }
    __syncthreads();
    if (threadIdx.x < 64) starts.totals[threadIdx.x] = __popcll(masks[threadIdx.x]);
    __syncthreads();
    if (warp == 0) find_starts(starts, block_tokens);
    __syncthreads();
    for (int i = threadIdx.x; i < EXPERTS * MOST_AT_ONCE; i += WARPS * LANES) {
        const int expert = i / MOST_AT_ONCE, token = i % MOST_AT_ONCE;
        const uint64 mask = masks[expert];
        if (mask >> token & 1) {
            const int before = __popcll(mask & ((1ull << token) - 1));
            pairs[starts.places[expert] + before] = token * CHOICES + ranks[token][expert];
        }
    }
    for (int i = threadIdx.x; i < num_items; i += WARPS * LANES) {
        if (i >= starts.items[64]) items[2 * num_items + i] = 0;
    }
    if (threadIdx.x < EXPERTS) {
        const int expert = threadIdx.x;
        for (int item = starts.items[expert], first = 0; item < starts.items[expert + 1]; ++item, first += block_tokens) {
            store_item(items, num_items, item, expert, starts.places[expert] + first,
                       min(starts.totals[expert] - first, block_tokens));
        }
    }
}

// Choices, weights and rounded rows of some tokens, and for each expert which of them have chosen it.
extern "C" __global__ void __launch_bounds__(TOKENS_AT_ONCE* LANES)
    choose_experts(const LOGIT* logits, const unsigned short* hidden, const POSITION* positions, unsigned char* choices,
                   unsigned short* masks, float* weights, unsigned char* rows, float* row_scales, int num_tokens,
                   int num_words) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    __shared__ uint32 own_masks[64];
    if (threadIdx.x < 64) own_masks[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous();
    const int token = blockIdx.x * TOKENS_AT_ONCE + warp;
    if (token < num_tokens) {
        float share;
        const int expert = chosen(logits + (long long)token * EXPERTS, share);
        const bool is_there = is_present(positions, token, num_tokens);
        if (lane < CHOICES) {
            weights[token * CHOICES + lane] = is_there ? share : 0.0f;
            choices[token * CHOICES + lane] = expert;
            if (is_there) atomicOr(&own_masks[expert], 1u << warp);
        }
        round_row(hidden + (long long)token * COLUMNS, rows + (long long)token * COLUMNS, row_scales + token);
    }
    __syncthreads();
    // A word has the bits of two programs; the last program may be an even one.
    if (threadIdx.x < EXPERTS) {
        unsigned short* own = masks + threadIdx.x * 2 * num_words + blockIdx.x;
        own[0] = own_masks[threadIdx.x];
        if (blockIdx.x + 1 == gridDim.x && blockIdx.x % 2 == 0) own[1] = 0;
    }
}

// The list of one expert, and its items.
extern "C" __global__ void __launch_bounds__(256)
    list_pairs(const unsigned char* choices, const uint32* masks, int* pairs, int* items, int num_words, int num_items,
               int block_tokens) {
    constexpr int THREADS = 256;
    const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES, expert = blockIdx.x;
    __shared__ Starts starts;
    __shared__ int sums[THREADS / LANES];
    wait_for_previous();
    {
        // Four threads count the tokens of one expert.
        int total = 0;
        if (thread / 4 < EXPERTS) {
            const uint32* own = masks + thread / 4 * num_words;
#pragma unroll 8
            for (int word = thread % 4; word < num_words; word += 4) total += __popc(own[word]);
        }
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (thread % 4 == 0) starts.totals[thread / 4] = total;
    }
    __syncthreads();
    if (warp == 0) find_starts(starts, block_tokens);
    __syncthreads();
    int place = starts.places[expert];
    for (int first = 0; first < num_words; first += THREADS) {
        const int word = first + thread;
        uint32 mask = word < num_words ? masks[expert * num_words + word] : 0;
        int before = __popc(mask);
        const int own = before;
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) {
            const int other = __shfl_up_sync(~0u, before, distance);
            if (lane >= distance) before += other;
        }
        if (lane == LANES - 1) sums[warp] = before;
        __syncthreads();
        before -= own;
        int all = 0;
#pragma unroll
        for (int i = 0; i < THREADS / LANES; ++i) {
            if (i < warp) before += sums[i];
            all += sums[i];
        }
        for (int at = place + before; mask; mask &= mask - 1, ++at) {
            const int token = word * 32 + __ffs(mask) - 1;
            int rank = 0;
#pragma unroll
            for (int choice = 1; choice < CHOICES; ++choice) {
                if (choices[token * CHOICES + choice] == expert) rank = choice;
            }
            pairs[at] = token * CHOICES + rank;
        }
        place += all;
        __syncthreads();  // the sums have been read
    }
    const int total = starts.totals[expert];
    for (int i = thread; i * block_tokens < total; i += THREADS) {
        store_item(items, num_items, starts.items[expert] + i, expert, starts.places[expert] + i * block_tokens,
                   min(total - i * block_tokens, block_tokens));
    }
    // Items that are not used have no pairs.
    for (int i = starts.items[64] + expert * THREADS + thread; i < num_items; i += EXPERTS * THREADS) {
        items[2 * num_items + i] = 0;
    }
}
