// Describes a call of the exchange. csrc/torch fills it in, from tensors and a handle.
#pragma once

#include "common/signature.h"
#include "cuda/rail.h"

namespace deepep_moe {

// Streams come as addresses. This bit says that the stream's owner may destroy it once the call is made.
constexpr uintptr_t kExternalStream = uintptr_t{1} << 63;

// Says how a call is made. Results do not depend on it.
struct CallMode {
    int num_sms = -1;       // SMs that send; 0 for copy engines, -1 for what GpuTuning says
    bool is_split = false;  // the caller starts the second half later
    uintptr_t stream = 0;   // stream of the call
    int64_t layer = 0;      // number of the model's layer that makes the call; rows are guessed for each layer separately
    bool is_late = false;   // a dispatch that has a guess returns before the counts are there (NvlinkExchange::count_late)
};

// With several nodes this is the part of a call that crosses. The rest of the call is then about the tokens that are in this node. The
// sizes of a row are set also with one node.
struct RailCall {
    RailMeetCall meet{};
    RailMoveCall move{};
};

// Returns how many numbers a handle's `call` has: the dispatch's own, tokens to and from each source, tokens of each local expert.
constexpr int64_t num_handle_numbers(int64_t num_sources, int64_t num_local_experts) { return 1 + 2 * num_sources + num_local_experts; }

template <class Params>
struct GpuCall {
    GpuPlanParams plan{};
    RailCall rail;
    Params params{};
    Signature signature{};
    const int64_t* numbers = nullptr;  // numbers of the handle, if the call goes along one

    int64_t slot_bytes() const { return GpuSlotLayout(rail.move.row_bytes, rail.move.tail_bytes).bytes; }
};
using GpuDispatchCall = GpuCall<GpuDispatchParams>;
using GpuCombineCall = GpuCall<GpuCombineParams>;

}  // namespace deepep_moe
