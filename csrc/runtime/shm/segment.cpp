#include "runtime/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace deepep_moe {
namespace {

[[noreturn]] void raise_errno(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Segment Segment::create(size_t bytes) {
    Segment segment;
    segment.fd_ = memfd_create("deepep_moe", MFD_CLOEXEC);
    if (segment.fd_ < 0) raise_errno("cannot create shared memory (memfd_create)");
    if (ftruncate(segment.fd_, static_cast<off_t>(bytes)) != 0)
        raise_errno("cannot size shared memory to " + std::to_string(bytes) + " bytes");
    segment.map(bytes);
    return segment;
}

Segment Segment::open(const std::string& path, size_t bytes) {
    Segment segment;
    segment.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (segment.fd_ < 0) raise_errno("cannot open a peer's shared memory at " + path + " (ranks must run as one user in one container)");
    struct stat status{};
    if (fstat(segment.fd_, &status) != 0) raise_errno("cannot read the size of " + path);
    if (static_cast<size_t>(status.st_size) != bytes)
        throw std::invalid_argument("shared memory at " + path + " has " + std::to_string(status.st_size) + " bytes, expected " +
                                    std::to_string(bytes));
    segment.map(bytes);
    segment.hide();
    return segment;
}

void Segment::map(size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (data == MAP_FAILED) raise_errno("cannot map " + std::to_string(bytes) + " bytes of shared memory");
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
}

Segment::~Segment() {
    if (data_ != nullptr) munmap(data_, bytes_);
    hide();
}

void Segment::hide() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
}

std::string Segment::path() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_); }

void Segment::swap(Segment& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(fd_, other.fd_);
}

}  // namespace deepep_moe
