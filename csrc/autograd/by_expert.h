// Dispatch and combine of rows by expert as autograd functions of PyTorch, in C++. What they do, in what order and with which kernels is
// that of deepep_moe/by_expert.py and deepep_moe/backends/nvlink.py, which also make every call that these decline: of tensors that kernels
// cannot read where they are, under transforms and modes, with arguments to be refused. Results do not depend on who makes a call.
#pragma once

#include <torch/extension.h>

#include <array>
#include <optional>
#include <utility>

#include "common/gpu_calls.h"

namespace deepep_moe {

using at::Tensor;
using torch::autograd::variable_list;

// Sections of the memory of a `PackedHandle`, in int32, and its end.
struct HandleShape {
    py::object shape;  // of Python
    int64_t num_tokens = -1;
    std::array<int64_t, 5> starts{};
};

// What a call along a dispatch needs of it.
struct Dispatched {
    Tensor memory, call;  // as of `PackedHandle`
    int64_t num_rows = 0, num_tokens = 0;
    std::array<int64_t, 4> starts{};
};

// What a dispatch sends.
struct Outgoing {
    Tensor x, topk_idx, topk_weights;  // the last of as many entries as topk_idx, or undefined
};

// A buffer's calls. Python has seen that nothing else is in flight in the buffer. Callers hold the GIL.
class ByExpert {
public:
    struct Settings {
        int64_t number, num_ranks, num_local_experts, num_topk, hidden, num_max_tokens;
        int num_sms, num_sms_of_sums;
    };
    // communicator: `_C.GpuCommunicator`. shape_of(num_tokens): the `HandleShape` of a dispatch. current_stream(): its address.
    // abort(error): tells the peers that this rank does not make its call.
    ByExpert(py::object communicator, const Settings& settings, at::Device device, py::object shape_of, py::object current_stream,
             py::object abort);

    const Settings settings;
    bool is_ready() const { return calls_ != nullptr && !calls_->has_failed(); }
    void release();  // the communicator: of a buffer that is destroyed, whoever still refers to this

    // Of a dispatch, with what it receives; there may be room for more rows behind the last.
    Dispatched dispatch(const Outgoing& out, Tensor& recv_x, Tensor& recv_weights);
    // A row of `x` to each of its token's experts. weighing: see `GpuWeighing`, or nullptr.
    Tensor dispatch_cached(const Dispatched& handle, const Tensor& x, const GpuWeighing* weighing);
    // The sum of each token's rows, and, if asked for, the values of its lanes.
    std::pair<Tensor, Tensor> combine(const Dispatched& handle, const Tensor& first, const PartsArg& parts, const Tensor& weights,
                                      const Tensor& lane_values, const Tensor& at_source, int64_t repeats);

    const HandleShape& shape_of(int64_t num_tokens);
    bool takes(const Outgoing& out, int64_t repeats) const;
    // Has the tensor memory on this device, which a kernel can be given?
    bool is_here(const Tensor& tensor) const {
        return tensor.defined() && tensor.device() == device_ && tensor.layout() == at::kStrided &&
               !tensor.unsafeGetTensorImpl()->is_python_dispatch();
    }
    // Those of tensors that kernels can read where they are: contiguous, of one type that can be summed, each with its expert's rows.
    std::optional<PartsArg> parts_of(at::TensorList tensors, const Dispatched& handle) const;
    const int64_t* counts_of(const Dispatched& handle) const;  // of each local expert
    bool takes_weights(const Tensor& weights, const Tensor& at_source, const Dispatched& handle) const;
    static GpuWeighing weighing(const Tensor& weights, const Tensor& first, const PartsArg& parts, const Tensor& grad_weights);

    // What `call` returns. Of what fails before the call is entered the peers are told. All calls are made in this.
    template <class Call>
    auto or_tell(const Call& call) {
        GpuCalls& calls = *calls_;
        const py::object kept = communicator_;  // which owns the calls
        const int64_t before = calls.num_calls();
        try {
            return call();
        } catch (...) {
            raise_again(calls.num_calls() == before);
        }
    }

private:
    HandleArg handle_arg(const Dispatched& handle) const;
    Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, at::TensorOptions(device_).dtype(type)); }
    uintptr_t current_stream() const;
    // What `steps` return, without the GIL: launches wait where a stream has too many, and for peers.
    template <class Steps>
    auto unlocked(const Steps& steps) {
        GpuCalls& calls = *calls_;
        const py::gil_scoped_release released;
        return steps(calls);
    }
    [[noreturn]] void raise_again(bool tells);
    void require(bool was_made);

    py::object communicator_, make_shape_, current_stream_, abort_;
    GpuCalls* calls_;
    const at::Device device_;
    RowGuess guess_;
    HandleShape shape_;
};

[[noreturn]] void raise_python();  // the error that Python has

}  // namespace deepep_moe
