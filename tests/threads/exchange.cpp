// The exchange over shared memory: calls in both layouts, refusals, calls that are left, stalls.
#include <atomic>
#include <chrono>

#include "ranks.h"
#include "runtime/shm/exchange.h"

namespace deepep_moe {
namespace {

constexpr int kNumChannels = 3;

class Rank {
public:
    Rank(Team& team, const Tokens& tokens, int rank, double timeout_s = 300)
        : team_(team),
          tokens_(tokens),
          rank_(rank),
          config_{team.num_ranks, kNumChannels, 2 * team.num_ranks, team.num_ranks, tokens.hidden},
          exchange_(config_, rank, timeout_s),
          experts_(tokens.experts(rank)),
          weights_(experts_.size(), 1),
          recv_counts_(team.num_ranks * kNumChannels),
          row_begin_(2 * recv_counts_.size()) {
        team.connect(exchange_, rank);
    }

    ShmExchange& exchange() { return exchange_; }

    // A dispatch and one along its handle, each with a combine.
    void step(int number, Layout layout) {
        plan(layout);
        move(number);
        combine(number);
        move_along(number + 1);
        combine(number + 1);
    }

    void plan(Layout layout) {
        layout_ = layout;
        const int num_ranks = config_.num_ranks, columns = num_ranks + config_.num_experts;
        std::vector<int32_t> own_counts(kNumChannels * columns), all_counts(num_ranks * own_counts.size());
        for (int channel = 0; channel < kNumChannels; ++channel) {
            int32_t* const counts = &own_counts[channel * columns];
            const Range range = channel_range(num_tokens(), channel, kNumChannels);
            for (int64_t token = range.begin; token < range.end; ++token) {
                for (int to = 0; to < num_ranks; ++to) counts[to] += tokens_.goes(rank_, static_cast<int>(token), to);
                for (int k = 0; k < config_.num_topk; ++k)
                    if (const int expert = experts_[token * config_.num_topk + k]; expert >= 0) ++counts[num_ranks + expert];
            }
        }
        exchange_.plan({.operation = Operation::kDispatch, .dtype = DType::kFloat32, .layout = layout, .has_weights = true},
                       own_counts.data(), -1, all_counts.data());
        call_ = static_cast<int64_t>(exchange_.num_calls());
        int num_recv_tokens = 0, num_rows = 0;
        for (size_t i = 0; i < recv_counts_.size(); ++i) num_recv_tokens += recv_counts_[i] = all_counts[i * columns + rank_];
        for (size_t i = 0; i < row_begin_.size(); ++i) {  // by expert, then source and channel
            const size_t expert = i / recv_counts_.size(), from = i % recv_counts_.size();
            row_begin_[2 * from + expert] = num_rows;
            num_rows += all_counts[from * columns + num_ranks + 2 * rank_ + expert];
        }
        num_rows_ = is_expert() ? num_rows : num_recv_tokens;
        recv_row_idx_.assign(num_recv_tokens * config_.num_topk, -1);
    }

    void move(int number) {
        const std::vector<float> x = tokens_.rows(number, rank_);
        std::vector<float> recv_weights(num_rows_ * (is_expert() ? 1 : config_.num_topk));
        std::vector<int64_t> recv_experts(is_expert() ? 0 : num_rows_ * config_.num_topk);
        recv_x_.assign(num_rows_ * config_.hidden, -1);
        DispatchParams params = dispatch_of(x);
        params.row_begin = row_begin_.data();
        params.topk_weights = weights_.data(), params.recv_topk_weights = recv_weights.data();
        params.recv_topk_idx = is_expert() ? nullptr : recv_experts.data(), params.recv_topk_idx_is_int64 = true;
        exchange_.dispatch(params);
    }

    void move_along(int number) {
        const std::vector<float> x = tokens_.rows(number, rank_);
        recv_x_.assign(num_rows_ * config_.hidden, -1);
        DispatchParams params = dispatch_of(x);
        params.cached = true;
        exchange_.make(signature_of(Operation::kCachedDispatch), params);
    }

    // Combine the received rows, multiplied by rank + 1.
    void combine(int number) {
        for (float& value : recv_x_) value *= static_cast<float>(rank_ + 1);
        std::vector<float> combined(num_tokens() * config_.hidden, -1);
        const CombineParams params{
            .dtype = DType::kFloat32,
            .layout = layout_,
            .recv_counts = recv_counts_.data(),
            .recv_row_idx = recv_row_idx_.data(),
            .x = reinterpret_cast<const std::byte*>(recv_x_.data()),
            .num_tokens = num_tokens(),
            .topk_idx = experts_.data(),
            .combined_x = reinterpret_cast<std::byte*>(combined.data()),
        };
        exchange_.make(signature_of(Operation::kCombine), params);
        for (int token = 0; token < num_tokens(); ++token) {
            float factor = 0;
            for (int to = 0; to < config_.num_ranks; ++to) factor += tokens_.goes(rank_, token, to) ? static_cast<float>(to + 1) : 0.0f;
            for (int column = 0; column < config_.hidden; ++column)
                require(combined[token * config_.hidden + column] == factor * tokens_.value(number, rank_, token), "combined row");
        }
    }

private:
    bool is_expert() const { return layout_ == Layout::kExpert; }
    int64_t num_tokens() const { return tokens_.count(rank_); }
    Signature signature_of(Operation operation) const { return {operation, DType::kFloat32, layout_, 1, call_}; }

    // A dispatch of `x` without weights.
    DispatchParams dispatch_of(const std::vector<float>& x) {
        return {
            .layout = layout_,
            .row_bytes = sizeof(float) * config_.hidden,
            .num_tokens = num_tokens(),
            .x = reinterpret_cast<const std::byte*>(x.data()),
            .topk_idx = experts_.data(),
            .recv_counts = recv_counts_.data(),
            .recv_x = reinterpret_cast<std::byte*>(recv_x_.data()),
            .recv_row_idx = recv_row_idx_.data(),
        };
    }

    Team& team_;
    const Tokens tokens_;
    const int rank_;
    const WorkspaceConfig config_;
    ShmExchange exchange_;
    const std::vector<int32_t> experts_;
    const std::vector<float> weights_;
    Layout layout_ = Layout::kExpert;
    int64_t call_ = 0, num_rows_ = 0;
    std::vector<int32_t> recv_counts_, row_begin_, recv_row_idx_;
    std::vector<float> recv_x_;
};

// More calls than a workspace has entries, while another thread looks at their number, as `Buffer.num_calls` may.
void run_steps(Team& team, const Tokens& tokens, int num_steps) {
    team.run([&](int rank) {
        Rank own(team, tokens, rank);
        std::jthread looks([&](std::stop_token stop) {
            for (uint64_t last = 0; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
                const uint64_t now = own.exchange().num_calls();
                require(now >= last, "number of calls");
                last = now;
            }
        });
        for (int number = 1; number <= num_steps; ++number) own.step(number, number % 2 == 0 ? Layout::kRank : Layout::kExpert);
    });
}

void run_refusals(Team& team, const Tokens& tokens) {
    team.run([&](int rank) {
        Rank own(team, tokens, rank);
        for (int number = 1; number <= 20; ++number) {
            const int culprit = number % team.num_ranks, cause = number % 2;
            if (rank == culprit) {
                own.exchange().refuse("ValueError: step " + std::to_string(number), cause);
            } else {
                const PeerError error = error_of<PeerError>("of a refusal", [&] { own.plan(Layout::kExpert); });
                require(error.rank == culprit && error.cause == cause, "who refused, and why");
            }
            own.step(number, Layout::kExpert);
        }
    });
}

// A rank leaves a call that it has entered. Its peers, which wait for its rows, learn why.
void run_left_calls(Team& team, const Tokens& tokens) {
    team.run([&](int rank) {
        Rank own(team, tokens, rank);
        for (int number = 1; number <= 20; ++number) {
            const int culprit = number % team.num_ranks;
            const std::string reason = "MemoryError: step " + std::to_string(number);
            if (rank == culprit) {
                own.plan(Layout::kExpert);
                own.exchange().abandon(reason);
            } else {
                const PeerError error = error_of<PeerError>("of a call that was left", [&] {
                    own.plan(Layout::kExpert);
                    own.move(number);
                });
                require(error.rank == culprit, "who left");
                require(std::string(error.what()).ends_with("left its call: " + reason), error.what());
            }
            own.step(number, Layout::kExpert);
        }
    });
}

// The last rank comes when the others have given up on it. All try again until it works.
void run_stall(Team& team, const Tokens& tokens) {
    std::atomic<int> num_waiting = team.num_ranks - 1;
    team.run([&](int rank) {
        Rank own(team, tokens, rank, 1);
        if (rank == team.num_ranks - 1)
            for (int left = num_waiting; left > 0; left = num_waiting) num_waiting.wait(left);
        int num_tries = 0;
        for (bool is_done = false; !is_done; ++num_tries) {
            require(num_tries < 100, "in step again");
            try {
                own.step(1, Layout::kExpert);
                is_done = true;
            } catch (const TimeoutError&) {
            } catch (const PeerError&) {
            }
            if (num_tries == 0 && --num_waiting >= 0) num_waiting.notify_all();
        }
        require(num_tries > 1 || rank == team.num_ranks - 1, "a stall is noticed");
        team.meet();
    });
}

}  // namespace

void run_exchange() {
    Team team(3);
    run_steps(team, {3, 8, 64}, 12);
    run_steps(team, {3, 12000, 40}, 2);  // more rows than a ring holds
    run_refusals(team, {3, 8, 16});
    run_left_calls(team, {3, 8, 16});
    run_stall(team, {3, 8, 16});
}

}  // namespace deepep_moe
