// Combines on one NVLink host, or on one of several nodes. This second kernel of the call may start while the plan runs.
//
//   Send blocks    Push sums from the outbox to the tokens' sources, with one flag a chunk. Wait for the tiles that work blocks sum.
//   Work blocks    1. Sum the rows of each peer's tokens on this rank into the outbox, in top-k order, rounded once.
//                  2. Add up each token of this rank, in rank order: sums that arrive with their chunk's flag, and rows on this rank.
//                     With several nodes, tokens of other nodes come first and their rounded sums go back. Then this rank's tokens
//                     follow, in node order, with the sums that come from other nodes.
//
// Rows of the rank layout, or of top-1, without weights skip the first step: they are sent from where they lie (`direct`). So are the rows
// of sums by lanes, each on its own, and the second step adds them.
#include "cuda/device/launch.cuh"
#include "cuda/device/push.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using tuning::kMaxRingWarps;
constexpr int kThreads = tuning::kCombineThreads;
constexpr int kEntriesAtOnce = 8;  // entries of recv_row_idx that a thread looks at for one slot
static_assert(kThreads >= kMaxExpertTensors);
static_assert(kThreads >= 32 * (kMaxRingWarps + 1), "a block that sends needs a warp for flags");

template <DType kType>
struct Kernel {
    using Values = Piece<kType>;
    static constexpr int kBatch = tuning::kCombineBatch;
    using Sum = float[kBatch][Values::kCount];
    using Pieces = uint4[kBatch];

    const GpuCombineParams& p;
    const ExpertRows& expert_rows;  // in shared memory, because threads may read different entries; unset if num_tensors is 0
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const int64_t row_bytes;
    const int num_pieces, num_tiles, tile_pieces;  // pieces and tiles of a row, and pieces of a tile
    const GpuSlotLayout slot;
    const Workspace workspace;
    const unsigned long long sequence;
    const int warp, lane;

    __device__ Kernel(const GpuCombineParams& p, const ExpertRows& expert_rows)
        : p(p),
          expert_rows(expert_rows),
          c(p.context),
          config(c.config),
          row_bytes(config.hidden * (16 / Values::kCount)),
          num_pieces(static_cast<int>(row_bytes / 16)),
          num_tiles(divide_up(num_pieces, p.max_tile_pieces)),
          tile_pieces(divide_up(num_pieces, 32 * num_tiles) * 32),
          slot(row_bytes, p.tail_bytes()),
          workspace(c, c.rank),
          sequence(c.state->sequence),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32) {}

    // Clamp a row to those that exist: rows beyond a bound may have been left out, and must not be read.
    __device__ int64_t within_bound(int64_t row) const { return min(row, p.num_rows - 1); }

    // Returns the number of the received token in a slot of a source.
    __device__ int recv_token(const Source& source, int slot) const {
        return first_from(c, p.routing, p.recv_counts, source) + slot - source.first_slot(config);
    }

    // Holds the rows of one token on this rank, in top-k order; thread n holds the n-th.
    struct Rows {
        int recv_token = -1;
        int row_of_lane = -1;             // the row of top-k entry `lane`; in the rank layout thread 0 holds the one row
        const std::byte* from = nullptr;  // the row in place `lane` of `count` rows
        int count = 0;
        float weight = 1.0f;

        __device__ Rows() {}
        __device__ Rows(const Kernel& k, int token) : recv_token(token) {
            const GpuCombineParams& p = k.p;
            if (recv_token < 0) return;
            if (p.is_expert_layout && k.lane < k.config.num_topk)
                row_of_lane = p.recv_row_idx[static_cast<int64_t>(recv_token) * k.config.num_topk + k.lane];
            if (!p.is_expert_layout && k.lane == 0 && recv_token < p.num_rows) row_of_lane = recv_token;
        }

        // Call before `add`, but long after the constructor, so that the constructor's loads are complete.
        __device__ void look_up(const Kernel& k) {
            const unsigned there = __ballot_sync(kFullWarp, row_of_lane >= 0);
            count = __popc(there);
            const int row = __shfl_sync(kFullWarp, row_of_lane, nth_set(there, k.lane));
            if (k.lane >= count) return;
            from = row_of(k.expert_rows, k.p.expert_rows.num_tensors, k.p.x, row, k.row_bytes);
            if (k.p.weights != nullptr) weight = k.p.weights[row];
        }

        // Returns the gradient that comes with top-k entry `lane`.
        __device__ float topk_weight_grad(const Kernel& k) const {
            const GpuCombineParams& p = k.p;
            if (p.is_expert_layout) return row_of_lane >= 0 ? p.topk_weight_grads[row_of_lane] : 0.0f;
            return recv_token >= 0 && recv_token < p.num_rows
                       ? p.topk_weight_grads[static_cast<int64_t>(recv_token) * k.config.num_topk + k.lane]
                       : 0.0f;
        }

        // Add pieces first, first + 32, ... of the rows to `sum`.
        __device__ void add(const Kernel& k, Sum& sum, int first, int end) const {
            const auto rows = [&](int n) { return pieces(shuffle(from, n)); };
            const auto weights = [&](int n) { return __shfl_sync(kFullWarp, weight, n); };
            sum_pieces<Values, kBatch>(sum, first, end, count, rows, weights, Pieces{});
        }
    };

    // Call use(first piece of this thread, end) for each batch of a tile.
    template <class Use>
    __device__ void each_batch(int tile, const Use& use) const {
        const int end = min((tile + 1) * tile_pieces, num_pieces);
#pragma unroll 1
        for (int first = tile * tile_pieces; first < end; first += 32 * kBatch) use(first + lane, end);
    }

    __device__ void write(std::byte* to, int first, int end, const Sum& sum) const {
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
            if (first + 32 * j < end) pieces(to)[first + 32 * j] = Values::store(sum[j]);
    }

    // Add the sums of the ranks of this node, in rank order.
    __device__ void add_ranks(Sum& sum, int first, int end, int index, const Rows& rows) const {
        const unsigned ranks = __ballot_sync(kFullWarp, index >= 0);
        const int rank = nth_set(ranks, lane), there = __shfl_sync(kFullWarp, index, rank);
        const std::byte* from = rank == c.rank ? nullptr : sum_from(rank, there);
        Sum here = {};
        rows.add(*this, here, first, end);
        Pieces held;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) held[j] = Values::store(here[j]);
        const auto sums = [&](int n) { return pieces(shuffle(from, n)); };
        sum_pieces<Values, kBatch>(sum, first, end, __popc(ranks), sums, [](int) { return 1.0f; }, held);
    }

    __device__ const std::byte* sum_from(int rank, int index) const { return workspace.inbox(rank) + index * slot.bytes; }

    // Returns the sum, in rank order, of the values that the ranks of this node have for top-k entry `lane` of the token.
    __device__ float sum_of_lane(int index, const Rows& rows) const {
        float sum = 0.0f;
        for (int rank = 0; rank < config.num_ranks; ++rank) {
            const int there = __shfl_sync(kFullWarp, index, rank);
            if (there < 0 || lane >= config.num_topk) continue;
            sum += rank == c.rank ? rows.topk_weight_grad(*this) : reinterpret_cast<const float*>(sum_from(rank, there) + row_bytes)[lane];
        }
        return sum;
    }

    // Returns the gradient of top-k entry `lane`, or 0 if no rank of this node has its expert. `index` is the token's slot on rank `lane`.
    __device__ float topk_weight_grad(int token, int index, const Rows& rows) const {
        if (p.options.sums_lanes) return sum_of_lane(index, rows);
        int expert = -1;
        if (lane < config.num_topk) expert = static_cast<int>(p.routing.expert(token, lane));
        const int rank = expert >= 0 ? expert / (config.num_experts / config.num_ranks) : c.rank;
        const int there = __shfl_sync(kFullWarp, index, rank);
        if (expert < 0) return 0.0f;
        return rank == c.rank ? rows.topk_weight_grad(*this) : reinterpret_cast<const float*>(sum_from(rank, there) + row_bytes)[lane];
    }

    // ---- sending blocks ----

    template <class Ring>
    __device__ void send() const {
        const auto ready = [&](const Source& to, int first, int end, int) {
            const unsigned long long* reduced = p.routing.reduced + to.rank * workspace.layout.num_reduced + first / kReducedSlots;
            return p.direct || warp_wait_flag(c, reduced, (end - first) * num_tiles, c.rank, GpuPhase::kReducedRows);
        };
        const auto find = [&](const Source& to, int index) {
            if (p.is_by_lane()) return row_in_slot(to, index);
            const int token = recv_token(to, index);
            return p.direct && p.is_expert_layout ? p.recv_row_idx[token] : token;
        };
        const auto rows = [&](const Source& to, int index, int row_index, const std::byte*& row, const std::byte*& tail) {
            const int64_t at = p.direct ? within_bound(max(row_index, 0)) : -1;     // for a row that a bound has left out, another
            row = workspace.outbox(to.rank) + (p.direct ? 0 : index) * slot.bytes;  // any row if there are no rows
            tail = row + row_bytes;
            if (at < 0) return;
            row = row_of(expert_rows, p.expert_rows.num_tensors, p.x, at, row_bytes);
            tail = reinterpret_cast<const std::byte*>(p.topk_weight_grads + at * p.tail_values());
        };
        const int chunk_slots = p.direct ? kChunkSlots : kReducedSlots, first_node = (config.node + 1) % config.num_nodes;
        push<Ring>(c, p.ring, slot, chunk_slots, p.is_by_lane() ? config.num_topk : 1, p.recv_counts, false, first_node, ready, find, rows);
    }

    // With sums by lanes: return the row that goes into a slot of a source, or kNoRow if the slot stays empty.
    __device__ int row_in_slot(const Source& source, int index) const {
        const int token = index / config.num_topk;
        const int32_t* const entries = p.recv_row_idx + static_cast<int64_t>(recv_token(source, token)) * config.num_topk;
        int rest = index - token * config.num_topk, row_index = kNoRow;  // rest: rows of the token still to skip
#pragma unroll 1
        for (int first = 0; first < config.num_topk; first += kEntriesAtOnce) {
            int entry[kEntriesAtOnce];
#pragma unroll
            for (int i = 0; i < kEntriesAtOnce; ++i) entry[i] = first + i < config.num_topk ? entries[first + i] : -1;
#pragma unroll
            for (int i = 0; i < kEntriesAtOnce; ++i)
                if (entry[i] != -1 && rest-- == 0) row_index = entry[i];
        }
        return row_index;
    }

    // ---- work blocks ----

    // On the experts' rank each warp sums one tile of a row, in the order in which rows are sent.

    __device__ void reduce() const {
        WarpTasks tasks(&c.state->next_reduce);
        Remote remote(*this, tasks.take());
        while (remote.peer >= 0) {
            Remote next(*this, tasks.take());
            remote.rows.look_up(*this);
            reduce_row(remote);
            remote = next;
        }
    }

    // Describes the part of a row that a task of `reduce` sums; peer: -1 past the last. It repeats the search of SourceTask, because using
    // that made the compiler spill a register of the sums. Rows for other nodes come first, because their way is longer.
    struct Remote {
        int peer = -1, index = 0, tile = 0;
        Rows rows;
        __device__ Remote(const Kernel& k, int task) {
#pragma unroll 1
            for (int turn = 1; turn < k.config.num_sources(); ++turn) {
                const Source to = Source::at_turn(k.config, (k.config.node + 1) % k.config.num_nodes, k.c.rank, turn);
                const int num_tasks = to.rank == k.c.rank ? 0 : k.p.recv_counts[to.number(k.config)] * k.num_tiles;
                if (task < num_tasks) {
                    peer = to.rank, index = to.first_slot(k.config) + task / k.num_tiles, tile = task % k.num_tiles;
                    rows = Rows(k, k.recv_token(to, index));
                    return;
                }
                task -= num_tasks;
            }
        }
    };

    __device__ void reduce_row(const Remote& remote) const {
        std::byte* to = workspace.outbox(remote.peer) + remote.index * slot.bytes;
        if (remote.tile == 0 && p.has_topk_weight_grads && lane < config.num_topk)
            reinterpret_cast<float*>(to + row_bytes)[lane] = remote.rows.topk_weight_grad(*this);
        each_batch(remote.tile, [&](int first, int end) {
            Sum sum = {};
            remote.rows.add(*this, sum, first, end);
            write(to, first, end, sum);
        });
        fence_bulk_copies();
        __syncwarp();
        if (lane == 0) add_release_local(p.routing.reduced + remote.peer * workspace.layout.num_reduced + remote.index / kReducedSlots, 1);
    }

    // On the token's rank each warp sums one tile of the token's row.

    template <bool kHasNodes>
    __device__ void finish() const {
        WarpTasks tasks(&c.state->next_receive);
        const int own_first = first_from(p.recv_counts, c.rank), num_tasks = p.routing.num_tokens * num_tiles;
        const auto token_of = [&](int task) {  // tokens of other nodes come first
            if constexpr (!kHasNodes) return task / num_tiles;
            return (task / num_tiles + (config.node + 1) * config.node_tokens()) % p.routing.num_tokens;
        };
        const auto slot_of = [&](int task) {  // the token's slot on rank `lane`, or -1 if it did not go there
            return task < num_tasks && lane < config.num_ranks ? p.routing.send_slot[token_of(task) * config.num_ranks + lane] : -1;
        };
        const auto rows_of = [&](int index) {
            const int own_index = __shfl_sync(kFullWarp, index, c.rank);
            if (own_index < 0) return Rows();
            if constexpr (!kHasNodes) return Rows(*this, own_first + own_index);
            return Rows(*this, recv_token({own_index / config.node_tokens(), c.rank}, own_index));
        };
        int task = tasks.take(), index = slot_of(task), next = tasks.take(), next_index = slot_of(next);
        Rows rows = rows_of(index);
        while (task < num_tasks) {  // loads for the next two tasks are in flight
            const int later = tasks.take(), later_index = slot_of(later);
            const Rows next_rows = rows_of(next_index);
            rows.look_up(*this);
            const bool is_remote = index >= 0 && lane != c.rank;
            if (!__all_sync(kFullWarp, !is_remote || wait_flag(c, workspace.arrived(lane, index), sequence, lane, GpuPhase::kCombineRows)))
                return;
            __syncwarp();  // all threads may read what one has seen arrive
            if constexpr (!kHasNodes) finish_token(task / num_tiles, task % num_tiles, index, rows);
            if constexpr (kHasNodes)
                if (!finish_token_of_nodes(token_of(task), task % num_tiles, index, rows)) return;
            task = next, index = next_index, rows = next_rows;
            next = later, next_index = later_index;
        }
    }

    // Add up, in rank order, sums that have come and the sum of this rank's rows. `index`: the token's slot on rank `lane`; -1: none.
    __device__ void finish_token(int token, int tile, int index, const Rows& rows) const {
        const unsigned ranks = __ballot_sync(kFullWarp, index >= 0);
        const int num_ranks = __popc(ranks), num_rows = num_ranks + (p.bias != nullptr);
        const int rank = nth_set(ranks, lane), there = __shfl_sync(kFullWarp, index, rank);  // lane n: the n-th rank and its slot
        const std::byte* from = lane < num_ranks ? sum_from(rank, there) : p.bias + static_cast<int64_t>(token) * row_bytes;
        if (lane < num_ranks && rank == c.rank) from = nullptr;
        const auto sums = [&](int n) { return pieces(shuffle(from, n)); };
        each_batch(tile, [&](int first, int end) {
            Sum sum = {}, here = {};
            rows.add(*this, here, first, end);
            Pieces held;  // this rank's sum, rounded as if it had been sent
#pragma unroll
            for (int j = 0; j < kBatch; ++j) held[j] = Values::store(here[j]);
            sum_pieces<Values, kBatch>(sum, first, end, num_rows, sums, [](int) { return 1.0f; }, held);
            write(p.combined_x + static_cast<int64_t>(token) * row_bytes, first, end, sum);
        });
        if (tile == 0 && p.combined_topk_weight_grads != nullptr) take_topk_weight_grads(token, index, rows);
    }

    // Finish a token if there are several nodes. Returns false if this rank gives up.
    __device__ bool finish_token_of_nodes(int token, int tile, int index, const Rows& rows) const {
        const int node = token / config.node_tokens(), at = token - node * config.node_tokens();
        if (node == config.node) return at >= p.rail.num_tokens || finish_own_token(token, at, tile, index, rows);
        if (__ballot_sync(kFullWarp, index >= 0) == 0) return true;  // the place has no token, or the token went to no rank here
        std::byte* to = p.rail.of_node(p.rail.outbox, config, node, slot.bytes) + at * slot.bytes;
        each_batch(tile, [&](int first, int end) {
            Sum sum = {};
            add_ranks(sum, first, end, index, rows);
            write(to, first, end, sum);
        });
        if (tile == 0 && p.has_topk_weight_grads) {
            const float value = topk_weight_grad(token, index, rows);
            if (lane < config.num_topk) reinterpret_cast<float*>(to + row_bytes)[lane] = value;
        }
        __syncwarp();
        if (lane == 0) add_release_local(p.rail.summed + token / kRailSlots, 1);
        return true;
    }

    // Add, in node order, the sums that have come from other nodes and the sum of this node, which is not rounded.
    __device__ bool finish_own_token(int token, int at, int tile, int index, const Rows& rows) const {
        const int there = lane < config.num_nodes && lane != config.node ? p.rail.slots[at * config.num_nodes + lane] : -1;
        const unsigned long long* ready = p.rail.ready + (lane * config.node_tokens() + there) / kRailSlots;
        const bool ok = there < 0 || wait_flag(c, ready, sequence, rail_peer(lane), GpuPhase::kRailRows);
        if (!__all_sync(kFullWarp, ok)) return false;
        __syncwarp();  // all threads may read what one has seen arrive
        const std::byte* from = there < 0 ? nullptr : p.rail.of_node(p.rail.inbox, config, lane, slot.bytes) + there * slot.bytes;
        const unsigned nodes = __ballot_sync(kFullWarp, there >= 0), before = nodes & ((1u << config.node) - 1), after = nodes & ~before;
        const std::byte* bias = p.bias == nullptr ? nullptr : p.bias + static_cast<int64_t>(at) * row_bytes;
        const auto earlier = [&](int n) { return pieces(shuffle(from, nth_set(before, n))); };
        const auto later = [&](int n) {
            const std::byte* sum = shuffle(from, nth_set(after, n));
            return pieces(n < __popc(after) ? sum : bias);
        };
        each_batch(tile, [&](int first, int end) {
            Sum sum = {}, of_node = {};
            add_ranks(of_node, first, end, index, rows);
            sum_pieces<Values, kBatch>(sum, first, end, __popc(before), earlier, [](int) { return 1.0f; }, Pieces{});
#pragma unroll
            for (int j = 0; j < kBatch; ++j)
#pragma unroll
                for (int v = 0; v < Values::kCount; ++v) sum[j][v] = __fadd_rn(sum[j][v], of_node[j][v]);
            sum_pieces<Values, kBatch>(sum, first, end, __popc(after) + (bias != nullptr), later, [](int) { return 1.0f; }, Pieces{});
            write(p.combined_x + static_cast<int64_t>(at) * row_bytes, first, end, sum);
        });
        if (tile == 0 && p.combined_topk_weight_grads != nullptr) take_topk_weight_grads_of_nodes(token, at, index, from, rows);
        return true;
    }

    // Write the gradients of the token's weights. `from` is the token's sum that came from node `lane`, or null.
    __device__ void take_topk_weight_grads_of_nodes(int token, int at, int index, const std::byte* from, const Rows& rows) const {
        float value = topk_weight_grad(token, index, rows);
        if (p.options.sums_lanes) {
            for (int other = 0; other < config.num_nodes; ++other) {
                const std::byte* sum = shuffle(from, other);
                if (sum != nullptr && lane < config.num_topk) value += reinterpret_cast<const float*>(sum + row_bytes)[lane];
            }
            if (lane < config.num_topk) p.combined_topk_weight_grads[at * config.num_topk + lane] = value;
            return;
        }
        const int expert = lane < config.num_topk ? p.rail.topk_idx[at * config.num_topk + lane] : -1;
        const int node = expert < 0 ? config.node : expert / config.num_experts;
        const std::byte* sum = shuffle(from, node);
        if (node != config.node) value = reinterpret_cast<const float*>(sum + row_bytes)[lane];
        if (lane < config.num_topk) p.combined_topk_weight_grads[at * config.num_topk + lane] = value;
    }

    // Finish where every row comes back on its own: the rows of a token by lanes, or of the top-1 tokens that share a row of the result.
    // Each warp sums one tile of a result, and thread n finds the n-th row.
    __device__ void finish_single_rows() const {
        WarpTasks tasks(&c.state->next_receive);
        const int num_rows = p.is_by_lane() ? config.num_topk : p.tokens_per_row;  // rows of one result
        const int num_results = p.is_by_lane() ? p.routing.num_tokens : p.routing.num_tokens / p.tokens_per_row;
#pragma unroll 1
        for (int task = tasks.take(); task < num_results * num_tiles; task = tasks.take()) {
            const int result = task / num_tiles;
            Returned row;
            if (p.is_by_lane())
                row.find_lane(*this, result, lane < num_rows);
            else if (lane < num_rows)
                row.find_token(*this, lane * num_results + result);
            const bool is_remote = row.rank >= 0 && row.rank != c.rank;
            if (!__all_sync(kFullWarp,
                            !is_remote || wait_flag(c, workspace.arrived(row.rank, row.index), sequence, row.rank, GpuPhase::kCombineRows)))
                return;
            __syncwarp();  // all threads may read what one has seen arrive
            if (task % num_tiles == 0 && p.combined_topk_weight_grads != nullptr && row.number >= 0)
                p.combined_topk_weight_grads[row.number] = row.topk_weight_grad(*this);
            add_rows(result, task % num_tiles, row);
        }
    }

    // Describes a row that comes back: its top-k entry among those of all tokens, the rank and slot it comes from, and where it lies.
    struct Returned {
        int number = -1, rank = -1, index = -1, row = -1;  // rank: -1 if there is no such row; row: of x, if it is on this rank
        const std::byte* from = nullptr;

        // Finds top-k entry `lane` of a token.
        __device__ void find_lane(const Kernel& k, int token, bool is_lane) {
            int slot = -1, expert = -1;
            if (is_lane) number = token * k.config.num_topk + k.lane, expert = static_cast<int>(k.p.routing.expert(token, k.lane));
            if (expert >= 0) rank = expert / (k.config.num_experts / k.config.num_ranks);
            const unsigned earlier = __match_any_sync(kFullWarp, rank) & ((1u << k.lane) - 1);
            if (rank < 0) return;
            slot = k.p.routing.send_slot[token * k.config.num_ranks + rank];
            index = slot * k.config.num_topk + __popc(earlier);
            if (rank == k.c.rank) row = k.p.recv_row_idx[(first_from(k.p.recv_counts, rank) + slot) * k.config.num_topk + k.lane];
            look_up(k);
        }

        // Finds the row of a token of top-1.
        __device__ void find_token(const Kernel& k, int token) {
            number = token;
            for (int to = 0; to < k.config.num_ranks; ++to) {
                const int slot = k.p.routing.send_slot[number * k.config.num_ranks + to];
                if (slot >= 0) rank = to, index = slot;
            }
            if (rank == k.c.rank) row = first_from(k.p.recv_counts, rank) + index;
            if (row >= 0) row = k.p.is_expert_layout ? k.p.recv_row_idx[row] : static_cast<int>(k.within_bound(row));
            look_up(k);
        }

        __device__ void look_up(const Kernel& k) {
            if (row >= 0) from = row_of(k.expert_rows, k.p.expert_rows.num_tensors, k.p.x, row, k.row_bytes);
            if (rank >= 0 && rank != k.c.rank) from = k.sum_from(rank, index);
        }

        __device__ float topk_weight_grad(const Kernel& k) const {
            if (from == nullptr) return 0.0f;
            return row >= 0 ? k.p.topk_weight_grads[row] : *reinterpret_cast<const float*>(from + k.row_bytes);
        }
    };

    __device__ void add_rows(int result, int tile, const Returned& row) const {
        const unsigned there = __ballot_sync(kFullWarp, row.from != nullptr);
        const int num_terms = __popc(there);
        float own_weight = 1.0f;
        if (row.from != nullptr && p.source_weights != nullptr) own_weight = p.source_weights[row.number];
        if (row.from != nullptr && p.weights_are_sent) own_weight = row.topk_weight_grad(*this);
        const std::byte* bias = p.bias == nullptr ? nullptr : p.bias + static_cast<int64_t>(result) * row_bytes;
        const auto rows = [&](int n) {
            const std::byte* from = shuffle(row.from, n < num_terms ? nth_set(there, n) : 0);
            return pieces(n < num_terms ? from : bias);
        };
        const auto weights = [&](int n) {
            const float weight = __shfl_sync(kFullWarp, own_weight, n < num_terms ? nth_set(there, n) : 0);
            return n < num_terms ? weight : 1.0f;
        };
        each_batch(tile, [&](int first, int end) {
            Sum sum = {};
            if (p.is_fused)
                sum_pieces<Values, kBatch, true>(sum, first, end, num_terms + (bias != nullptr), rows, weights, Pieces{});
            else
                sum_pieces<Values, kBatch>(sum, first, end, num_terms + (bias != nullptr), rows, weights, Pieces{});
            write(p.combined_x + static_cast<int64_t>(result) * row_bytes, first, end, sum);
        });
    }

    __device__ void take_topk_weight_grads(int token, int index, const Rows& rows) const {
        const float value = topk_weight_grad(token, index, rows);
        if (lane < config.num_topk) p.combined_topk_weight_grads[token * config.num_topk + lane] = value;
    }
};

// On the token's rank a work block adds up the sums of the ranks, in one node or over several, or single rows.
enum class Finish { kTokens, kTokensOfNodes, kSingleRows };

template <DType kType, class Ring, Finish kFinish>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ GpuCombineParams p) {
    __shared__ ExpertRows expert_rows;
    if (p.expert_rows.num_tensors > 0) {
        if (threadIdx.x < p.expert_rows.num_tensors)
            expert_rows.first_row[threadIdx.x] = p.expert_rows.first_row[threadIdx.x],
            expert_rows.rows[threadIdx.x] = p.expert_rows.rows[threadIdx.x];
        __syncthreads();
    }
    if (!wait_for_plan(p.context, false)) return wait_for_kernel_before();
    const Kernel<kType> kernel(p, expert_rows);
    if (static_cast<int>(blockIdx.x) < p.num_send_blocks) {
        kernel.template send<Ring>();
        return wait_for_kernel_before();
    }
    if (p.reduces) kernel.reduce();
    if constexpr (kFinish == Finish::kSingleRows) {
        if (p.finishes) kernel.finish_single_rows();
    } else {
        if (p.finishes) kernel.template finish<kFinish == Finish::kTokensOfNodes>();
    }
    wait_for_kernel_before();
}

template <DType kType, Finish kFinish>
void launch_for(const GpuCombineParams& p, void* stream, bool early) {
    const int blocks = p.num_send_blocks + p.num_work_blocks;
    const int64_t row_bytes = p.context.config.hidden * (16 / Piece<kType>::kCount);
    if (p.ring.stages == 0) return launch<combine<kType, PlainRing, kFinish>>("combine", blocks, kThreads, 0, p, stream);
    const int64_t shared_bytes = p.num_send_blocks > 0 ? RingMemory::bytes(p.ring, GpuSlotLayout(row_bytes, p.tail_bytes())) : 0;
    launch<combine<kType, BulkRing, kFinish>>("combine", blocks, kThreads, shared_bytes, p, stream, early);
}

template <DType kType>
void launch_for(const GpuCombineParams& p, void* stream, bool early) {
    if (p.adds_single_rows()) return launch_for<kType, Finish::kSingleRows>(p, stream, early);
    if (p.context.config.num_nodes > 1) return launch_for<kType, Finish::kTokensOfNodes>(p, stream, early);
    launch_for<kType, Finish::kTokens>(p, stream, early);
}

}  // namespace

void load_combine_of_nodes() {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
        with_dtype(dtype, "", [](auto type) {
            load<combine<type.value, PlainRing, Finish::kTokensOfNodes>>();
            load<combine<type.value, BulkRing, Finish::kTokensOfNodes>>();
        });
}

void launch_combine(const GpuCombineParams& p, void* stream, bool early) {
    with_dtype(p.dtype, "fp8 rows cannot be summed; combine takes fp32, bf16 or fp16",
               [&](auto dtype) { launch_for<dtype.value>(p, stream, early); });
}

}  // namespace deepep_moe
