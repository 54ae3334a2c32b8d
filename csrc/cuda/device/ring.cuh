// How a warp moves whole rows: through a ring in shared memory with bulk copies (sm_90), or with 16-byte loads and stores. Both rings
// take rows with `add` and hand each of them, in order, to `drain`, which says where it goes with `store`, `store_slot`, `store_tail`.
#pragma once

#include "cuda/device/rows.cuh"

namespace deepep_moe {

// A row on its way, its tail, and this lane's note about it.
struct RingRow {
    const std::byte* row;
    const std::byte* tail;
    int note;
};

__device__ __forceinline__ void copy_words(void* to, const void* from, int64_t bytes) {
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

    // Zeros to a row, before any row is added; `end_zeros` follows the last.
    __device__ void store_zeros(std::byte* to) { zero_row(to, slot_.row_bytes); }
    __device__ void end_zeros() {}

private:
    const GpuSlotLayout& slot_;
};

// Shared memory of a block: notes int32[warps][stages][32] | barriers u64[warps][stages] | stages, 128-byte aligned.
struct RingMemory {
    __host__ __device__ static int64_t header_bytes(const GpuRing& r) { return divide_up(r.warps * r.stages * (128 + 8), 128) * 128; }
    __host__ __device__ static int64_t bytes(const GpuRing& r, const GpuSlotLayout& slot) { return header_bytes(r) + r.warps * r.stages * slot.bytes; }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

class BulkRing : public PlainRing {  // never launched here
public:
    __device__ BulkRing(const GpuRing& ring, const GpuSlotLayout& slot) : PlainRing(ring, slot) { __trap(); }
};

#else

class BulkRing {
public:
    static constexpr int kBehind = 1;  // stores that may still read the ring when a row is added

    __device__ BulkRing(const GpuRing& ring, const GpuSlotLayout& slot) : slot_(slot), stages_(ring.stages), ahead_(ring.stages - 1 - kBehind), paced_(ring.paced) {
        extern __shared__ __align__(128) std::byte memory[];
        const int first = threadIdx.x / 32 * ring.stages;
        notes_ = reinterpret_cast<int*>(memory) + first * 32;
        full_ = reinterpret_cast<uint64_t*>(memory + 128 * ring.warps * ring.stages) + first;
        rows_ = memory + RingMemory::header_bytes(ring) + first * slot.bytes;
        if (lane() == 0) {
            for (int i = 0; i < stages_; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(full_ + i)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        __syncwarp();
    }

    // Starts to load a row; drains the oldest ones beyond `ahead`.
    template <class Drain>
    __device__ void add(const std::byte* row, const std::byte* tail, int note, const Drain& drain) {
        if (added_ - drained_ > ahead_) drain_oldest(drain);
        notes_[add_stage_ * 32 + lane()] = note;
        std::byte* to = rows_ + add_stage_ * slot_.bytes;
        const bool bulk_tail = slot_.tail_bytes % 16 == 0 && slot_.tail_bytes > 0;
        if (lane() == 0 && !paced_) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kBehind) : "memory");
        if (lane() == 0 && paced_) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kBehind) : "memory");
        __syncwarp();
        if (slot_.tail_bytes > 0 && !bulk_tail) {
            copy_words(to + slot_.row_bytes, tail, slot_.tail_bytes);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        if (lane() == 0) {
            const uint32_t bytes = static_cast<uint32_t>(slot_.row_bytes + (bulk_tail ? slot_.tail_bytes : 0));
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(full_ + add_stage_)), "r"(bytes) : "memory");
            load(to, row, slot_.row_bytes);
            if (bulk_tail) load(to + slot_.row_bytes, tail, slot_.tail_bytes);
        }
        __syncwarp();
        ++added_;
        if (++add_stage_ == stages_) add_stage_ = 0;
    }

    template <class Drain>
    __device__ void flush(const Drain& drain) {
        while (drained_ < added_) drain_oldest(drain);
    }

    // Until all but the newest `kPending` rows are where they go, for whoever sees this thread's next release.
    template <int kPending>
    __device__ void settle() const {
        if (lane() == 0) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
        __syncwarp();
    }

    __device__ void store(std::byte* to, const RingRow& from) const { store(to, from.row, slot_.row_bytes); }
    __device__ void store_slot(std::byte* to, const RingRow& from) const { store(to, from.row, slot_.row_bytes + divide_up(slot_.tail_bytes, 16) * 16); }
    __device__ void store_tail(std::byte* to, const RingRow& from) const {
        if (slot_.tail_bytes % 16 == 0)
            store(to, from.tail, slot_.tail_bytes);
        else
            copy_words(to, from.tail, slot_.tail_bytes);
    }

    __device__ void store_zeros(std::byte* to) {
        if (!has_zeros_) {
            zero_row(rows_, slot_.row_bytes);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
        }
        has_zeros_ = true;
        store(to, rows_, slot_.row_bytes);
    }
    __device__ void end_zeros() {
        if (has_zeros_ && lane() == 0) asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
    }

private:
    static __device__ int lane() { return threadIdx.x % 32; }
    static __device__ uint32_t shared(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

    template <class Drain>
    __device__ void drain_oldest(const Drain& drain) {
        asm volatile(
            "{\n\t.reg .pred done;\n\tagain_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again_%=;\n\t}" ::"r"(
                shared(full_ + drain_stage_)),
            "r"(parity_)
            : "memory");
        __syncwarp();
        const std::byte* row = rows_ + drain_stage_ * slot_.bytes;
        drain(RingRow{row, row + slot_.row_bytes, notes_[drain_stage_ * 32 + lane()]});
        if (lane() == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        __syncwarp();
        ++drained_;
        if (++drain_stage_ == stages_) drain_stage_ = 0, parity_ ^= 1;
    }

    __device__ void load(std::byte* to, const std::byte* from, int64_t bytes) const {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(to)), "l"(from),
                     "r"(static_cast<uint32_t>(bytes)), "r"(shared(full_ + add_stage_))
                     : "memory");
    }

    static __device__ void store(std::byte* to, const std::byte* from, int64_t bytes) {
        if (lane() == 0)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared(from)), "r"(static_cast<uint32_t>(bytes))
                         : "memory");
    }

    const GpuSlotLayout& slot_;
    const int stages_, ahead_;
    const bool paced_;
    int* notes_;
    uint64_t* full_;
    std::byte* rows_;
    bool has_zeros_ = false;
    int added_ = 0, drained_ = 0, add_stage_ = 0, drain_stage_ = 0;
    uint32_t parity_ = 0;
};

#endif

}  // namespace deepep_moe
