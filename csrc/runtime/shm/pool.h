// Memory for outputs that is kept for the next call.
//
// Fresh pages cost more than the rows copied into them (a fault and a cleared page each), and the C library returns large blocks to
// the system at once. The pool keeps as many bytes as were ever in use at the same time, and no more: those returned last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace deepep_moe {

class HostPool : public std::enable_shared_from_this<HostPool> {
public:
    class Block {
    public:
        Block(std::shared_ptr<HostPool> pool, void* data, size_t bytes, size_t capacity)
            : pool_(std::move(pool)), data_(data), bytes_(bytes), capacity_(capacity) {}
        ~Block() { pool_->give_back(data_, capacity_); }
        Block(const Block&) = delete;
        void* data() const { return data_; }
        size_t bytes() const { return bytes_; }

    private:
        std::shared_ptr<HostPool> pool_;
        void* data_;
        size_t bytes_, capacity_;
    };

    ~HostPool() { trim(0); }
    std::unique_ptr<Block> allocate(size_t bytes);  // uninitialized; throws std::bad_alloc
    void trim(size_t keep_bytes);                   // returns unused memory to the system
    size_t bytes_in_use() const;
    size_t bytes_cached() const;

private:
    void give_back(void* data, size_t capacity);
    void trim_locked(size_t keep_bytes);

    mutable std::mutex mutex_;
    struct Free {
        void* data;
        uint64_t returned;  // when: the number of blocks given back before
    };
    std::multimap<size_t, Free> free_;  // by capacity
    size_t in_use_ = 0, peak_ = 0, cached_ = 0;
    uint64_t num_returned_ = 0;
};

}  // namespace deepep_moe
