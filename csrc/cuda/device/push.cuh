// The sending half of dispatch and combine: chunks of rows into the inbox of a peer, a flag a chunk.
#pragma once

#include "cuda/device/ring.cuh"

namespace deepep_moe {

using tuning::kRowsBehindFlag;

// Flags that the sending warps of a block want set. To release one takes a round trip over the link, so another warp does it, for all.
class DueFlags {
public:
    // All threads of the block.
    __device__ DueFlags() {
        __shared__ unsigned long long words[32];
        words_ = words;
        if (threadIdx.x < 32) words_[threadIdx.x] = 0;
        __syncthreads();
    }

    // One lane of a sending warp: what its warp has written so far is there for whoever sees `flag`.
    __device__ void add(unsigned long long* flag) { post(reinterpret_cast<uintptr_t>(flag)); }
    __device__ void end() { post(kEnd); }

    // The warp that sets them, until `num_warps` have ended.
    __device__ void serve(int num_warps, unsigned long long sequence) const {
        const int lane = threadIdx.x % 32;
        while (num_warps > 0) {
            const unsigned long long word = exchange_acquire_block(words_ + lane, 0);
            if (__ballot_sync(kFullWarp, word != 0) == 0) {
                pause_ns(kPauseNs);
                continue;
            }
            __syncwarp();
            fence_system();
            if (word != 0 && word != kEnd) store_relaxed(reinterpret_cast<unsigned long long*>(word), sequence);
            num_warps -= __popc(__ballot_sync(kFullWarp, word == kEnd));
        }
        // What a warp posted before its end, but into the word that was looked at earlier in the same round.
        const unsigned long long word = exchange_acquire_block(words_ + lane, 0);
        fence_system();
        if (word != 0 && word != kEnd) store_relaxed(reinterpret_cast<unsigned long long*>(word), sequence);
    }

private:
    static constexpr int kWordsOfWarp = 2;
    static_assert(kWordsOfWarp * tuning::kMaxRingWarps <= 32);
    static constexpr unsigned long long kEnd = 1;

    __device__ void post(unsigned long long value) {
        unsigned long long* word = words_ + threadIdx.x / 32 * kWordsOfWarp + next_;
        while (!replace_release_block(word, 0, value)) pause_ns(kPauseNs);
        next_ = (next_ + 1) % kWordsOfWarp;
    }

    unsigned long long* words_;
    int next_ = 0;
};

// Chunks that a warp sends, to one peer after the other, the next rank first: so at any time a rank hears from about one. A flag is due
// once later rows are on their way, so that the link never runs dry.
template <class Ring>
class Pusher {
public:
    __device__ Pusher(const GpuContext& context, const GpuRing& ring, const GpuSlotLayout& slot, const DueFlags& due)
        : context_(context), slot_(slot), own_(context, context.rank), ring_(ring, slot), due_(due), lane_(threadIdx.x % 32) {}

    // All that nobody else takes of counts[node, peer] rows to each peer, `chunk_slots` at a time, those of `first_node` first. find(to,
    // slot) is what a lane must know of a row, ready(to, first, end, found) waits for some of them (false: give up), and rows(to, slot,
    // found, row, tail) says where one lies. With `to_outbox` rows go to this rank's outbox, without flags.
    template <class Ready, class Find, class Rows>
    __device__ void push(int chunk_slots, const int32_t* counts, bool to_outbox, int first_node, const Ready& ready, const Find& find,
                         const Rows& rows) {
        const auto drain = [&](const RingRow& row) {
            const Note note(__shfl_sync(kFullWarp, row.note, 0));
            const Workspace theirs(context_, note.peer);
            std::byte* const box = to_outbox ? own_.outbox(note.peer) : theirs.inbox(context_.rank);
            ring_.store_slot(box + note.index * slot_.bytes, row);
            follow(note.is_announced && !to_outbox ? theirs.arrived(context_.rank, note.index) : nullptr);
        };
        const GpuWorkspaceConfig& config = context_.config;
        const auto is_own = [&](const Source& to) { return to.rank == context_.rank; };
        const auto num_chunks = [&](const Source& to) { return is_own(to) ? 0 : divide_up(counts[to.number(config)], chunk_slots); };
        const auto target = [&](int turn) { return Source::at_turn(config, first_node, context_.rank, turn); };
        WarpTasks chunks(&context_.state->next_send);
        while (true) {
            const SourceTask chunk(chunks.take(), 1, config.num_sources(), target, num_chunks);
            if (!chunk.is_there) break;
            const Source& to = chunk.source;
            const int begin = to.first_slot(config), first = begin + chunk.number * chunk_slots;
            const int end = min(first + chunk_slots, begin + counts[to.number(config)]);
            const int found = first + lane_ < end ? find(to, first + lane_) : 0;
            if (!ready(to, first, end, found)) break;
#pragma unroll 1
            for (int slot = first; slot < end; ++slot) {
                const std::byte *row = nullptr, *tail = nullptr;
                rows(to, slot, __shfl_sync(kFullWarp, found, slot - first), row, tail);
                ring_.add(row, tail, Note{to.rank, slot + 1 == end || (slot + 1) % kChunkSlots == 0, slot}.word(), drain);
            }
        }
        finish(drain);  // also where the block gives up: nothing may be on its way into its shared memory
    }

private:
    // Of a row in the ring.
    struct Note {
        int peer;
        bool is_announced;  // with its flag
        int index;
        __device__ Note(int peer, bool is_announced, int index) : peer(peer), is_announced(is_announced), index(index) {}
        __device__ explicit Note(int word)
            : peer(word % kMaxGpuRanks), is_announced(word / kMaxGpuRanks % 2 != 0), index(word / (2 * kMaxGpuRanks)) {}
        __device__ int word() const { return peer + kMaxGpuRanks * (is_announced + 2 * index); }
    };
    static_assert(kRefused <= (1u << 31) / (2 * kMaxGpuRanks), "an index, a rank and a bit in an int");

    // After each row: the flag of the row so far behind is due, and that of this one is kept.
    __device__ void follow(unsigned long long* flag) {
        if (flags_[kRowsBehindFlag - 1] != nullptr) ring_.template settle<kRowsBehindFlag - 1>();  // this row is not yet among them
        if (flags_[kRowsBehindFlag - 1] != nullptr && lane_ == 0) due_.add(flags_[kRowsBehindFlag - 1]);
#pragma unroll
        for (int i = kRowsBehindFlag - 1; i > 0; --i) flags_[i] = flags_[i - 1];
        flags_[0] = flag;
    }

    template <class Drain>
    __device__ void finish(const Drain& drain) {
        ring_.flush(drain);
        ring_.template settle<0>();
        if (lane_ != 0) return;
        fence_system();
#pragma unroll
        for (int i = 0; i < kRowsBehindFlag; ++i)
            if (flags_[i] != nullptr) store_relaxed(flags_[i], context_.state->sequence);
        due_.end();
    }

    const GpuContext& context_;
    const GpuSlotLayout slot_;
    const Workspace own_;
    Ring ring_;
    DueFlags due_;
    const int lane_;
    unsigned long long* flags_[kRowsBehindFlag] = {};  // of the last rows sent, the newest first; null: the row has none
};

// A sending block: see Pusher::push. All its threads must call it; it has a warp more than the ring.
template <class Ring, class Ready, class Find, class Rows>
__device__ void push(const GpuContext& context, const GpuRing& ring, const GpuSlotLayout& slot, int chunk_slots, const int32_t* counts,
                     bool to_outbox, int first_node, const Ready& ready, const Find& find, const Rows& rows) {
    const DueFlags due;
    const int warp = threadIdx.x / 32;
    if (warp < ring.warps) Pusher<Ring>(context, ring, slot, due).push(chunk_slots, counts, to_outbox, first_node, ready, find, rows);
    if (warp == ring.warps) due.serve(ring.warps, context.state->sequence);
}

}  // namespace deepep_moe
