// Low-latency combine in one kernel, or in two halves. Sending: a block sums the rows of a token's experts on this rank and pushes the sum
// straight from registers. Receiving: a block waits for a token's sums and adds them. What is summed comes through shared memory, as registers
// could not hold all that must be on its way at once.
#include <algorithm>

#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyLaunch<LowLatencyCombineParams>;

constexpr int kThreads = 448, kBatch = 2;  // pieces of 16 bytes of a row, of a lane at a time: at once, a row of 7168 columns of bf16
constexpr int kStagedRows = 8;             // on their way at once
constexpr int64_t kSharedBytes = int64_t{16} * kStagedRows * kBatch * kThreads;

template <DType kType>
constexpr int kLanesPerScale = kScaleBlock / Piece<kType>::kCount;

template <DType kType, bool kQuantized>
struct Kernel {
    using Values = Piece<kType>;
    using Columns = Fp8Columns<Values::kCount>;
    using Sum = float[kBatch][Values::kCount];

    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyCombineParams& p;
    const unsigned long long call;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_pieces;
    const int64_t row_bytes, wire_bytes;
    const LowLatencyHandleLayout handle;

    __device__ Kernel(const Launch& l, unsigned long long call)
        : c(l.context),
          config(c.config),
          p(l.call),
          call(call),
          num_pieces(config.hidden / Values::kCount),
          row_bytes(16 * static_cast<int64_t>(num_pieces)),
          wire_bytes(kQuantized ? config.hidden : row_bytes),
          handle(config) {}

    template <class T>
    __device__ const T* in_handle(int64_t offset) const {
        return reinterpret_cast<const T*>(p.handle + offset);
    }

    // The batches of a row, a warp at a time: use(first piece of this lane).
    template <class Use>
    __device__ void each_batch(const Use& use) const {
#pragma unroll 1
        for (int first = warp * 32 * kBatch; first < num_pieces; first += kThreads * kBatch) use(first + lane);
    }

    // Adds pieces `at`, `at` + 32, ... of rows(0), rows(1), ... to `sum`, in order. All lanes must call it.
    template <class Rows, class Weights>
    __device__ void sum_rows(Sum& sum, int at, int num_rows, const Rows& rows, const Weights& weights) const {
        uint4* const staged = shared_memory<uint4>() + threadIdx.x;  // each thread has places of its own
#pragma unroll 1
        for (int first = 0; first < num_rows; first += kStagedRows) {
            const int count = min(kStagedRows, num_rows - first);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const uint4* from = rows(first + i);
#pragma unroll
                for (int j = 0; j < kBatch; ++j)
                    if (at + 32 * j < num_pieces) copy_async(staged + (i * kBatch + j) * kThreads, from + at + 32 * j);
            }
            wait_copies();
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const float weight = weights(first + i);
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    float x[Values::kCount];
                    Values::load(staged[(i * kBatch + j) * kThreads], x);
#pragma unroll
                    for (int v = 0; v < Values::kCount; ++v) sum[j][v] = __fadd_rn(sum[j][v], __fmul_rn(weight, x[v]));
                }
            }
        }
    }

    // ---- sending ----

    __device__ void enter() const {
        if (threadIdx.x == 0) *reinterpret_cast<unsigned long long*>(p.call) = call;
        if (threadIdx.x < config.num_ranks && !is_masked(c, threadIdx.x)) store_relaxed(Turn(c, threadIdx.x, call).entered(c.rank), p.what.flag(call, 0));
    }

    __device__ void send() const {
        Task task(*this, blockIdx.x);
#pragma unroll 1
        for (int nth = blockIdx.x; task.to.source >= 0; nth += gridDim.x) {
            const Task next(*this, nth + gridDim.x);
            if (send_sum(task)) {
                __syncthreads();
                if (threadIdx.x == 0) store_release(Turn(c, task.to.source, call).arrived(c.rank, task.to.token), p.what.flag(call, 1));
            }
            task = next;
        }
    }

    // A token that was received, and its rows: of each lane of top-k. to.source: -1 past the last.
    struct Task {
        SourceToken to;
        LowLatencyRow own{-1, 0.0f};

        // Ranks often have equally many tokens: rows are loaded as if, before it is known how many there are.
        __device__ Task(const Kernel& k, int nth)
            : to(nth, [&](int) { return k.p.num_tokens; }, k.first(), k.config.num_ranks) {
            const int32_t* num_tokens = k.template in_handle<int32_t>(k.handle.num_tokens);
            load(k);
            const SourceToken is(nth, [&](int source) { return num_tokens[source]; }, k.first(), k.config.num_ranks);
            if (is.source == to.source && is.token == to.token) return;
            to = is;
            load(k);
        }
        __device__ void load(const Kernel& k) {
            own.row = -1;
            if (to.source < 0 || k.lane >= k.config.num_topk) return;
            own = k.template in_handle<LowLatencyRow>(k.handle.rows)[(to.source * k.config.num_max_tokens + to.token) * k.config.num_topk + k.lane];
        }
    };

    // The source whose tokens are first: all ranks begin with another one.
    __device__ int first() const { return (c.rank + 1) % config.num_ranks; }

    // Had the token rows here, and can its rank take their sum?
    __device__ bool send_sum(const Task& task) const {
        const unsigned lanes = __ballot_sync(kFullWarp, task.own.row >= 0);
        if (lanes == 0 || is_masked(c, task.to.source)) return false;
        std::byte* const slot = Turn(c, task.to.source, call).slot(c.rank, task.to.token);
        const auto rows = [&](int n) { return pieces(p.x + __shfl_sync(kFullWarp, task.own.row, nth_set(lanes, n)) * row_bytes); };
        const auto weights = [&](int n) { return __shfl_sync(kFullWarp, task.own.weight, nth_set(lanes, n)); };
        each_batch([&](int at) {
            Sum sum = {};
            sum_rows(sum, at, __popc(lanes), rows, weights);
            write(slot, at, sum);
        });
        return true;
    }

    __device__ void write(std::byte* slot, int at, const Sum& sum) const {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int piece = at + 32 * j;
            if constexpr (!kQuantized) {
                if (piece < num_pieces) pieces(slot)[piece] = Values::store(sum[j]);
            } else {
                const Fp8Block scale(largest_of<kLanesPerScale<kType>>(sum[j]), false);
                if (piece >= num_pieces) continue;
                reinterpret_cast<typename Columns::Raw*>(slot)[piece] = scale.store(sum[j]).raw;
                if (lane % kLanesPerScale<kType> == 0) reinterpret_cast<float*>(slot + wire_bytes)[piece / kLanesPerScale<kType>] = scale.scale;
            }
        }
    }

    // ---- receiving ----

    __device__ void receive() const {
        const unsigned first = ranks_of(blockIdx.x);
        const Sources sources = meet(c, call, p.what, p.statistics, blockIdx.x == 0 && warp == 0);
#pragma unroll 1
        for (int token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
            const unsigned ranks = wait_token(token, (token == blockIdx.x ? first : ranks_of(token)) & sources.came);
            each_batch([&](int at) {
                Sum sum = {};
                add(sum, token, ranks, at);
#pragma unroll
                for (int j = 0; j < kBatch; ++j)
                    if (at + 32 * j < num_pieces) pieces(p.combined_x + token * row_bytes)[at + 32 * j] = Values::store(sum[j]);
            });
        }
    }

    __device__ unsigned ranks_of(int token) const { return token < p.num_tokens ? in_handle<unsigned>(handle.rank_masks)[token] : 0; }

    // Of `ranks`, those whose sums of the token have come: all, unless one is masked in this very call, when warps may differ.
    __device__ unsigned wait_token(int token, unsigned ranks) const {
        bool came = false;
        if ((ranks >> lane & 1) != 0) came = wait_flag_of(c, Turn(c, c.rank, call).arrived(lane, token), call, lane, GpuPhase::kCombineRows) != 0;
        __syncwarp();
        return __ballot_sync(kFullWarp, came);
    }

    __device__ void add(Sum& sum, int token, unsigned ranks, int at) const {
        const Turn own(c, c.rank, call);
        if constexpr (!kQuantized) {
            const auto rows = [&](int n) { return pieces(own.slot(nth_set(ranks, n), token)); };
            sum_rows(sum, at, __popc(ranks), rows, [](int) { return 1.0f; });
        } else {
            for (unsigned rest = ranks; rest != 0; rest &= rest - 1) add_quantized(sum, own.slot(__ffs(rest) - 1, token), at);
        }
    }

    __device__ void add_quantized(Sum& sum, const std::byte* slot, int at) const {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int piece = at + 32 * j;
            if (piece >= num_pieces) continue;
            Columns y;
            y.raw = reinterpret_cast<const typename Columns::Raw*>(slot)[piece];
            const float scale = reinterpret_cast<const float*>(slot + wire_bytes)[piece / kLanesPerScale<kType>];
#pragma unroll
            for (int v = 0; v < Values::kCount; ++v) sum[j][v] = __fadd_rn(sum[j][v], __fmul_rn(load_fp8(y.values[v]), scale));
        }
    }
};

template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) low_latency_combine(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const LowLatencyContext& c = l.context;
    const unsigned long long call = l.sends ? next_call(c) : *reinterpret_cast<const unsigned long long*>(l.call.call);
    const Kernel<kType, kQuantized> kernel(l, call);
    if (l.sends) {
        if (blockIdx.x == 0) kernel.enter();
        kernel.send();
    }
    if (l.receives) kernel.receive();
    if (l.sends) end_send(c, call);
}

template <DType kType>
void launch_type(const Launch& l, void* stream) {
    if (l.call.what.fp8)
        launch<low_latency_combine<kType, true>>("low_latency_combine", l.num_blocks, kThreads, kSharedBytes, l, stream, starts_early());
    else
        launch<low_latency_combine<kType, false>>("low_latency_combine", l.num_blocks, kThreads, kSharedBytes, l, stream, starts_early());
}

}  // namespace

int low_latency_combine_blocks_per_multiprocessor() { return blocks_per_multiprocessor<low_latency_combine<DType::kBFloat16, false>>(kThreads, kSharedBytes); }

void launch_low_latency_combine(Launch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kCombine;
    if (!l.sends) l.num_blocks = std::min(l.num_blocks, std::max(1, l.call.num_tokens));
    switch (l.call.what.dtype) {
        case DType::kFloat32: return launch_type<DType::kFloat32>(l, stream);
        case DType::kBFloat16: return launch_type<DType::kBFloat16>(l, stream);
        case DType::kFloat16: return launch_type<DType::kFloat16>(l, stream);
        case DType::kFloat8: throw std::invalid_argument("combine takes float32, bfloat16 or float16");
    }
}

}  // namespace deepep_moe
