// Shared memory of ranks that are threads of one process. All of them see it at one address, which is how the thread sanitizer knows it.
#include "runtime/shm/segment.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace deepep_moe {

// It is never freed: the program is short.
Segment Segment::create(size_t bytes) {
    constexpr size_t kAlignment = 4096;
    Segment segment;
    segment.data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    if (segment.data_ == nullptr) throw std::bad_alloc();
    std::memset(segment.data_, 0, bytes);
    return segment;
}

Segment Segment::open(const std::string& path, size_t) {
    Segment segment;
    segment.data_ = reinterpret_cast<std::byte*>(std::stoull(path));
    return segment;
}

Segment::~Segment() = default;

void Segment::hide() {}

std::string Segment::path() const { return std::to_string(reinterpret_cast<uintptr_t>(data_)); }

void Segment::swap(Segment& other) noexcept { std::swap(data_, other.data_); }

}  // namespace deepep_moe
