// One product of a mixture of experts in float8, for Hopper: rows of a weight times the tokens of an expert's list.
//
// The weight is the left operand. A program takes tiles in turns: ROWS rows of one expert's weight by the tokens of
// one item, up to TOKENS of them. Two warpgroups multiply half of the rows each, in as many columns as there are
// tokens, in steps of 16; one more warpgroup loads: the weight by the bulk copy engine, tokens by their addresses,
// since they lie anywhere. It runs ahead into the next tile while the others finish theirs.
//
// In shared memory a row of an operand's block is 128 bytes, whose pieces of 16 are exchanged as the hardware's
// swizzle says, so that neither copies nor products meet in one bank.
//
// In the first product (IS_GATED) eight rows of the activated half and the same eight of the gate half follow one
// another in a tile, as the tensor map orders them. A thread then has both of what it multiplies.
//
// With few tokens (IS_FEW) the first product rounds its results to float8 itself, with a scale for each token and tile;
// the second one scales the sums of so many columns. Its registers and shared memory let two programs, or kernels of
// another stream, share a multiprocessor.
//
// Compiled with COLUMNS and WIDTH (columns of the weight, and of the result), CHOICES, TILES (of 64 rows, for each
// warpgroup), TOKENS and STEP, STAGES, PROGRAMS (on one multiprocessor), LOADERS, SHARED_BYTES, PASS_BYTES (of results
// that a warpgroup puts in order at once), IS_GATED, IS_FEW, IS_DEPENDENT, ELEMENT ("bf16" or "f16"), and behind the
// structures Product<N> of expert_products.py.

constexpr int ROWS = 128 * TILES;
constexpr int BLOCK = 128;  // columns of an iteration
constexpr int ITERATIONS = COLUMNS / BLOCK;
constexpr int MULTIPLIERS = 256;
constexpr int ROWS_AT_ONCE = LOADERS / 8;  // of tokens, 16 bytes for each thread
constexpr int TURNS = TOKENS / ROWS_AT_ONCE;
constexpr bool LOOKS_AHEAD = PROGRAMS == 1 || IS_FEW;  // else the other program has work meanwhile
constexpr int WEIGHT_BYTES = ROWS * BLOCK;
constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKENS * BLOCK;
constexpr int RESULT_ROWS = IS_GATED ? ROWS / 2 : ROWS;
constexpr int SEGMENT_BYTES = RESULT_ROWS;  // two bytes for each of a warpgroup's rows of the result
constexpr int PIECES = SEGMENT_BYTES / 16;
constexpr int PASS_TOKENS = PASS_BYTES / SEGMENT_BYTES;
constexpr int BLOCKS = WIDTH / RESULT_ROWS;
constexpr int WARPS = MULTIPLIERS / 32;
constexpr float LARGEST = 448.0f;             // of float8
constexpr float SMALLEST_MAGNITUDE = 1e-12f;  // the scale of values that are all zero must not be 0

static_assert(COLUMNS % BLOCK == 0 && WIDTH % RESULT_ROWS == 0, "sizes must be multiples of tiles");
static_assert(!IS_FEW || !IS_GATED || RESULT_ROWS == BLOCK, "a tile of results has one scale");

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

struct Shared {
    unsigned char stages[STAGES][STAGE_BYTES];
#if !IS_FEW
    unsigned char results[2][PASS_BYTES];
#elif IS_GATED
    union {
        float maxima[WARPS][TOKENS];
        unsigned char results[TOKENS][RESULT_ROWS];
    };
#else
    float block_scales[ITERATIONS][TOKENS];
#endif
    float scales[TOKENS];
    int pairs[TOKENS];
    uint64 full[STAGES];
    uint64 free[STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory does not suffice");

__device__ uint32 shared_address(const void* pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

__device__ void set_up(uint64* barrier, uint32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ void arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void arrive_and_expect(uint64* barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ void arrive_after_copies(uint64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void wait(uint64* barrier, uint32 parity) {
    uint32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}

// Products reach shared memory by another way than copies do.
__device__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ void copy_weight(uint32 to, const TensorMap* map, uint64* barrier, int column, int block, int expert) {
#if IS_GATED
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(0), "r"(block * (ROWS / 16)), "r"(expert)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(block * ROWS), "r"(expert)
        : "memory");
#endif
}

// A block of 128 bytes a row, in groups of eight rows, in the swizzle of 128 bytes.
__device__ uint64 descriptor(uint32 address) {
    return (uint64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int STILL_RUNNING>
__device__ void finish_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(STILL_RUNNING) : "memory");
}

__device__ uint32 packed(float low, float high) {
    uint32 pair;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ void sync_multipliers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ void sync_warpgroup(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory"); }

// gelu(activated) * (gate + 1): the error function by formula 7.1.26 of Abramowitz and Stegun.
__device__ float gated(float activated, float gate) {
    const float distance = fabsf(activated) * 0.7071067811865476f;
    const float share = __fdividef(1.0f, 1.0f + 0.3275911f * distance);
    const float series =
        share * (-0.284496736f + share * (1.421413741f + share * (-1.453152027f + share * 1.061405429f)));
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * distance * distance));
    const float tail = 0.5f * share * (0.254829592f + series) * power;
    return activated * (activated < 0.0f ? tail : 1.0f - tail) * (gate + 1.0f);
}

// Of a tile: what the items say, and which rows.
struct Tile {
    int expert;
    int first;
    int count;
    int block;
};

// Not from the cache of the multiprocessor, since this may run before the kernel before has ended.
__device__ Tile tile_of(const int* items, int num_items, int tile) {
    const int item = tile / BLOCKS;
    return {__ldcg(items + item), __ldcg(items + num_items + item), __ldcg(items + 2 * num_items + item),
            tile % BLOCKS};
}

// Sums of a tile's first N tokens. `stage` counts on over all tiles.
template <int N>
__device__ void multiply(float (&sums)[TILES][TOKENS / 2], Shared& shared, int warpgroup, uint32& stage) {
#pragma unroll 1
    for (int iteration = 0; iteration < ITERATIONS; ++iteration, ++stage) {
        const uint32 place = stage % STAGES;
        wait(&shared.full[place], stage / STAGES & 1);
        see_copies();
        const uint32 weight = shared_address(shared.stages[place]) + warpgroup * TILES * 64 * BLOCK;
        const uint64 tokens = descriptor(shared_address(shared.stages[place]) + WEIGHT_BYTES);
        begin_products();
#pragma unroll
        for (int step = 0; step < BLOCK / 32; ++step) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                Product<N>::add(sums[tile], descriptor(weight + tile * 64 * BLOCK) + step * 2, tokens + step * 2,
                                iteration > 0 || step > 0);
            }
        }
        commit_products();
        if (PROGRAMS > 1 && !IS_FEW) {  // the other program multiplies meanwhile
            finish_products<0>();
            if (threadIdx.x % 32 == 0) arrive(&shared.free[place]);
        } else {
            // The products of the iteration before have ended: their blocks may be overwritten.
            finish_products<1>();
            if (iteration > 0 && threadIdx.x % 32 == 0) arrive(&shared.free[(stage - 1) % STAGES]);
        }
    }
    if (PROGRAMS > 1 && !IS_FEW) return;
    finish_products<0>();
    if (threadIdx.x % 32 == 0) arrive(&shared.free[(stage - 1) % STAGES]);
}

#if IS_FEW && !IS_GATED
// The same where each iteration's columns of a token have a scale of their own.
template <int N>
__device__ void multiply_scaled(float (&sums)[TILES][TOKENS / 2], Shared& shared, int warpgroup, uint32& stage) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[tile][i] = 0.0f;
    }
#pragma unroll 1
    for (int iteration = 0; iteration < ITERATIONS; ++iteration, ++stage) {
        const uint32 place = stage % STAGES;
        wait(&shared.full[place], stage / STAGES & 1);
        see_copies();
        const uint32 weight = shared_address(shared.stages[place]) + warpgroup * TILES * 64 * BLOCK;
        const uint64 tokens = descriptor(shared_address(shared.stages[place]) + WEIGHT_BYTES);
        float parts[TILES][TOKENS / 2];
        begin_products();
#pragma unroll
        for (int step = 0; step < BLOCK / 32; ++step) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                Product<N>::add(parts[tile], descriptor(weight + tile * 64 * BLOCK) + step * 2, tokens + step * 2,
                                step > 0);
            }
        }
        commit_products();
        finish_products<0>();
        if (threadIdx.x % 32 == 0) arrive(&shared.free[place]);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int block = 0; block < N / 8; ++block) {
                const float2 both = *(const float2*)&shared.block_scales[iteration][block * 8 + threadIdx.x % 4 * 2];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    asm volatile("" : "+f"(parts[tile][block * 4 + i])::"memory");
                    sums[tile][block * 4 + i] += parts[tile][block * 4 + i] * (i % 2 ? both.y : both.x);
                }
            }
        }
    }
}
#endif

template <int N>
__device__ void multiply_tokens(float (&sums)[TILES][TOKENS / 2], Shared& shared, int warpgroup, uint32& stage) {
#if IS_FEW && !IS_GATED
    multiply_scaled<N>(sums, shared, warpgroup, stage);
#else
    multiply<N>(sums, shared, warpgroup, stage);
#endif
}

template <int N>
__device__ void multiply_up_to(int count, float (&sums)[TILES][TOKENS / 2], Shared& shared, int warpgroup,
                               uint32& stage) {
    if constexpr (N == TOKENS) {
        multiply_tokens<N>(sums, shared, warpgroup, stage);
    } else {
        if (count <= N) {
            multiply_tokens<N>(sums, shared, warpgroup, stage);
        } else {
            multiply_up_to<N + STEP>(count, sums, shared, warpgroup, stage);
        }
    }
}

// Eight rows of eight tokens of four matrices at once: a thread's two tokens of one row to tokens of eight rows each.
__device__ void put_transposed(uint32 address, const uint32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Where a piece of a token's segment is among the results that are put in order.
__device__ uint32 place_of(int token, int piece) {
    const int turn = PIECES >= 8 ? token & 7 : token / (8 / PIECES) & (PIECES - 1);
    return token * SEGMENT_BYTES + (piece ^ turn) * 16;
}

#if IS_FEW && IS_GATED
// Rounds a tile's results to float8, each token with one scale, and stores them.
__device__ void store_quantised(float (&sums)[TILES][TOKENS / 2], Shared& shared, const Tile& tile, int warpgroup,
                              const float* weight_scales, unsigned char* out, float* out_scales) {
    const int thread = threadIdx.x, warp = thread % 128 / 32, lane = thread % 32;
    const int row = warpgroup * TILES * 32 + warp * 8 + lane / 4;
    const float* own_scales = weight_scales + (long long)tile.expert * (2 * WIDTH) + tile.block * RESULT_ROWS + row;
#pragma unroll
    for (int block = 0; block < TOKENS / 8; ++block) {
        const float2 both = *(const float2*)&shared.scales[block * 8 + lane % 4 * 2];
        float largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float upper = own_scales[i * 32], lower = own_scales[i * 32 + WIDTH];
            float* own = &sums[i][block * 4];
            own[0] = gated(own[0] * (upper * both.x), own[2] * (lower * both.x));
            own[1] = gated(own[1] * (upper * both.y), own[3] * (lower * both.y));
            largest[0] = fmaxf(largest[0], fabsf(own[0]));
            largest[1] = fmaxf(largest[1], fabsf(own[1]));
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            largest[0] = fmaxf(largest[0], __shfl_xor_sync(~0u, largest[0], distance));
            largest[1] = fmaxf(largest[1], __shfl_xor_sync(~0u, largest[1], distance));
        }
        if (lane < 4) {
            *(float2*)&shared.maxima[thread / 32][block * 8 + lane * 2] = make_float2(largest[0], largest[1]);
        }
    }
    sync_multipliers();
    float2 largest[TOKENS / 8];
#pragma unroll
    for (int block = 0; block < TOKENS / 8; ++block) {
        largest[block] = make_float2(SMALLEST_MAGNITUDE, SMALLEST_MAGNITUDE);
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float2 other = *(const float2*)&shared.maxima[i][block * 8 + lane % 4 * 2];
            largest[block].x = fmaxf(largest[block].x, other.x);
            largest[block].y = fmaxf(largest[block].y, other.y);
        }
    }
    sync_multipliers();  // results take their place
#pragma unroll
    for (int block = 0; block < TOKENS / 8; ++block) {
        const float2 factor = make_float2(LARGEST / largest[block].x, LARGEST / largest[block].y);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float* own = &sums[i][block * 4];
            unsigned short pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(own[1] * factor.y), "f"(own[0] * factor.x));
            shared.results[block * 8 + lane % 4 * 2][row + i * 32] = pair & 0xFF;
            shared.results[block * 8 + lane % 4 * 2 + 1][row + i * 32] = pair >> 8;
        }
        const int token = block * 8 + lane % 4 * 2;
        if (thread < 4) {
            float* to = out_scales + (long long)(tile.first + token) * BLOCKS + tile.block;
            if (token < tile.count) to[0] = largest[block].x / LARGEST;
            if (token + 1 < tile.count) to[BLOCKS] = largest[block].y / LARGEST;
        }
    }
    sync_multipliers();
    constexpr int ROW_PIECES = RESULT_ROWS / 16;
#pragma unroll 1
    for (int i = thread; i < tile.count * ROW_PIECES; i += MULTIPLIERS) {
        const int token = i / ROW_PIECES, piece = i % ROW_PIECES;
        *(uint4*)(out + (long long)(tile.first + token) * WIDTH + tile.block * RESULT_ROWS + piece * 16) =
            *(const uint4*)&shared.results[token][piece * 16];
    }
}
#elif IS_FEW
// Stores a tile's results: each thread the rows that it has.
__device__ void store_few(float (&sums)[TILES][TOKENS / 2], Shared& shared, const Tile& tile, int warpgroup,
                          const float* weight_scales, unsigned short* out) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int row = tile.block * ROWS + warpgroup * TILES * 64 + warp * 16 + lane / 4;
    const float* own_scales = weight_scales + (long long)tile.expert * WIDTH + row;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const float upper = own_scales[i * 64], lower = own_scales[i * 64 + 8];
#pragma unroll
        for (int block = 0; block < TOKENS / 8; ++block) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int token = block * 8 + lane % 4 * 2 + j;
                if (token < tile.count) {
                    unsigned short* to = out + (long long)shared.pairs[token] * WIDTH + row + i * 64;
                    const uint32 both = packed(sums[i][block * 4 + j] * upper, sums[i][block * 4 + 2 + j] * lower);
                    to[0] = both & 0xFFFF;
                    to[8] = both >> 16;
                }
            }
        }
    }
}
#else
// Stores a tile's results in the order of tokens, in passes of as many tokens as shared memory has place for.
__device__ void store_many(float (&sums)[TILES][TOKENS / 2], Shared& shared, const Tile& tile, int warpgroup,
                           const float* weight_scales, unsigned short* out) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const uint32 results = shared_address(shared.results[warpgroup]);
#if IS_GATED
    const int first_row = tile.block * RESULT_ROWS + warpgroup * TILES * 32 + warp * 8 + lane / 4;
    const float* own_scales = weight_scales + (long long)tile.expert * (2 * WIDTH) + first_row;
#else
    const int first_row = tile.block * RESULT_ROWS + warpgroup * TILES * 64 + warp * 16 + lane / 4;
    const float* own_scales = weight_scales + (long long)tile.expert * WIDTH + first_row;
#endif
#pragma unroll
    for (int pass = 0; pass < (TOKENS + PASS_TOKENS - 1) / PASS_TOKENS; ++pass) {
        if (pass * PASS_TOKENS >= tile.count) break;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#if IS_GATED
            const float upper = own_scales[i * 32], lower = own_scales[i * 32 + WIDTH];
#pragma unroll
            for (int block = 0; block < PASS_TOKENS / 8; block += 4) {
                if (pass * PASS_TOKENS + block * 8 >= tile.count) break;
                uint32 words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = pass * (PASS_TOKENS / 8) + block + j;
                    const float2 both = *(const float2*)&shared.scales[at * 8 + lane % 4 * 2];
                    const float* own = &sums[i][at * 4];
                    words[j] = packed(gated(own[0] * (upper * both.x), own[2] * (lower * both.x)),
                                      gated(own[1] * (upper * both.y), own[3] * (lower * both.y)));
                }
                put_transposed(results + place_of(block * 8 + lane, i * 4 + warp), words);
            }
#else
            const float upper = own_scales[i * 64], lower = own_scales[i * 64 + 8];
#pragma unroll
            for (int block = 0; block < PASS_TOKENS / 8; block += 2) {
                if (pass * PASS_TOKENS + block * 8 >= tile.count) break;
                uint32 words[4];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int at = pass * (PASS_TOKENS / 8) + block + j;
                    const float2 both = *(const float2*)&shared.scales[at * 8 + lane % 4 * 2];
                    const float* own = &sums[i][at * 4];
                    words[2 * j] = packed(own[0] * (upper * both.x), own[1] * (upper * both.y));
                    words[2 * j + 1] = packed(own[2] * (lower * both.x), own[3] * (lower * both.y));
                }
                put_transposed(
                    results + place_of(block * 8 + lane / 16 * 8 + lane % 8, i * 8 + warp * 2 + lane / 8 % 2), words);
            }
#endif
        }
        sync_warpgroup(warpgroup);
        const int piece = thread % PIECES;
#pragma unroll 1
        for (int token = thread / PIECES; token < PASS_TOKENS; token += 128 / PIECES) {
            const int own = pass * PASS_TOKENS + token;
            if (own >= tile.count) break;
            uint4 words;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                         : "r"(results + place_of(token, piece)));
            const long long to = IS_GATED ? tile.first + own : shared.pairs[own];
            *(uint4*)(out + to * WIDTH + tile.block * RESULT_ROWS + warpgroup * (RESULT_ROWS / 2) + piece * 8) = words;
        }
        sync_warpgroup(warpgroup);
    }
}
#endif

// What the kernel before has written may be read behind this; the next one may start.
__device__ void wait_for_previous() {
#if IS_DEPENDENT
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The first weights of the second product come while the first one runs. Returns how many iterations' weights they are.
__device__ uint32 load_early(Shared& shared, const TensorMap* map, const int* items, int num_items) {
#if IS_DEPENDENT && !IS_GATED
    if (blockIdx.x >= num_items * BLOCKS) return 0;
    // The kernel before has waited for the items, so that they are complete.
    const Tile tile = tile_of(items, num_items, blockIdx.x);
    if (tile.count == 0) return 0;
    if (threadIdx.x == MULTIPLIERS) {
        for (int early = 0; early < min(STAGES, ITERATIONS); ++early) {
            arrive_and_expect(&shared.full[early], WEIGHT_BYTES);
            copy_weight(shared_address(shared.stages[early]), map, &shared.full[early], early * BLOCK, tile.block,
                        tile.expert);
        }
    }
    return min(STAGES, ITERATIONS);
#else
    return 0;
#endif
}

__device__ void load(Shared& shared, const TensorMap* map, const unsigned char* tokens, const int* pairs,
                     const int* items, int num_items) {
    const int thread = threadIdx.x - MULTIPLIERS;
    const int first_row = thread / 8, piece = thread % 8;
    const int num_tiles = num_items * BLOCKS;
    uint32 stage = 0;
    const uint32 num_early = load_early(shared, map, items, num_items);
    wait_for_previous();
    Tile next = {0, 0, 0, 0};
    int next_rows[TURNS];
    // A tile's rows are looked up while the tile before is loaded.
    auto look_up_tile = [&](int index) {
        next.count = 0;
        if (index < num_tiles) next = tile_of(items, num_items, index);
    };
    auto look_up_rows = [&]() {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int row = first_row + i * ROWS_AT_ONCE, place = next.first + row;
            next_rows[i] = row >= next.count ? 0 : IS_GATED ? pairs[place] : place;
        }
    };
    look_up_tile(blockIdx.x);
    look_up_rows();
#pragma unroll 1
    for (int index = blockIdx.x; next.count > 0; index += gridDim.x) {  // items without tokens come last
        const Tile tile = next;
        uint32 own[TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            own[i] = (IS_GATED ? next_rows[i] / CHOICES : next_rows[i]) * (COLUMNS / 16) + piece;
        }
#pragma unroll 1
        for (int iteration = 0; iteration < ITERATIONS; ++iteration, ++stage) {
            const uint32 place = stage % STAGES;
            wait(&shared.free[place], (stage / STAGES & 1) ^ 1);
            const uint32 address = shared_address(shared.stages[place]);
            if (thread == 0 && stage >= num_early) {
                arrive_and_expect(&shared.full[place], WEIGHT_BYTES);
                copy_weight(address, map, &shared.full[place], iteration * BLOCK, tile.block, tile.expert);
            }
            const unsigned char* from = tokens + iteration * BLOCK;
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int row = first_row + i * ROWS_AT_ONCE;
                if (row < tile.count) {
                    const uint32 to = address + WEIGHT_BYTES + row * BLOCK + (piece ^ row % 8) * 16;
                    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to),
                                 "l"(from + (uint64)own[i] * 16)
                                 : "memory");
                }
            }
            arrive_after_copies(&shared.full[place]);
            if (LOOKS_AHEAD && iteration == 0) look_up_tile(index + gridDim.x);
            if (LOOKS_AHEAD && iteration == min(1, ITERATIONS - 1)) look_up_rows();
        }
        if (!LOOKS_AHEAD) {
            look_up_tile(index + gridDim.x);
            look_up_rows();
        }
    }
}

__device__ void multiply_and_store(Shared& shared, const float* token_scales, const float* weight_scales,
                                   const int* pairs, const int* items, void* out, float* out_scales, int num_items) {
    const int thread = threadIdx.x, warpgroup = thread / 128;
    uint32 stage = 0;
    wait_for_previous();
#pragma unroll 1
    for (int index = blockIdx.x; index < num_items * BLOCKS; index += gridDim.x) {
        const Tile tile = tile_of(items, num_items, index);
        if (tile.count == 0) break;
        int pair = 0;
        float scale = 0.0f;
        if (thread < tile.count) {
            pair = pairs[tile.first + thread];
            if (IS_GATED || !IS_FEW) scale = token_scales[IS_GATED ? pair / CHOICES : tile.first + thread];
        }
        float sums[TILES][TOKENS / 2];
#if IS_FEW && !IS_GATED
        sync_multipliers();  // scales of the tile before have been read
        for (int i = thread; i < tile.count * ITERATIONS; i += MULTIPLIERS) {
            shared.block_scales[i % ITERATIONS][i / ITERATIONS] = token_scales[(long long)tile.first * ITERATIONS + i];
        }
        sync_multipliers();
#endif
        multiply_up_to<STEP>(tile.count, sums, shared, warpgroup, stage);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int j = 0; j < TOKENS / 2; ++j) asm volatile("" : "+f"(sums[i][j])::"memory");
        }
        sync_multipliers();  // scales and pairs of the tile before have been read
        if (thread < TOKENS) {
            shared.pairs[thread] = pair;
            shared.scales[thread] = scale;
        }
        sync_multipliers();
#if IS_FEW && IS_GATED
        store_quantised(sums, shared, tile, warpgroup, weight_scales, (unsigned char*)out, out_scales);
#elif IS_FEW
        store_few(sums, shared, tile, warpgroup, weight_scales, (unsigned short*)out);
#else
        store_many(sums, shared, tile, warpgroup, weight_scales, (unsigned short*)out);
#endif
    }
}

// `out_scales` are only written where results are rounded.
extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, PROGRAMS)
    expert_product(const __grid_constant__ TensorMap map, const unsigned char* tokens, const float* token_scales,
                   const float* weight_scales, const int* pairs, const int* items, void* out, float* out_scales,
                   int num_items) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&shared.full[stage], LOADERS + 1);
            set_up(&shared.free[stage], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
#if PROGRAMS == 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
#endif
        load(shared, &map, tokens, pairs, items, num_items);
    } else {
#if PROGRAMS == 1
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
#endif
        multiply_and_store(shared, token_scales, weight_scales, pairs, items, out, out_scales, num_items);
    }
}
