#include "runtime/process.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

namespace deepep_moe {
namespace {

// Returns the text of /proc/<pid>/stat. It is empty if the process is gone, and nothing if it cannot be read now, for example because no
// file can be opened.
std::optional<std::string> status_of(int pid) {
    char path[64], text[1024];
    std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return errno == ENOENT || errno == ESRCH ? std::optional<std::string>("") : std::nullopt;
    const size_t length = std::fread(text, 1, sizeof(text), file);
    const bool failed = std::ferror(file) != 0 && errno != ESRCH;
    std::fclose(file);
    return failed ? std::nullopt : std::optional<std::string>({text, length});
}

// Returns the start time in that text, or 0 if the process has ended.
uint64_t start_time_in(const std::string& status) {
    const char* field = std::strrchr(status.c_str(), ')');  // the name before it may hold anything
    if (field == nullptr || field[1] != ' ') return 0;
    field += 2;  // field 3 is the state
    if (*field == 'Z' || *field == 'X') return 0;
    for (int index = 3; index < 22 && field != nullptr; ++index) {
        field = std::strchr(field, ' ');
        if (field != nullptr) ++field;
    }
    return field != nullptr ? std::strtoull(field, nullptr, 10) : 0;
}

// Returns whether /proc has the process numbers that are used here; false if it belongs to an outer container.
bool is_own_proc() {
    char target[32];
    const ssize_t length = readlink("/proc/self", target, sizeof(target));
    return length > 0 && std::string(target, length) == std::to_string(getpid());
}

}  // namespace

bool Process::is_gone() const {
    if (start_time == 0) return false;
    const auto status = status_of(pid);
    return status && start_time_in(*status) != start_time;
}

Process running(int pid) { return {pid, is_own_proc() ? start_time_in(status_of(pid).value_or("")) : 0}; }

}  // namespace deepep_moe
