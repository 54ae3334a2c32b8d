// Rows of low-latency calls travel in the lines of cuda/low_latency.h. A block stores them; a warp waits for them and adds them up.
#pragma once

#include "cuda/device/fp8.cuh"
#include "cuda/device/low_latency.cuh"
#include "cuda/device/rows.cuh"

namespace deepep_moe {

constexpr int kPartsOfLine = kLineBytes / 16;               // 7 pieces and the line's end; part i belongs to thread i % kPartsOfLine
constexpr int kPiecesOfBlock = kScaleBlock / 16;            // pieces of fp8 with one scale
constexpr int kWholePieces = kLinePieces * kPiecesOfBlock;  // fill whole lines and whole blocks

__device__ __forceinline__ bool ends_line() { return threadIdx.x % kPartsOfLine == kLinePieces; }
__device__ __forceinline__ unsigned long long flag_in(const uint4& part) { return static_cast<unsigned long long>(part.w) << 32 | part.z; }
__device__ __forceinline__ uint4 line_end(float first_scale, float last_scale, unsigned long long flag) {
    return make_uint4(__float_as_uint(first_scale), __float_as_uint(last_scale), static_cast<unsigned>(flag),
                      static_cast<unsigned>(flag >> 32));
}

// Returns the piece in part `i` of a row's lines; meaningless where `ends_line`.
__device__ __forceinline__ int piece_of(int i) { return i / kPartsOfLine * kLinePieces + i % kPartsOfLine; }
__device__ __forceinline__ int parts_of(int num_pieces) {
    return static_cast<int>(GpuLowLatencyLayout::lines_of(num_pieces)) * kPartsOfLine;
}

// Returns the scale of a piece, which is one of the two at the end of its line.
__device__ __forceinline__ float scale_of(int piece, const uint4& end) {
    const int first = piece / kLinePieces * kLinePieces;
    return __uint_as_float(piece / kPiecesOfBlock == first / kPiecesOfBlock ? end.x : end.y);
}

// ---- sending ----

// Holds up to kPieces pieces of a row in shared memory, a multiple of kWholePieces, and their scales if they are fp8.
template <int kPieces>
struct StagedPieces {
    static_assert(kPieces % kWholePieces == 0);
    uint4 pieces[kPieces];
    float scales[kPieces / kPiecesOfBlock];

    // Returns part `i` of the lines of these pieces.
    __device__ uint4 part(int i, int num_pieces, bool has_scales, unsigned long long flag) const {
        const int piece = piece_of(i);
        if (!ends_line()) return piece < num_pieces ? pieces[piece] : make_uint4(0, 0, 0, 0);
        if (!has_scales) return line_end(0.0f, 0.0f, flag);
        return line_end(scales[(piece - kLinePieces) / kPiecesOfBlock], scales[(min(piece, num_pieces) - 1) / kPiecesOfBlock], flag);
    }

    // Store the pieces at row_at(rank), with `flag` in each line, for each of the num_ranks ranks from first_rank on that is in `ranks`.
    // The order begins at this rank, so that not all ranks store to the same one at a time. All threads of a block call it.
    template <class RowAt>
    __device__ void push(const LowLatencyContext& c, int first_rank, int num_ranks, unsigned ranks, int num_pieces, bool has_scales,
                         unsigned long long flag, const RowAt& row_at) const {
        const int num_parts = parts_of(num_pieces);
#pragma unroll 1
        for (int first = threadIdx.x / 32 * 32; first < num_parts; first += blockDim.x) {
            const int i = first + threadIdx.x % 32;
            const uint4 value = part(i, num_pieces, has_scales, flag);
            __syncwarp();
#pragma unroll 1
            for (int turn = 0; turn < num_ranks; ++turn) {
                const int next = c.rank + turn, to = next < first_rank + num_ranks ? next : next - num_ranks;
                if ((ranks >> to & 1) != 0) store_part(row_at(to) + i, value, i < num_parts);
            }
        }
    }
};

// ---- heads ----

// Returns the part of a head that this thread stores, where thread i holds top-k entry i. All threads of a warp call it.
__device__ __forceinline__ uint4 head_part(const LowLatencyLane& entry, unsigned long long flag) {
    const unsigned long long word = static_cast<unsigned long long>(__float_as_uint(entry.weight)) << 32 |
                                    static_cast<unsigned>(entry.index) << 16 | static_cast<uint16_t>(entry.expert);
    const int lane = threadIdx.x % 32, first = lane / kPartsOfLine * kLineLanes + 2 * (lane % kPartsOfLine);
    const unsigned long long a = __shfl_sync(kFullWarp, word, first % 32), b = __shfl_sync(kFullWarp, word, (first + 1) % 32),
                             end = ends_line() ? flag : b;
    return make_uint4(static_cast<unsigned>(a), static_cast<unsigned>(a >> 32), static_cast<unsigned>(end),
                      static_cast<unsigned>(end >> 32));
}

// Inverts head_part: return this thread's top-k entry from the parts that the warp has loaded.
__device__ __forceinline__ LowLatencyLane lane_of_head(const uint4& part) {
    const int nth = threadIdx.x % 32 % kLineLanes, from = threadIdx.x % 32 / kLineLanes * kPartsOfLine + nth / 2;
    const unsigned first[2] = {__shfl_sync(kFullWarp, part.x, from), __shfl_sync(kFullWarp, part.z, from)};
    const unsigned second[2] = {__shfl_sync(kFullWarp, part.y, from), __shfl_sync(kFullWarp, part.w, from)};
    const unsigned low = nth % 2 == 0 ? first[0] : first[1], high = nth % 2 == 0 ? second[0] : second[1];
    return {static_cast<int16_t>(low), static_cast<uint16_t>(low >> 16), __uint_as_float(high)};
}

// ---- receiving ----

// Poll until done(masks_too); every kLooks-th poll has masks_too set, for `done` to check for masked ranks too. Returns false past the
// deadline, or if another wait of this rank has failed. All threads of a warp call it.
template <class Done>
__device__ __forceinline__ bool look_until(const LowLatencyContext& c, const Done& done) {
    unsigned long long deadline = 0;
#pragma unroll 1
    for (unsigned round = 0; !done(round % kLooks == kLooks - 1); ++round) {
        if (deadline == 0) deadline = now_ns() + c.timeout_ns;
        if (round % kLooks == kLooks - 1 && __any_sync(kFullWarp, gave_up(c) || now_ns() >= deadline)) return false;
        pause_ns(kLowLatencyPauseNs);
    }
    return true;
}

// Computes addresses of parts before a polling loop, because the compiler does not hoist a functor's arithmetic out of it.
template <int kCount>
struct Places {
    const uint4* at[kCount];

    template <class Place>
    __device__ explicit Places(const Place& place) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) at[i] = place(i);
    }
    __device__ const uint4* operator()(int i) const { return at[i]; }
};

// Holds kCount parts of lines for each thread. All threads of a warp load them together; place(i) is the address of part i, or nullptr.
template <int kCount>
struct Parts {
    static constexpr unsigned kAll = (1u << kCount) - 1;
    uint4 values[kCount];

    template <class Place>
    __device__ void load(const Place& place) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint4* from = place(i);
            values[i] = load_part(from, from != nullptr);
        }
    }

    // Returns a mask whose bit i says that all lines of parts i have arrived, as the threads at their ends have `flag`.
    template <class Place>
    __device__ unsigned here(const Place& place, unsigned long long flag) const {
        unsigned here = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const bool is_here = !ends_line() || place(i) == nullptr || flag_in(values[i]) == flag;
            here |= static_cast<unsigned>(__all_sync(kFullWarp, is_here)) << i;
        }
        return here;
    }
};

template <DType kType, int kColumns>
__device__ __forceinline__ void add_piece(float (&sum)[kColumns], const uint4& piece) {
    float x[kColumns];
    Piece<kType>::load(piece, x);
#pragma unroll
    for (int v = 0; v < kColumns; ++v) sum[v] = __fadd_rn(sum[v], x[v]);
}

// Add the columns of part `i`, which are kType, or fp8 with the scales at the end of their line. All threads of a warp call it.
template <DType kType, bool kQuantized, int kColumns>
__device__ __forceinline__ void add_part(float (&sum)[kColumns], const uint4& part, int i) {
    if constexpr (kQuantized) {
        const int end = threadIdx.x % 32 / kPartsOfLine * kPartsOfLine + kLinePieces;
        const uint4 scales = make_uint4(__shfl_sync(kFullWarp, part.x, end), __shfl_sync(kFullWarp, part.y, end), 0, 0);
        add_fp8(sum, part, scale_of(piece_of(i), scales));
    } else {
        add_piece<kType>(sum, part);
    }
}

}  // namespace deepep_moe
