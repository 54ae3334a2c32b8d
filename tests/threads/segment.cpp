// Shared memory of ranks that are threads of one process. All of them see it at one address, which is how the thread sanitizer knows it.
#include "runtime/shm/segment.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

namespace deepep_moe {
namespace {

struct Shared {
    std::byte* data;
    size_t bytes;
    int num_users;
};

std::mutex mutex;
std::map<int, Shared> all_shared;
int next_number = 0;

constexpr size_t kAlignment = 4096;

}  // namespace

Segment Segment::create(size_t bytes) {
    const std::lock_guard lock(mutex);
    auto* const data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    if (data == nullptr) throw std::bad_alloc();
    std::fill_n(data, bytes, std::byte{0});
    Segment segment;
    segment.fd_ = next_number++;
    segment.data_ = data;
    all_shared[segment.fd_] = {data, bytes, 1};
    return segment;
}

Segment Segment::open(const std::string& path, size_t bytes) {
    const std::lock_guard lock(mutex);
    Segment segment;
    Shared& shared = all_shared.at(std::stoi(path));
    if (shared.bytes != bytes) throw std::invalid_argument("shared memory " + path + " has another size");
    ++shared.num_users;
    segment.fd_ = std::stoi(path);
    segment.data_ = shared.data;
    return segment;
}

Segment::~Segment() {
    if (data_ == nullptr) return;
    const std::lock_guard lock(mutex);
    Shared& shared = all_shared.at(fd_);
    if (--shared.num_users > 0) return;
    std::free(shared.data);
    all_shared.erase(fd_);
}

void Segment::hide() {}

std::string Segment::path() const { return std::to_string(fd_); }

void Segment::swap(Segment& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(fd_, other.fd_);
}

}  // namespace deepep_moe
