// Guesses how many rows to allocate before they are counted, so that the kernel that receives need not wait for the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace deepep_moe {

constexpr size_t kMaxGuesses = 4096;  // guesses that a buffer keeps

class RowGuess {
public:
    static constexpr int64_t kShare = 16;  // 1 / kShare more rows than last time are allocated

    // Returns a little more than the last count if that was close to the one before, or -1 for no guess.
    int64_t room() const { return last_ < 0 || std::max(last_ - before_, before_ - last_) * kShare > last_ ? -1 : last_ + last_ / kShare; }
    void remember(int64_t num_rows) { before_ = std::exchange(last_, num_rows); }

private:
    int64_t last_ = -1, before_ = -1;  // rows of the last two dispatches
};

}  // namespace deepep_moe
