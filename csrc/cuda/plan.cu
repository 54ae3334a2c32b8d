// Plans where this rank's tokens go. This is the first kernel of every call.
//
//   Blocks          At most 64 of kPlanThreads; fewer if the GPU, or a share of it, holds fewer. All must be on the GPU at once, because
//                   they wait for each other.
//
//   Block 0         Enters the call: stores `entered` at every rank. After a call that this rank refused or failed in, it first waits
//                   until the peers have entered that one.
//   Every block     Counts one segment of one node's tokens by ballots and prefix sums, so the order is the same in every run.
//   Last to count   Sums the segments, stores `sequence`, and stores counts at every rank. Waits for `entered` and the counts of the
//                   peers, then tells the host.
//   Other blocks    Wait for `sequence`, then give their tokens a slot for each destination. The last one to do so stores `placed`.
//
// With a handle the counts are known and are not exchanged. A refusal is entered like a call, but waits for nobody unless this rank
// refuses many calls in a row.
#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

#include <algorithm>

namespace deepep_moe {

// Rare paths are not inlined, because a kernel that runs once for microseconds must fetch every line of its code.
__device__ __noinline__ inline void refuse_index(const GpuContext& c, int entry, long long expert) {
    report(c, kIndexOutOfRange, entry % c.config.num_topk, GpuPhase::kNone, entry / c.config.num_topk, expert);
}

__device__ __noinline__ inline void refuse_duplicate(const GpuContext& c, int entry, int expert) {
    report(c, kDuplicateExpert, entry % c.config.num_topk, GpuPhase::kNone, entry / c.config.num_topk, expert);
}

namespace {

using tuning::kMaxSegments, tuning::kPlanThreads, tuning::kQuickLooks;

// All threads of a block call it.
__device__ __noinline__ void refuse_handle(const GpuContext& c) {
    if (threadIdx.x == 0) report(c, kFailedHandle, c.rank, GpuPhase::kNone, 0, 0);
    __syncthreads();
}

// Wait until all peers have entered `call`. A peer that is behind still reads this rank's entry or refusal stamp of the call before it,
// which this rank is about to overwrite. All threads of a block call it, if this rank may not have met its peers in `call` or since.
__device__ __noinline__ void catch_up(const GpuContext& c, unsigned long long call) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < c.config.num_ranks) wait_flag(c, Workspace(c, c.rank).entered(call, peer), call << kValueBits, peer, GpuPhase::kEntry);
    __syncthreads();
}

// Report that `peer` is not in call `sequence`. `word` is its refusal of this call or of a later one, because a rank that refuses waits
// for nobody. If it has refused this call too, the stamp of this call says why.
__device__ __noinline__ void report_refusal(const GpuContext& c, unsigned long long sequence, unsigned long long word, int peer) {
    const Workspace workspace(c, c.rank);
    const unsigned long long what = workspace.stamp(sequence, peer)->what;
    const bool has_refused_this = what == 0 || (what & kRefusedByGpu) != 0;
    const unsigned long long call = has_refused_this ? sequence : word >> kValueBits;
    report(c, kPeerRefused, peer, GpuPhase::kNone, static_cast<long long>(call), workspace.stamp(call, peer)->cause());
}

__device__ __noinline__ bool wait_count(const GpuContext& c, const unsigned long long* words, int at, unsigned long long expected,
                                        int32_t* counts) {
    const int peer = at / c.layout.columns % c.config.num_ranks;
    const unsigned long long sequence = expected >> kValueBits;
    if (wait_word(c, Workspace(c, c.rank).entered(sequence, peer), expected, peer, GpuPhase::kEntry) == 0) return false;
    const unsigned long long word = wait_word(c, words + at, expected, peer, GpuPhase::kCounts);
    counts[at] = static_cast<int>(word - expected);
    const bool refuses = word >= (expected | kRefused);
    if (refuses) report_refusal(c, sequence, word, peer);
    return word != 0 && !refuses;
}

struct Plan {
    static constexpr int kLoads = tuning::kPlanLoads;

    const GpuPlanParams& p;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const GpuRouting& r;
    const int columns, num_local, warp, lane;
    const unsigned long long sequence;
    const int node;                  // the node whose tokens this block counts
    const int warp_begin, warp_end;  // this warp's tokens
    int32_t* const warp_counts;      // shared memory [kPlanWarps, columns]: tokens of each warp
    int32_t* const all_counts;       // [num_sources, columns] counts of each source; later, in the same memory
    int32_t* const experts;          // shared memory [32, num_topk]: experts of 32 tokens of this warp, -1 = none
    const Workspace workspace;
    int* const num_rows;  // shared memory [kMaxGpuRanks]: rows that each rank receives

    __device__ Plan(const GpuPlanParams& p, int32_t* shared, int* num_rows)
        : p(p),
          c(p.context),
          config(c.config),
          r(p.routing),
          columns(c.layout.columns),
          num_local(config.num_experts / config.num_ranks),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32),
          sequence(c.state->sequence + 1),
          node(static_cast<int>(blockIdx.x) / r.node_segments),
          warp_begin(first_of(node) + ((static_cast<int>(blockIdx.x) - node * r.node_segments) * kPlanWarps + warp) * r.tokens_per_warp),
          warp_end(min(min(warp_begin + r.tokens_per_warp, first_of(node + 1)), r.num_tokens)),
          warp_counts(shared),
          all_counts(shared),
          experts(shared + kPlanWarps * columns + warp * 32 * config.num_topk),
          workspace(c, c.rank),
          num_rows(num_rows) {}

    // ---- entry: once a peer sees it, the peer may write its part of this rank's workspace ----

    __device__ void enter() const {
        const unsigned long long lead = is_refusal() ? kStamps - 1 : 1;  // calls that this rank may be ahead of its peers
        if (c.state->last_met + lead < sequence) catch_up(c, sequence - lead);
        const bool is_failed_handle = p.cached && p.recv_counts != nullptr && p.recv_counts[0] < 0, had_given_up = gave_up(c);
        if (is_failed_handle) refuse_handle(c);
        if (static_cast<int>(threadIdx.x) >= config.num_ranks) return;
        const bool has_failed = (is_failed_handle || had_given_up) &&
                                static_cast<volatile GpuFailure*>(c.failure)->kind != kNoFailure;  // else the peers learn of it later
        const bool refuses = is_refusal() || has_failed;
        const Workspace theirs(c, threadIdx.x);
        GpuStamp& stamp = *theirs.stamp(sequence, c.rank);
        if (is_refusal()) stamp = p.stamp;
        stamp.what = p.stamp.what;
        if (refuses) return refuse(theirs);
        if (!p.cached) store_relaxed(theirs.bound(sequence, c.rank), sequence << kValueBits | bound_to_tell());
        store_relaxed(theirs.entered(sequence, c.rank), sequence << kValueBits | digest(p.stamp.what));
    }

    __device__ unsigned long long bound_to_tell() const {
        return p.num_recv_rows_bound < 0 ? kNoBound : min(p.num_recv_rows_bound, static_cast<long long>(kNoBound));
    }

    // The host has refused this call.
    __device__ bool is_refusal() const { return p.stamp.what == 0; }

    __device__ void refuse(const Workspace& theirs) const {
        GpuStamp& stamp = *theirs.stamp(sequence, c.rank);
        if (!is_refusal()) stamp.what = p.stamp.what | kRefusedByGpu, stamp.reason[0] = '\0', stamp.why = own_failure(c);
        store_release(theirs.entered(sequence, c.rank), sequence << kValueBits);
    }

    // ---- every block counts one segment of the tokens ----

    // Returns the number of a node's first token, which is that of its first slot too.
    __device__ int first_of(int node) const { return node * config.node_tokens(); }

    __device__ void count() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kPlanWarps * columns; i += kPlanThreads) warp_counts[i] = 0;
#pragma unroll 1
        for (int i = blockIdx.x * kPlanThreads + threadIdx.x; p.cached && i < config.num_ranks * workspace.layout.num_reduced;
             i += gridDim.x * kPlanThreads)
            r.reduced[i] = 0;  // only combines use it, and they are cached
        __syncthreads();
        int32_t* counts = warp_counts + warp * columns;
#pragma unroll 1
        for (int first = warp_begin; first < warp_end; first += 32) {
            const int num_tokens = min(warp_end - first, 32);
            load_experts(first, num_tokens);
            count_ranks(first, num_tokens, counts + config.num_experts);
            const int num_entries = num_tokens * config.num_topk, step = 32 / config.num_topk * config.num_topk;  // whole tokens
#pragma unroll 1
            for (int begin = 0; !p.cached && begin < num_entries; begin += step)
                count_expert(first * config.num_topk, lane < step && begin + lane < num_entries ? begin + lane : -1, counts);
            __syncwarp();
        }
        __syncthreads();
#pragma unroll 1
        for (int column = threadIdx.x; column < columns; column += kPlanThreads) {
            int total = 0;
#pragma unroll
            for (int w = 0; w < kPlanWarps; ++w) {
                r.warp_counts[(static_cast<int>(blockIdx.x) * kPlanWarps + w) * columns + column] = total;
                total += warp_counts[w * columns + column];
            }
            r.segment_counts[static_cast<int>(blockIdx.x) * columns + column] = total;
        }
    }

    // Load the experts of up to 32 tokens, and refuse indices out of range.
    __device__ void load_experts(int first, int num_tokens) const {
        const int num_entries = num_tokens * config.num_topk, before = first * config.num_topk;
#pragma unroll 1
        for (int begin = lane; begin < num_entries; begin += 32 * kLoads) {
            int64_t wide[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int entry = begin + 32 * i, token = entry / config.num_topk;
                wide[i] = entry < num_entries ? r.expert(first + token, entry - token * config.num_topk) : -1;
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int entry = begin + 32 * i;
                if (entry >= num_entries) continue;
                const bool inside = wide[i] >= -1 && wide[i] < config.num_experts;
                if (!inside) refuse_index(c, before + entry, wide[i]);
                experts[entry] = inside ? static_cast<int>(wide[i]) : -1;
                if (r.narrow_topk_idx != nullptr) r.narrow_topk_idx[before + entry] = experts[entry];
            }
        }
        __syncwarp();
    }

    // Give each token its slots on the way to its ranks, and count these. Each thread takes one token.
    __device__ void count_ranks(int first, int num_tokens, int32_t* counts) const {
        unsigned ranks = 0;
#pragma unroll 1
        for (int k = 0; k < config.num_topk && lane < num_tokens; ++k) {
            const int expert = experts[lane * config.num_topk + k];
            if (expert >= 0) ranks |= 1u << (expert / num_local);
        }
#pragma unroll 1
        for (int rank = 0; rank < config.num_ranks; ++rank) {
            const unsigned goes = __ballot_sync(kFullWarp, ranks >> rank & 1);
            const int before = counts[rank] + __popc(goes & ((1u << lane) - 1));
            if (lane < num_tokens) r.send_slot[(first + lane) * config.num_ranks + rank] = (ranks >> rank & 1) ? before : -1;
            __syncwarp();
            if (lane == 0) counts[rank] += __popc(goes);
            __syncwarp();
        }
    }

    // Number the entries with the same expert in thread order, and refuse duplicates. Each thread takes one entry of topk_idx, or -1.
    __device__ void count_expert(int first_entry, int entry, int32_t* counts) const {
        const int expert = entry >= 0 ? experts[entry] : -1;
        const unsigned same = __match_any_sync(kFullWarp, expert), earlier = same & ((1u << lane) - 1);
        const int before = __popc(earlier);
        if (expert >= 0) r.index_in_warp[first_entry + entry] = counts[expert] + before;
        if (expert >= 0 && earlier >> (lane - lane % config.num_topk) != 0) refuse_duplicate(c, first_entry + entry, expert);
        __syncwarp();
        if (expert >= 0 && before == 0) counts[expert] += __popc(same);
        __syncwarp();
    }

    // ---- the last block to count sums the segments and exchanges the sums ----

    __device__ void exchange() const {
        __shared__ bool refuses, failed;
        __shared__ int bounds[kMaxGpuRanks];
        if (threadIdx.x == 0) refuses = failed = is_refusal() || gave_up(c);
        __syncthreads();
        if (refuses) {  // the reason must be visible before any count that says so
            if (static_cast<int>(threadIdx.x) < config.num_ranks) refuse(Workspace(c, threadIdx.x));
            fence_system();
            __syncthreads();
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < config.num_nodes * columns; i += kPlanThreads) sum_segments(i % columns, i / columns, refuses);
        if (p.cached && config.num_nodes > 1 && p.recv_counts != nullptr) find_sources();
        __syncthreads();
        if (threadIdx.x == 0) let_place();
        if (warp == kPlanWarps - 1) {
            const bool met = !refuses && __all_sync(kFullWarp, lane >= config.num_ranks || meet(lane));
            __syncwarp();  // orders the stores below behind what all threads of the warp have seen
            if (lane == 0 && met) {
                c.state->last_met = sequence;
                store_release_local(&c.state->met, c.plan);
                static_cast<volatile GpuCounts*>(c.counts)->met = c.plan;
            }
            if (lane == 0 && !met) failed = true;
            let_next_kernel_start();
        }
        if (!refuses) place();  // ahead of the peers' counts, as the senders wait for this block's tokens too
        if (!p.cached && !gather()) failed = true;
        __syncthreads();
        const bool is_laid_out = !p.cached && !failed;
        if (is_laid_out && warp < config.num_ranks) lay_out(warp);
        if (is_laid_out && warp == kPlanWarps - 1) take_bounds(bounds);
        __syncthreads();
        if (is_laid_out && warp == 0 && !have_room(bounds)) failed = true;
        __syncthreads();
        const bool is_counted = is_laid_out && !failed;
        if (is_counted && config.num_nodes > 1) {
            find_sources();
            __syncthreads();
        }
        if (threadIdx.x == 0 && !failed) {
            if (is_counted) c.state->num_rows = num_rows[c.rank];  // receivers read it after `counted`
            store_release_local(&c.state->counted, c.plan);
        }
        if (is_counted && warp == kPlanWarps - 1) tell();
        if (!p.cached && failed) receive_nothing();
    }

    // After a failed dispatch, mark the handle and set all counts to 0.
    __device__ void receive_nothing() const {
#pragma unroll 1
        for (int local = threadIdx.x; local < num_local; local += kPlanThreads) p.num_recv_tokens_per_expert[local] = 0;
        if (static_cast<int>(threadIdx.x) < config.num_sources()) p.recv_counts[threadIdx.x] = threadIdx.x == 0 ? kFailed : 0;
    }

    // Precompute how many tokens come before each source, because with several nodes there are too many sources to add up in each warp.
    __device__ void find_sources() const {
        const int source = static_cast<int>(threadIdx.x);
        if (source < config.num_sources()) r.recv_first[source] = first_from(p.recv_counts, source);
    }

    // Replace the counts of each segment by the sums of those before it, and send the total. A rank that refuses sends kRefused instead.
    __device__ void sum_segments(int column, int node, bool refuses) const {
        int total = 0;
        const int end = (node + 1) * r.node_segments;
#pragma unroll 1
        for (int first = node * r.node_segments; first < end; first += kLoads) {
            int count[kLoads];
            int32_t* cells = r.segment_counts + first * columns + column;
#pragma unroll
            for (int i = 0; i < kLoads; ++i) count[i] = first + i < end ? __ldcg(cells + i * columns) : 0;
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (first + i < end) cells[i * columns] = total;
                total += count[i];
            }
        }
        if (column >= config.num_experts) r.send_counts[node * config.num_ranks + column - config.num_experts] = total;
        const unsigned long long word = sequence << kValueBits | (refuses ? kRefused : static_cast<unsigned long long>(total));
#pragma unroll 1
        for (int rank = 0; rank < config.num_ranks && !p.cached; ++rank)
            store_relaxed(Workspace(c, rank).counts(sequence, node * config.num_ranks + c.rank) + column, word);
    }

    // Wait for a peer to enter, and report one that is in another call or refuses.
    __device__ bool meet(int peer) const {
        const unsigned long long seen = wait_word(c, workspace.entered(sequence, peer), sequence << kValueBits, peer, GpuPhase::kEntry);
        if (seen == 0) return false;
        if (peer == c.rank || seen == (sequence << kValueBits | digest(p.stamp.what))) return true;
        if ((seen & kRefused) == 0)
            report_refusal(c, sequence, seen, peer);
        else
            report(c, kMismatch, peer, GpuPhase::kNone, static_cast<long long>(sequence), 0);
        return false;
    }

    // Read the counts of all ranks, as they arrive, into the shared memory that held the counts of this block's warps.
    __device__ bool gather() const {
        const int num_words = config.num_sources() * columns;
        const unsigned long long expected = sequence << kValueBits;
        const unsigned long long* words = workspace.counts(sequence, 0);
        bool ok = true;
#pragma unroll 1
        for (int first = threadIdx.x; first < num_words; first += kPlanThreads * kLoads) {
            unsigned long long word[kLoads];
            unsigned not_here = 1;
#pragma unroll 1
            for (int look = 0; look < kQuickLooks && not_here != 0; ++look) {
                not_here = 0;
#pragma unroll
                for (int i = 0; i < kLoads; ++i)
                    word[i] = first + i * kPlanThreads < num_words ? load_relaxed(words + first + i * kPlanThreads) : expected;
#pragma unroll
                for (int i = 0; i < kLoads; ++i)
                    if (word[i] - expected >= kRefused) not_here |= 1u << i;  // the word is of an older call, a refusal, or of a later call
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i)
                if (first + i * kPlanThreads < num_words) all_counts[first + i * kPlanThreads] = static_cast<int>(word[i] - expected);
            for (; not_here != 0; not_here &= not_here - 1) {
                const int at = first + (__ffs(not_here) - 1) * kPlanThreads;
                ok = wait_count(c, words, at, expected, all_counts) && ok;
            }
        }
        return ok;
    }

    __device__ int count_of(int source, int column) const { return all_counts[source * columns + column]; }

    // Compute where each expert's group begins on `rank`, and in it the first row of this rank's tokens. One warp calls it.
    __device__ void lay_out(int rank) const {
        int rows = 0;
#pragma unroll 1
        for (int first = 0; first < num_local; first += 32) {
            const int local = first + lane, expert = rank * num_local + local;
            const int num_sources = local < num_local ? config.num_sources() : 0;
            int total = 0;
#pragma unroll 1
            for (int source = 0; source < num_sources; ++source) total += count_of(source, expert);
            if (rank == c.rank && local < num_local) {
                p.num_recv_tokens_per_expert[local] = total;
                if (p.reports_counts) c.expert_counts[local] = total;
            }
            const int padded = divide_up(total, p.expert_alignment) * p.expert_alignment;
            const int inclusive = prefix_sum(padded);
            int row = rows + inclusive - padded;
#pragma unroll 1
            for (int source = 0; source < num_sources; ++source) {
                if (source % config.num_ranks == c.rank) r.expert_row_base[source / config.num_ranks * config.num_experts + expert] = row;
                row += count_of(source, expert);
            }
            rows += __shfl_sync(kFullWarp, inclusive, 31);
        }
        if (lane == 0) num_rows[rank] = p.is_expert_layout ? rows : num_recv_tokens(rank);
        if (rank != c.rank) return;
#pragma unroll 1
        for (int source = lane; source < config.num_sources(); source += 32)
            p.recv_counts[source] = count_of(source, config.num_experts + c.rank);
    }

    __device__ int num_recv_tokens(int rank) const {
        int num_tokens = 0;
#pragma unroll 1
        for (int source = 0; source < config.num_sources(); ++source) num_tokens += count_of(source, config.num_experts + rank);
        return num_tokens;
    }

    // Read into shared memory how many rows each rank has room for. One warp calls it.
    __device__ void take_bounds(int* bounds) const {
        const unsigned long long expected = sequence << kValueBits;
        if (lane >= config.num_ranks) return;
        const unsigned long long word = wait_word(c, workspace.bound(sequence, lane), expected, lane, GpuPhase::kCounts);
        bounds[lane] = word == 0 ? -1 : static_cast<int>(word - expected);
    }

    // Returns whether every rank has room for its rows. If not, all ranks of the node report the same rank. One warp calls it.
    __device__ bool have_room(const int* bounds) const {
        const bool is_rank = lane < config.num_ranks;
        long long bound = is_rank && bounds[lane] != kNoBound ? bounds[lane] : INT32_MAX;
        if (lane == c.rank && p.num_recv_rows_bound >= 0) bound = p.num_recv_rows_bound;  // exact: a word cannot hold large bounds
        const unsigned lacking = __ballot_sync(kFullWarp, is_rank && num_rows[lane] > bound);
        if (lacking == 0) return true;
        if (lane == 0) static_cast<volatile GpuCounts*>(c.counts)->lacking = c.plan;
        __syncwarp();
        if (lane == __ffs(lacking) - 1) report(c, kExceededBound, lane, GpuPhase::kNone, bound, num_rows[lane]);
        return false;
    }

    // Let the other blocks place their tokens, for which they need nothing but the sums of this rank's segments.
    __device__ void let_place() const {
        GpuState& state = *c.state;
        state.num_counted = state.num_told = state.next_send = state.next_reduce = state.next_receive = 0;
        store_release_local(&state.sequence, sequence);
    }

    // Write the counts to host memory. One warp calls it.
    __device__ void tell() const {
        volatile GpuCounts* counts = c.counts;
        if (!p.reports_counts) return;
#pragma unroll 1
        for (int source = lane; source < config.num_sources(); source += 32) {
            const int rank = source % config.num_ranks;  // rank of the source; also a rank to which this one sends tokens of that node
            counts->recv_counts[source] = count_of(source, config.num_experts + c.rank);
            counts->send_counts[source] = count_of(source - rank + c.rank, config.num_experts + rank);
        }
        __syncwarp();
        if (lane != 0) return;
        counts->num_rows = num_rows[c.rank];
        __threadfence_system();
        counts->ready = c.plan;
    }

    // ---- all other blocks wait for the sums, and every block places its tokens ----

    __device__ bool wait_until_summed() const {
        __shared__ int ok;
        if (threadIdx.x == 0) ok = wait_flag(c, &c.state->sequence, sequence, c.rank, GpuPhase::kPlan) && !gave_up(c);
        __syncthreads();
        return ok != 0;
    }

    __device__ void place() const {
        const bool has_rank = warp_begin < warp_end && lane < config.num_ranks;  // this thread counts for rank `lane`
        const int before = has_rank ? first_of(node) + tokens_before(c, r, warp_begin, config.num_experts + lane) : 0;
#pragma unroll 1
        for (int first = warp_begin; first < warp_end; first += 32) {
            const int token = first + lane;
#pragma unroll 1
            for (int rank = 0; rank < config.num_ranks; ++rank) {
                const int base = __shfl_sync(kFullWarp, before, rank);
                if (token >= warp_end) continue;
                int32_t& slot = r.send_slot[token * config.num_ranks + rank];
                if (slot < 0) continue;
                slot += base;
                r.send_token[rank * config.num_max_tokens + slot] = static_cast<int32_t>(token);
            }
        }
        if (is_last_block(&c.state->num_placed, gridDim.x) && threadIdx.x == 0) {
            c.state->num_placed = 0;
            store_release_local(&c.state->placed, c.plan);
        }
    }
};

static_assert(kMaxGpuRanks < kPlanWarps, "a warp a rank lays out its experts, beside one that takes the bounds");
static_assert(kMaxGpuSources <= kPlanThreads && kMaxGpuNodes <= kMaxSegments, "a thread a source finds its first token, a block its node");

__global__ void __launch_bounds__(kPlanThreads, 1) plan(const __grid_constant__ GpuPlanParams p) {
    __shared__ int num_rows[kMaxGpuRanks];
    const Plan plan(p, shared_memory<int32_t>(), num_rows);
    if (blockIdx.x == 0) plan.enter();
    plan.count();
    if (is_last_block(&p.context.state->num_counted, gridDim.x)) return plan.exchange();
    let_next_kernel_start();
    if (plan.wait_until_summed()) plan.place();
}

}  // namespace

int64_t plan_shared_bytes(const GpuWorkspaceConfig& config) {
    const int64_t columns = config.num_experts + config.num_ranks;
    const int64_t counting = kPlanWarps * (columns + 32 * config.num_topk), gathering = config.num_sources() * columns;
    return static_cast<int64_t>(sizeof(int32_t)) * std::max(counting, gathering);
}

int plan_blocks_per_multiprocessor(const GpuWorkspaceConfig& config) {
    return blocks_per_multiprocessor<plan>(kPlanThreads, plan_shared_bytes(config));
}

void launch_plan(const GpuPlanParams& p, void* stream) {
    const int blocks = p.context.config.num_nodes * p.routing.node_segments;
    launch<plan>("plan", blocks, kPlanThreads, plan_shared_bytes(p.context.config), p, stream);
}

}  // namespace deepep_moe
