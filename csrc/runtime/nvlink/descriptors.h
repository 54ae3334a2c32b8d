// How ranks of one host give each other a file descriptor.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "runtime/process.h"

namespace deepep_moe {

// Owns a file descriptor.
class Descriptor {
public:
    explicit Descriptor(int number = -1) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept { return std::swap(number_, other.number_), *this; }
    ~Descriptor();
    int number() const { return number_; }

private:
    int number_;
};

// A descriptor on its way to the peers, and the socket for theirs. The ranks first tell each other the addresses of their sockets.
class DescriptorExchange {
public:
    using Address = std::array<char, 16>;  // abstract, so it needs no file: a zero byte, then random bytes

    explicit DescriptorExchange(Descriptor own);  // throws std::system_error
    const Address& address() const { return address_; }
    // Send the descriptor to the peers and return theirs, by rank; `rank` is this one. Throws std::runtime_error where a peer has ended or
    // has sent nothing in time. The error names it as first_rank + its index.
    std::vector<Descriptor> exchange(const std::vector<Address>& addresses, const std::vector<Process>& processes, size_t rank,
                                     int first_rank, double timeout_s) const;

private:
    struct Mail {
        int pid = 0;  // of the sender, as the kernel says
        Descriptor content;
    };
    int send(const Address& to) const;
    Mail receive() const;

    const Descriptor own_, socket_;
    Address address_{};
};

}  // namespace deepep_moe
