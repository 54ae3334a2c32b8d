#include "cpu/dispatch.h"

#include <cstring>

#include "cpu/row_ops.h"

namespace deepep_moe {
namespace {

// Points to a token that arrives: from a ring slot, or from this rank's x.
struct Arrival {
    const int32_t* experts;  // [num_topk] local experts, -1 = not here
    const float* weights;    // [num_topk]
    const std::byte* row;
    const std::byte* scales;
};

class DispatchChannel {
public:
    DispatchChannel(const DispatchParams& p, const Channel& c)
        : p_(p),
          c_(c),
          slot_(c.num_topk, p.row_bytes, p.scale_bytes),
          experts_per_rank_(c.num_experts / c.num_ranks),
          range_(channel_range(p.num_tokens, c.channel, c.num_channels)),
          masks_(rank_masks(p.topk_idx, range_, c.num_topk, experts_per_rank_)),
          peers_(c.num_ranks) {
        for (int peer = 0; peer < c.num_ranks; ++peer) {
            Peer& state = peers_[peer];
            state.next_token = range_.begin;
            state.sender = c.sender(peer, slot_);
            state.receiver = c.receiver(peer, slot_);
            state.expected = p.recv_counts[peer * c.num_channels + c.channel];
            state.first_slot = first_slot(p.recv_counts, peer, c.channel, c.num_channels);
            if (p.row_begin != nullptr) {
                const int32_t* begin = p.row_begin + (static_cast<size_t>(peer) * c.num_channels + c.channel) * experts_per_rank_;
                state.next_row.assign(begin, begin + experts_per_rank_);
            }
            skip_to_next(peer);
        }
    }

    void run() {
        Waiter waiter(*c_.monitor);
        while (!done()) {
            bool moved = false;
            for (int offset = 1; offset < c_.num_ranks; ++offset) {
                moved |= send((c_.rank + offset) % c_.num_ranks);
                moved |= receive((c_.rank + c_.num_ranks - offset) % c_.num_ranks);
            }
            if (!moved) moved = deliver_own();  // use the time in which no peer can be served for rows that stay here
            if (moved)
                waiter.progress();
            else
                waiter.idle([&](auto&& report) { report_lacks(report); });
        }
        finish_streaming();
    }

private:
    struct Peer {
        RingSender sender;
        RingReceiver receiver;
        int64_t next_token;  // the next token of this rank for the peer, or the range's end
        int64_t first_slot;  // first slot of the peer's tokens here
        int64_t delivered = 0, expected;
        std::vector<int32_t> next_row;  // [num_local_experts] where the peer's next row of each expert goes
    };

    void skip_to_next(int peer) {
        int64_t& token = peers_[peer].next_token;
        while (token < range_.end && (masks_[token - range_.begin] >> peer & 1) == 0) ++token;
    }

    bool done() const {
        for (const Peer& peer : peers_)
            if (peer.next_token < range_.end || peer.delivered < peer.expected) return false;
        return true;
    }

    void local_experts(int64_t token, int rank, int32_t* experts) const {
        const int32_t first = rank * experts_per_rank_;
        for (int k = 0; k < c_.num_topk; ++k) {
            const int32_t expert = p_.topk_idx[token * c_.num_topk + k] - first;
            experts[k] = expert >= 0 && expert < experts_per_rank_ ? expert : -1;
        }
    }

    void fill_slot(std::byte* slot, int64_t token, int peer) const {
        local_experts(token, peer, reinterpret_cast<int32_t*>(slot));
        if (p_.topk_weights != nullptr)
            std::memcpy(slot + slot_.values_offset, p_.topk_weights + token * c_.num_topk, sizeof(float) * c_.num_topk);
        std::memcpy(slot + slot_.row_offset, p_.x + token * p_.row_bytes, p_.row_bytes);
        if (p_.x_scales != nullptr) std::memcpy(slot + slot_.scales_offset, p_.x_scales + token * p_.scale_bytes, p_.scale_bytes);
    }

    bool send(int peer) {
        Peer& state = peers_[peer];
        int count = 0;
        for (; count < kBatch && state.next_token < range_.end; ++count) {
            std::byte* slot = state.sender.next();
            if (slot == nullptr) break;
            fill_slot(slot, state.next_token++, peer);
            state.sender.push();
            skip_to_next(peer);
        }
        if (count > 0) state.sender.publish();
        return count > 0;
    }

    bool receive(int source) {
        Peer& state = peers_[source];
        int count = 0;
        for (; count < kBatch && state.delivered < state.expected; ++count) {
            const std::byte* slot = state.receiver.next();
            if (slot == nullptr) break;
            deliver(state, {reinterpret_cast<const int32_t*>(slot), reinterpret_cast<const float*>(slot + slot_.values_offset),
                            slot + slot_.row_offset, slot + slot_.scales_offset});
            state.receiver.pop();
        }
        if (count > 0) state.receiver.publish();
        return count > 0;
    }

    bool deliver_own() {
        Peer& state = peers_[c_.rank];
        int count = 0;
        for (; count < kBatch && state.next_token < range_.end; ++count) {
            const int64_t token = state.next_token++;
            int32_t experts[kMaxTopk];
            local_experts(token, c_.rank, experts);
            deliver(state, {experts, at(p_.topk_weights, token * c_.num_topk), at(p_.x, token * p_.row_bytes),
                            at(p_.x_scales, token * p_.scale_bytes)});
            skip_to_next(c_.rank);
        }
        return count > 0;
    }

    void deliver(Peer& source, const Arrival& arrival) {
        const int64_t slot = source.first_slot + source.delivered++;
        if (p_.layout == Layout::kExpert) return expand(source, slot, arrival);
        put_row(slot, arrival);
        for (int k = 0; k < c_.num_topk; ++k) {
            const int64_t lane = slot * c_.num_topk + k;
            if (p_.recv_topk_idx != nullptr && p_.recv_topk_idx_is_int64)
                static_cast<int64_t*>(p_.recv_topk_idx)[lane] = arrival.experts[k];
            if (p_.recv_topk_idx != nullptr && !p_.recv_topk_idx_is_int64)
                static_cast<int32_t*>(p_.recv_topk_idx)[lane] = arrival.experts[k];
            if (p_.recv_topk_weights != nullptr) p_.recv_topk_weights[lane] = arrival.experts[k] >= 0 ? arrival.weights[k] : 0.0f;
        }
    }

    void expand(Peer& source, int64_t slot, const Arrival& arrival) {
        for (int k = 0; k < c_.num_topk; ++k) {
            int32_t& row = p_.recv_row_idx[slot * c_.num_topk + k];
            if (!p_.cached) row = arrival.experts[k] >= 0 ? source.next_row[arrival.experts[k]]++ : -1;
            if (row < 0) continue;
            put_row(row, arrival);
            if (p_.recv_topk_weights != nullptr) p_.recv_topk_weights[row] = arrival.weights[k];
        }
    }

    void put_row(int64_t row, const Arrival& arrival) {
        copy_row(p_.recv_x + row * p_.row_bytes, arrival.row, p_.row_bytes, p_.streaming);
        if (p_.recv_x_scales != nullptr) std::memcpy(p_.recv_x_scales + row * p_.scale_bytes, arrival.scales, p_.scale_bytes);
    }

    template <class Report>
    void report_lacks(Report&& report) const {
        for (int peer = 0; peer < c_.num_ranks; ++peer) {
            const Peer& state = peers_[peer];
            if (peer == c_.rank) continue;
            if (state.delivered < state.expected && state.receiver.is_empty())
                report(Lack{peer, "dispatch rows", state.expected, state.delivered});
            if (state.next_token < range_.end && state.sender.is_full())
                report(Lack{peer, "dispatch ring space", state.sender.filled(), state.sender.drained()});
        }
    }

    const DispatchParams& p_;
    const Channel& c_;
    const SlotLayout slot_;
    const int experts_per_rank_;
    const Range range_;
    const std::vector<uint64_t> masks_;  // a mask of ranks for each token of range_
    std::vector<Peer> peers_;            // [num_ranks], this rank included
};

}  // namespace

void move_channel(const DispatchParams& params, const Channel& channel) { DispatchChannel(params, channel).run(); }

}  // namespace deepep_moe
