// Low-latency calls over shared memory: one thread of a rank sends while another one receives the call before. Refusals, masks.
#include <algorithm>
#include <functional>
#include <map>

#include "common/errors.h"
#include "ranks.h"
#include "runtime/shm/low_latency.h"

namespace deepep_moe {
namespace {

constexpr double kTimeoutS = 300;

// Half of a rank's batch: a dispatch and the combine of what it received.
class Batch {
public:
    // weighs_late: its weights are given to combine, not to dispatch.
    Batch(ShmLowLatency& exchange, const Tokens& tokens, int rank, std::vector<int64_t>& wait_ns, bool weighs_late)
        : exchange_(exchange),
          weighs_late_(weighs_late),
          tokens_(tokens),
          rank_(rank),
          wait_ns_(wait_ns),
          weights_(tokens.weights(rank)),
          received_(tokens.num_ranks) {}

    void send_dispatch(int number) {
        step_ = number;
        x_ = tokens_.rows(number, rank_);
        run(LowLatencyOperation::kDispatch, true);
    }
    void receive_dispatch(RankSet alive) {
        run(LowLatencyOperation::kDispatch, false);
        for (int source = 0; source < tokens_.num_ranks; ++source) {
            const int num_tokens = contains(alive, source) ? tokens_.count(source) : 0;
            require(received_[source].size() == static_cast<size_t>(num_tokens) * tokens_.hidden, "rows of a rank");
            for (int token = 0; token < num_tokens; ++token) {
                const float value = tokens_.value(step_, source, token);
                tokens_.check_row(&received_[source][token * tokens_.hidden], value, value + 0.5f, "received row");
            }
        }
    }
    void send_combine() { run(LowLatencyOperation::kCombine, true); }
    void receive_combine(RankSet alive) {
        run(LowLatencyOperation::kCombine, false);
        for (int token = 0; token < tokens_.count(rank_); ++token) {
            float factor = 0;
            for (int to = 0; to < tokens_.num_ranks; ++to)
                if (contains(alive, to)) factor += static_cast<float>(to + 1) * tokens_.weight(token, to);
            const float value = tokens_.value(step_, rank_, token);
            tokens_.check_row(&combined_[token * tokens_.hidden], factor * value, factor * (value + 0.5f), "combined row");
        }
    }

private:
    // Every token goes to every rank, which multiplies it by its number and its weight.
    class Rows final : public LowLatencyRows {
    public:
        Rows(Batch& batch, LowLatencyOperation operation) : b_(batch), is_dispatch_(operation == LowLatencyOperation::kDispatch) {}

        void write(uint64_t number, RankSet ranks) override {
            b_.number_ = number;
            visit(ranks, [&](int to) {
                if (is_dispatch_ != b_.weighs_late_) std::copy(b_.weights_.begin(), b_.weights_.end(), weights(to, b_.rank_));
                if (is_dispatch_) std::copy(b_.x_.begin(), b_.x_.end(), slots(to, b_.rank_));
            });
            if (!is_dispatch_ && !b_.weighs_late_) write_weighted(number, ranks);
        }
        void write_weighted(uint64_t, RankSet ranks) override {
            visit(ranks, [&](int to) {
                if (b_.weighs_late_) b_.keep_weights(to, weights(b_.rank_, to));
                const auto& rows = b_.received_[to];
                for (size_t i = 0; i < rows.size(); ++i)
                    slots(to, b_.rank_)[i] = rows[i] * static_cast<float>(b_.rank_ + 1) * b_.kept_weights_[to][i / b_.tokens_.hidden];
            });
        }
        void read(uint64_t, RankSet entered, RankSet arrived, const std::vector<int>& values) override {
            require(entered == arrived, "all rows of those that have entered");
            b_.combined_.assign(b_.x_.size(), 0);
            if (is_dispatch_) b_.received_.assign(b_.tokens_.num_ranks, {});
            visit(entered, [&](int source) {
                const float* const rows = slots(b_.rank_, source);
                if (is_dispatch_) {
                    b_.received_[source].assign(rows, rows + values[source] * b_.tokens_.hidden);
                    if (!b_.weighs_late_) b_.keep_weights(source, weights(b_.rank_, source));
                } else {
                    for (size_t i = 0; i < b_.combined_.size(); ++i) b_.combined_[i] += rows[i];
                }
            });
        }
        bool is_interrupted() const override { return false; }

    private:
        template <class Visit>
        void visit(RankSet ranks, const Visit& visit_rank) const {
            for (int rank = 0; rank < b_.tokens_.num_ranks; ++rank)
                if (contains(ranks, rank)) visit_rank(rank);
        }
        std::byte* area(int owner, int source) const { return b_.exchange_.area(owner, source, b_.number_); }
        float* weights(int owner, int source) const {
            return reinterpret_cast<float*>(area(owner, source)) + b_.tokens_.most * b_.tokens_.num_ranks;
        }
        float* slots(int owner, int source) const { return reinterpret_cast<float*>(area(owner, source) + b_.exchange_.layout().slots); }

        Batch& b_;
        const bool is_dispatch_;
    };

    void run(LowLatencyOperation operation, bool sends) {
        Rows rows(*this, operation);
        const bool is_dispatch = operation == LowLatencyOperation::kDispatch;
        const LowLatencyWhat what{operation, DType::kFloat32, false, false, is_dispatch != weighs_late_, false};
        exchange_.run({what, is_dispatch ? tokens_.count(rank_) : 0, number_, wait_ns_.data(), rows}, sends, !sends);
    }
    // The weights of the tokens of `source` for this rank.
    void keep_weights(int source, const float* all) {
        kept_weights_[source].resize(tokens_.count(source));
        for (int token = 0; token < tokens_.count(source); ++token) kept_weights_[source][token] = all[token * tokens_.num_ranks + rank_];
    }

    ShmLowLatency& exchange_;
    const bool weighs_late_;
    const Tokens tokens_;
    const int rank_;
    std::vector<int64_t>& wait_ns_;
    const std::vector<float> weights_;
    std::vector<float> x_, combined_;
    std::vector<std::vector<float>> received_;        // rows of each rank
    std::map<int, std::vector<float>> kept_weights_;  // of its tokens
    uint64_t number_ = 0;                             // of the call
    int step_ = 0;
};

class Rank {
public:
    Rank(Team& team, const Tokens& tokens, int rank)
        : exchange_({team.num_ranks, 2 * team.num_ranks, team.num_ranks, tokens.hidden, tokens.most}, rank, kTimeoutS, false),
          wait_ns_(team.num_ranks),
          first_(exchange_, tokens, rank, wait_ns_, false),
          second_(exchange_, tokens, rank, wait_ns_, true) {
        team.connect(exchange_, rank);
    }

    ShmLowLatency& exchange() { return exchange_; }
    Batch& batch() { return first_; }

    // Two alternating batches: while this thread sends for one, another receives for the other.
    void step(int number, RankSet alive) {
        first_.send_dispatch(number);
        beside([&] { first_.receive_dispatch(alive); }, [&] { second_.send_dispatch(number + 1); });
        beside([&] { second_.receive_dispatch(alive); }, [&] { first_.send_combine(); });
        beside([&] { first_.receive_combine(alive); }, [&] { second_.send_combine(); });
        second_.receive_combine(alive);
    }

private:
    static void beside(const std::function<void()>& receive, const std::function<void()>& send) {
        const std::jthread receives(receive);
        send();
    }

    ShmLowLatency exchange_;
    std::vector<int64_t> wait_ns_;
    Batch first_, second_;
};

void run_steps(Team& team, const Tokens& tokens, RankSet all) {
    team.run([&](int rank) {
        Rank own(team, tokens, rank);
        for (int number = 1; number <= 20; ++number) own.step(number, all);
    });
}

void run_refusals(Team& team, const Tokens& tokens, RankSet all) {
    team.run([&](int rank) {
        Rank own(team, tokens, rank);
        for (int number = 1; number <= 20; ++number) {
            const int culprit = number % team.num_ranks;
            if (rank == culprit) {
                own.exchange().refuse("ValueError: step " + std::to_string(number));
            } else {
                own.batch().send_dispatch(number);
                require(error_of<PeerError>("of a refusal", [&] { own.batch().receive_dispatch(all); }).rank == culprit, "who refused");
            }
            own.step(number, all);
        }
    });
}

// The last rank is left out for a while, and comes back.
void run_masks(Team& team, const Tokens& tokens, RankSet all) {
    const int last = team.num_ranks - 1;
    team.run([&](int rank) {
        Rank own(team, tokens, rank);
        for (int number = 1; number <= 5; ++number) {
            own.step(number, all);
            if (rank == last) {
                own.exchange().rejoin();
            } else {
                own.exchange().mask(last, true);
                own.step(number + 1, all & ~(RankSet{1} << last));
                own.exchange().mask(last, false);
            }
            own.step(number + 2, all);
        }
    });
}

}  // namespace

void run_low_latency() {
    Team team(3);
    run_steps(team, {3, 16, 20}, 7);
    run_refusals(team, {3, 16, 8}, 7);
    run_masks(team, {3, 16, 8}, 7);
}

}  // namespace deepep_moe
