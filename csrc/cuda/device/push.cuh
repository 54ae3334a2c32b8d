// The sending half of dispatch and combine: chunks of rows into the inbox of a peer, a flag a chunk.
#pragma once

#include "cuda/device/ring.cuh"

namespace deepep_moe {

constexpr int kRowsBehindFlag = kChunkSlots - 1;  // rows sent after a chunk before its flag: by then the chunk's own have landed

// Chunks that a warp sends. A chunk's flag goes out once later rows are on their way, so that the link never runs dry.
template <class Ring>
class Pusher {
public:
    __device__ Pusher(const GpuContext& context, const GpuRing& ring, const GpuSlotLayout& slot)
        : context_(context), slot_(slot), own_(context, context.rank), ring_(ring, slot), sequence_(context.state->sequence), lane_(threadIdx.x % 32) {}

    // All chunks of `count` rows to `peer` that nobody else takes from `next`. ready(chunk) waits for the chunk's rows (false: give up);
    // find(index) is what a lane must know of a row, and rows(index, found, row, tail) says where it lies. With `to_outbox` rows go to
    // this rank's outbox, without flags.
    template <class Ready, class Find, class Rows>
    __device__ bool push(int peer, int count, int* next, bool to_outbox, const Ready& ready, const Find& find, const Rows& rows) {
        const Workspace theirs(context_, peer);
        std::byte* const box = to_outbox ? own_.outbox(peer) : theirs.inbox(context_.rank);
        const auto drain = [&](const RingRow& row) {
            const int index = __shfl_sync(kFullWarp, row.note, 0);
            ring_.store_slot(box + index * slot_.bytes, row);
            if (++since_ == kRowsBehindFlag) release<kRowsBehindFlag - 1>();
            if ((index + 1) % kChunkSlots != 0 && index + 1 != count) return;
            release<0>();
            if (!to_outbox) flag_ = theirs.arrived(context_.rank, index / kChunkSlots);
            since_ = 0;
        };
        WarpTasks chunks(next);
        for (int chunk = chunks.take(); chunk * kChunkSlots < count; chunk = chunks.take()) {
            if (!ready(chunk)) {
                ring_.flush(drain);  // nothing may be on its way into shared memory that the block gives up
                release<0>(true);
                return false;
            }
            const int first = chunk * kChunkSlots, end = min(first + kChunkSlots, count);
            const int found = first + lane_ < end ? find(first + lane_) : 0;
#pragma unroll 1
            for (int index = first; index < end; ++index) {
                const std::byte *row = nullptr, *tail = nullptr;
                rows(index, __shfl_sync(kFullWarp, found, index - first), row, tail);
                ring_.add(row, tail, index, drain);
            }
        }
        ring_.flush(drain);
        release<0>(true);
        return true;
    }

private:
    // Sets the flag that is due. kPending: rows that may still be on their way.
    template <int kPending>
    __device__ void release(bool last = false) {
        if (flag_ == nullptr && !last) return;
        ring_.template settle<kPending>();
        if (lane_ == 0 && flag_ != nullptr) store_release(flag_, sequence_);
        flag_ = nullptr;
    }

    const GpuContext& context_;
    const GpuSlotLayout slot_;
    const Workspace own_;
    Ring ring_;
    const unsigned long long sequence_;
    const int lane_;
    unsigned long long* flag_ = nullptr;
    int since_ = 0;
};

}  // namespace deepep_moe
