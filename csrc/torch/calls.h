// A buffer's calls on GPUs, with PyTorch's tensors: the only way from Python to the exchange (csrc/runtime/nvlink). `takes...` say yes or
// no to the arguments of a call; where they say no, Python finds out what is wrong with them.
#pragma once

#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "runtime/nvlink/shim.h"
#include "torch/handle.h"
#include "torch/streams.h"

namespace deepep_moe {

// The mode of a call.
struct Mode {
    int num_sms = -1;                         // SMs that send; 0: copy engines; -1: the buffer's
    bool is_async = false, is_split = false;  // is_async: on the buffer's own stream; is_split: the caller starts the second half
    int64_t layer = 0;                        // as CallMode has it
    bool is_late = false;                     // as CallMode has it; not if is_async or is_split
    bool is_checked = false;                  // Python has checked the call
    bool is_beside() const { return is_async && !is_split; }
};

// The inputs of a dispatch. A tensor that the caller did not give is undefined.
struct Outgoing {
    Tensor x, x_scales, topk_idx, topk_weights;  // topk_weights has as many entries as topk_idx
    int64_t tokens_per_row = 1;                  // tokens that share a row of x, one after another
};

// The inputs of a combine besides its rows. A tensor that the caller did not give is undefined.
struct CombineInputs {
    Tensor weights;            // [num_rows]
    Tensor bias;               // [num_tokens, hidden]
    Tensor topk_weight_grads;  // in the form of the topk_weights that the dispatch returned
    Tensor source_weights;     // [tokens_per_row, num_tokens / tokens_per_row], applied at the source instead of `weights`
    int64_t tokens_per_row = 1;
    CombineOptions options{};
};

// The results of a dispatch.
struct Received : InFlight {
    Tensor x, x_scales, topk_weights;
    Tensor grad_weights;  // with a scaling
    std::shared_ptr<Handle> handle;
    variable_list parts;  // the rows of each local expert, where they were asked for
};

struct Combined : InFlight {
    Tensor x, topk_weight_grads;
};

// Rows on their way are gradients of `x * weights[:, None]`; see `RowScaling` of cuda/params.h.
struct Scaling {
    Tensor weights, x;
    const ExpertRows* expert_rows = nullptr;
};

// Describes a dispatch whose counts the host has not looked at, or whose rows did not fit.
struct Late {
    GpuDispatchCall call;
    CallMode mode;
    Outgoing sent;
    std::optional<Received> received = std::nullopt;  // all rows, if they did not fit
};

// Callers hold the GIL.
class Calls : public std::enable_shared_from_this<Calls> {
public:
    struct Settings {
        int64_t number, num_topk, num_max_tokens;
        int num_sms;                                   // -1: the exchange's own
        int64_t lanes;                                 // tokens of top-1 that are lanes of one token for the exchange; 1: none are
        bool is_by_lane, is_fused;                     // sums go over lanes; as `GpuCombineParams` has it
        int64_t num_ranks, num_local_experts, hidden;  // ranks of all nodes
        int64_t num_nodes, num_node_tokens;            // the latter: 0 where there is one node
    };
    // owner: `_C.NvlinkExchange`, of `exchange`. tell(error, has_entered): tells the peers that this rank does not make its call, or does
    // not finish it.
    Calls(py::object owner, ExchangeShim& exchange, const Settings& settings, at::Device device, py::object tell);

    const Settings settings;
    bool is_released() const { return exchange_ == nullptr; }
    bool has_failed() const { return exchange_ != nullptr && exchange_->has_failed(); }  // kernels have reported a failure
    bool is_held = false;  // the buffer is suspended, or its next call raises an earlier failure: Python makes that call
    // Returns false too where a second half is to come first, and in a forked process.
    bool can_begin() const {
        const std::shared_ptr<SecondHalf> half = half_.lock();
        return !is_released() && !is_held && !has_failed() && (half == nullptr || half->is_begun()) && getpid() == process_id_;
    }
    bool can_fuse() const { return settings.num_nodes == 1; }          // rows by expert, shared rows, scaling, sums by lanes
    int64_t lanes() const { return can_fuse() ? settings.lanes : 1; }  // over nodes each is a token, and Python sums
    int64_t num_calls() const { return exchange_->num_calls(); }
    void release();  // releases the exchange of a destroyed buffer, even if something still refers to this object

    // num_recv_rows: -1 without a bound.
    Received dispatch(const Outgoing& sent, bool is_expert_layout, int64_t expert_alignment, int64_t num_recv_rows, const Mode& how);
    // Waits for the counts of the last dispatch if it is late. Rows that did not fit are received again, and the handle then has their
    // number. Every call begins with this; callers that read a handle before that call it themselves. A failure is told to the peers.
    void look_at_counts() {
        or_tell([&] { count_late(); }, true);
    }
    Received take_late(const std::shared_ptr<Handle>& handle);  // returns those rows, once
    // Sends a row of `x` to each of its token's experts. scaling: nullptr for none.
    Received dispatch_cached(const std::shared_ptr<Handle>& handle, const Outgoing& sent, const Scaling* scaling, const Mode& how);
    // Returns the sum of each token's rows, and its topk_weight_grads if asked for. x: the rows, or the first of several tensors that hold
    // them as `expert_rows` says.
    Combined combine(const Handle& handle, const Tensor& x, const ExpertRows* expert_rows, const CombineInputs& inputs, const Mode& how);

    // Return whether the calls take these.
    bool takes(const Outgoing& sent) const;
    bool takes_along(const Handle& handle, const Outgoing& sent) const;
    bool takes_rows(const Handle& handle, const Tensor& x) const;
    bool takes_inputs(const Handle& handle, const Tensor& x, const CombineInputs& inputs) const;
    bool takes_handle(const Handle& handle) const;
    // Returns the tensors' rows if kernels can read them in place. Such tensors are contiguous, of one type that can be summed, and in
    // whole pieces. Each is [1, ..., num_rows, hidden] of its expert's rows, without padding.
    std::optional<ExpertRows> expert_rows_of(at::TensorList tensors, const Handle& handle) const;
    // Are these a tensor for each local expert, of its rows, wherever they lie? All rows in one tensor, of such.
    bool can_join(at::TensorList tensors, const Handle& handle) const;
    Tensor joined(at::TensorList tensors) const;
    bool is_here(const Tensor& tensor) const { return is_on(device_, tensor); }

    HandleShape shape_of(int64_t num_tokens, bool is_expert_layout) const;
    int64_t num_handle_numbers() const { return deepep_moe::num_handle_numbers(settings.num_ranks, settings.num_local_experts); }
    // Returns the handle of an operator, which gets it in parts.
    Handle handle_of(const Tensor& memory, const Tensor& call, int64_t num_tokens, bool is_expert_layout, int64_t expert_alignment,
                     int64_t num_rows) const;

    // Returns the result of `call`. If it fails, this tells the peers. All calls that Python has not checked go through it.
    template <class Call>
    auto or_tell(const Call& call, bool was_entered = false) -> decltype(call()) {
        ExchangeShim& exchange = *exchange_;
        const py::object kept = owner_;
        const int64_t before = exchange.num_calls();
        try {
            return call();
        } catch (...) {
            raise_again(was_entered || exchange.num_calls() != before);
        }
    }

private:
    Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, at::TensorOptions(device_).dtype(type)); }
    bool are_rows(const Tensor& x, const Tensor& scales) const;
    // These fill in the call's parameters, in params.cpp. A dispatch gets its outputs by `receive_into`.
    GpuDispatchCall dispatch_call(const Handle& handle, const Outgoing& sent, int64_t num_recv_rows) const;
    GpuDispatchCall cached_dispatch_call(const Handle& handle, const Outgoing& sent) const;
    GpuCombineCall combine_call(const Handle& handle, const Tensor& x, const ExpertRows* expert_rows, const CombineInputs& inputs,
                                const Combined& combined) const;
    void receive_into(Received& rows, const Outgoing& sent, GpuDispatchCall& call, int64_t num_rows, bool is_guess, bool is_bounded) const;
    void count_late();
    CallMode begin(const Mode& how);
    CallMode begin_along(const Handle& handle, const Mode& how);
    template <class Call>
    void run(InFlight& in_flight, const Mode& how, const CallMode& mode, Call& call, variable_list& tensors,
             const std::function<bool(ExchangeShim&)>& enqueue);
    [[noreturn]] void raise_again(bool has_entered);

    py::object owner_, tell_;
    ExchangeShim* exchange_;
    const at::Device device_;
    OwnStream own_;
    std::weak_ptr<Handle> late_;
    std::weak_ptr<SecondHalf> half_;  // of the last call in two halves
    const pid_t process_id_ = getpid();
};

}  // namespace deepep_moe
