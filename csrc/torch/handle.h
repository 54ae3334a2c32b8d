// The handle of a dispatch tells where its rows came from. It is one allocation, which Python's `PackedHandle` wraps.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "cuda/params.h"
#include "torch/tensors.h"

namespace deepep_moe {

// Sections of a handle's memory, in int32. The first three hold the tokens of each local expert, the tokens from each rank, and the rows of
// lanes. The next two, over several nodes only, hold the routing of the tokens that this rank serves, and how many are of each node. The
// last holds the routing; the buffer does not determine its length.
enum HandleSection { kTokensPerExpert, kRecvCounts, kRecvRowIdx, kNodeTopkIdx, kInCounts, kTopkIdx, kNumHandleSections };

struct HandleShape {
    int64_t num_tokens = 0, num_topk = 0, num_node_tokens = 0;       // the last: that this rank serves at most; 0 where there is one node
    int64_t lanes = 1;                                               // tokens that are one token with so many lanes for the exchange
    std::array<std::array<int64_t, 2>, kNumHandleSections> sizes{};  // rows and columns; no columns: of one dimension
    std::array<int64_t, kNumHandleSections + 1> starts{};            // and the end
};

struct Late;

struct Handle {
    int64_t buffer_id = 0, expert_alignment = 1, num_rows = 0;
    bool is_expert_layout = true;
    HandleShape shape;
    Tensor memory, call;              // int32, and on the host int64: `DispatchHandle` says what is in them
    Tensor recv_topk_idx;             // only in the rank layout
    std::optional<uintptr_t> stream;  // stream of the dispatch's caller, to which the memory belongs
    std::shared_ptr<Late> late;       // set until the host knows that the rows fit
    std::shared_ptr<bool> is_unfit;   // shared by a late dispatch and its backward: its first outputs hold no rows
    std::array<uint32_t, 3> versions{};

    // Returns the versions of memory, call and recv_topk_idx, by which PyTorch counts changes in place.
    std::array<uint32_t, 3> current_versions() const {
        const auto version_of = [](const Tensor& tensor) { return tensor.defined() ? static_cast<uint32_t>(tensor._version()) : 0; };
        return {version_of(memory), version_of(call), version_of(recv_topk_idx)};
    }
    void seal() { versions = current_versions(); }  // a tensor that is changed in place from now on is an error in the next call
    bool is_unchanged() const {
        const auto now = current_versions();
        return now[0] == versions[0] && now[1] == versions[1];  // no call reads recv_topk_idx
    }
    bool has_recv_topk_idx() const { return current_versions()[2] == versions[2]; }

    Tensor section(int i) const {
        TORCH_CHECK(has_memory(memory), "a tensor of this handle was freed after its dispatch; dispatch again");
        const c10::InferenceMode counts_changes(false);  // so that PyTorch counts changes in place
        const at::IntArrayRef sizes(shape.sizes.at(i));
        const Tensor part = part_of(memory, shape.starts[i], sizes[1] == 0 ? sizes.slice(0, 1) : sizes);
        part.unsafeGetTensorImpl()->set_version_counter(memory.unsafeGetTensorImpl()->version_counter());  // a change in place is seen
        return part;
    }
    // Returns the number of rows of each local expert, or -1 if the host does not know it.
    at::ArrayRef<int64_t> counts_on_host() const {
        const int64_t num_experts = shape.sizes[kTokensPerExpert][0];
        return {call.const_data_ptr<int64_t>() + call.numel() - num_experts, static_cast<size_t>(num_experts)};
    }
    // Returns [num_local_experts] int64, padding included, or an undefined tensor if the host does not know the counts.
    Tensor num_rows_per_expert_on_host() const {
        const at::ArrayRef<int64_t> counts = counts_on_host();
        if (counts[0] < 0) return {};
        const Tensor rows = at::empty({static_cast<int64_t>(counts.size())}, at::kLong);
        std::transform(counts.begin(), counts.end(), rows.mutable_data_ptr<int64_t>(),
                       [&](int64_t count) { return (count + expert_alignment - 1) / expert_alignment * expert_alignment; });
        return rows;
    }
    // Returns a handle like this one with other tensors: those that a backward has saved, or none.
    Handle with(const Tensor& saved_memory, const Tensor& saved_call) const {
        Handle copy = *this;
        copy.memory = saved_memory, copy.call = saved_call, copy.recv_topk_idx = Tensor(), copy.late = nullptr;
        if (copy.memory.defined()) copy.seal();
        return copy;
    }

    int64_t number() const { return *call.const_data_ptr<int64_t>(); }  // of the dispatch among the calls of its buffer
    Layout layout() const { return is_expert_layout ? Layout::kExpert : Layout::kRank; }
    // Returns the address of a section, which the dispatch writes.
    int32_t* at(HandleSection section) const { return const_cast<int32_t*>(memory.const_data_ptr<int32_t>()) + shape.starts[section]; }
    // Returns the routing of `num_tokens` tokens in a section, as the exchange takes it.
    GpuTopkIdx experts_at(HandleSection section, int64_t num_tokens) const {
        return {at(section), shape.num_topk * shape.lanes, 1, false, static_cast<int>(num_tokens / shape.lanes)};
    }
};

}  // namespace deepep_moe
