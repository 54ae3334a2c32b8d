// Bindings of the conversions of dense routing, on CPUs and GPUs; see deepep_moe/_C.pyi. The caller must check shapes and dtypes.
#include "cpu/dense_routing.h"

#include "bindings/tensor.h"
#if defined(DEEPEP_MOE_CUDA)
#include "cuda/launch.h"
#endif

using namespace deepep_moe;

namespace {

DenseRouting sizes_of(const TensorArg& dense, const TensorArg& lanes) { return {dense.num_rows, dense.num_columns, lanes.num_columns}; }

template <class Convert>
void with_lanes_of_map(const TensorArg& routing_map, const TensorArg& values, const TensorArg& topk_idx, const TensorArg& topk_values,
                       const Convert& convert) {
    if (routing_map.is_empty() || topk_idx.is_empty()) return;
    convert(LanesOfMapParams{
        .sizes = sizes_of(routing_map, topk_idx),
        .routing_map = routing_map.as<const uint8_t*>(),
        .values = values.as<const float*>(),
        .topk_idx = topk_idx.as<int64_t*>(),
        .topk_values = topk_values.as<float*>(),
    });
}

template <class Convert>
void with_dense_of_lanes(const TensorArg& topk_idx, const TensorArg& topk_values, const TensorArg& values, const Convert& convert) {
    if (values.is_empty()) return;
    convert(DenseOfLanesParams{
        .sizes = sizes_of(values, topk_idx),
        .topk_idx = topk_idx.as<const int64_t*>(),
        .topk_values = topk_values.as<const float*>(),
        .values = values.as<float*>(),
    });
}

CountLanesParams count_lanes_params(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& is_token_in_rank) {
    const int64_t num_ranks = is_token_in_rank.num_columns;
    return {
        .sizes = {is_token_in_rank.num_rows, counts.num_rows - num_ranks, topk_idx.num_columns},
        .num_ranks = num_ranks,
        .topk_idx = topk_idx.as<const void*>(),
        .is_int64 = topk_idx.element_bytes == 8,
        .counts = counts.as<int32_t*>(),
        .is_token_in_rank = is_token_in_rank.as<uint8_t*>(),
    };
}

void bound_count_lanes(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& is_token_in_rank) {
    if (!is_token_in_rank.is_empty()) count_lanes(count_lanes_params(topk_idx, counts, is_token_in_rank));
}

void bound_lanes_of_map(const TensorArg& routing_map, const TensorArg& values, const TensorArg& topk_idx, const TensorArg& topk_values) {
    with_lanes_of_map(routing_map, values, topk_idx, topk_values, lanes_of_map);
}

void bound_dense_of_lanes(const TensorArg& topk_idx, const TensorArg& topk_values, const TensorArg& values) {
    with_dense_of_lanes(topk_idx, topk_values, values, dense_of_lanes);
}

#if defined(DEEPEP_MOE_CUDA)
void gpu_lanes_of_map(const TensorArg& routing_map, const TensorArg& values, const TensorArg& topk_idx, const TensorArg& topk_values,
                      uintptr_t stream) {
    with_lanes_of_map(routing_map, values, topk_idx, topk_values,
                      [&](const LanesOfMapParams& p) { launch_lanes_of_map(p, reinterpret_cast<void*>(stream)); });
}

void gpu_dense_of_lanes(const TensorArg& topk_idx, const TensorArg& topk_values, const TensorArg& values, uintptr_t stream) {
    with_dense_of_lanes(topk_idx, topk_values, values,
                        [&](const DenseOfLanesParams& p) { launch_dense_of_lanes(p, reinterpret_cast<void*>(stream)); });
}

void gpu_count_lanes(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& is_token_in_rank, uintptr_t stream) {
    if (!is_token_in_rank.is_empty())
        launch_count_lanes(count_lanes_params(topk_idx, counts, is_token_in_rank), reinterpret_cast<void*>(stream));
}
#endif

}  // namespace

void bind_dense_routing(py::module_& m) {
    m.def("lanes_of_map", &bound_lanes_of_map, py::arg("routing_map"), py::arg("values"), py::arg("topk_idx"), py::arg("topk_values"));
    m.def("dense_of_lanes", &bound_dense_of_lanes, py::arg("topk_idx"), py::arg("topk_values"), py::arg("values"));
    m.def("count_lanes", &bound_count_lanes, py::arg("topk_idx"), py::arg("counts"), py::arg("is_token_in_rank"));
#if defined(DEEPEP_MOE_CUDA)
    m.def("gpu_count_lanes", &gpu_count_lanes, py::arg("topk_idx"), py::arg("counts"), py::arg("is_token_in_rank"), py::arg("stream"));
    m.def("gpu_lanes_of_map", &gpu_lanes_of_map, py::arg("routing_map"), py::arg("values"), py::arg("topk_idx"), py::arg("topk_values"),
          py::arg("stream"));
    m.def("gpu_dense_of_lanes", &gpu_dense_of_lanes, py::arg("topk_idx"), py::arg("topk_values"), py::arg("values"), py::arg("stream"));
#endif
}
