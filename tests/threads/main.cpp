// The CPU library with ranks as threads, for the thread sanitizer: it follows the memory that ranks share only inside a process.
#include <cstdio>

#include "ranks.h"

int main() {
    using namespace deepep_moe;
    const struct {
        const char* name;
        void (*run)();
    } parts[] = {{"exchange", run_exchange}, {"failures", run_failures}};
    for (const auto& part : parts) {
        part.run();
        std::printf("%s is right\n", part.name);
    }
}
