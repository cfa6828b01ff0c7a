// Attention of every patch of a crop to every patch of the same crop, for Hopper's warpgroup products.
//
// Keys and values of one head of one crop fit into the shared memory of a multiprocessor as they are, 72 dimensions and
// not the 128 of a power of two. A program keeps them there while its warpgroups take 64 queries each in rounds; one
// more warpgroup, the loader, brings the next head's tiles as soon as the last round has let go of these. Rounds of
// all heads stand in one line, which the programs share out evenly.
//
// Warpgroups take turns in asking for products: while those of one run, the others turn their scores into weights.
// That the running maximum corrects what was summed before is as in FlashAttention-2 (Dao, 2023), and that products
// and weights of two tiles overlap and warpgroups take turns as in FlashAttention-3 (Shah et al., 2024).
//
// In shared memory eight dimensions of one row, 16 bytes, are a piece; the pieces of all rows lie one after the other, then
// come the next eight dimensions. Products read that without a swizzle, keys as rows and values as columns alike.
//
// Compiled with DIM, HEADS, PATCHES, TILE, WARPGROUPS, PIECE_BYTES, SHARED_BYTES, ELEMENT ("bf16" or "f16") and
// IS_FLOAT8, and behind the functions multiply_keys and multiply_values of crop_attention.py.

typedef unsigned int uint32;
typedef unsigned long long uint64;

constexpr int PIECES = DIM / 8;
constexpr int KEY_STEPS = (DIM + 15) / 16;
constexpr int TILES = (PATCHES + TILE - 1) / TILE;
constexpr int TAIL_KEYS = PATCHES - (TILES - 1) * TILE;
constexpr int TAIL = (TAIL_KEYS + 15) / 16 * 16;
constexpr int OPERAND_BYTES = PIECES * PIECE_BYTES;
constexpr int QUERIES = 64;
constexpr int ROUNDS = (PATCHES + QUERIES * WARPGROUPS - 1) / (QUERIES * WARPGROUPS);
constexpr int ROW_STRIDE = 3 * HEADS * DIM;
constexpr int LOADERS = 128;
constexpr float LOWEST = -3e38f;


struct Barriers {
    uint64 keys[TILES];
    uint64 values[TILES];
    uint64 free[TILES];
};

static_assert(DIM % 8 == 0 && DIM >= 16 && TILES > 1, "these sizes are not supported");
static_assert(2 * OPERAND_BYTES + sizeof(Barriers) <= SHARED_BYTES, "keys and values do not fit");

__device__ uint32 shared_address(const void* pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

__device__ void set_up(uint64* barrier, uint32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ void arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void arrive_after_copies(uint64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Products reach shared memory by another way than copies do.
__device__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// Warpgroup after warpgroup: `pass_turn` lets the next one past `take_turn`.
__device__ void take_turn(int warpgroup) { asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory"); }
__device__ void pass_turn(int warpgroup) {
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + (warpgroup + 1) % WARPGROUPS) : "memory");
}

__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int STILL_RUNNING>
__device__ void finish_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(STILL_RUNNING) : "memory");
}

// Rows of 16 bytes in groups of eight; `leading` and `stride` are what the hardware calls so.
__device__ uint64 descriptor(uint32 address, uint32 leading, uint32 stride) {
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)(leading >> 4) << 16 | (uint64)(stride >> 4) << 32;
}

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ uint32 packed(float low, float high) {
    uint32 pair;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ uint32 packed_float8(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Among four neighbours, word i of lane j goes to word j of lane i.
__device__ void quad_transpose(uint32 (&words)[4]) {
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance) {
        const bool is_upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32& low = words[distance == 1 ? 2 * i : i];
            uint32& high = words[distance == 1 ? 2 * i + 1 : i + 2];
            const uint32 other = __shfl_xor_sync(~0u, is_upper ? low : high, distance);
            (is_upper ? low : high) = other;
        }
    }
}

// Two rows of queries, eight apart, and what comes of them. The four threads of a quad share them: each has words of
// two lanes from every piece.
struct Rows {
    uint32 query[2][PIECES];
    float attended[DIM / 2];
    float largest[2];
    float sum[2];
};

// Begins to load words as they lie: a whole piece for each thread of a quad, as far as there are four.
__device__ void begin_queries(Rows& rows, const unsigned short* head, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = min(first_row + lane / 4 + half * 8, PATCHES - 1);
        const uint32* words = (const uint32*)(head + (long long)row * ROW_STRIDE);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece += 4) {
            if (piece + 4 <= PIECES) {
                const uint4 loaded = *(const uint4*)(words + (piece + lane % 4) * 4);
                rows.query[half][piece] = loaded.x;
                rows.query[half][piece + 1] = loaded.y;
                rows.query[half][piece + 2] = loaded.z;
                rows.query[half][piece + 3] = loaded.w;
            } else {
#pragma unroll
                for (int rest = piece; rest < PIECES; ++rest) rows.query[half][rest] = words[rest * 4 + lane % 4];
            }
        }
    }
}

__device__ void finish_queries(Rows& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int piece = 0; piece + 4 <= PIECES; piece += 4) {
            quad_transpose(*(uint32(*)[4]) & rows.query[half][piece]);
        }
    }
}

template <int KEYS>
__device__ void begin_scores(float (&scores)[KEYS / 2], const Rows& rows, uint32 keys) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        // An odd last piece is paired with the one before it, whose lanes count as zero then.
        const bool is_odd = DIM % 16 != 0 && step == KEY_STEPS - 1;
        const int piece = is_odd ? PIECES - 2 : 2 * step;
        const uint32 left[4] = {is_odd ? 0 : rows.query[0][piece], is_odd ? 0 : rows.query[1][piece],
                                rows.query[0][piece + 1], rows.query[1][piece + 1]};
        multiply_keys(scores, left, descriptor(keys + piece * PIECE_BYTES, PIECE_BYTES, 128), step > 0);
    }
    commit_products();
}

// Scores to weights of the softmax, in place, of which VALID are there; and how much smaller older ones have become.
template <int KEYS, int VALID>
__device__ void weigh(float (&scores)[KEYS / 2], Rows& rows, float scale, float (&shrink)[2]) {
    const int lane = threadIdx.x % 32;
    float largest[2] = {rows.largest[0], rows.largest[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        if (i / 4 * 8 + 7 >= VALID && i / 4 * 8 + lane % 4 * 2 + i % 2 >= VALID) scores[i] = LOWEST;
        largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
    }
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        largest[half] = quad_max(largest[half]);
        shift[half] = largest[half] * scale;
        shrink[half] = exp2_fast(rows.largest[half] * scale - shift[half]);
        rows.largest[half] = largest[half];
        rows.sum[half] *= shrink[half];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        scores[i] = exp2_fast(scores[i] * scale - shift[i / 2 % 2]);
        rows.sum[i / 2 % 2] += scores[i];
    }
}

template <int KEYS>
__device__ void pack(uint32 (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = packed(scores[2 * i], scores[2 * i + 1]);
}

template <int KEYS>
__device__ void begin_sums(Rows& rows, const uint32 (&weights)[KEYS / 4], uint32 values) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
        multiply_values(rows.attended, &weights[step * 4], descriptor(values + step * 256, 128, PIECE_BYTES));
    }
    commit_products();
}

// A warpgroup's place in shared memory and in the head it works on.
struct Place {
    Barriers& barriers;
    uint32 keys;
    uint32 values;
    int warpgroup;
    uint32 parity;
    bool is_last_round;

    __device__ void let_go(int tile) const {
        if (is_last_round && threadIdx.x % 32 == 0) arrive(&barriers.free[tile]);
    }
    __device__ void wait_for_keys(int tile) const { wait(&barriers.keys[tile], parity); }
    __device__ void wait_for_values(int tile) const { wait(&barriers.values[tile], parity); }
    __device__ uint32 keys_of(int tile) const { return keys + tile * TILE * 16; }
    __device__ uint32 values_of(int tile) const { return values + tile * TILE * 16; }
};

// Weights of a tile's KEYS keys, VALID of which are there, while the values of the tile before are still added up.
template <int KEYS, int VALID>
__device__ void attend(Rows& rows, const uint32 (&before)[TILE / 4], uint32 (&weights)[KEYS / 4], const Place& place,
                       int tile, float scale) {
    float scores[KEYS / 2], shrink[2];
    place.wait_for_keys(tile);
    place.wait_for_values(tile - 1);
    see_copies();
    take_turn(place.warpgroup);
    begin_products();
    begin_scores<KEYS>(scores, rows, place.keys_of(tile));
    begin_products();
    begin_sums<TILE>(rows, before, place.values_of(tile - 1));
    pass_turn(place.warpgroup);
    finish_products<1>();
    weigh<KEYS, VALID>(scores, rows, scale, shrink);
    finish_products<0>();
    place.let_go(tile - 1);
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) rows.attended[i] *= shrink[i / 2 % 2];
    pack<KEYS>(weights, scores);
}

__device__ void begin_tail(Rows& rows, const uint32 (&weights)[TAIL / 4], const Place& place) {
    place.wait_for_values(TILES - 1);
    see_copies();
    begin_products();
    begin_sums<TAIL>(rows, weights, place.values_of(TILES - 1));
}

__device__ void attend_first(Rows& rows, uint32 (&weights)[TILE / 4], const Place& place, float scale) {
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) rows.attended[i] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.largest[half] = LOWEST;
        rows.sum[half] = 0;
    }
    float scores[TILE / 2], shrink[2];
    place.wait_for_keys(0);
    see_copies();
    take_turn(place.warpgroup);
    begin_products();
    begin_scores<TILE>(scores, rows, place.keys_of(0));
    pass_turn(place.warpgroup);
    finish_products<0>();
    weigh<TILE, TILE>(scores, rows, scale, shrink);
    pack<TILE>(weights, scores);
}

__device__ void store(Rows& rows, unsigned char* head, int first_row, float out_factor) {
    const int lane = threadIdx.x % 32;
    constexpr int WORD_BYTES = IS_FLOAT8 ? 2 : 4;
    float factor[2];
    unsigned char* to[2];
    bool is_there[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        factor[half] = out_factor / quad_sum(rows.sum[half]);
        const int row = first_row + lane / 4 + half * 8;
        is_there[half] = row < PATCHES;
        to[half] = head + (long long)row * HEADS * DIM * (IS_FLOAT8 ? 1 : 2);
    }
    uint32 words[2][PIECES];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const float low = rows.attended[piece * 4 + half * 2] * factor[half];
            const float high = rows.attended[piece * 4 + half * 2 + 1] * factor[half];
            words[half][piece] = IS_FLOAT8 ? packed_float8(low, high) : packed(low, high);
        }
    }
    // Whole pieces go out at once where there are four for the quad.
#pragma unroll
    for (int piece = 0; piece + 4 <= PIECES; piece += 4) {
        const int offset = (piece + lane % 4) * 4 * WORD_BYTES;
        if (IS_FLOAT8) {
            uint32 both[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) both[i] = words[0][piece + i] | words[1][piece + i] << 16;
            quad_transpose(both);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32 order = half == 0 ? 0x5410 : 0x7632;
                const uint2 whole = {__byte_perm(both[0], both[1], order), __byte_perm(both[2], both[3], order)};
                if (is_there[half]) *(uint2*)(to[half] + offset) = whole;
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                quad_transpose(*(uint32(*)[4]) & words[half][piece]);
                const uint4 whole = {words[half][piece], words[half][piece + 1], words[half][piece + 2],
                                     words[half][piece + 3]};
                if (is_there[half]) *(uint4*)(to[half] + offset) = whole;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int piece = PIECES / 4 * 4; piece < PIECES; ++piece) {
            unsigned char* word = to[half] + (piece * 4 + lane % 4) * WORD_BYTES;
            if (!is_there[half]) continue;
            if (IS_FLOAT8) {
                *(unsigned short*)word = words[half][piece];
            } else {
                *(uint32*)word = words[half][piece];
            }
        }
    }
}

// Rows `first` to `first + count` of keys or values into shared memory; what lies past the crop becomes zero.
__device__ void copy_rows(uint32 to, const unsigned short* from, int first, int count) {
#pragma unroll 1  // a loader has few registers
    for (int i = threadIdx.x % LOADERS; i < count * PIECES; i += LOADERS) {
        const int row = first + i / PIECES, piece = i % PIECES;
        const unsigned short* source = from + (long long)min(row, PATCHES - 1) * ROW_STRIDE + piece * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * 16 + piece * PIECE_BYTES),
                     "l"(source), "r"(row < PATCHES ? 16 : 0)
                     : "memory");
    }
}

__device__ const unsigned short* queries_of(const unsigned short* packed_rows, int head) {
    return packed_rows + (long long)(head / HEADS) * PATCHES * ROW_STRIDE + head % HEADS * DIM;
}

extern "C" __global__ void __launch_bounds__((WARPGROUPS + 1) * 128, 1)
    crop_attention(const unsigned short* packed_rows, unsigned char* out, int num_heads, float scale,
                   float out_factor) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Barriers& barriers = *(Barriers*)(memory + 2 * OPERAND_BYTES);
    const uint32 keys = shared_address(memory), values = keys + OPERAND_BYTES;
    if (threadIdx.x == 0) {
        for (int tile = 0; tile < TILES; ++tile) {
            set_up(&barriers.keys[tile], LOADERS);
            set_up(&barriers.values[tile], LOADERS);
            set_up(&barriers.free[tile], WARPGROUPS * 4);
        }
    }
    __syncthreads();

    const int begin = (long long)num_heads * ROUNDS * blockIdx.x / gridDim.x;
    const int end = (long long)num_heads * ROUNDS * (blockIdx.x + 1) / gridDim.x;
    const int first_head = begin / ROUNDS;
    const int warpgroup = threadIdx.x / 128;

    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        for (int head = first_head; head * ROUNDS < end; ++head) {
            const unsigned short* from = queries_of(packed_rows, head) + HEADS * DIM;
            for (int tile = 0; tile < TILES; ++tile) {
                if (head > first_head) wait(&barriers.free[tile], (head - first_head - 1) & 1);
                const int count = tile == TILES - 1 ? TAIL : TILE;
                copy_rows(keys, from, tile * TILE, count);
                arrive_after_copies(&barriers.keys[tile]);
                copy_rows(values, from + HEADS * DIM, tile * TILE, count);
                arrive_after_copies(&barriers.values[tile]);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        const int own_row = warpgroup * QUERIES + threadIdx.x % 128 / 32 * 16;
        Rows rows;
        begin_queries(rows, queries_of(packed_rows, first_head), begin % ROUNDS * WARPGROUPS * QUERIES + own_row);
        if (warpgroup == WARPGROUPS - 1) pass_turn(warpgroup);
        for (int round = begin; round < end; ++round) {
            const int head = round / ROUNDS;
            const Place place = {barriers, keys, values, warpgroup, uint32(head - first_head) & 1,
                                 round + 1 == end || (round + 1) % ROUNDS == 0};
            uint32 weights[TILE / 4], tail_weights[TAIL / 4];
            finish_queries(rows);
            attend_first(rows, weights, place, scale);
#pragma unroll 1
            for (int tile = 1; tile < TILES - 1; ++tile) {
                attend<TILE, TILE>(rows, weights, weights, place, tile, scale);
            }
            attend<TAIL, TAIL_KEYS>(rows, weights, tail_weights, place, TILES - 1, scale);
            begin_tail(rows, tail_weights, place);
            // No more products need the queries: the next ones come while the last values are added up.
            const int next = min(round + 1, end - 1);
            begin_queries(rows, queries_of(packed_rows, next / ROUNDS), next % ROUNDS * WARPGROUPS * QUERIES + own_row);
            finish_products<0>();
            place.let_go(TILES - 1);
            const long long first = (long long)(head / HEADS) * PATCHES * HEADS * DIM + head % HEADS * DIM;
            store(rows, out + first * (IS_FLOAT8 ? 1 : 2), round % ROUNDS * WARPGROUPS * QUERIES + own_row, out_factor);
        }
    }
}
