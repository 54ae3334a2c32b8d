// A low-latency call as tensors describe it. The runtime of each backend sets the operation.
#pragma once

#include "common/low_latency.h"
#include "common/tensor_arg.h"

namespace deepep_moe {

inline LowLatencyDispatchParams low_latency_dispatch_of(const TensorArg& x, const TensorArg& topk_idx, const TensorArg& topk_weights,
                                                        const TensorArg& handle, const TensorArg& recv_x, const TensorArg& recv_x_scales,
                                                        const TensorArg& num_recv_tokens_per_expert, const TensorArg& statistics,
                                                        DType dtype, bool is_rounded) {
    LowLatencyDispatchParams params{};
    params.what.dtype = dtype;
    params.what.fp8 = recv_x_scales.is_there;
    params.what.is_rounded = is_rounded;
    params.what.has_weights = topk_weights.is_there;
    params.statistics = statistics.as<int64_t*>();
    params.is_int64 = topk_idx.element_bytes == 8;
    params.num_tokens = static_cast<int>(x.num_rows);
    params.x = x.as<const std::byte*>();
    params.topk_idx = topk_idx.as<const void*>();
    params.topk_weights = topk_weights.as<const float*>();
    params.handle = handle.as<std::byte*>();
    params.recv_x = recv_x.as<std::byte*>();
    params.recv_x_scales = recv_x_scales.as<void*>();
    params.num_recv_tokens_per_expert = num_recv_tokens_per_expert.as<int32_t*>();
    return params;
}

// topk_weights: of this call, or None. number: one int64.
inline LowLatencyCombineParams low_latency_combine_of(const TensorArg& x, const TensorArg& handle, const TensorArg& topk_weights,
                                                      const TensorArg& number, const TensorArg& combined_x, const TensorArg& statistics,
                                                      DType dtype, bool fp8) {
    LowLatencyCombineParams params{};
    params.what.dtype = dtype;
    params.what.fp8 = fp8;
    params.what.has_weights = topk_weights.is_there;
    params.statistics = statistics.as<int64_t*>();
    params.num_tokens = static_cast<int>(combined_x.num_rows);
    params.handle = handle.as<const std::byte*>();
    params.call = number.as<std::byte*>();
    params.topk_weights = topk_weights.as<const float*>();
    params.x = x.as<const std::byte*>();
    params.combined_x = combined_x.as<std::byte*>();
    return params;
}

}  // namespace deepep_moe
