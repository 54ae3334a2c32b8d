// The blocks of a combine share this: it says where the rows of a token lie on this rank, and how they are summed.
#pragma once

#include "cuda/device/push.cuh"

namespace deepep_moe {

template <DType kType>
struct CombineRows {
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

    __device__ CombineRows(const GpuCombineParams& p, const ExpertRows& expert_rows)
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
        __device__ Rows(const CombineRows& k, int token) : recv_token(token) {
            const GpuCombineParams& p = k.p;
            if (recv_token < 0) return;
            if (p.is_expert_layout && k.lane < k.config.num_topk)
                row_of_lane = p.recv_row_idx[static_cast<int64_t>(recv_token) * k.config.num_topk + k.lane];
            if (!p.is_expert_layout && k.lane == 0 && recv_token < p.num_rows) row_of_lane = recv_token;
        }

        // Call before `add`, but long after the constructor, so that the constructor's loads are complete.
        __device__ void look_up(const CombineRows& k) {
            const unsigned there = __ballot_sync(kFullWarp, row_of_lane >= 0);
            count = __popc(there);
            const int row = __shfl_sync(kFullWarp, row_of_lane, nth_set(there, k.lane));
            if (k.lane >= count) return;
            from = row_of(k.expert_rows, k.p.expert_rows.num_tensors, k.p.x, row, k.row_bytes);
            if (k.p.weights != nullptr) weight = k.p.weights[row];
        }

        // Returns the gradient that comes with top-k entry `lane`.
        __device__ float topk_weight_grad(const CombineRows& k) const {
            const GpuCombineParams& p = k.p;
            if (p.is_expert_layout) return row_of_lane >= 0 ? p.topk_weight_grads[row_of_lane] : 0.0f;
            return recv_token >= 0 && recv_token < p.num_rows
                       ? p.topk_weight_grads[static_cast<int64_t>(recv_token) * k.config.num_topk + k.lane]
                       : 0.0f;
        }

        // Add pieces first, first + 32, ... of the rows to `sum`.
        __device__ void add(const CombineRows& k, Sum& sum, int first, int end) const {
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
};

}  // namespace deepep_moe
