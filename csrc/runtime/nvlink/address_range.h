// Memory of a GPU at addresses that stay the same, shared with processes of this host.
#pragma once

#include <cstddef>

namespace deepep_moe {

// Addresses of this process, and the memory that is mapped there. A plain value, which a forked process may drop: it has no CUDA.
struct AddressRange {
    std::byte* begin = nullptr;
    size_t bytes = 0;               // in whole pages
    unsigned long long memory = 0;  // CUDA's handle
    bool is_mapped = false;

    // Map new memory of `device`, or that of a peer's descriptor, for `device` to use. The first time they also reserve the addresses. They
    // throw std::runtime_error; nothing is mapped then.
    void create(size_t wished_bytes, int device);
    void open(int descriptor, size_t bytes, int device);
    int share() const;  // return a descriptor of the memory
    // Unmap the memory, which no kernel of this process may use then. The driver frees it once no process maps it.
    void unmap();
    void free() noexcept;  // unmap, and give the addresses back

private:
    void map(size_t whole_bytes, int device);
    int release();
};

}  // namespace deepep_moe
