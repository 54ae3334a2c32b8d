// Runs dense routing from C++ for plain tensors on a GPU without gradient: outputs and launch in one call of Python. It declines every
// other call by None, and Python makes that one with PyTorch's operators (deepep_moe/ops/lanes.py, which says what the functions do).
#include "torch/streams.h"

namespace deepep_moe {
namespace {

bool is_matrix(const Tensor& tensor) { return tensor.defined() && tensor.dim() == 2 && is_on(tensor.device(), tensor); }

// Are they chosen experts and probabilities of these rows?
bool is_routing_of(const Tensor& rows, const Tensor& routing_map, const Tensor& values) {
    const bool fits =
        routing_map.scalar_type() == at::kBool && routing_map.device() == rows.device() && routing_map.size(0) == rows.size(0);
    return fits && (!values.defined() || can_be_summed(values.scalar_type()) || values.scalar_type() == at::kDouble);
}

Tensor contiguous(const Tensor& tensor, at::ScalarType type) {
    if (!tensor.defined()) return tensor;
    return tensor.scalar_type() == type ? tensor.contiguous() : tensor.to(type).contiguous();
}

Tensor empty_like_rows_of(const Tensor& tensor, int64_t num_columns, at::ScalarType type) {
    return at::empty({tensor.size(0), num_columns}, tensor.options().dtype(type));
}

// Returns topk_idx, and the values or None. With rows [num_tokens, ...] it also declines what is not a bool map, with floating-point
// values, of these tokens.
std::optional<std::pair<Tensor, OptionalTensor>> lanes_of_map(py::handle given_map, py::handle given_values, int64_t num_topk,
                                                              py::handle given_rows) {
    if (is_watched() || !are_plain({given_map, given_values, given_rows})) return std::nullopt;
    Tensor routing_map = unpacked(given_map), values = unpacked(given_values), topk_values;
    if (!is_matrix(routing_map)) return std::nullopt;
    if (values.defined() && !(is_on(routing_map.device(), values) && values.sizes() == routing_map.sizes())) return std::nullopt;
    if (!given_rows.is_none() && !is_routing_of(unpacked(given_rows), routing_map, values)) return std::nullopt;
    const at::AutoDispatchBelowADInplaceOrView below;
    routing_map = contiguous(routing_map, at::kBool), values = contiguous(values, at::kFloat);
    const int64_t sizes[] = {routing_map.size(0), num_topk}, num_lanes = sizes[0] * sizes[1];
    const Tensor both = at::empty({num_lanes * (values.defined() ? 3 : 2)}, routing_map.options().dtype(at::kInt));  // one allocation
    const Tensor topk_idx = part_of(both, 0, sizes, at::kLong);
    if (values.defined()) topk_values = part_of(both, 2 * num_lanes, sizes, at::kFloat);
    const LanesOfMapParams params{
        {routing_map.size(0), routing_map.size(1), num_topk},
        data_of<uint8_t>(routing_map),
        data_of<float>(values),
        data_of<int64_t>(topk_idx),
        data_of<float>(topk_values),
    };
    if (topk_idx.numel() > 0) launch_kernel(kernels->lanes_of_map, params, routing_map.device());
    return std::pair(topk_idx, optional_of(topk_values));
}

OptionalTensor dense_of_lanes(py::handle given_idx, py::handle given_values, int64_t num_experts) {
    if (is_watched() || !are_plain({given_idx, given_values})) return std::nullopt;
    Tensor topk_idx = unpacked(given_idx), topk_values = unpacked(given_values);
    if (!is_matrix(topk_idx) || !topk_values.defined() || !is_on(topk_idx.device(), topk_values)) return std::nullopt;
    if (topk_values.sizes() != topk_idx.sizes() || needs_gradients({&topk_values})) return std::nullopt;
    topk_idx = contiguous(topk_idx, at::kLong), topk_values = contiguous(topk_values, at::kFloat);
    const Tensor values = empty_like_rows_of(topk_values, num_experts, at::kFloat);
    const DenseOfLanesParams params{
        {topk_idx.size(0), num_experts, topk_idx.size(1)}, data_of<int64_t>(topk_idx), data_of<float>(topk_values), data_of<float>(values)};
    if (values.numel() > 0) launch_kernel(kernels->dense_of_lanes, params, values.device());
    return values;
}

// Returns the counts of ranks, then of experts, and is_token_in_rank.
std::optional<std::pair<Tensor, Tensor>> count_lanes(py::handle given_idx, int64_t num_experts, int64_t num_ranks) {
    if (is_watched() || !are_plain({given_idx})) return std::nullopt;
    const Tensor idx = unpacked(given_idx);
    if (!is_matrix(idx) || !is_index(idx.scalar_type())) return std::nullopt;
    const Tensor topk_idx = idx.contiguous(), in_rank = empty_like_rows_of(topk_idx, num_ranks, at::kBool);
    const Tensor counts = at::zeros({num_ranks + num_experts}, topk_idx.options().dtype(at::kInt));
    const CountLanesParams params{
        {topk_idx.size(0), num_experts, topk_idx.size(1)},
        num_ranks,
        data_of<void>(topk_idx),
        topk_idx.scalar_type() == at::kLong,
        data_of<int32_t>(counts),
        data_of<uint8_t>(in_rank),
    };
    if (in_rank.numel() > 0) launch_kernel(kernels->count_lanes, params, counts.device());
    return std::pair(counts, in_rank);
}

}  // namespace

void bind_dense_routing(py::module_& m) {
    using torch::wrap_pybind_function;
    const py::arg topk_idx("topk_idx"), num_experts("num_experts");
    m.def("lanes_of_map", wrap_pybind_function(lanes_of_map), py::arg("routing_map"), py::arg("values"), py::arg("num_topk"),
          py::arg("rows") = py::none());
    m.def("dense_of_lanes", wrap_pybind_function(dense_of_lanes), topk_idx, py::arg("topk_values"), num_experts);
    m.def("count_lanes", wrap_pybind_function(count_lanes), topk_idx, num_experts, py::arg("num_ranks"));
}

}  // namespace deepep_moe
