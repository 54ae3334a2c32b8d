// The parameters of a plan of copies from tensors, for both bindings.
#pragma once

#include "bindings/tensor.h"
#include "common/copy_plan.h"

namespace deepep_moe {

inline CopyPlanParams copy_plan_params(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& copies, const TensorArg& rows,
                                       const TensorArg& physical_topk_idx, int rank, int cost, int capacity) {
    return {
        .num_ranks = static_cast<int>(counts.num_rows),
        .num_experts = static_cast<int>(counts.num_columns),
        .num_slots = static_cast<int>(copies.num_columns),
        .rank = rank,
        .cost = cost,
        .capacity = capacity,
        .num_entries = topk_idx.num_rows * topk_idx.num_columns,
        .is_int64 = topk_idx.element_bytes == 8,
        .counts = counts.as<const int32_t*>(),
        .topk_idx = topk_idx.as<const void*>(),
        .copies = copies.as<int32_t*>(),
        .rows = rows.as<int32_t*>(),
        .physical_topk_idx = physical_topk_idx.as<void*>(),
    };
}

}  // namespace deepep_moe
