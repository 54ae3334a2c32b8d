// Combine on one NVLink host. Working blocks sum the rows of each token on this rank into the outbox, sending blocks push the sums to
// the tokens' sources chunk by chunk, and the working blocks then add up, in rank order, the sums of each own token as they arrive.
#include "cuda/device/launch.cuh"
#include "cuda/device/push.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kWarpsPerRow = kWarps / kChunkSlots;  // a block sums a chunk at a time
constexpr int kWarpsPerToken = 2;

template <DType kType>
struct Kernel {
    using Values = Piece<kType>;
    static constexpr int kBatch = 4;  // pieces a lane sums at a time
    using Sum = float[kBatch][Values::kCount];

    const GpuCombineParams& p;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const int64_t row_bytes, num_pieces;
    const GpuSlotLayout slot;
    const Workspace own;
    const unsigned long long sequence;
    const int warp, lane;

    __device__ explicit Kernel(const GpuCombineParams& p)
        : p(p), c(p.context), config(c.config), row_bytes(config.hidden * (16 / Values::kCount)), num_pieces(row_bytes / 16),
          slot(row_bytes, p.tail_bytes()), own(c, c.rank), sequence(c.state->sequence), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // The first of the tokens received from `source`.
    __device__ int64_t first_from(int source) const {
        int64_t first = 0;
        for (int before = 0; before < source; ++before) first += p.recv_counts[before];
        return first;
    }

    // Where a bound on rows was exceeded, which is reported, nothing beyond them may be read.
    __device__ int64_t within_bound(int64_t row) const { return min(row, p.num_rows - 1); }

    // ---- sending blocks: as in dispatch, each serves one peer, then helps with the others ----

    template <class Ring>
    __device__ void send() const {
        Pusher<Ring> pusher(c, p.ring, slot);
        for (int turn = 0; turn < config.num_ranks - 1; ++turn) {
            const int peer = (c.rank + 1 + (blockIdx.x + turn) % (config.num_ranks - 1)) % config.num_ranks;
            const int64_t first = first_from(peer);
            const unsigned long long* reduced = p.routing.reduced + peer * own.layout.num_chunks;
            const auto ready = [&](int chunk) { return p.direct || warp_wait_flag(c, reduced + chunk, sequence, c.rank, GpuPhase::kReducedRows); };
            const auto find = [](int) { return 0; };
            const auto rows = [&](int index, int, const std::byte*& row, const std::byte*& tail) {
                const int64_t at = within_bound(first + index);
                row = p.direct ? p.x + at * row_bytes : own.outbox(peer) + index * slot.bytes;
                tail = p.direct ? reinterpret_cast<const std::byte*>(p.lane_values + at * config.num_topk) : row + row_bytes;
            };
            if (!pusher.push(peer, p.recv_counts[peer], &c.state->next_send[peer], false, ready, find, rows)) return;
        }
    }

    // ---- working blocks, the expert side: some warps a row, one chunk after another ----

    __device__ void reduce() const {
        const int row_in_chunk = warp / kWarpsPerRow;
        int num_remote = 0;
        for (int peer = 0; peer < config.num_ranks; ++peer)
            if (peer != c.rank) num_remote = max(num_remote, num_chunks(peer) * (config.num_ranks - 1));
        const int num_tasks = num_remote + num_chunks(c.rank);  // what stays here last
        const auto row_of = [&](int task) { return Place(*this, task, num_remote, row_in_chunk); };
        int task = take();
        int row = row_at(row_of(task).recv_token);
        while (task < num_tasks) {
            const int upcoming = take();
            const int upcoming_row = upcoming < num_tasks ? row_at(row_of(upcoming).recv_token) : -1;
            reduce_row(row_of(task), row, upcoming_row);
            fence_bulk_copies();
            __syncthreads();
            if (const Place place = row_of(task); threadIdx.x == 0 && place.recv_token >= 0)
                store_release_local(p.routing.reduced + place.peer * own.layout.num_chunks + place.chunk, sequence);
            task = upcoming, row = upcoming_row;
        }
    }

    __device__ int num_chunks(int peer) const { return static_cast<int>(divide_up(p.recv_counts[peer], kChunkSlots)); }

    // A number from the counter of tasks, the same for the whole block.
    __device__ int take() const {
        __shared__ int taken;
        __syncthreads();
        if (threadIdx.x == 0) taken = atomicAdd(&c.state->next_reduce, 1);
        __syncthreads();
        return taken;
    }

    // The row-th token of a task's chunk; recv_token: -1 where there is none.
    struct Place {
        int peer, chunk, index;
        int64_t recv_token;
        __device__ Place(const Kernel& k, int task, int num_remote, int row) {
            const int others = k.config.num_ranks - 1;
            peer = k.c.rank, chunk = task - num_remote;
            if (task < num_remote) peer = (k.c.rank + 1 + task % others) % k.config.num_ranks, chunk = task / others;
            index = chunk * kChunkSlots + row;
            recv_token = index < k.p.recv_counts[peer] ? k.first_from(peer) + index : -1;
        }
    };

    __device__ void reduce_row(const Place& place, int row, int upcoming_row) const {
        const int part = warp % kWarpsPerRow;
        if (place.recv_token >= 0) {
            const Rows rows(*this, place.recv_token, row);
            std::byte* to = own.outbox(place.peer) + place.index * slot.bytes;
            if (part == 0 && p.has_lane_values && lane < config.num_topk) reinterpret_cast<float*>(to + row_bytes)[lane] = rows.lane_value;
            each_batch(part, kWarpsPerRow, [&](int64_t first, int64_t end) {
                Sum sum = {};
                rows.add(sum, first, end);
                write(to, first, end, sum);
            });
        }
        if (upcoming_row >= 0) prefetch_part(p.x + upcoming_row * row_bytes, part);
    }

    __device__ void prefetch_part(const std::byte* row, int part) const {
        const int64_t per_part = pieces_per_part(kWarpsPerRow) * 16, begin = part * per_part;
        if (begin < row_bytes) bulk_prefetch(row + begin, static_cast<uint32_t>(min(per_part, row_bytes - begin)));
    }

    __device__ int64_t pieces_per_part(int parts) const { return divide_up(num_pieces, 32 * parts) * 32; }

    // A warp's part of a row, in batches: use(first piece of this lane, end).
    template <class Use>
    __device__ void each_batch(int part, int parts, const Use& use) const {
        const int64_t per_part = pieces_per_part(parts), end = min((part + 1) * per_part, num_pieces);
        for (int64_t first = part * per_part; first < end; first += 32 * kBatch) use(first + lane, end);
    }

    __device__ void write(std::byte* to, int64_t first, int64_t end, const Sum& sum) const {
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
            if (first + 32 * j < end) pieces(to)[first + 32 * j] = Values::store(sum[j]);
    }

    // Of a token received, the row that holds it for this lane of top-k, or -1. None for a negative token.
    __device__ int row_at(int64_t recv_token) const {
        if (recv_token < 0) return -1;
        if (!p.is_expert_layout) return lane == 0 && recv_token < p.num_rows ? static_cast<int>(recv_token) : -1;
        return lane < config.num_topk ? p.recv_row_idx[recv_token * config.num_topk + lane] : -1;
    }

    // The rows of one token on this rank, in order of top-k; lane n knows the n-th.
    struct Rows {
        const Kernel& kernel;
        int row, count;
        float weight = 1.0f, lane_value = 0.0f;  // lane_value: of this lane of top-k

        __device__ Rows(const Kernel& k, int64_t recv_token, int row_of_lane) : kernel(k), row(row_of_lane) {
            const GpuCombineParams& p = k.p;
            if (p.has_lane_values && recv_token >= 0 && k.lane < k.config.num_topk) {
                if (!p.is_expert_layout && recv_token < p.num_rows) lane_value = p.lane_values[recv_token * k.config.num_topk + k.lane];
                if (p.is_expert_layout && row >= 0) lane_value = p.lane_values[row];
            }
            const unsigned there = __ballot_sync(kFullWarp, row >= 0);
            count = __popc(there);
            row = __shfl_sync(kFullWarp, row, nth_set(there, k.lane));
            if (row >= 0 && p.weights != nullptr) weight = p.weights[row];
        }

        // Adds pieces first, first + 32, ... of the rows to `sum`.
        __device__ void add(Sum& sum, int64_t first, int64_t end) const {
            const auto rows = [&](int n) { return pieces(kernel.p.x + static_cast<int64_t>(__shfl_sync(kFullWarp, row, n)) * kernel.row_bytes); };
            const auto weights = [&](int n) { return __shfl_sync(kFullWarp, weight, n); };
            if (kernel.p.weights != nullptr)
                sum_pieces<Values, true, kBatch>(sum, first, end, count, rows, weights);
            else
                sum_pieces<Values, false, kBatch>(sum, first, end, count, rows, weights);
        }
    };

    // ---- working blocks, the source side: some warps a token ----

    __device__ void finish() const {
        const int64_t own_first = first_from(c.rank);
        for (int task = warp_take(&c.state->next_receive); task < p.routing.num_tokens * kWarpsPerToken; task = warp_take(&c.state->next_receive)) {
            const int64_t token = task / kWarpsPerToken;
            const int index = lane < config.num_ranks ? p.routing.send_slot[token * config.num_ranks + lane] : -1;
            if (!__all_sync(kFullWarp, index < 0 || wait_for(index / kChunkSlots))) return;
            __syncwarp();  // what one lane has seen arrive, all may read
            finish_token(token, index, own_first, task % kWarpsPerToken);
        }
    }

    // For a chunk of rank `lane`.
    __device__ bool wait_for(int chunk) const {
        if (lane != c.rank) return wait_flag(c, own.arrived(lane, chunk), sequence, lane, GpuPhase::kCombineRows);
        return p.direct || wait_flag(c, p.routing.reduced + c.rank * own.layout.num_chunks + chunk, sequence, c.rank, GpuPhase::kReducedRows);
    }

    // `index`: the token's slot on rank `lane`, -1 = it did not go there.
    __device__ void finish_token(int64_t token, int index, int64_t own_first, int part) const {
        const unsigned ranks = __ballot_sync(kFullWarp, index >= 0);
        const int rank = nth_set(ranks, lane), there = __shfl_sync(kFullWarp, index, rank);  // lane n: the n-th rank and its slot
        const std::byte* from = nullptr;
        if (lane < __popc(ranks)) from = sum_of(rank, there, own_first);
        const auto rows = [&](int n) { return pieces(reinterpret_cast<const std::byte*>(__shfl_sync(kFullWarp, reinterpret_cast<uintptr_t>(from), n))); };
        const auto unweighted = [](int) { return 1.0f; };
        each_batch(part, kWarpsPerToken, [&](int64_t first, int64_t end) {
            Sum sum = {};
            sum_pieces<Values, false, kBatch>(sum, first, end, __popc(ranks), rows, unweighted);
            if (p.bias != nullptr)
                sum_pieces<Values, false, kBatch>(sum, first, end, 1, [&](int) { return pieces(p.bias + token * row_bytes); }, unweighted);
            write(p.combined_x + token * row_bytes, first, end, sum);
        });
        if (part == 0 && p.combined_lane_values != nullptr) take_lane_values(token, index, own_first);
    }

    // The sum of a rank's rows of one token, where it lies here.
    __device__ const std::byte* sum_of(int rank, int index, int64_t own_first) const {
        if (rank != c.rank) return own.inbox(rank) + index * slot.bytes;
        return p.direct ? p.x + within_bound(own_first + index) * row_bytes : own.outbox(rank) + index * slot.bytes;
    }

    __device__ void take_lane_values(int64_t token, int index, int64_t own_first) const {
        const int64_t entry = token * config.num_topk + lane;
        int expert = -1;
        if (lane < config.num_topk)
            expert = p.routing.is_int64 ? static_cast<int>(static_cast<const int64_t*>(p.routing.topk_idx)[entry])
                                        : static_cast<const int32_t*>(p.routing.topk_idx)[entry];
        const int rank = expert >= 0 ? expert / (config.num_experts / config.num_ranks) : c.rank;
        const int there = __shfl_sync(kFullWarp, index, rank);
        if (lane >= config.num_topk) return;
        float value = 0.0f;
        if (expert >= 0 && rank == c.rank && p.direct)
            value = p.lane_values[within_bound(own_first + there) * config.num_topk + lane];
        else if (expert >= 0)
            value = reinterpret_cast<const float*>(sum_of(rank, there, own_first) + row_bytes)[lane];
        p.combined_lane_values[entry] = value;
    }
};

template <DType kType, class Ring>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ GpuCombineParams p) {
    __shared__ bool is_over;
    if (threadIdx.x == 0) is_over = gave_up(p.context);
    __syncthreads();
    if (is_over) return;
    const Kernel<kType> kernel(p);
    if (static_cast<int>(blockIdx.x) < p.num_send_blocks) {
        if (kernel.warp < p.ring.warps) kernel.template send<Ring>();
        return;
    }
    if (p.reduces) kernel.reduce();
    if (p.finishes) kernel.finish();
}

template <DType kType>
void launch_for(const GpuCombineParams& p, void* stream) {
    const int blocks = p.num_send_blocks + p.num_work_blocks;
    const int64_t row_bytes = p.context.config.hidden * (16 / Piece<kType>::kCount);
    if (p.ring.stages == 0) return launch(combine<kType, PlainRing>, "combine", blocks, kThreads, 0, p, stream);
    const int64_t shared_bytes = p.num_send_blocks > 0 ? RingMemory::bytes(p.ring, GpuSlotLayout(row_bytes, p.tail_bytes())) : 0;
    launch(combine<kType, BulkRing>, "combine", blocks, kThreads, shared_bytes, p, stream);
}

}  // namespace

void launch_combine(const GpuCombineParams& p, void* stream) {
    switch (p.dtype) {
        case DType::kFloat32: return launch_for<DType::kFloat32>(p, stream);
        case DType::kBFloat16: return launch_for<DType::kBFloat16>(p, stream);
        case DType::kFloat16: return launch_for<DType::kFloat16>(p, stream);
        case DType::kFloat8: throw std::invalid_argument("fp8 rows cannot be summed; combine takes fp32, bf16 or fp16");
    }
}

}  // namespace deepep_moe
