// A low-latency buffer's calls on GPUs, with PyTorch's tensors: the only way from Python to csrc/runtime/nvlink/low_latency. C++ says yes
// or no to the arguments of a call; where it says no, Python finds out what is wrong with them.
#pragma once

#include <memory>
#include <optional>

#include "runtime/nvlink/shim.h"
#include "torch/streams.h"

namespace deepep_moe {

struct LowLatencyReceived : InFlight {
    Tensor x, x_scales, counts, state;
    int64_t num_tokens = 0;  // tokens of this rank
};

struct LowLatencyCombined : InFlight {
    Tensor x;
};

// Callers hold the GIL.
class LowLatencyCalls : public std::enable_shared_from_this<LowLatencyCalls> {
public:
    // owner: `_C.NvlinkLowLatency`. statistics: of the buffer, on its device.
    LowLatencyCalls(py::object owner, Tensor statistics);
    void release();  // the communicator: of a buffer that is destroyed

    // Takes the arguments of the Python methods. Returns nothing if C++ does not take one of them, unless Python has checked the call
    // (`is_checked`).
    std::optional<LowLatencyReceived> dispatch(py::handle x, py::handle topk_idx, py::handle topk_weights, py::handle fp8,
                                               py::handle scale_format, py::handle async_op, py::handle return_hook, bool is_checked);
    // state, num_tokens: of the handle.
    std::optional<LowLatencyCombined> combine(py::handle x, py::handle state, int64_t num_tokens, py::handle topk_weights, py::handle out,
                                              py::handle wire, py::handle async_op, py::handle return_hook, bool is_checked);

private:
    bool is_ready() const { return !is_watched() && shim_ != nullptr && shim_->is_ready(); }
    bool are_rows(const Tensor& x, at::IntArrayRef sizes) const;
    bool takes(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights) const;
    bool are_weights(const Tensor& topk_weights, int64_t num_tokens) const;  // or none
    void receive_into(LowLatencyReceived& received, at::ScalarType type, bool fp8, bool is_rounded) const;
    template <class Params>
    void run(InFlight& in_flight, py::handle async_op, py::handle return_hook, variable_list tensors, const Params& params);
    Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, statistics_.options().dtype(type)); }

    py::object owner_;
    LowLatencyShim* shim_;
    const LowLatencyConfig sizes_;
    const int64_t handle_bytes_;
    const Tensor statistics_, number_;  // number_: of a combine, which kernels on one stream after another write
    OwnStream own_;
};

}  // namespace deepep_moe
