// Bindings of the conversions of dense routing; see deepep_moe/_C.pyi. The caller must check shapes and dtypes.
#include "bindings/tensor.h"
#include "cuda/launch.h"

using namespace deepep_moe;

namespace {

void lanes_of_map(const TensorArg& routing_map, const TensorArg& values, const TensorArg& topk_idx, const TensorArg& topk_values,
                  uintptr_t stream) {
    if (routing_map.is_empty() || topk_idx.is_empty()) return;
    const LanesOfMapParams params{
        .sizes = {routing_map.num_rows, routing_map.num_columns, topk_idx.num_columns},
        .routing_map = routing_map.as<const uint8_t*>(),
        .values = values.as<const float*>(),
        .topk_idx = topk_idx.as<int64_t*>(),
        .topk_values = topk_values.as<float*>(),
    };
    launch_lanes_of_map(params, reinterpret_cast<void*>(stream));
}

void dense_of_lanes(const TensorArg& topk_idx, const TensorArg& topk_values, const TensorArg& values, uintptr_t stream) {
    if (values.is_empty()) return;
    const DenseOfLanesParams params{
        .sizes = {values.num_rows, values.num_columns, topk_idx.num_columns},
        .topk_idx = topk_idx.as<const int64_t*>(),
        .topk_values = topk_values.as<const float*>(),
        .values = values.as<float*>(),
    };
    launch_dense_of_lanes(params, reinterpret_cast<void*>(stream));
}

void count_lanes(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& is_token_in_rank, uintptr_t stream) {
    if (is_token_in_rank.is_empty()) return;
    const int64_t num_ranks = is_token_in_rank.num_columns;
    const CountLanesParams params{
        .sizes = {is_token_in_rank.num_rows, counts.num_rows - num_ranks, topk_idx.num_columns},
        .num_ranks = num_ranks,
        .topk_idx = topk_idx.as<const void*>(),
        .is_int64 = topk_idx.element_bytes == 8,
        .counts = counts.as<int32_t*>(),
        .is_token_in_rank = is_token_in_rank.as<uint8_t*>(),
    };
    launch_count_lanes(params, reinterpret_cast<void*>(stream));
}

}  // namespace

void bind_gpu_dense_routing(py::module_& m) {
    m.def("gpu_lanes_of_map", &lanes_of_map);
    m.def("gpu_dense_of_lanes", &dense_of_lanes);
    m.def("gpu_count_lanes", &count_lanes);
}
