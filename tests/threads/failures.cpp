// Failures of calls behind shims: each thread raises the failure of its own call, once.
#include "ranks.h"
#include "runtime/nvlink/guarded.h"

namespace deepep_moe {
namespace {

struct Shim : Guarded<Shim> {
    bool fail(int rank) noexcept {
        return guarded([&] { throw std::runtime_error(std::to_string(rank)); });
    }
};

}  // namespace

void run_failures() {
    Team team(3);
    Shim shim;
    team.run([&](int rank) {
        for (int step = 0; step < 100; ++step) {
            require(!shim.fail(rank), "a call that fails");
            team.meet();
            Guarded<int>::raise_failure();  // calls of another kind have not failed
            const auto error = error_of<std::runtime_error>("of a call that has failed", [&] { shim.raise_failure(); });
            require(error.what() == std::to_string(rank), "the failure of this thread's call");
            shim.raise_failure();
            team.meet();
        }
    });
}

}  // namespace deepep_moe
