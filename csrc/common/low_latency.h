// Low-latency dispatch and combine share these flags and handles on CPUs and GPUs. The parameters of calls are for GPUs. A rank's calls,
// dispatches and combines alike, are numbered 1, 2, ... in the order in which they send, the same on every rank. Call n uses turn n %
// kTurns of a workspace. cuda/low_latency.h lays out workspaces on GPUs, deepep_moe/low_latency/shm_calls those on CPUs.
//
// At most kMaxInFlight calls are sent and not yet received. A rank that sends call n has received n - 2, so all ranks had sent n - 2. For
// that they had received n - 4. So turns never overlap, although receivers send no word.
//
// A combine may bring weights. They travel as in a dispatch, from the token's rank to its experts' ranks, to where a dispatch's turn has
// the token's lanes. A rank sums no token before it has them, so the sending half waits for the peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/types.h"

namespace deepep_moe {

constexpr int kTurns = 4, kMaxInFlight = 2;
constexpr int kLowLatencyMaxHostRanks = 8, kLowLatencyMaxRanks = 32;    // ranks of one host, and all ranks; a mask has a bit for each rank
constexpr int kValueBitsOfFlag = 16, kWhatBits = 8 + kValueBitsOfFlag;  // bits of a flag below the number of its call

enum class LowLatencyOperation : int { kDispatch = 0, kCombine = 1 };

// Says what a rank does in a call, in the low bits of its flags. All ranks must do the same.
struct LowLatencyWhat {
    LowLatencyOperation operation;
    DType dtype;       // of x
    bool fp8;          // rows travel as e4m3 with a scale for kScaleBlock columns
    bool is_rounded;   // scales of a dispatch are powers of two
    bool has_weights;  // topk_weights travel
    bool is_refused;   // the rank refuses its arguments, for the reason in `reasons`

    // The rank of the rail tells its node by this, in place of all fields, that the rank did not come.
    static constexpr unsigned kAbsent = 1u << 7;

    DEEPEP_MOE_HD constexpr unsigned packed() const {
        return static_cast<unsigned>(operation) | static_cast<unsigned>(dtype) << 1 | fp8 << 3 | is_rounded << 4 | has_weights << 5 |
               is_refused << 6;
    }
    DEEPEP_MOE_HD constexpr unsigned long long flag(unsigned long long call, int value) const {
        return call << kWhatBits | packed() << kValueBitsOfFlag | static_cast<unsigned>(value);
    }
    // Returns the dispatch whose last bits a combine has sent, if it was less than 2^15 calls from `own_call`.
    static constexpr unsigned long long dispatch_near(unsigned long long own_call, int value) {
        return own_call + static_cast<long long>(static_cast<int16_t>(value - static_cast<int>(own_call % (1u << kValueBitsOfFlag))));
    }
    DEEPEP_MOE_HD static constexpr unsigned packed_in(unsigned long long flag) {
        return static_cast<unsigned>(flag) % (1u << kWhatBits) >> kValueBitsOfFlag;
    }
    DEEPEP_MOE_HD static constexpr int value_in(unsigned long long flag) { return static_cast<int>(flag % (1u << kValueBitsOfFlag)); }
    DEEPEP_MOE_HD static constexpr LowLatencyWhat unpacked(unsigned bits) {
        return {static_cast<LowLatencyOperation>(bits & 1),
                static_cast<DType>(bits >> 1 & 3),
                (bits >> 3 & 1) != 0,
                (bits >> 4 & 1) != 0,
                (bits >> 5 & 1) != 0,
                (bits >> 6 & 1) != 0};
    }
};

// Call `launcher` with constants: the type of x, and whether rows travel as fp8. For x of fp8 throw std::invalid_argument.
template <class Launcher>
void with_types(const LowLatencyWhat& what, const Launcher& launcher) {
    const char* why_not_fp8 = what.operation == LowLatencyOperation::kDispatch ? "rows are quantized on their way; give them as they are"
                                                                               : "combine takes float32, bfloat16 or float16";
    with_dtype(what.dtype, why_not_fp8,
               [&](auto dtype) { what.fp8 ? launcher(dtype, std::true_type{}) : launcher(dtype, std::false_type{}); });
}

// Describes one top-k entry of a token on its way to its expert's rank.
struct alignas(8) LowLatencyLane {
    int16_t expert;  // number among that rank's experts, or -1 if the expert is not there
    uint16_t index;  // how many earlier tokens of the source have the same expert
    float weight;    // 1 without topk_weights
};

// Describes one top-k entry of a received token: its row (expert * rows_of_expert + place, or -1) and its weight.
struct alignas(8) LowLatencyRow {
    int32_t row;
    float weight;
};

struct LowLatencyConfig {
    int num_ranks, num_experts, num_topk, hidden;
    int64_t num_max_tokens;
    int lanes = 1;  // with sums by lanes, each (token, lane) of the caller is a token here; a token has so many
    int num_local_experts = num_ranks > 0 ? num_experts / num_ranks : 0;
    DEEPEP_MOE_HD int64_t capacity() const { return num_ranks * num_max_tokens; }  // tokens of all ranks
    DEEPEP_MOE_HD int64_t rows_of_expert() const { return capacity() / lanes; }    // a token of the caller names an expert once
};

DEEPEP_MOE_HD constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Lays out the handle of a dispatch, in memory of the caller, which has what a rank needs for its combines. `failed` is
// call ^ LowLatencyContext::failed if the dispatch failed on a GPU.
//   call u64 | failed u64 | num_tokens i32[kLowLatencyMaxRanks] from each rank | rank_masks u32[num_max_tokens] |
//   rows LowLatencyRow[num_ranks][num_max_tokens][num_topk].
// Bit r of a rank mask: the token was sent to rank r.
struct LowLatencyHandleLayout {
    int64_t failed, num_tokens, rank_masks, rows, total_bytes;
    DEEPEP_MOE_HD explicit LowLatencyHandleLayout(const LowLatencyConfig& c)
        : failed(8),
          num_tokens(16),
          rank_masks(num_tokens + 4 * kLowLatencyMaxRanks),
          rows(round_up(rank_masks + 4 * c.num_max_tokens, 16)),
          total_bytes(round_up(rows + static_cast<int64_t>(sizeof(LowLatencyRow)) * c.capacity() * c.num_topk, 16)) {}
};

// Lays out sums over all calls, in memory of the caller. `num_tokens_per_expert` counts received tokens. `wait_ns` is the time from a
// receiver's start until it had heard of each rank. `num_dropped` counts (token, expert) pairs of this rank whose rank was masked.
//   num_tokens_per_expert i64[num_local_experts] | wait_ns i64[num_ranks] | num_dropped i64
struct LowLatencyStatistics {
    int64_t *num_tokens_per_expert, *wait_ns, *num_dropped;
    DEEPEP_MOE_HD LowLatencyStatistics(const LowLatencyConfig& c, int64_t* all)
        : num_tokens_per_expert(all), wait_ns(all + c.num_local_experts), num_dropped(wait_ns + c.num_ranks) {}
};

struct LowLatencyDispatchParams {
    LowLatencyWhat what;
    int64_t* statistics;  // LowLatencyStatistics
    bool is_int64;        // topk_idx is int64
    int num_tokens;
    const std::byte* x;         // [num_tokens, hidden]
    const void* topk_idx;       // [num_tokens, num_topk] int32 or int64, -1 = no expert
    const float* topk_weights;  // [num_tokens, num_topk], or nullptr
    std::byte* handle;          // LowLatencyHandleLayout, out
    std::byte* recv_x;          // [num_local_experts, capacity, hidden] dtype of x, or e4m3
    void* recv_x_scales;        // fp8: [num_local_experts, hidden / 128, capacity] fp32, or rounded [num_local_experts, ceil(hidden / 512),
                                // capacity] int32 of four biased exponents, the first in the lowest byte
    int32_t* num_recv_tokens_per_expert;  // [num_local_experts]
};

struct LowLatencyCombineParams {
    LowLatencyWhat what;
    int64_t* statistics;        // LowLatencyStatistics
    int num_tokens;             // this rank's tokens in the dispatch
    const std::byte* handle;    // the handle of the dispatch
    std::byte* call;            // u64: the half that sends writes the number of the call, for the half that receives
    const float* topk_weights;  // [num_tokens, num_topk] for this call, or nullptr: those of the dispatch
    const std::byte* x;         // [num_local_experts, capacity, hidden]
    std::byte* combined_x;      // [num_tokens, hidden]
};

}  // namespace deepep_moe
