// The pool of outputs: several threads take memory and give it back.
#include "runtime/shm/pool.h"

#include <algorithm>

#include "ranks.h"

namespace deepep_moe {

void run_pool() {
    const auto pool = std::make_shared<HostPool>();
    {
        std::vector<std::jthread> threads;
        for (int thread = 0; thread < 4; ++thread)
            threads.emplace_back([&, thread] {
                for (int turn = 0; turn < 50; ++turn) {
                    const size_t bytes = 5000 + 1000 * static_cast<size_t>(turn % 3);
                    const auto block = pool->allocate(bytes);
                    auto* const data = static_cast<unsigned char*>(block->data());
                    std::fill_n(data, bytes, static_cast<unsigned char>(thread));
                    std::this_thread::yield();
                    require(std::count(data, data + bytes, thread) == static_cast<int64_t>(bytes), "memory of one thread");
                    if (turn % 10 == 0) pool->trim(0);
                }
            });
    }
    require(pool->bytes_in_use() == 0, "all of it is back");
}

}  // namespace deepep_moe
