#include "runtime/shm/pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "common/types.h"

namespace deepep_moe {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;

}  // namespace

std::unique_ptr<HostPool::Block> HostPool::allocate(size_t bytes) {
    std::lock_guard lock(mutex_);
    size_t capacity = align_up(std::max<size_t>(bytes, 1), bytes >= kHugePage ? kHugePage : kPage);
    void* data = nullptr;
    // Sizes vary a little from call to call with the routing: up to half as much again fits too.
    if (auto found = free_.lower_bound(capacity); found != free_.end() && found->first <= capacity + capacity / 2) {
        capacity = found->first;
        data = found->second.data;
        cached_ -= capacity;
        free_.erase(found);
    } else {
        data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        if (capacity >= kHugePage) madvise(data, capacity, MADV_HUGEPAGE);  // fewer faults where the system allows; else no harm
    }
    in_use_ += capacity;
    peak_ = std::max(peak_, in_use_);
    return std::make_unique<Block>(shared_from_this(), data, bytes, capacity);
}

void HostPool::give_back(void* data, size_t capacity) {
    std::lock_guard lock(mutex_);
    in_use_ -= capacity;
    cached_ += capacity;
    free_.emplace(capacity, Free{data, num_returned_++});
    trim_locked(peak_);
}

void HostPool::trim(size_t keep_bytes) {
    std::lock_guard lock(mutex_);
    trim_locked(keep_bytes);
}

void HostPool::trim_locked(size_t keep_bytes) {
    while (cached_ > keep_bytes) {
        const auto oldest = std::min_element(free_.begin(), free_.end(),
                                             [](const auto& a, const auto& b) { return a.second.returned < b.second.returned; });
        munmap(oldest->second.data, oldest->first);
        cached_ -= oldest->first;
        free_.erase(oldest);
    }
}

size_t HostPool::bytes_in_use() const {
    std::lock_guard lock(mutex_);
    return in_use_;
}

size_t HostPool::bytes_cached() const {
    std::lock_guard lock(mutex_);
    return cached_;
}

}  // namespace deepep_moe
