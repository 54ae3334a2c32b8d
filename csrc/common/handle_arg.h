// Holds the fields of a `DispatchHandle` that a call reads.
#pragma once

#include "common/tensor_arg.h"
#include "common/types.h"

namespace deepep_moe {

// Returns how many numbers a handle's `call` has: the dispatch's own, tokens to and from each source, tokens of each local expert.
constexpr int64_t num_handle_numbers(int64_t num_sources, int64_t num_local_experts) { return 1 + 2 * num_sources + num_local_experts; }

struct HandleArg {
    TensorArg topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert;
    TensorArg node_topk_idx, in_counts;  // only with several nodes
    const int64_t* call = nullptr;       // host memory
    bool is_expert_layout = true;
    int expert_alignment = 1;
    int64_t num_rows = 0;

    int64_t number() const { return *call; }  // the number of the dispatch
    Layout layout() const { return is_expert_layout ? Layout::kExpert : Layout::kRank; }
};

}  // namespace deepep_moe
