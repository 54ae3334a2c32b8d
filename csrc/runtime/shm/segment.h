// Makes shared memory that cannot outlive its processes.
//
// A segment is an anonymous memory file: it has no name in any file system, so nothing is left behind however its owner ends.
// Peers of the same user open it through the owner's /proc/<pid>/fd.
#pragma once

#include <cstddef>
#include <string>

namespace deepep_moe {

class Segment {
public:
    Segment() = default;
    static Segment create(size_t bytes);                         // zeroed; throws std::system_error
    static Segment open(const std::string& path, size_t bytes);  // throws std::system_error, std::invalid_argument for another size
    ~Segment();
    Segment(Segment&& other) noexcept { swap(other); }
    Segment& operator=(Segment&& other) noexcept {
        swap(other);
        return *this;
    }

    std::byte* data() const { return data_; }
    std::string path() const;  // for peers, until `hide` or the end of this process
    void hide();               // nobody can open it any more; mappings stay

private:
    void swap(Segment& other) noexcept;
    void map(size_t bytes);

    std::byte* data_ = nullptr;
    size_t bytes_ = 0;
    int fd_ = -1;
};

}  // namespace deepep_moe
