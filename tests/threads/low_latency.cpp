// Low-latency calls over shared memory: one thread of a rank sends while another one receives the call before. Refusals, masks.
#include <algorithm>
#include <functional>
#include <limits>

#include "common/errors.h"
#include "common/low_latency_call.h"
#include "ranks.h"
#include "runtime/shm/low_latency.h"

namespace deepep_moe {
namespace {

constexpr double kTimeoutS = 300;

// Half of a rank's batch: a dispatch and the combine of what it received.
class Batch {
public:
    // weighs_late: its weights are given to combine, not to dispatch.
    Batch(ShmLowLatency& exchange, const Tokens& tokens, int rank, std::vector<int64_t>& statistics, bool weighs_late)
        : exchange_(exchange),
          weighs_late_(weighs_late),
          tokens_(tokens),
          rank_(rank),
          statistics_(statistics),
          experts_(tokens.experts(rank)),
          weights_(tokens.weights(rank)),
          handle_(exchange.handle_bytes() / sizeof(int64_t)),
          number_(1),
          recv_x_(2 * capacity() * tokens.hidden),
          num_received_(2) {}

    void send_dispatch(int number) {
        step_ = number;
        x_ = tokens_.rows(number, rank_);
        std::fill(recv_x_.begin(), recv_x_.end(), -1.0f);
        exchange_.dispatch(dispatch(), true, false);
    }
    void receive_dispatch(RankSet alive) {
        exchange_.dispatch(dispatch(), false, true);
        for (int expert = 0; expert < 2; ++expert) {
            auto wanted = tokens_.received(rank_, expert);
            std::erase_if(wanted, [&](const auto& pair) { return !contains(alive, pair.first); });
            require(num_received_[expert] == static_cast<int>(wanted.size()), "rows of an expert");
            for (size_t row = 0; row < wanted.size(); ++row) {
                const float value = tokens_.value(step_, wanted[row].first, wanted[row].second);
                tokens_.check_row(&recv_x_[(expert * capacity() + row) * tokens_.hidden], value, value + 0.5f, "received row");
            }
        }
    }
    void send_combine() {
        for (float& value : recv_x_) value *= static_cast<float>(rank_ + 1);
        combined_.assign(x_.size(), -1);
        exchange_.combine(combine(), true, false);
    }
    void receive_combine(RankSet alive) {
        exchange_.combine(combine(), false, true);
        for (int token = 0; token < tokens_.count(rank_); ++token) {
            float factor = 0;
            for (int to = 0; to < tokens_.num_ranks; ++to)
                if (tokens_.goes(rank_, token, to) && contains(alive, to)) factor += static_cast<float>(to + 1) * tokens_.weight(token, to);
            const float value = tokens_.value(step_, rank_, token);
            tokens_.check_row(&combined_[token * tokens_.hidden], factor * value, factor * (value + 0.5f), "combined row");
        }
    }

private:
    int64_t capacity() const { return static_cast<int64_t>(tokens_.num_ranks) * tokens_.most; }
    int64_t num_tokens() const { return tokens_.count(rank_); }
    TensorArg handle() const { return tensor(handle_, {static_cast<int64_t>(handle_.size())}); }
    TensorArg weights() const { return tensor(weights_, {num_tokens(), tokens_.num_ranks}); }
    TensorArg statistics() const { return tensor(statistics_, {static_cast<int64_t>(statistics_.size())}); }

    LowLatencyDispatchParams dispatch() const {
        return low_latency_dispatch_of(tensor(x_, {num_tokens(), tokens_.hidden}), tensor(experts_, {num_tokens(), tokens_.num_ranks}),
                                       weighs_late_ ? TensorArg{} : weights(), handle(), tensor(recv_x_, {2, capacity(), tokens_.hidden}),
                                       {}, tensor(num_received_, {2}), statistics(), DType::kFloat32, false);
    }
    LowLatencyCombineParams combine() const {
        return low_latency_combine_of(tensor(recv_x_, {2, capacity(), tokens_.hidden}), handle(), weighs_late_ ? weights() : TensorArg{},
                                      tensor(number_, {1}), tensor(combined_, {num_tokens(), tokens_.hidden}), statistics(),
                                      DType::kFloat32, false);
    }

    ShmLowLatency& exchange_;
    const bool weighs_late_;
    const Tokens tokens_;
    const int rank_;
    const std::vector<int64_t>& statistics_;
    const std::vector<int64_t> experts_;
    const std::vector<float> weights_;
    const std::vector<int64_t> handle_, number_;
    std::vector<float> x_, recv_x_, combined_;
    const std::vector<int32_t> num_received_;
    int step_ = 0;
};

class Rank {
public:
    Rank(Team& team, const Tokens& tokens, int rank)
        : exchange_({team.num_ranks, 2 * team.num_ranks, team.num_ranks, tokens.hidden, tokens.most}, rank, kTimeoutS, false),
          statistics_(2 + team.num_ranks + 1),
          first_(exchange_, tokens, rank, statistics_, false),
          second_(exchange_, tokens, rank, statistics_, true) {
        team.connect(exchange_, rank);
    }

    ShmLowLatency& exchange() { return exchange_; }
    Batch& batch() { return first_; }

    // Two batches by turns: while this thread sends for one, another receives for the other.
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
    std::vector<int64_t> statistics_;
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
