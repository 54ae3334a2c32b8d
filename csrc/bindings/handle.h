// Reads a `DispatchHandle` by its attributes.
#pragma once

#include "bindings/tensor.h"
#include "common/handle_arg.h"

namespace deepep_moe {

inline const Name kLayout{"layout"}, kAlignment{"expert_alignment"}, kNumRows{"num_rows"}, kCall{"call"};
inline const Name kTopkIdx{"topk_idx"}, kRecvRowIdx{"recv_row_idx"}, kRecvCounts{"recv_counts"};
inline const Name kTokensPerExpert{"num_recv_tokens_per_expert"};

inline HandleArg handle_arg(py::handle handle) {
    HandleArg arg;
    arg.call = tensor_arg(attribute(handle, kCall)).as<const int64_t*>();
    arg.is_expert_layout = PyUnicode_CompareWithASCIIString(attribute(handle, kLayout).ptr(), "expert") == 0;
    arg.expert_alignment = static_cast<int>(to_int(attribute(handle, kAlignment)));
    arg.num_rows = to_int(attribute(handle, kNumRows));
    arg.topk_idx = tensor_arg(attribute(handle, kTopkIdx));
    arg.recv_row_idx = tensor_arg(attribute(handle, kRecvRowIdx));
    arg.recv_counts = tensor_arg(attribute(handle, kRecvCounts));
    arg.num_recv_tokens_per_expert = tensor_arg(attribute(handle, kTokensPerExpert));
    return arg;
}

}  // namespace deepep_moe

namespace pybind11::detail {

template <>
struct type_caster<deepep_moe::HandleArg> {
    PYBIND11_TYPE_CASTER(deepep_moe::HandleArg, const_name("DispatchHandle"));
    bool load(handle source, bool) {
        value = deepep_moe::handle_arg(source);
        return true;
    }
};

}  // namespace pybind11::detail
