// On the hop between nodes, rows go to the rank with the same index in the other node, and rows from there are announced to the kernels of
// this node. The NVSHMEM operations of the data path are a put with its signal word, and a test of a word that has arrived.
//
//   Meet   One block for each node. Counts which tokens cross and which experts they choose there, tells that node's rank, and waits for
//          its message.
//   Move   The first warp waits for the words of chunks that arrive, and sets `ready` for the kernels of this node. The others send, with
//          one put a chunk: in a dispatch packed rows of x, in a combine sums, as the node's kernels compute them.
//
// Words are SET to the call's number, one for each chunk, because puts come in any order. A box is written again once its node's rank has
// entered the next call. By then that rank has received and used all rows, so nobody reads its inbox or this rank's outbox any more.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "nvshmem/rail.h"

namespace deepep_moe {
namespace {

constexpr int kMeetThreads = 512;
constexpr int kMeetWarps = kMeetThreads / 32;
constexpr int kLooks = 64;          // polls of a word between two reads of the clock
constexpr int kMoveThreads = 1024;  // many, because NVSHMEM has few loads in flight for each thread if a put goes over NVLink

__device__ unsigned long long* word_at(const RailContext& r, int64_t offset) {
    return reinterpret_cast<unsigned long long*>(r.base + offset);
}

// ---- meet ----

struct Meeting {
    const RailMeetParams& p;
    const RailContext& r;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const int node, num_topk, warp, lane;
    const unsigned long long sequence;
    RailMessage* const out;
    RailLane* const out_lanes;

    __device__ explicit Meeting(const RailMeetParams& p)
        : p(p),
          r(p.rail),
          c(r.context),
          config(c.config),
          node(blockIdx.x),
          num_topk(config.num_topk),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32),
          sequence(c.state->sequence + 1),
          out(reinterpret_cast<RailMessage*>(r.base + r.layout.out_of(sequence, node))),
          out_lanes(reinterpret_cast<RailLane*>(out + 1)) {}

    __device__ bool is_own() const { return node == config.node; }
    __device__ bool has_lanes() const { return !p.cached || p.has_weights; }

    __device__ int expert(int token, int k) const {
        const int64_t expert = p.topk.expert(token, k);
        if (expert >= -1 && expert < config.num_nodes * config.num_experts) return static_cast<int>(expert);
        report(c, kIndexOutOfRange, k, GpuPhase::kNone, token, expert);
        return -1;
    }

    __device__ float weight(int token, int k) const { return !p.has_weights ? 0.0f : p.topk_weights.of(token, k); }

    // Returns the bit mask of the top-k entries that choose this node. Refuses indices out of range, and duplicates.
    __device__ unsigned lanes_to_node(int token) const {
        unsigned lanes = 0;
        for (int k = 0; k < num_topk; ++k) {
            const int chosen = expert(token, k);
            if (chosen < 0) continue;
            if (chosen / config.num_experts == node) lanes |= 1u << k;
            for (int before = 0; before < k && !p.cached; ++before)
                if (expert(token, before) == chosen) report(c, kDuplicateExpert, k, GpuPhase::kNone, token, chosen);
        }
        return lanes;
    }

    // Find the slot of each token that crosses, in token order, and write its entries for that node. Return the number of such tokens.
    __device__ int find_slots() const {
        __shared__ int of_warps[kMeetWarps];
        int num_before = 0;
        for (int first = 0; first < p.topk.num_tokens; first += kMeetThreads) {
            const int token = first + static_cast<int>(threadIdx.x);
            const unsigned lanes = token < p.topk.num_tokens ? lanes_to_node(token) : 0, goes = __ballot_sync(kFullWarp, lanes != 0);
            if (lane == 0) of_warps[warp] = __popc(goes);
            __syncthreads();
            int slot = num_before + __popc(goes & ((1u << lane) - 1));
            for (int w = 0; w < kMeetWarps; ++w) {
                if (w < warp) slot += of_warps[w];
                num_before += of_warps[w];
            }
            __syncthreads();
            if (token >= p.topk.num_tokens) continue;
            if (is_own()) {
                take_own(token);
                continue;
            }
            r.slots[token * config.num_nodes + node] = lanes != 0 ? slot : -1;
            if (lanes == 0) continue;
            r.tokens[node * config.node_tokens() + slot] = token;
            for (int k = 0; has_lanes() && k < num_topk; ++k) {
                const bool is_there = (lanes >> k & 1) != 0;
                out_lanes[slot * num_topk + k] = {is_there ? expert(token, k) - node * config.num_experts : -1,
                                                  is_there ? weight(token, k) : 0.0f};
            }
        }
        return num_before;
    }

    // Write a token of this rank to the share of its own node.
    __device__ void take_own(int token) const {
        r.slots[token * config.num_nodes + node] = -1;
        for (int k = 0; k < num_topk; ++k) {
            const int chosen = expert(token, k);
            if (!p.cached) p.narrow_topk_idx[token * num_topk + k] = chosen;
            write_lane(token, k, chosen >= 0 && chosen / config.num_experts == node ? chosen % config.num_experts : -1, weight(token, k));
        }
    }

    // Write top-k entry k of a token in this node's share.
    __device__ void write_lane(int slot, int k, int expert, float weight) const {
        const int64_t entry = (int64_t{node} * config.node_tokens() + slot) * num_topk + k;
        if (!p.cached) p.node_topk_idx[entry] = expert;
        if (p.has_weights) p.node_topk_weights[entry] = weight;
    }

    // Send the message and enter the call in `node`. All threads call it.
    __device__ void enter(int num_tokens) const {
        __shared__ bool refuses;
        __syncthreads();  // all threads have found their slots and written their lanes
        if (threadIdx.x == 0) {
            const bool is_refusal = p.stamp.what == 0;
            if (p.handle_counts != nullptr && p.handle_counts[0] < 0) report(c, kFailedHandle, c.rank, GpuPhase::kNone, 0, 0);
            refuses = is_refusal || gave_up(c);
            out->stamp = p.stamp;
            if (refuses && !is_refusal) out->stamp.reason[0] = '\0', out->stamp.why = own_failure(c);
            out->num_tokens = num_tokens;
            r.out_counts[node] = num_tokens;
        }
        __syncthreads();
        const int64_t lanes = has_lanes() && !refuses ? int64_t{num_tokens} * num_topk : 0;
        const unsigned long long value = sequence << kValueBits | (refuses ? 0 : digest(p.stamp.what));
        fence_system();
        nvshmemx_putmem_signal_nbi_block(
            r.base + r.layout.in_of(sequence, config.node), out, sizeof(RailMessage) + lanes * sizeof(RailLane),
            reinterpret_cast<uint64_t*>(r.base + r.layout.entered_of(sequence, config.node)), value, NVSHMEM_SIGNAL_SET, r.pes[node]);
    }

    // Wait until the node's rank has entered `call`. Thread 0 calls it.
    __device__ unsigned long long wait_for_entry(unsigned long long call) const {
        unsigned long long* word = word_at(r, r.layout.entered_of(call, node));
        const unsigned long long seen = wait_word(c, word, call << kValueBits, rail_peer(node), GpuPhase::kRailEntry);
        if (seen != 0) nvshmem_uint64_test(reinterpret_cast<uint64_t*>(word), NVSHMEM_CMP_GE, call << kValueBits);
        return seen;
    }

    __device__ bool meet() const {
        __shared__ bool met;
        if (threadIdx.x == 0) {
            const unsigned long long seen = p.stamp.what == 0 || gave_up(c) ? 0 : wait_for_entry(sequence);
            met = seen == (sequence << kValueBits | digest(p.stamp.what));
            const bool refuses = (seen & kRefused) == 0;  // the rank refuses this call, or a later one if it has failed
            const unsigned long long call = refuses ? seen >> kValueBits : sequence;
            const auto* message = reinterpret_cast<const RailMessage*>(r.base + r.layout.in_of(call, node));
            if (seen != 0 && !met)
                report(c, refuses ? kPeerRefused : kMismatch, rail_peer(node), GpuPhase::kNone, static_cast<long long>(call),
                       refuses ? message->stamp.cause() : 0);
        }
        __syncthreads();
        return met;
    }

    // Read the message of the node's rank. Its tokens are the first of this node's share; the other places get no expert.
    __device__ void take_lanes(int num_tokens) const {
        const auto* in = reinterpret_cast<const RailLane*>(r.base + r.layout.in_of(sequence, node) + sizeof(RailMessage));
        for (int i = threadIdx.x; i < config.node_tokens() * num_topk; i += kMeetThreads) {
            const bool is_there = i < num_tokens * num_topk;
            if (has_lanes()) write_lane(i / num_topk, i % num_topk, is_there ? in[i].expert : -1, is_there ? in[i].weight : 0.0f);
        }
    }

    __device__ void run() const {
        if (threadIdx.x == 0 && r.state->last_met + 1 < sequence && !is_own()) wait_for_entry(sequence - 1);
        __syncthreads();
        for (int i = threadIdx.x; i < r.layout.num_chunks; i += kMeetThreads) r.summed[node * r.layout.num_chunks + i] = 0;
        const int num_tokens = find_slots();
        bool met = true;
        if (is_own()) {
            for (int i = threadIdx.x; i < (config.node_tokens() - p.topk.num_tokens) * num_topk; i += kMeetThreads)
                write_lane(p.topk.num_tokens + i / num_topk, i % num_topk, -1, 0.0f);
            if (threadIdx.x == 0) r.out_counts[node] = 0;
            if (threadIdx.x == 0 && !p.cached && p.in_counts != nullptr) p.in_counts[node] = 0;
        } else {
            enter(num_tokens);
            met = meet();
            const int num_in = met ? reinterpret_cast<const RailMessage*>(r.base + r.layout.in_of(sequence, node))->num_tokens : 0;
            if (p.stamp.what != 0) take_lanes(num_in);
            if (threadIdx.x == 0 && !p.cached && p.in_counts != nullptr) p.in_counts[node] = num_in;
        }
        end(met);
    }

    __device__ void end(bool met) const {
        RailState& state = *r.state;
        if (threadIdx.x == 0 && met) atomicAdd(&state.num_met, 1);
        if (!is_last_block(&state.num_done, gridDim.x) || threadIdx.x != 0) return;
        if (state.num_met == config.num_nodes && p.stamp.what != 0) state.last_met = sequence;
        state.sequence = sequence;
        state.num_done = state.num_met = state.next_send = state.has_lost = 0;
    }
};

__global__ void __launch_bounds__(kMeetThreads, 1) meet(const __grid_constant__ RailMeetParams p) { Meeting(p).run(); }

// ---- move ----

struct Mover {
    const RailMoveParams& p;
    const RailContext& r;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const GpuSlotLayout slot;
    const int node_tokens, lane;
    const unsigned long long sequence;

    __device__ explicit Mover(const RailMoveParams& p)
        : p(p),
          r(p.rail),
          c(r.context),
          config(c.config),
          slot(p.row_bytes, p.tail_bytes),
          node_tokens(config.node_tokens()),
          lane(threadIdx.x % 32),
          sequence(r.state->sequence) {}

    __device__ int num_out(int node) const { return p.is_combine ? p.in_counts[node] : r.out_counts[node]; }
    // Returns the number of rows that come. In a dispatch the sender's message has it, which serves also where the handle has failed.
    __device__ int num_in(int node) const {
        return p.is_combine ? r.out_counts[node]
                            : reinterpret_cast<const RailMessage*>(r.base + r.layout.in_of(sequence, node))->num_tokens;
    }

    // Returns the offset of this rank's slots for `other`, or of those that a rank of `owner` has for tokens of `other`.
    __device__ int64_t box_of(int owner, int other) const { return (other - (other > owner)) * node_tokens * slot.bytes; }

    // Send chunks to one node after the other, the next one first.
    __device__ void send() const {
        WarpTasks tasks(&r.state->next_send);
        const auto node_at = [&](int turn) { return Source{(config.node + turn) % config.num_nodes, 0}; };
        const auto num_chunks = [&](const Source& to) { return divide_up(num_out(to.node), kRailSlots); };
        while (true) {
            const SourceTask chunk(tasks.take(), 1, config.num_nodes, node_at, num_chunks);
            if (!chunk.is_there || !send_chunk(chunk.source.node, chunk.number)) return;
        }
    }

    __device__ bool send_chunk(int node, int chunk) const {
        const int first = chunk * kRailSlots, num_rows = min(kRailSlots, num_out(node) - first);
        std::byte* from = r.base + r.layout.outbox + box_of(config.node, node) + first * slot.bytes;
        if (p.is_combine) {
            const unsigned long long* summed = r.summed + node * r.layout.num_chunks + chunk;
            if (!warp_wait_flag(c, summed, num_rows * p.num_tiles, c.rank, GpuPhase::kReducedRows)) return false;
        } else {
            for (int i = 0; i < num_rows; ++i) pack(r.tokens[node * node_tokens + first + i], from + i * slot.bytes);
        }
        fence_system();
        __syncwarp();
        std::byte* to = r.base + r.layout.inbox + box_of(node, config.node) + first * slot.bytes;
        auto* word = reinterpret_cast<uint64_t*>(r.base + r.layout.arrived_of(config.node, chunk));
        nvshmemx_putmem_signal_nbi_warp(to, from, num_rows * slot.bytes, word, sequence, NVSHMEM_SIGNAL_SET, r.pes[node]);
        return true;
    }

    // Pack a row of x and its scales. One warp calls it.
    __device__ void pack(int token, std::byte* to) const {
        copy_row(to, p.x + int64_t{token} * p.row_bytes, p.row_bytes);
        const auto* scales = reinterpret_cast<const float*>(p.x_scales + int64_t{token} * p.tail_bytes);
        for (int i = lane; i < p.tail_bytes / 4; i += 32) reinterpret_cast<float*>(to + p.row_bytes)[i] = scales[i];
    }

    // Each thread polls one chunk, and its next once that has arrived, so chunks need not wait for each other. One warp calls it.
    __device__ void receive() const {
        GpuWaits waits = c;
        waits.timeout_ns = p.timeout_ns;
        if (!p.is_combine) waits.gave_up = &r.state->has_lost;
        // A node computes no sums before all its ranks have come; until then those ranks are late, not the rail.
        if (p.is_combine && !wait_flag(c, &c.state->met, c.plan, c.rank, GpuPhase::kPlan)) return;
        for (int turn = 1; turn < config.num_nodes; ++turn) {
            const int node = (config.node + config.num_nodes - turn) % config.num_nodes;
            if (!receive_from(node, waits)) return;
        }
    }

    __device__ bool receive_from(int node, const GpuWaits& waits) const {
        const int num_chunks = divide_up(num_in(node), kRailSlots);
        unsigned long long deadline = now_ns() + waits.timeout_ns;
        unsigned round = 0;
        for (int chunk = lane; chunk < num_chunks; ++round) {
            unsigned long long* word = word_at(r, r.layout.arrived_of(node, chunk));
            const unsigned long long seen = load_acquire(word);
            if (seen >= sequence) {
                nvshmem_uint64_test(reinterpret_cast<uint64_t*>(word), NVSHMEM_CMP_GE, sequence);
                store_release_local(r.ready + node * r.layout.num_chunks + chunk, sequence);
                chunk += 32;
                deadline = now_ns() + waits.timeout_ns;
                continue;
            }
            pause_ns(kPauseNs);
            if (round % kLooks != kLooks - 1 || (!gave_up(waits) && now_ns() < deadline)) continue;
            report_lack(c, rail_peer(node), GpuPhase::kRailRows, sequence, seen);
            *static_cast<volatile int*>(waits.gave_up) = 1;
            return false;
        }
        return true;
    }
};

__global__ void __launch_bounds__(kMoveThreads, 1) move(const __grid_constant__ RailMoveParams p) {
    const Mover mover(p);
    // Rows of a dispatch cross once its rail has met, even if the plan, which runs meanwhile, gives up. All ranks of the rail rely on that,
    // because a box may not be written again before. Sums cross only if the node computes some.
    __shared__ bool is_made;  // read once, because the plan may give up between two threads' reads
    if (threadIdx.x == 0) is_made = mover.sequence == p.rail.state->last_met && !(p.is_combine && gave_up(p.rail.context));
    __syncthreads();
    if (!is_made) return;
    if (blockIdx.x == 0 && threadIdx.x < 32) return mover.receive();
    mover.send();
}

const char* launch_meet(const RailMeetParams& p, void* stream) noexcept {
    return why_failed([&] { launch<meet>("meet", p.rail.context.config.num_nodes, kMeetThreads, 0, p, stream); });
}

const char* launch_move(const RailMoveParams& p, void* stream) noexcept {
    return why_failed([&] { launch<move>("move", p.num_blocks, kMoveThreads, 0, p, stream); });
}

constexpr RailShim kRailShim{kRailShimBytes,     &launch_meet,     &launch_move,        &launch_rail_send,
                             &launch_rail_weigh, &launch_rail_sum, &launch_rail_control};

}  // namespace

const RailShim& rail_shim() { return kRailShim; }

}  // namespace deepep_moe
