// What a call reads of a `DispatchHandle`.
#pragma once

#include "common/tensor_arg.h"
#include "common/types.h"

namespace deepep_moe {

struct HandleArg {
    TensorArg topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert;
    TensorArg node_topk_idx, in_counts;  // where ranks are of several nodes
    const int64_t* call = nullptr;       // host memory
    bool is_expert_layout = true;
    int expert_alignment = 1;
    int64_t num_rows = 0;

    int64_t number() const { return *call; }  // of the dispatch
    Layout layout() const { return is_expert_layout ? Layout::kExpert : Layout::kRank; }

    // Of a `PackedHandle`: addresses only, but for the two of top-k. starts: of the sections of `memory`, in int32. num_node_tokens: rows
    // of node_topk_idx; 0 where there is one node.
    void unpack(uintptr_t memory, std::span<const int64_t> starts, int64_t num_tokens, int64_t num_topk, int64_t num_node_tokens) {
        TensorArg* const tensors[] = {&topk_idx, &recv_row_idx, &recv_counts, &num_recv_tokens_per_expert, &node_topk_idx, &in_counts};
        for (size_t i = 0; i < starts.size(); ++i) tensors[i]->address = memory + sizeof(int32_t) * starts[i];
        topk_idx.num_rows = num_tokens;
        node_topk_idx.num_rows = num_node_tokens;
        node_topk_idx.is_there = num_node_tokens > 0;
        for (TensorArg* experts : {&topk_idx, &node_topk_idx}) {
            experts->num_columns = num_topk;
            experts->element_bytes = sizeof(int32_t);
        }
    }
};

}  // namespace deepep_moe
