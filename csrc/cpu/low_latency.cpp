#include "cpu/low_latency.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "cpu/fp8.h"
#include "cpu/layout.h"
#include "cpu/row_ops.h"

namespace deepep_moe {
namespace {

constexpr int kScalesPerWord = 4;  // rounded

// The memory of a handle.
template <class Byte>
struct HandleView {
    template <class T>
    using Field = std::conditional_t<std::is_const_v<Byte>, const T, T>;

    HandleView(const LowLatencyConfig& config, Byte* memory)
        : call(reinterpret_cast<Field<uint64_t>*>(memory)),
          num_tokens(at<int32_t>(memory, LowLatencyHandleLayout(config).num_tokens)),
          rank_masks(at<uint32_t>(memory, LowLatencyHandleLayout(config).rank_masks)),
          rows(at<LowLatencyRow>(memory, LowLatencyHandleLayout(config).rows)),
          config_(config) {}
    Field<LowLatencyRow>* lanes(int source, int64_t token) const {
        return rows + (source * config_.num_max_tokens + token) * config_.num_topk;
    }

    Field<uint64_t>* call;
    Field<int32_t>* num_tokens;  // -1: not received yet
    Field<uint32_t>* rank_masks;
    Field<LowLatencyRow>* rows;

private:
    template <class T>
    static Field<T>* at(Byte* memory, int64_t offset) {
        return reinterpret_cast<Field<T>*>(memory + offset);
    }
    const LowLatencyConfig& config_;
};

void add(int64_t& counter, int64_t value) { std::atomic_ref(counter).fetch_add(value, std::memory_order_relaxed); }

// The ranks of `ranks`, from the one after `rank` on, and that one last: so that not all send to the same one at a time.
template <class Visit>
void visit_from(const LowLatencyCall& call, RankSet ranks, Visit visit) {
    for (int offset = 1; offset <= call.config.num_ranks; ++offset) {
        const int rank = (call.rank + offset) % call.config.num_ranks;
        if (contains(ranks, rank)) visit(rank);
    }
}

// ---- dispatch ----

// A row on its way: [hidden] elements, then for fp8 words of scales.
struct RowFormat {
    RowFormat(const LowLatencyConfig& config, const LowLatencyWhat& what)
        : row_bytes(config.hidden * (what.fp8 ? 1 : element_bytes(what.dtype))) {
        const int num_blocks = config.hidden / kScaleBlock;
        if (what.fp8) num_words = what.is_rounded ? (num_blocks + kScalesPerWord - 1) / kScalesPerWord : num_blocks;
    }
    size_t bytes() const { return row_bytes + sizeof(uint32_t) * num_words; }

    size_t row_bytes;
    int num_words = 0;
};

class DispatchSender {
public:
    DispatchSender(const LowLatencyCall& call, const LowLatencyDispatchParams& p)
        : c_(call.config),
          call_(call),
          p_(p),
          format_(call.config, p.what),
          experts_(static_cast<size_t>(p.num_tokens) * c_.num_topk),
          counts_(c_.num_experts),
          scales_(c_.hidden / kScaleBlock),
          fp8_row_(format_.bytes()) {
        std::vector<int32_t> tokens_per_rank(c_.num_ranks);
        count_tokens({p.topk_idx, p.is_int64, p.num_tokens, c_.num_topk, c_.num_ranks, c_.num_experts, experts_.data()}, {0, p.num_tokens},
                     {tokens_per_rank.data(), counts_.data()});
    }

    void run() {
        const HandleView handle(c_, p_.handle);
        *handle.call = call_.number;
        std::fill_n(handle.num_tokens, kLowLatencyMaxRanks, -1);
        choose_ranks(handle.rank_masks);
        visit_from(call_, call_.ranks, [&](int to) { send_lanes(to); });
        for (int token = 0; token < p_.num_tokens; ++token) send_row(token, handle.rank_masks[token]);
    }

private:
    int rank_of(int32_t expert) const { return expert / c_.num_local_experts; }

    void choose_ranks(uint32_t* rank_masks) {
        int64_t num_dropped = 0;
        for (int token = 0; token < p_.num_tokens; ++token) {
            RankSet chosen = 0;
            for (int k = 0; k < c_.num_topk; ++k) {
                const int32_t expert = experts_[static_cast<size_t>(token) * c_.num_topk + k];
                if (expert < 0) continue;
                chosen |= RankSet{1} << rank_of(expert);
                num_dropped += !contains(call_.ranks, rank_of(expert));
            }
            rank_masks[token] = chosen & call_.ranks;
        }
        if (num_dropped > 0) add(*LowLatencyStatistics(c_, p_.statistics).num_dropped, num_dropped);
    }

    void send_lanes(int to) {
        const LowLatencyTurn there = call_.turn(to);
        const int num_local = c_.num_local_experts, first = to * num_local;
        std::vector<int> before(num_local);
        for (int token = 0; token < p_.num_tokens; ++token) {
            LowLatencyLane* lanes = there.lanes(call_.rank, token);
            for (int k = 0; k < c_.num_topk; ++k) {
                const size_t lane = static_cast<size_t>(token) * c_.num_topk + k;
                const int local = experts_[lane] - first;
                const bool is_there = experts_[lane] >= 0 && local >= 0 && local < num_local;
                lanes[k] = {-1, 0, 0.0f};
                if (is_there) lanes[k] = {static_cast<int16_t>(local), static_cast<uint16_t>(before[local]++), weight(lane)};
            }
        }
        for (int local = 0; local < num_local; ++local) there.count(call_.rank, local) = p_.what.flag(call_.number, counts_[first + local]);
        there.entered(call_.rank).store(p_.what.flag(call_.number, p_.num_tokens), std::memory_order_release);
    }

    float weight(size_t lane) const { return p_.topk_weights != nullptr ? p_.topk_weights[lane] : 1.0f; }

    void send_row(int token, RankSet ranks) {
        if (ranks == 0) return;
        const std::byte* row = p_.x + static_cast<int64_t>(token) * c_.hidden * element_bytes(p_.what.dtype);
        if (p_.what.fp8) row = quantized(row);
        visit_from(call_, ranks, [&](int to) {
            const LowLatencyTurn there = call_.turn(to);
            std::memcpy(there.slot(call_.rank, token), row, format_.bytes());
            there.arrived(call_.rank, token).store(call_.arrived(p_.what), std::memory_order_release);
        });
    }

    const std::byte* quantized(const std::byte* row) {
        quantize_row(p_.what.dtype, row, c_.hidden, p_.what.is_rounded, reinterpret_cast<uint8_t*>(fp8_row_.data()), scales_.data());
        auto* words = reinterpret_cast<uint32_t*>(fp8_row_.data() + format_.row_bytes);
        std::fill_n(words, format_.num_words, 0u);
        for (size_t block = 0; block < scales_.size(); ++block) {
            const auto bits = std::bit_cast<uint32_t>(scales_[block]);
            if (p_.what.is_rounded)
                words[block / kScalesPerWord] |= (bits >> 23) << 8 * (block % kScalesPerWord);
            else
                words[block] = bits;
        }
        return fp8_row_.data();
    }

    const LowLatencyConfig& c_;
    const LowLatencyCall& call_;
    const LowLatencyDispatchParams& p_;
    const RowFormat format_;
    std::vector<int32_t> experts_;  // [num_tokens, num_topk]
    std::vector<int32_t> counts_;   // [num_experts]
    std::vector<float> scales_;     // of one row
    std::vector<std::byte> fp8_row_;
};

class DispatchReceiver {
public:
    DispatchReceiver(const LowLatencyCall& call, const LowLatencyDispatchParams& p, LowLatencyWaits& waits)
        : c_(call.config),
          call_(call),
          p_(p),
          waits_(waits),
          format_(call.config, p.what),
          handle_(call.config, p.handle),
          here_(call.turn(call.rank)),
          first_place_(static_cast<size_t>(c_.num_ranks) * c_.num_local_experts),
          missing_row_(format_.bytes()) {}

    void run() {
        place();
        for (int source = 0; source < c_.num_ranks; ++source)
            if (!contains(call_.ranks, source)) handle_.num_tokens[source] = 0;
        visit_from(call_, call_.ranks, [&](int source) { receive_from(source); });
    }

private:
    // Rows of an expert by source, those of a source by token.
    void place() {
        const LowLatencyStatistics statistics(c_, p_.statistics);
        for (int expert = 0; expert < c_.num_local_experts; ++expert) {
            int32_t num_rows = 0;
            for (int source = 0; source < c_.num_ranks; ++source) {
                first_place_[source * c_.num_local_experts + expert] = num_rows;
                if (contains(call_.ranks, source)) num_rows += LowLatencyWhat::value_in(here_.count(source, expert));
            }
            p_.num_recv_tokens_per_expert[expert] = num_rows;
            add(statistics.num_tokens_per_expert[expert], num_rows);
        }
    }

    void receive_from(int source) {
        const int num_tokens = LowLatencyWhat::value_in(here_.entered(source).load(std::memory_order_relaxed));
        for (int token = 0; token < num_tokens; ++token)
            if (find_rows(source, token)) expand(source, token);
        handle_.num_tokens[source] = num_tokens;
    }

    // Is the token for this rank?
    bool find_rows(int source, int token) {
        const LowLatencyLane* lanes = here_.lanes(source, token);
        LowLatencyRow* rows = handle_.lanes(source, token);
        bool is_any = false;
        for (int k = 0; k < c_.num_topk; ++k) {
            rows[k] = {-1, 0.0f};
            if (lanes[k].expert < 0) continue;
            const int32_t place = first_place_[source * c_.num_local_experts + lanes[k].expert] + lanes[k].index;
            rows[k] = {static_cast<int32_t>(lanes[k].expert * c_.capacity() + place), lanes[k].weight};
            is_any = true;
        }
        return is_any;
    }

    void expand(int source, int token) {
        const bool is_here = waits_.wait(here_.arrived(source, token), call_.arrived(p_.what), source, "dispatch rows");
        const std::byte* slot = is_here ? here_.slot(source, token) : missing_row_.data();
        const LowLatencyRow* rows = handle_.lanes(source, token);
        for (int k = 0; k < c_.num_topk; ++k)
            if (rows[k].row >= 0) write(slot, rows[k].row);
    }

    void write(const std::byte* slot, int64_t row) const {
        std::memcpy(p_.recv_x + row * format_.row_bytes, slot, format_.row_bytes);
        if (!p_.what.fp8) return;
        const auto* words = reinterpret_cast<const uint32_t*>(slot + format_.row_bytes);
        const int64_t expert = row / c_.capacity(), place = row % c_.capacity();
        auto* scales = static_cast<uint32_t*>(p_.recv_x_scales) + expert * format_.num_words * c_.capacity() + place;
        for (int word = 0; word < format_.num_words; ++word) scales[word * c_.capacity()] = words[word];
    }

    const LowLatencyConfig& c_;
    const LowLatencyCall& call_;
    const LowLatencyDispatchParams& p_;
    LowLatencyWaits& waits_;
    const RowFormat format_;
    const HandleView<std::byte> handle_;
    const LowLatencyTurn here_;
    std::vector<int32_t> first_place_;  // [num_ranks, num_local_experts]
    const std::vector<std::byte> missing_row_;
};

// ---- combine ----

class CombineSender {
public:
    CombineSender(const LowLatencyCall& call, const LowLatencyCombineParams& p)
        : c_(call.config),
          call_(call),
          p_(p),
          row_bytes_(c_.hidden * element_bytes(p.what.dtype)),
          handle_(call.config, p.handle),
          sum_(p.what.fp8 ? c_.hidden : 0) {
        if (std::any_of(handle_.num_tokens, handle_.num_tokens + c_.num_ranks, [](int32_t num_tokens) { return num_tokens < 0; }))
            throw std::invalid_argument(
                "handle is of a dispatch that was not received; call its hook, or wait for its event, before combine");
        if (!is_in_bounds()) throw std::invalid_argument("the state of this handle was changed after its dispatch; dispatch again");
    }

    void enter() {
        std::memcpy(p_.call, &call_.number, sizeof(call_.number));
        const uint64_t entered = p_.what.flag(call_.number, LowLatencyWhat::value_in(*handle_.call));
        visit_from(call_, call_.ranks, [&](int to) {
            if (p_.what.has_weights) send_weights(call_.turn(to));
            call_.turn(to).entered(call_.rank).store(entered, std::memory_order_release);
        });
    }

    void send_sums(RankSet ranks) {
        visit_from(call_, ranks, [&](int to) {
            for (int token = 0; token < handle_.num_tokens[to]; ++token) send_row(to, token);
        });
    }

private:
    // PyTorch does not count every change of the handle's memory.
    bool is_in_bounds() const {
        const int64_t num_rows = c_.num_local_experts * c_.capacity();
        for (int source = 0; source < c_.num_ranks; ++source) {
            if (handle_.num_tokens[source] > c_.num_max_tokens) return false;
            const LowLatencyRow* const rows = handle_.lanes(source, 0);
            const int64_t num_lanes = int64_t{handle_.num_tokens[source]} * c_.num_topk;
            if (std::any_of(rows, rows + num_lanes, [&](const LowLatencyRow& lane) { return lane.row >= num_rows; })) return false;
        }
        return std::none_of(handle_.rank_masks, handle_.rank_masks + p_.num_tokens,
                            [&](uint32_t ranks) { return ranks >> c_.num_ranks != 0; });
    }

    // All tokens' to every rank: which of them go there its own handle says.
    void send_weights(const LowLatencyTurn& there) const {
        LowLatencyLane* lanes = there.lanes(call_.rank, 0);
        for (int64_t i = 0; i < int64_t{p_.num_tokens} * c_.num_topk; ++i) lanes[i] = {-1, 0, p_.topk_weights[i]};
    }

    void send_row(int to, int token) {
        const void* rows[kMaxTopk];
        float weights[kMaxTopk];
        const int num_rows = gather(to, token, rows, weights);
        if (num_rows == 0) return;
        const LowLatencyTurn there = call_.turn(to);
        std::byte* slot = there.slot(call_.rank, token);
        SumParams sum{slot, rows, weights, nullptr, num_rows, c_.hidden, nullptr, 0};
        if (p_.what.fp8) {
            sum.sum = sum_.data();
            sum_rows_to_float32(p_.what.dtype, sum);
            quantize_row(DType::kFloat32, sum_.data(), c_.hidden, false, reinterpret_cast<uint8_t*>(slot),
                         reinterpret_cast<float*>(slot + c_.hidden));
        } else {
            sum_rows(p_.what.dtype, sum);
        }
        there.arrived(call_.rank, token).store(call_.arrived(p_.what), std::memory_order_release);
    }

    int gather(int to, int token, const void** rows, float* weights) const {
        const LowLatencyRow* lanes = handle_.lanes(to, token);
        const LowLatencyLane* own = call_.turn(call_.rank).lanes(to, token);
        int num_rows = 0;
        for (int k = 0; k < c_.num_topk; ++k) {
            if (lanes[k].row < 0) continue;
            rows[num_rows] = p_.x + lanes[k].row * row_bytes_;
            weights[num_rows++] = p_.what.has_weights ? own[k].weight : lanes[k].weight;
        }
        return num_rows;
    }

    const LowLatencyConfig& c_;
    const LowLatencyCall& call_;
    const LowLatencyCombineParams& p_;
    const size_t row_bytes_;
    const HandleView<const std::byte> handle_;
    std::vector<float> sum_;
};

class CombineReceiver {
public:
    CombineReceiver(const LowLatencyCall& call, const LowLatencyCombineParams& p, LowLatencyWaits& waits)
        : c_(call.config), call_(call), p_(p), waits_(waits), here_(call.turn(call.rank)) {}

    void run() {
        const HandleView<const std::byte> handle(c_, p_.handle);
        for (int token = 0; token < p_.num_tokens; ++token) add_up(token, handle.rank_masks[token] & call_.ranks);
    }

private:
    void add_up(int token, RankSet ranks) {
        const std::byte* slots[kLowLatencyMaxHostRanks];
        int num_slots = 0;
        for (int rank = 0; rank < c_.num_ranks; ++rank)
            if (contains(ranks, rank) && waits_.wait(here_.arrived(rank, token), call_.arrived(p_.what), rank, "combine rows"))
                slots[num_slots++] = here_.slot(rank, token);
        std::byte* out = p_.combined_x + static_cast<int64_t>(token) * c_.hidden * element_bytes(p_.what.dtype);
        if (p_.what.fp8) return add_up_fp8(slots, num_slots, out);
        const void* rows[kLowLatencyMaxHostRanks];
        std::copy_n(slots, num_slots, rows);
        sum_rows(p_.what.dtype, {out, rows, nullptr, nullptr, num_slots, c_.hidden, nullptr, 0});
    }

    void add_up_fp8(const std::byte* const* slots, int num_slots, std::byte* out) const {
        Fp8Row rows[kLowLatencyMaxHostRanks];
        for (int i = 0; i < num_slots; ++i)
            rows[i] = {reinterpret_cast<const uint8_t*>(slots[i]), reinterpret_cast<const float*>(slots[i] + c_.hidden)};
        sum_fp8_rows(p_.what.dtype, rows, num_slots, c_.hidden, out);
    }

    const LowLatencyConfig& c_;
    const LowLatencyCall& call_;
    const LowLatencyCombineParams& p_;
    LowLatencyWaits& waits_;
    const LowLatencyTurn here_;
};

}  // namespace

void send(const LowLatencyCall& call, const LowLatencyDispatchParams& params) { DispatchSender(call, params).run(); }
void receive(const LowLatencyCall& call, const LowLatencyDispatchParams& params, LowLatencyWaits& waits) {
    DispatchReceiver(call, params, waits).run();
}

void enter(const LowLatencyCall& call, const LowLatencyCombineParams& params) { CombineSender(call, params).enter(); }
void send_sums(const LowLatencyCall& call, const LowLatencyCombineParams& params, RankSet to) { CombineSender(call, params).send_sums(to); }
void receive(const LowLatencyCall& call, const LowLatencyCombineParams& params, LowLatencyWaits& waits) {
    CombineReceiver(call, params, waits).run();
}

}  // namespace deepep_moe
