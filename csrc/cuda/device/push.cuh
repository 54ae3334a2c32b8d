// The sending half of dispatch and combine pushes chunks of rows into the inbox of a peer, with one flag a chunk.
#pragma once

#include "cuda/device/ring.cuh"

namespace deepep_moe {

using tuning::kRowsBehindFlag;
constexpr int kNoRow = INT32_MIN;  // `find` returns this for a slot that stays empty

// The sending warps of a block ask another warp to set these flags. A release over the link costs a round trip, and one serves all flags.
class DueFlags {
public:
    // All threads of the block call it.
    __device__ DueFlags() {
        __shared__ unsigned long long words[32];
        words_ = words;
        if (threadIdx.x < 32) words_[threadIdx.x] = 0;
        __syncthreads();
    }

    // One thread of a sending warp calls it. A reader that sees `flag` set also sees what the warp has written before.
    __device__ void add(unsigned long long* flag) { post(reinterpret_cast<uintptr_t>(flag)); }
    __device__ void end() { post(kEnd); }

    // The warp that sets the flags runs this until `num_warps` warps have ended.
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
        // A warp may have posted a flag, then its end, where this round had looked at the flag's word before; so look once more.
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

// Sends a warp's chunks to one peer after the other, the next rank first, so that at any time a rank receives from about one peer. A flag
// is set only once later rows are in flight, so that the link never idles.
template <class Ring>
class Pusher {
public:
    __device__ Pusher(const GpuContext& context, const GpuRing& ring, const GpuSlotLayout& slot, const DueFlags& due)
        : context_(context), slot_(slot), workspace_(context, context.rank), ring_(ring, slot), due_(due), lane_(threadIdx.x % 32) {}

    // Send the rows of counts[node, peer] tokens to each peer, in chunks of `chunk_slots` that no other warp has taken, those of
    // `first_node` first. A token has `token_slots` slots. The functor find(to, slot) returns a row's number, or kNoRow. The functor
    // ready(to, first, end, row_index) waits for the rows, and returns false if this rank gives up. The functor rows(to, slot, row_index,
    // row, tail) sets the addresses of row and tail. With `to_outbox` rows go to this rank's outbox, without flags.
    template <class Ready, class Find, class Rows>
    __device__ void push(int chunk_slots, int token_slots, const int32_t* counts, bool to_outbox, int first_node, const Ready& ready,
                         const Find& find, const Rows& rows) {
        const auto drain = [&](const RingRow& row) {
            const Note note(__shfl_sync(kFullWarp, row.note, 0));
            const Workspace theirs(context_, note.peer);
            std::byte* const box = to_outbox ? workspace_.outbox(note.peer) : theirs.inbox(context_.rank);
            ring_.store_slot(box + note.index * slot_.bytes, row);
            follow(note.is_announced && !to_outbox ? theirs.arrived(context_.rank, note.index) : nullptr);
        };
        const GpuWorkspaceConfig& config = context_.config;
        const auto is_own = [&](const Source& to) { return to.rank == context_.rank; };
        const auto num_slots = [&](const Source& to) { return counts[to.number(config)] * token_slots; };
        const auto num_chunks = [&](const Source& to) { return is_own(to) ? 0 : divide_up(num_slots(to), chunk_slots); };
        const auto target = [&](int turn) { return Source::at_turn(config, first_node, context_.rank, turn); };
        WarpTasks chunks(&context_.state->next_send);
        while (true) {
            const SourceTask chunk(chunks.take(), 1, config.num_sources(), target, num_chunks);
            if (!chunk.is_there) break;
            const Source& to = chunk.source;
            const int begin = to.first_slot(config), first = begin + chunk.number * chunk_slots;
            const int end = min(first + chunk_slots, begin + num_slots(to));
            const int row_index = first + lane_ < end ? find(to, first + lane_) : kNoRow;
            if (!ready(to, first, end, row_index)) break;
#pragma unroll 1
            for (unsigned rest = __ballot_sync(kFullWarp, row_index != kNoRow); rest != 0; rest &= rest - 1) {
                const int i = __ffs(rest) - 1;
                const unsigned behind_flag = ~0u << (i / kChunkSlots + 1) * kChunkSlots;  // slots of later flags
                const std::byte *row = nullptr, *tail = nullptr;
                rows(to, first + i, __shfl_sync(kFullWarp, row_index, i), row, tail);
                ring_.add(row, tail, Note{to.rank, (rest & (rest - 1) & ~behind_flag) == 0, first + i}.word(), drain);
            }
        }
        finish(drain);  // also if the block gives up: no copy into its shared memory may be in flight when it ends
    }

private:
    // A note about a row in the ring, packed into an int.
    struct Note {
        int peer;
        bool is_announced;  // the row is the last before a flag
        int index;
        __device__ Note(int peer, bool is_announced, int index) : peer(peer), is_announced(is_announced), index(index) {}
        __device__ explicit Note(int word)
            : peer(word % kMaxGpuRanks), is_announced(word / kMaxGpuRanks % 2 != 0), index(word / (2 * kMaxGpuRanks)) {}
        __device__ int word() const { return peer + kMaxGpuRanks * (is_announced + 2 * index); }
    };
    static_assert(kRefused <= (1u << 31) / (2 * kMaxGpuRanks), "an index, a rank and a bit in an int");

    // Keep this row's flag, and post the flag of the row kRowsBehindFlag rows before it. It is called after each row.
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
    const Workspace workspace_;
    Ring ring_;
    DueFlags due_;
    const int lane_;
    unsigned long long* flags_[kRowsBehindFlag] = {};  // flags of the last rows sent, newest first; null: the row has no flag
};

// Runs a sending block, as Pusher::push describes. It has one warp more than the ring. All its threads must call this.
template <class Ring, class Ready, class Find, class Rows>
__device__ void push(const GpuContext& context, const GpuRing& ring, const GpuSlotLayout& slot, int chunk_slots, int token_slots,
                     const int32_t* counts, bool to_outbox, int first_node, const Ready& ready, const Find& find, const Rows& rows) {
    const DueFlags due;
    const int warp = threadIdx.x / 32;
    if (warp < ring.warps)
        Pusher<Ring>(context, ring, slot, due).push(chunk_slots, token_slots, counts, to_outbox, first_node, ready, find, rows);
    if (warp == ring.warps) due.serve(ring.warps, context.state->sequence);
}

}  // namespace deepep_moe
