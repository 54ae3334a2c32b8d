// Plain low-latency calls from C++: checks, outputs and the launch of both halves in one call of Python. It makes a call only if everything
// about it is plain, as `Calls` does; it declines every other call by None, and Python makes that one.
#pragma once

#include "runtime/nvlink/shim.h"
#include "torch/tensors.h"

namespace deepep_moe {

// Callers hold the GIL.
class LowLatencyCalls {
public:
    struct Settings {
        int64_t num_ranks, num_local_experts, num_topk, hidden, num_max_tokens, handle_bytes;
    };
    // shim: `_C.NvlinkLowLatencyShim`. statistics: of the buffer, on its device.
    LowLatencyCalls(py::object shim, const Settings& settings, Tensor statistics);
    void release();  // the communicator: of a buffer that is destroyed

    // (num_tokens, recv_x, recv_x_scales, num_recv_tokens_per_expert, state).
    py::object dispatch(py::handle x, py::handle topk_idx, py::handle topk_weights, py::handle fp8, py::handle scale_format,
                        uintptr_t stream);
    // combined_x. state, num_tokens: of the handle.
    py::object combine(py::handle x, py::handle state, int64_t num_tokens, py::handle topk_weights, py::handle out, py::handle wire,
                       uintptr_t stream);

private:
    struct Received {
        Tensor x, x_scales, counts, state;
    };
    bool is_ready() const { return !is_watched() && shim_ != nullptr && shim_->is_ready(); }
    bool are_rows(const Tensor& x, at::IntArrayRef sizes) const;
    bool takes(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights) const;
    bool are_weights(const Tensor& topk_weights, int64_t num_tokens) const;  // or none
    Received receive_buffers(at::ScalarType type, bool fp8, bool is_rounded) const;
    Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, statistics_.options().dtype(type)); }

    const Settings settings_;
    py::object owner_;
    LowLatencyShim* shim_;
    const Tensor statistics_, number_;  // number_: of a combine, which kernels on one stream after another write
};

}  // namespace deepep_moe
