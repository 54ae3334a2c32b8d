// Binds what low-latency calls need: sizes, the words of calls, and the memory of ranks on one host, whose calls Python makes.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <limits>
#include <system_error>

#include "bindings/tensor.h"
#include "common/low_latency.h"
#include "common/signature.h"
#include "cpu/wait.h"
#include "cuda/low_latency.h"

using namespace deepep_moe;

namespace {

std::atomic_ref<uint64_t> word_at(uintptr_t address) { return std::atomic_ref(*reinterpret_cast<uint64_t*>(address)); }

// Return whole pages of shared memory to the system; they read as zeros from then on. Returns their bytes.
int64_t give_back(const TensorArg& memory) {
    const int64_t page = sysconf(_SC_PAGESIZE), begin = static_cast<int64_t>(memory.address), bytes = memory.num_rows * memory.row_bytes();
    const int64_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
    if (end <= first) return 0;
    if (madvise(reinterpret_cast<void*>(first), static_cast<size_t>(end - first), MADV_REMOVE) != 0)
        throw std::system_error(errno, std::generic_category(), "cannot give shared memory back (madvise)");
    return end - first;
}

void bind_words(py::module_& m) {
    m.def("load_word", [](uintptr_t address) { return word_at(address).load(std::memory_order_acquire); });
    m.def("store_word", [](uintptr_t address, uint64_t value) { word_at(address).store(value, std::memory_order_release); });
    m.def("give_back", &give_back);
}

}  // namespace

void bind_low_latency(py::module_& m) {
    m.attr("LOW_LATENCY_MAX_TOKENS") = std::numeric_limits<uint16_t>::max();
    m.attr("LOW_LATENCY_MAX_LOCAL_EXPERTS") = std::numeric_limits<int16_t>::max();
    m.attr("LOW_LATENCY_MAX_HOST_RANKS") = kLowLatencyMaxHostRanks;
    m.attr("LOW_LATENCY_MAX_RANKS") = kLowLatencyMaxRanks;
    LowLatencyWhat refused{};
    refused.is_refused = true;
    m.attr("LOW_LATENCY_REFUSED") = refused.packed();
    m.attr("HAS_LEFT") = kHasLeft;
    m.attr("IF_SLOW") = kIfSlow;
    const py::arg num_ranks("num_ranks"), num_experts("num_experts"), num_topk("num_topk"), hidden("hidden"),
        num_max_tokens("num_max_tokens");
    m.def(
        "low_latency_handle_offsets",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            const LowLatencyHandleLayout layout({num_ranks, num_experts, num_topk, hidden, num_max_tokens});
            return py::make_tuple(layout.num_tokens, layout.rank_masks, layout.rows, layout.total_bytes);
        },
        py::kw_only(), num_ranks, num_experts, num_topk, hidden, num_max_tokens);
    m.def(
        "low_latency_gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuLowLatencyLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}, 1).total_bytes;
        },
        py::kw_only(), num_ranks, num_experts, num_topk, hidden, num_max_tokens);
    m.def("low_latency_what", [](bool is_combine, DType dtype, bool fp8, bool is_rounded, bool has_weights) {
        const auto operation = is_combine ? LowLatencyOperation::kCombine : LowLatencyOperation::kDispatch;
        return LowLatencyWhat{operation, dtype, fp8, is_rounded, has_weights, false}.packed();
    });
    m.def("describe_low_latency", [](unsigned what) { return describe(LowLatencyWhat::unpacked(what)); });
    m.def("are_waits_hurried", [] { return waits_hurry.load(); });
    bind_words(m);
}
