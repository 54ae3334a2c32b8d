// A warp moves whole rows through a ring in shared memory with bulk copies (sm_90), or with 16-byte loads and stores. Both rings take rows
// with `add`, and pass them in order to `drain`, which stores them with `store`, `store_slot` and `store_tail`.
#pragma once

#include "cuda/device/rows.cuh"

namespace deepep_moe {

// Holds a row on its way, its tail, and this thread's note about it.
struct RingRow {
    const std::byte* row;
    const std::byte* tail;
    int note;
};

__device__ __forceinline__ void copy_words(void* to, const void* from, int64_t bytes) {
#pragma unroll 1
    for (int64_t i = threadIdx.x % 32; i < bytes / 4; i += 32) static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
}

class PlainRing {
public:
    __device__ PlainRing(const GpuRing&, const GpuSlotLayout& slot) : slot_(slot) {}

    template <class Drain>
    __device__ void add(const std::byte* row, const std::byte* tail, int note, const Drain& drain) {
        drain(RingRow{row, tail, note});
    }
    template <class Drain>
    __device__ void flush(const Drain&) {}
    template <int kPending>
    __device__ void settle() const {
        __syncwarp();
    }
    __device__ void store(std::byte* to, const RingRow& from) const { copy_row(to, from.row, slot_.row_bytes); }
    __device__ void store_tail(std::byte* to, const RingRow& from) const { copy_words(to, from.tail, slot_.tail_bytes); }
    __device__ void store_slot(std::byte* to, const RingRow& from) const {
        store(to, from);
        store_tail(to + slot_.row_bytes, from);
    }

    // Write zeros to a row. Call it before any row is added, and `end_zeros` after the last.
    __device__ void store_zeros(std::byte* to) { zero_row(to, slot_.row_bytes); }
    __device__ void end_zeros() {}

private:
    const GpuSlotLayout slot_;
};

// Lays out the shared memory of a block: notes int32[warps][stages][32] | barriers u64[warps][stages] | stages, 128-byte aligned.
struct RingMemory {
    __host__ __device__ static int64_t header_bytes(const GpuRing& r) { return divide_up(r.warps * r.stages * (128 + 8), 128) * 128; }
    __host__ __device__ static int64_t bytes(const GpuRing& r, const GpuSlotLayout& slot) {
        return header_bytes(r) + r.warps * r.stages * slot.bytes;
    }
};

#if !DEEPEP_MOE_BULK_COPIES

class BulkRing : public PlainRing {  // never launched here
public:
    __device__ BulkRing(const GpuRing& ring, const GpuSlotLayout& slot) : PlainRing(ring, slot) { __trap(); }
};

#else

class BulkRing {
public:
    static constexpr int kBehind = 1;  // stores that may still read the ring when a row is added

    __device__ BulkRing(const GpuRing& ring, const GpuSlotLayout& slot)
        : slot_(slot), stages_(ring.stages), ahead_(ring.stages - 1 - kBehind) {
        auto* memory = shared_memory<std::byte>();
        const int first = threadIdx.x / 32 * ring.stages;
        notes_ = reinterpret_cast<int*>(memory) + first * 32;
        full_ = reinterpret_cast<uint64_t*>(memory + 128 * ring.warps * ring.stages) + first;
        rows_ = memory + RingMemory::header_bytes(ring) + first * slot.bytes;
        if (lane() == 0) {
#pragma unroll 1
            for (int i = 0; i < stages_; ++i) barrier_init(full_ + i);
            barrier_publish();
        }
        __syncwarp();
    }

    // Start to load a row, after draining the oldest one if more than `ahead_` are in the ring.
    template <class Drain>
    __device__ void add(const std::byte* row, const std::byte* tail, int note, const Drain& drain) {
        if (added_ - drained_ > ahead_) drain_oldest(drain);
        notes_[add_stage_ * 32 + lane()] = note;
        std::byte* to = rows_ + add_stage_ * slot_.bytes;
        const bool bulk_tail = slot_.tail_bytes % 16 == 0 && slot_.tail_bytes > 0;
        if (lane() == 0) bulk_wait_read<kBehind>();
        __syncwarp();
        if (slot_.tail_bytes > 0 && !bulk_tail) {
            copy_words(to + slot_.row_bytes, tail, slot_.tail_bytes);
            fence_bulk_copies_shared();
        }
        if (lane() == 0) {
            const uint32_t bytes = static_cast<uint32_t>(slot_.row_bytes + (bulk_tail ? slot_.tail_bytes : 0));
            barrier_expect(full_ + add_stage_, bytes);
            bulk_load(to, row, static_cast<uint32_t>(slot_.row_bytes), full_ + add_stage_);
            if (bulk_tail) bulk_load(to + slot_.row_bytes, tail, static_cast<uint32_t>(slot_.tail_bytes), full_ + add_stage_);
        }
        __syncwarp();
        ++added_;
        if (++add_stage_ == stages_) add_stage_ = 0;
    }

    template <class Drain>
    __device__ void flush(const Drain& drain) {
        while (drained_ < added_) drain_oldest(drain);
    }

    // Wait until all but the newest `kPending` rows are written, visible to whoever sees this thread's next release.
    template <int kPending>
    __device__ void settle() const {
        if (lane() == 0) bulk_wait_written<kPending>();
        __syncwarp();
    }

    __device__ void store(std::byte* to, const RingRow& from) const { store(to, from.row, slot_.row_bytes); }
    __device__ void store_slot(std::byte* to, const RingRow& from) const {
        store(to, from.row, slot_.row_bytes + divide_up(slot_.tail_bytes, 16) * 16);
    }
    __device__ void store_tail(std::byte* to, const RingRow& from) const {
        if (slot_.tail_bytes % 16 == 0)
            store(to, from.tail, slot_.tail_bytes);
        else
            copy_words(to, from.tail, slot_.tail_bytes);
    }

    __device__ void store_zeros(std::byte* to) {
        if (!has_zeros_) {
            zero_row(rows_, slot_.row_bytes);
            fence_bulk_copies_shared();
            __syncwarp();
        }
        has_zeros_ = true;
        store(to, rows_, slot_.row_bytes);
    }
    __device__ void end_zeros() {
        if (has_zeros_ && lane() == 0) {
            bulk_commit();
            bulk_wait_read<0>();
        }
        __syncwarp();
    }

private:
    static __device__ int lane() { return threadIdx.x % 32; }

    template <class Drain>
    __device__ void drain_oldest(const Drain& drain) {
        barrier_wait(full_ + drain_stage_, parity_);
        __syncwarp();
        const std::byte* row = rows_ + drain_stage_ * slot_.bytes;
        drain(RingRow{row, row + slot_.row_bytes, notes_[drain_stage_ * 32 + lane()]});
        if (lane() == 0) bulk_commit();
        __syncwarp();
        ++drained_;
        if (++drain_stage_ == stages_) drain_stage_ = 0, parity_ ^= 1;
    }

    static __device__ void store(std::byte* to, const std::byte* from, int64_t bytes) {
        if (lane() == 0) bulk_store(to, from, static_cast<uint32_t>(bytes));
    }

    const GpuSlotLayout slot_;
    const int stages_, ahead_;
    int* notes_;
    uint64_t* full_;
    std::byte* rows_;
    bool has_zeros_ = false;
    int added_ = 0, drained_ = 0, add_stage_ = 0, drain_stage_ = 0;
    uint32_t parity_ = 0;
};

#endif

}  // namespace deepep_moe
