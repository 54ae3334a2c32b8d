#include "runtime/nvlink/descriptors.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace deepep_moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBetweenLooksMs = 50;  // at the processes of ranks that have not sent

void check(bool is_done, const char* what) {
    if (!is_done) throw std::system_error(errno, std::generic_category(), what);
}

struct Name {
    sockaddr_un address{AF_UNIX, {}};
    socklen_t bytes;

    explicit Name(const DescriptorExchange::Address& name) : bytes(offsetof(sockaddr_un, sun_path) + name.size()) {
        std::memcpy(address.sun_path, name.data(), name.size());
    }
};

// A message of one byte, with `control_bytes` for a descriptor and the sender's credentials.
struct Message {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};

    explicit Message(size_t control_bytes) {
        header.msg_iov = &data;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = control_bytes;
    }
};

}  // namespace

Descriptor::~Descriptor() {
    if (number_ >= 0) close(number_);
}

DescriptorExchange::DescriptorExchange(Descriptor own) : own_(std::move(own)), socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    check(socket_.number() >= 0, "cannot make a socket for the descriptors of peers");
    check(getrandom(address_.data() + 1, address_.size() - 1, 0) > 0, "getrandom");
    const int yes = 1;
    check(setsockopt(socket_.number(), SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) == 0, "SO_PASSCRED");
    const Name name(address_);
    check(bind(socket_.number(), reinterpret_cast<const sockaddr*>(&name.address), name.bytes) == 0, "cannot bind a socket");
}

std::vector<Descriptor> DescriptorExchange::exchange(const std::vector<Address>& addresses, const std::vector<Process>& processes,
                                                     size_t rank, int first_rank, double timeout_s) const {
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    const auto name = [&](size_t peer) { return "rank " + std::to_string(first_rank + static_cast<int>(peer)); };
    std::string failure;  // raised once all other ranks have the descriptor, because they wait for it
    for (size_t peer = 0; peer < processes.size(); ++peer)
        if (const int error = peer == rank ? 0 : send(addresses[peer]); error != 0)
            failure = name(peer) + " could not be sent the workspace's descriptor: " + std::strerror(error);
    if (!failure.empty()) throw std::runtime_error(failure);
    std::vector<Descriptor> theirs(processes.size());
    for (size_t num_missing = processes.size() - 1; num_missing > 0;) {
        Mail mail = receive();
        for (size_t peer = 0; peer < processes.size(); ++peer) {
            if (peer == rank || theirs[peer].number() >= 0) continue;
            if (mail.content.number() >= 0 && mail.pid == processes[peer].pid)
                theirs[peer] = std::move(mail.content), --num_missing;
            else if (processes[peer].is_gone() || Clock::now() > deadline)
                throw std::runtime_error(name(peer) + (Clock::now() > deadline ? " did not send its workspace's descriptor in time"
                                                                               : " has ended before it sent its workspace's descriptor"));
        }
    }
    return theirs;
}

// Return 0 or the error. The queue of a socket holds 10 messages, more than there are peers.
int DescriptorExchange::send(const Address& to) const {
    const Name name(to);
    Message message(CMSG_SPACE(sizeof(int)));
    message.header.msg_name = const_cast<sockaddr_un*>(&name.address);
    message.header.msg_namelen = name.bytes;
    cmsghdr* const part = CMSG_FIRSTHDR(&message.header);
    *part = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    const int content = own_.number();
    std::memcpy(CMSG_DATA(part), &content, sizeof(content));
    return sendmsg(socket_.number(), &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? errno : 0;
}

// Wait for a message until it is time to look at the processes again.
DescriptorExchange::Mail DescriptorExchange::receive() const {
    Mail mail;
    pollfd waiting{socket_.number(), POLLIN, 0};
    Message message(CMSG_SPACE(sizeof(ucred)) + CMSG_LEN(sizeof(int)));  // with CMSG_SPACE, two descriptors would fit
    if (poll(&waiting, 1, kBetweenLooksMs) <= 0) return mail;
    if (recvmsg(socket_.number(), &message.header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0) return mail;
    for (cmsghdr* part = CMSG_FIRSTHDR(&message.header); part != nullptr; part = CMSG_NXTHDR(&message.header, part)) {
        int value = 0;  // the descriptor, or the first field of ucred, which is the pid
        std::memcpy(&value, CMSG_DATA(part), sizeof(value));
        if (part->cmsg_type == SCM_RIGHTS) mail.content = Descriptor(value);
        if (part->cmsg_type == SCM_CREDENTIALS) mail.pid = value;
    }
    if ((message.header.msg_flags & MSG_CTRUNC) != 0 && mail.content.number() < 0)
        throw std::runtime_error("a peer's descriptor is lost: this process may open no more files (ulimit -n)");
    return mail;
}

}  // namespace deepep_moe
