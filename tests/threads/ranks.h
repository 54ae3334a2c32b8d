// Ranks as threads, and tokens whose sums can be computed by hand. Rows and weights that are received are tested by tests/exchange.
#pragma once

#include <unistd.h>

#include <barrier>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace deepep_moe {

inline void require(bool condition, const std::string& what) {
    if (!condition) throw std::runtime_error("not as expected: " + what);
}

// The error of type `Error` that `call` throws.
template <class Error, class Call>
Error error_of(const std::string& what, Call&& call) {
    try {
        call();
    } catch (const Error& error) {
        return error;
    }
    throw std::runtime_error("no error: " + what);
}

// The ranks, and where they meet.
class Team {
public:
    explicit Team(int num_ranks) : num_ranks(num_ranks), barrier_(num_ranks), paths_(num_ranks), pids_(num_ranks, getpid()) {}

    // Runs `rank_main(rank)` of every rank. One that fails ends the program: its peers may wait for it.
    template <class RankMain>
    void run(const RankMain& rank_main) {
        std::vector<std::jthread> threads;
        for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back([&, rank] { rank_main(rank); });
    }
    void meet() { barrier_.arrive_and_wait(); }

    template <class Workspace>
    void connect(Workspace& own, int rank) {
        paths_[rank] = own.path();
        meet();
        own.connect(paths_, pids_);
        meet();
        own.seal();
    }

    const int num_ranks;

private:
    std::barrier<> barrier_;
    std::vector<std::string> paths_;
    std::vector<int> pids_;
};

// The tokens that ranks send in a step. Top-k entry d of a token is for rank d, which holds two experts.
struct Tokens {
    int num_ranks, hidden, most;

    int count(int rank) const { return most - rank; }
    // Not every token goes to every rank.
    bool goes(int source, int token, int to) const { return (source + token + to) % 4 != 3; }
    float value(int step, int source, int token) const { return static_cast<float>(1000 * step + 100 * source + token); }

    std::vector<int32_t> experts(int source) const {
        std::vector<int32_t> all;
        for (int token = 0; token < count(source); ++token)
            for (int to = 0; to < num_ranks; ++to) all.push_back(goes(source, token, to) ? 2 * to + token % 2 : -1);
        return all;
    }
    std::vector<float> rows(int step, int source) const {
        std::vector<float> all;
        for (int token = 0; token < count(source); ++token) all.insert(all.end(), hidden, value(step, source, token));
        return all;
    }
};

void run_exchange();
void run_failures();

}  // namespace deepep_moe
