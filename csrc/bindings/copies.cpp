// Binds plans of copies (deepep_moe/_C.pyi). The caller must check shapes and dtypes.
#include <optional>

#include "bindings/tensor.h"
#include "common/copy_plan.h"
#if defined(DEEPEP_MOE_CUDA)
#include "cuda/launch.h"
#endif

using namespace deepep_moe;

namespace {

// With a stream the tensors lie on its GPU, without one on the CPU.
void plan(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& copies, const TensorArg& rows,
          const TensorArg& physical_topk_idx, int rank, int cost, int capacity, std::optional<uintptr_t> stream) {
    const CopyPlanParams params{
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
    if (!stream) return plan_copies_on_cpu(params);
#if defined(DEEPEP_MOE_CUDA)
    launch_plan_copies(params, reinterpret_cast<void*>(*stream));
#else
    throw std::invalid_argument("this build has no GPU kernels; reinstall deepep_moe where nvcc is, or plan with tensors on the CPU");
#endif
}

}  // namespace

void bind_copies(py::module_& m) { m.def("plan_copies", &plan); }
