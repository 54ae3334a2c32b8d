// Bindings of the CPU's conversions of dense routing; see deepep_moe/_C.pyi. Shapes and dtypes are the caller's to check.
#include "cpu/dense_routing.h"

#include "bindings/tensor.h"

using namespace deepep_moe;

namespace {

DenseRouting sizes_of(const TensorArg& dense, const TensorArg& lanes) { return {dense.num_rows, dense.num_columns, lanes.num_columns}; }

void bound_lanes_of_map(const TensorArg& routing_map, const TensorArg& values, const TensorArg& topk_idx, const TensorArg& topk_values) {
    if (routing_map.is_empty() || topk_idx.is_empty()) return;
    lanes_of_map({
        .sizes = sizes_of(routing_map, topk_idx),
        .routing_map = routing_map.as<const uint8_t*>(),
        .values = values.as<const float*>(),
        .topk_idx = topk_idx.as<int64_t*>(),
        .topk_values = topk_values.as<float*>(),
    });
}

void bound_dense_of_lanes(const TensorArg& topk_idx, const TensorArg& topk_values, const TensorArg& values) {
    if (values.is_empty()) return;
    dense_of_lanes({
        .sizes = sizes_of(values, topk_idx),
        .topk_idx = topk_idx.as<const int64_t*>(),
        .topk_values = topk_values.as<const float*>(),
        .values = values.as<float*>(),
    });
}

}  // namespace

void bind_dense_routing(py::module_& m) {
    m.def("lanes_of_map", &bound_lanes_of_map, py::arg("routing_map"), py::arg("values"), py::arg("topk_idx"), py::arg("topk_values"));
    m.def("dense_of_lanes", &bound_dense_of_lanes, py::arg("topk_idx"), py::arg("topk_values"), py::arg("values"));
}
