#include "common/signature.h"

#include <algorithm>
#include <cstring>

namespace deepep_moe {

std::string describe(const Signature& s) {
    if (s.operation == Operation::kExpertSlots)
        return std::string(s.has_topk_weight_grads ? "return of gradients" : "fetch of experts") + " with tensors #" +
               std::to_string(s.handle_call);
    const char* operations[] = {"dispatch", "cached dispatch", "combine"};
    std::string text =
        std::string(operations[static_cast<int>(s.operation)]) + " of " + name_of(s.dtype) + " rows, layout " + name_of(s.layout);
    if (s.operation == Operation::kDispatch) text += ", expert_alignment " + std::to_string(s.expert_alignment);
    if (s.handle_call != 0) text += ", with the handle of call " + std::to_string(s.handle_call);
    if (s.has_weights) text += ", with topk_weights";
    if (s.has_scales) text += ", with x_scales";
    if (s.has_topk_weight_grads) text += ", with gradients of topk_weights";
    return text;
}

std::string describe(const LowLatencyWhat& what) {
    const bool is_dispatch = what.operation == LowLatencyOperation::kDispatch;
    std::string text = std::string(is_dispatch ? "dispatch" : "combine") + " of " + name_of(what.dtype);
    if (what.fp8) text += ", sent as fp8";
    if (what.is_rounded) text += " with scales of powers of two";
    if (what.has_weights) text += ", with topk_weights";
    return text;
}

std::string describe_combine(unsigned long long dispatch) { return "combine with the handle of call " + std::to_string(dispatch); }

uint64_t pack(const Signature& s) {
    const uint64_t flags = (s.has_weights ? 1 : 0) | (s.has_scales ? 2 : 0) | (s.has_topk_weight_grads ? 4 : 0);
    return uint64_t{1} << 63 | static_cast<uint64_t>(s.operation) << 58 | static_cast<uint64_t>(s.dtype) << 55 |
           static_cast<uint64_t>(s.layout) << 54 | flags << 51 | static_cast<uint64_t>(s.expert_alignment) << 32 |
           (static_cast<uint64_t>(s.handle_call) & 0xffffffffu);
}

Signature unpack(uint64_t packed) {
    const auto bits = [&](int first, int count) { return static_cast<int>(packed >> first & ((uint64_t{1} << count) - 1)); };
    return {static_cast<Operation>(bits(58, 2)),
            static_cast<DType>(bits(55, 3)),
            static_cast<Layout>(bits(54, 1)),
            bits(32, 19),
            static_cast<int64_t>(packed & 0xffffffffu),
            bits(51, 1) != 0,
            bits(52, 1) != 0,
            bits(53, 1) != 0};
}

void copy_text(char* target, size_t capacity, const std::string& text) {
    size_t length = std::min(text.size(), capacity - 1);
    while (length > 0 && length < text.size() && (text[length] & 0xc0) == 0x80) --length;
    std::memcpy(target, text.data(), length);
    target[length] = '\0';
}

}  // namespace deepep_moe
