#include "runtime/process.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace deepep_moe {

uint64_t process_start_time(int pid) {
    char path[64], text[1024];
    std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0;
    const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    text[length] = '\0';
    const char* field = std::strrchr(text, ')');  // the name before it may hold anything
    if (field == nullptr || field[1] != ' ') return 0;
    field += 2;  // field 3, the state
    if (*field == 'Z' || *field == 'X') return 0;
    for (int index = 3; index < 22 && field != nullptr; ++index) {
        field = std::strchr(field, ' ');
        if (field != nullptr) ++field;
    }
    return field != nullptr ? std::strtoull(field, nullptr, 10) : 0;
}

}  // namespace deepep_moe
