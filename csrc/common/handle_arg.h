// What a call reads of a `DispatchHandle`.
#pragma once

#include "common/tensor_arg.h"
#include "common/types.h"

namespace deepep_moe {

struct HandleArg {
    TensorArg topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert;
    const int64_t* call = nullptr;  // host memory
    bool is_expert_layout = true;
    int expert_alignment = 1;
    int64_t num_rows = 0;

    int64_t number() const { return *call; }  // of the dispatch
    Layout layout() const { return is_expert_layout ? Layout::kExpert : Layout::kRank; }

    // Of a `PackedHandle`: addresses only, but for topk_idx. starts: of the sections of `memory`, in int32.
    void unpack(uintptr_t memory, std::span<const int64_t> starts, int64_t num_tokens, int64_t num_topk) {
        TensorArg* const tensors[] = {&topk_idx, &recv_row_idx, &recv_counts, &num_recv_tokens_per_expert};
        for (int i = 0; i < 4; ++i) tensors[i]->address = memory + sizeof(int32_t) * starts[i];
        topk_idx.num_rows = num_tokens;
        topk_idx.num_columns = num_topk;
        topk_idx.element_bytes = sizeof(int32_t);
    }
};

}  // namespace deepep_moe
