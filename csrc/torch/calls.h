// A buffer's plain calls from C++, with PyTorch's tensors: the host's shortest way to the exchange (csrc/runtime/nvlink). It makes a call
// only if everything about it is plain: tensors of PyTorch's own class on the buffer's device, with shapes and types that the call takes.
// It declines every other call, and Python makes that one, with the same bits and with errors that say what is wrong.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <utility>

#include "runtime/nvlink/shim.h"
#include "torch/tensors.h"

namespace deepep_moe {

// What a call along a dispatch needs of it: a `DispatchHandle`.
struct Dispatched {
    Tensor memory, call;  // as of the handle
    int64_t num_rows = 0, num_tokens = 0;
    std::array<int64_t, 5> starts{};  // of the sections of `memory`, in int32, and its end
    bool is_expert_layout = true;
    int64_t expert_alignment = 1;
};

// What a dispatch sends. Undefined tensors: not given.
struct Outgoing {
    Tensor x, x_scales, topk_idx, topk_weights;  // the last of as many entries as topk_idx
    int64_t tokens_per_row = 1;                  // of x, one after another
};

// What a dispatch brings.
struct Incoming {
    Tensor x, x_scales, topk_idx, topk_weights;
};

// What a combine takes besides its rows. Undefined tensors: not given.
struct CombineInputs {
    Tensor weights;            // [num_rows]
    Tensor bias;               // [num_tokens, hidden]
    Tensor topk_weight_grads;  // as the dispatch returned topk_weights
    Tensor source_weights;     // [tokens_per_row, num_tokens / tokens_per_row], applied at the source instead of `weights`
    int64_t tokens_per_row = 1;
    bool sums_lanes = false;  // of topk_weight_grads, as `GpuCombineParams` has it
};

// Callers hold the GIL.
class Calls {
public:
    struct Settings {
        int64_t number, num_ranks, num_local_experts, num_topk, hidden, num_max_tokens;
        int num_sms;  // -1: the exchange's own
    };
    // shim: `_C.ExchangeShim`. shape_of(num_tokens, layout): the `HandleShape` of a dispatch. current_stream(): its address.
    // tell(error, has_entered): tells the peers that this rank does not make its call, or does not finish it.
    Calls(py::object shim, const Settings& settings, at::Device device, py::object shape_of, py::object current_stream, py::object tell);

    const Settings settings;
    bool is_ready() const { return exchange_ != nullptr && !exchange_->has_failed(); }
    int64_t num_calls() const { return exchange_->num_calls(); }
    void release();  // the exchange: of a buffer that is destroyed, whoever still refers to this

    // num_recv_rows: -1 without a bound. num_sms: -1 as the settings say.
    Dispatched dispatch(const Outgoing& out, Incoming& in, bool is_expert_layout, int64_t expert_alignment, int64_t num_recv_rows,
                        int num_sms);
    // A row of `x` to each of its token's experts. scaling: see `RowScaling`, or nullptr.
    Incoming dispatch_cached(const Dispatched& handle, const Outgoing& out, const RowScaling* scaling, int num_sms);
    // The sum of each token's rows, and, if asked for, its topk_weight_grads. x: the rows, or the first of several tensors that hold them
    // as `expert_rows` says.
    std::pair<Tensor, Tensor> combine(const Dispatched& handle, const Tensor& x, const ExpertRowsArg* expert_rows,
                                      const CombineInputs& inputs, int num_sms);

    // Are these what the calls take?
    bool takes(const Outgoing& out) const;
    bool takes_along(const Dispatched& handle, const Outgoing& out) const;
    bool takes_rows(const Dispatched& handle, const Tensor& x) const;
    bool takes_inputs(const Dispatched& handle, const Tensor& x, const CombineInputs& inputs) const;
    // The tensors' rows if kernels can read them where they are: contiguous, of one type that can be summed, each with its expert's rows.
    std::optional<ExpertRowsArg> expert_rows_of(at::TensorList tensors, const Dispatched& handle) const;
    bool is_here(const Tensor& tensor) const { return is_on(device_, tensor); }

    py::object shape_of(int64_t num_tokens, bool is_expert_layout) const;
    const int64_t* counts_of(const Dispatched& handle) const;  // of each local expert, on the host
    Tensor tokens_per_expert(const Dispatched& handle) const;  // [num_local_experts], a part of the handle's memory
    static RowScaling scaling(const Tensor& weights, const Tensor& x, const ExpertRowsArg* expert_rows, const Tensor& grad_weights);

    // What `call` returns. If it fails, the peers are told. All calls are made in this.
    template <class Call>
    auto or_tell(const Call& call) {
        ExchangeShim& exchange = *exchange_;
        const py::object kept = shim_;  // which owns the exchange
        const int64_t before = exchange.num_calls();
        try {
            return call();
        } catch (...) {
            raise_again(exchange.num_calls() != before);
        }
    }

private:
    HandleArg handle_arg(const Dispatched& handle) const;
    Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, at::TensorOptions(device_).dtype(type)); }
    bool are_rows(const Tensor& x, const Tensor& scales) const;
    Incoming receive_buffers(const Outgoing& out, GpuDispatchCall& call, int64_t num_rows, bool is_guess, bool is_bounded) const;
    CallMode mode(int num_sms) const;
    [[noreturn]] void raise_again(bool has_entered);
    const std::array<int64_t, 5>& starts_of(int64_t num_tokens, bool is_expert_layout);

    py::object shim_, make_shape_, current_stream_, tell_;
    ExchangeShim* exchange_;
    const at::Device device_;
    std::array<int64_t, 5> starts_[2]{};  // by layout, of the last dispatch, which had
    int64_t num_tokens_[2] = {-1, -1};
};

}  // namespace deepep_moe
