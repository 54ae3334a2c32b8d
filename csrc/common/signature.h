// Holds the properties of a call that all ranks must agree on, packs them into a word, and describes them.
#pragma once

#include <cstdint>
#include <string>

#include "common/low_latency.h"
#include "common/types.h"

namespace deepep_moe {

enum class Operation : int { kDispatch = 0, kCachedDispatch = 1, kCombine = 2, kExpertSlots = 3 };

struct Signature {
    Operation operation;
    DType dtype;
    Layout layout;
    int expert_alignment = 1;
    int64_t handle_call = 0;   // the dispatch whose handle is used, 0 without one; expert slots: a digest of where their tensors lie
    bool has_weights = false;  // dispatch: topk_weights travel
    bool has_scales = false;   // dispatch: fp8 scales travel
    bool has_topk_weight_grads = false;  // combine: gradients of topk_weights travel; expert slots: gradients return
    bool operator==(const Signature&) const = default;
};

std::string describe(const Signature& signature);
std::string describe(const LowLatencyWhat& what);
std::string describe_combine(unsigned long long dispatch);  // a low-latency combine along the handle of call `dispatch`

// Packs a signature into one word, which is never 0. `handle_call` keeps its low 32 bits.
uint64_t pack(const Signature& signature);
Signature unpack(uint64_t packed);

// Copy `text` to `target` with a zero at its end. Text that is too long is cut, but not inside a UTF-8 character.
void copy_text(char* target, size_t capacity, const std::string& text);

}  // namespace deepep_moe
