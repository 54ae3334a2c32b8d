#include "cpu/combine.h"

#include <bit>
#include <cstring>

#include "cpu/row_ops.h"

namespace deepep_moe {
namespace {

class CombineChannel {
public:
    CombineChannel(const CombineParams& p, const Channel& c)
        : p_(p),
          c_(c),
          row_bytes_(element_bytes(p.dtype) * c.hidden),
          slot_(c.num_topk, row_bytes_, 0),
          experts_per_rank_(c.num_experts / c.num_ranks),
          range_(channel_range(p.num_tokens, c.channel, c.num_channels)),
          masks_(rank_masks(p.topk_idx, range_, c.num_topk, experts_per_rank_)),
          next_token_(range_.begin),
          own_slot_(slot_.bytes),
          peers_(c.num_ranks) {
        if (c.ranks_per_node < c.num_ranks) {
            node_sums_.resize(static_cast<size_t>(c.num_ranks / c.ranks_per_node) * c.hidden);
            rounded_.resize(row_bytes_);
        }
        for (int peer = 0; peer < c.num_ranks; ++peer) {
            Peer& state = peers_[peer];
            state.sender = c.sender(peer, slot_);
            state.receiver = c.receiver(peer, slot_);
            state.next_slot = first_slot(p.recv_counts, peer, c.channel, c.num_channels);
            state.last_slot = state.next_slot + p.recv_counts[peer * c.num_channels + c.channel];
        }
    }

    void run() {
        Waiter waiter(*c_.monitor);
        while (!done()) {
            bool moved = false;
            for (int offset = 1; offset < c_.num_ranks; ++offset) moved |= send((c_.rank + offset) % c_.num_ranks);
            moved |= finish_tokens();
            if (moved)
                waiter.progress();
            else
                waiter.idle([&](auto&& report) { report_lacks(report); });
        }
    }

private:
    struct Peer {
        RingSender sender;
        RingReceiver receiver;
        int64_t next_slot, last_slot;  // slots of the tokens that have come from the peer
    };

    bool done() const {
        if (next_token_ < range_.end) return false;
        for (int peer = 0; peer < c_.num_ranks; ++peer)
            if (peer != c_.rank && peers_[peer].next_slot < peers_[peer].last_slot) return false;
        return true;
    }

    // On the experts' rank, writes one row of the wire's dtype and one value per top-k entry, for the token in `slot_idx`.
    void reduce(int64_t slot_idx, bool is_last, std::byte* slot) const {
        const void* rows[kMaxTopk] = {p_.x + slot_idx * row_bytes_};
        float weights[kMaxTopk] = {p_.weights != nullptr ? p_.weights[slot_idx] : 1.0f};
        auto* values = reinterpret_cast<float*>(slot + slot_.values_offset);
        int num_rows = 1;
        if (p_.layout == Layout::kExpert) {
            num_rows = gather(p_.recv_row_idx + slot_idx * c_.num_topk, rows, weights, values);
        } else if (p_.topk_weight_grads != nullptr) {
            std::memcpy(values, p_.topk_weight_grads + slot_idx * c_.num_topk, sizeof(float) * c_.num_topk);
        }
        if (num_rows == 1 && p_.weights == nullptr) {
            std::memcpy(slot + slot_.row_offset, rows[0], row_bytes_);
            return;
        }
        const void* next_rows[kMaxTopk];
        const int num_next =
            p_.layout == Layout::kExpert && !is_last ? gather(p_.recv_row_idx + (slot_idx + 1) * c_.num_topk, next_rows) : 0;
        sum_rows(p_.dtype, {slot + slot_.row_offset, rows, p_.weights != nullptr ? weights : nullptr, nullptr, num_rows, c_.hidden,
                            next_rows, num_next});
    }

    int gather(const int32_t* row_of_lane, const void** rows, float* weights = nullptr, float* values = nullptr) const {
        int num_rows = 0;
        for (int k = 0; k < c_.num_topk; ++k) {
            const int32_t row = row_of_lane[k];
            if (values != nullptr && p_.topk_weight_grads != nullptr) values[k] = row >= 0 ? p_.topk_weight_grads[row] : 0.0f;
            if (row < 0) continue;
            rows[num_rows] = p_.x + static_cast<size_t>(row) * row_bytes_;
            if (weights != nullptr && p_.weights != nullptr) weights[num_rows] = p_.weights[row];
            ++num_rows;
        }
        return num_rows;
    }

    void reduce_next(Peer& source, std::byte* slot) const {
        const int64_t slot_idx = source.next_slot++;
        reduce(slot_idx, source.next_slot == source.last_slot, slot);
    }

    bool send(int peer) {
        Peer& state = peers_[peer];
        int count = 0;
        for (; count < kBatch && state.next_slot < state.last_slot; ++count) {
            std::byte* slot = state.sender.next();
            if (slot == nullptr) break;
            reduce_next(state, slot);
            state.sender.push();
        }
        if (count > 0) state.sender.publish();
        return count > 0;
    }

    // On the source rank, sums the tokens whose rows have all come.
    bool finish_tokens() {
        int count = 0;
        for (; count < kBatch && next_token_ < range_.end && finish(next_token_, masks_[next_token_ - range_.begin]); ++count)
            ++next_token_;
        if (count == 0) return false;
        for (int peer = 0; peer < c_.num_ranks; ++peer)
            if (peer != c_.rank) peers_[peer].receiver.publish();
        return true;
    }

    bool finish(int64_t token, uint64_t mask) {
        const std::byte* slots[kMaxRanks];
        const void* rows[kMaxRanks];
        int num_rows = 0;
        for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
            const int rank = std::countr_zero(rest);
            slots[rank] = rank == c_.rank ? own_slot_.data() : peers_[rank].receiver.next();
            if (slots[rank] == nullptr) return false;
            rows[num_rows++] = slots[rank] + slot_.row_offset;
        }
        if (mask >> c_.rank & 1) reduce_next(peers_[c_.rank], own_slot_.data());
        const std::byte* bias = p_.bias != nullptr ? p_.bias + token * row_bytes_ : nullptr;
        const SumParams sum{p_.combined_x + token * row_bytes_, rows, nullptr, bias, num_rows, c_.hidden, nullptr, 0};
        if (node_sums_.empty())
            sum_rows(p_.dtype, sum);
        else
            sum_over_nodes(mask, sum);
        if (p_.combined_topk_weight_grads != nullptr) {
            if (p_.options.sums_lanes)
                sum_lanes(token, mask, slots);
            else
                take_topk_weight_grads(token, slots);
        }
        for (uint64_t rest = mask & ~(uint64_t{1} << c_.rank); rest != 0; rest &= rest - 1) peers_[std::countr_zero(rest)].receiver.pop();
        return true;
    }

    // Sums of.rows, which has one row for each rank of `mask`, ascending. A node's sum is rounded if it would cross to this node.
    void sum_over_nodes(uint64_t mask, const SumParams& of) {
        const void* sums[kMaxRanks];
        int num_sums = 0;
        const void* const* rows = of.rows;
        for (int first = 0; first < c_.num_ranks; first += c_.ranks_per_node) {
            const int num_rows = std::popcount(mask >> first & ((uint64_t{1} << c_.ranks_per_node) - 1));
            if (num_rows == 0) continue;
            float* const sum = node_sums_.data() + static_cast<size_t>(num_sums) * c_.hidden;
            const void* const rounded = rounded_.data();
            SumParams node{sum, rows, nullptr, nullptr, num_rows, c_.hidden, nullptr, 0};
            if (c_.rank / c_.ranks_per_node != first / c_.ranks_per_node) {
                sum_rows(p_.dtype, {rounded_.data(), rows, nullptr, nullptr, num_rows, c_.hidden, nullptr, 0});
                node.rows = &rounded, node.num_rows = 1;
            }
            sum_rows_to_float32(p_.dtype, node);
            sums[num_sums++] = sum;
            rows += num_rows;
        }
        sum_float32_rows(p_.dtype, {of.sum, sums, nullptr, of.bias, num_sums, c_.hidden, nullptr, 0});
    }

    void take_topk_weight_grads(int64_t token, const std::byte* const* slots) {
        for (int64_t lane = token * c_.num_topk, k = 0; k < c_.num_topk; ++k, ++lane) {
            const int32_t expert = p_.topk_idx[lane];
            const auto* values =
                expert >= 0 ? reinterpret_cast<const float*>(slots[expert / experts_per_rank_] + slot_.values_offset) : nullptr;
            p_.combined_topk_weight_grads[lane] = values != nullptr ? values[k] : 0.0f;
        }
    }

    void sum_lanes(int64_t token, uint64_t mask, const std::byte* const* slots) {
        float* const sums = p_.combined_topk_weight_grads + token * c_.num_topk;
        std::fill_n(sums, c_.num_topk, 0.0f);
        for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
            const auto* values = reinterpret_cast<const float*>(slots[std::countr_zero(rest)] + slot_.values_offset);
            for (int k = 0; k < c_.num_topk; ++k) sums[k] += values[k];
        }
    }

    template <class Report>
    void report_lacks(Report&& report) const {
        const uint64_t wanted = next_token_ < range_.end ? masks_[next_token_ - range_.begin] : 0;
        for (int peer = 0; peer < c_.num_ranks; ++peer) {
            if (peer == c_.rank) continue;
            const Peer& state = peers_[peer];
            if ((wanted >> peer & 1) && state.receiver.is_empty())
                report(Lack{peer, "combine rows", state.receiver.drained() + 1, state.receiver.filled()});
            if (state.next_slot < state.last_slot && state.sender.is_full())
                report(Lack{peer, "combine ring space", state.sender.filled(), state.sender.drained()});
        }
    }

    const CombineParams& p_;
    const Channel& c_;
    const size_t row_bytes_;
    const SlotLayout slot_;
    const int experts_per_rank_;
    const Range range_;
    const std::vector<uint64_t> masks_;  // a mask of ranks for each token of range_
    int64_t next_token_;
    std::vector<std::byte> own_slot_;
    std::vector<float> node_sums_;    // [num_nodes, hidden], if there are several nodes
    std::vector<std::byte> rounded_;  // one row, a node's rounded sum
    std::vector<Peer> peers_;         // [num_ranks], this rank included
};

}  // namespace

void move_channel(const CombineParams& params, const Channel& channel) { CombineChannel(params, channel).run(); }

}  // namespace deepep_moe
