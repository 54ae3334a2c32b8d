// Adds up what the ranks of this node have sent for a token. The token's rank does this, or the rank of its rail in this node.
#pragma once

#include "cuda/device/low_latency_lines.cuh"
#include "cuda/device/low_latency_rail.cuh"

namespace deepep_moe {

// Lists, in shared memory, the ranks of this node that have a sum of a token, in rank order, and where these sums lie here.
struct TokenSums {
    int num;
    int ranks[kLowLatencyMaxHostRanks];
    const uint4* rows[kLowLatencyMaxHostRanks];
};

// Find the sums of a token of the rail's rank in `node`. Bit r of `ranks` says that rank r of this node has one, which lies in the slot
// that the rank with index r of `node` would use. One warp calls it.
__device__ __forceinline__ void find_sums(const RailCall& rail, int node, int token, unsigned ranks, TokenSums& out) {
    const int lane = threadIdx.x % 32;
    if ((ranks >> lane & 1) != 0) {
        const int nth = __popc(ranks & ((1u << lane) - 1));
        out.ranks[nth] = rail.first_rank() + lane;
        out.rows[nth] = Turn(rail.c, rail.c.rank, rail.call).row(node * rail.r.ranks_per_node + lane, token);
    }
    if (lane == 0) out.num = __popc(ranks);
}

// With kQuantized sums travel as fp8.
template <DType kType, bool kQuantized>
struct NodeSums {
    using Values = Piece<kType>;
    static constexpr int kColumns = kQuantized ? 16 : Values::kCount;  // columns of a piece as it travels
    static constexpr int kRanksAtOnce = kQuantized ? 2 : 4;            // ranks whose parts a thread has in flight
    using Sum = float[kColumns];

    const LowLatencyContext& c;
    const unsigned long long flag;
    const int num_pieces, num_parts;  // pieces and parts of a row as it travels

    __device__ NodeSums(const LowLatencyContext& c, unsigned long long flag)
        : c(c), flag(flag), num_pieces(c.config.hidden / kColumns), num_parts(parts_of(num_pieces)) {}

    // Add part `i` of the sums of all ranks, in rank order. A rank that is masked meanwhile is left out, even if it has come back since.
    // One warp calls it, each thread with its own part.
    __device__ void add_ranks(Sum& sum, const TokenSums& from, int i) const {
#pragma unroll 1
        for (int first = 0; first < from.num; first += kRanksAtOnce) add_parts(sum, from, first, i);
    }

private:
    __device__ void add_parts(Sum& sum, const TokenSums& from, int first, int i) const {
        const int num = from.num - first;
        const Places<kRanksAtOnce> place([&](int n) { return n < num && i < num_parts ? from.rows[first + n] + i : nullptr; });
        Parts<kRanksAtOnce> parts;
        unsigned here = 0;
        const auto done = [&](bool masks_too) {
            parts.load(place);
            here = parts.here(place, flag);
            unsigned given_up = 0;
            if (masks_too)
                for (int n = 0; n < min(num, kRanksAtOnce); ++n)
                    given_up |= static_cast<unsigned>(!takes_part(c, from.ranks[first + n], flag >> kWhatBits)) << n;
            return (here | __reduce_or_sync(kFullWarp, given_up)) == parts.kAll;
        };
        const bool is_done = look_until(c, done);
#pragma unroll
        for (int n = 0; n < kRanksAtOnce; ++n) {
            if (n < num && (here >> n & 1) != 0) add_part<kType, kQuantized>(sum, parts.values[n], i);
            if (!is_done && (here >> n & 1) == 0 && threadIdx.x % 32 == 0)
                mask_or_report(c, from.ranks[first + n], GpuPhase::kCombineRows, flag >> kWhatBits, 0);
        }
    }
};

// Returns whether a rank's word says that it combines for the same dispatch. If not, it reports that.
__device__ __forceinline__ bool check_along(const LowLatencyContext& c, const LowLatencyCombineParams& p, unsigned long long flag,
                                            unsigned long long word, int source) {
    if (!check_what(c, flag, word, source)) return false;
    const int ours = LowLatencyWhat::value_in(dispatch_of(p)), theirs = LowLatencyWhat::value_in(word);
    if (ours != theirs) report(c, kMismatch, source, GpuPhase::kCombineRows, static_cast<long long>(dispatch_of(p)), theirs);
    return ours == theirs;
}

__device__ __forceinline__ void count_wait(const LowLatencyContext& c, int64_t* statistics, int source, unsigned long long since) {
    atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(c.config, statistics).wait_ns) + source, now_ns() - since);
}

}  // namespace deepep_moe
