// What the bindings of both low-latency communicators share: their calls.
#pragma once

#include "bindings/tensor.h"
#include "common/low_latency_call.h"

namespace deepep_moe {

// Stream: the type of what a call takes last, if anything. name: of that argument.
template <class LowLatency, class... Stream, class Class, class... Name>
void bind_low_latency_calls(Class& cls, const Name&... name) {
    using Released = py::call_guard<py::gil_scoped_release>;
    cls.def(
        "dispatch",
        [](LowLatency& self, const TensorArg& x, const TensorArg& topk_idx, const TensorArg& topk_weights, const TensorArg& state,
           const TensorArg& recv_x, const TensorArg& recv_x_scales, const TensorArg& num_recv_tokens_per_expert,
           const TensorArg& statistics, DType dtype, bool is_rounded, bool sends, bool receives, Stream... stream) {
            self.dispatch(low_latency_dispatch_of(x, topk_idx, topk_weights, state, recv_x, recv_x_scales, num_recv_tokens_per_expert,
                                                  statistics, dtype, is_rounded),
                          sends, receives, stream...);
        },
        py::arg("x"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("state"), py::arg("recv_x"), py::arg("recv_x_scales"),
        py::arg("num_recv_tokens_per_expert"), py::arg("statistics"), py::arg("dtype"), py::arg("is_rounded"), py::arg("sends"),
        py::arg("receives"), name..., Released());
    cls.def(
        "combine",
        [](LowLatency& self, const TensorArg& x, const TensorArg& state, const TensorArg& topk_weights, const TensorArg& number,
           const TensorArg& combined_x, const TensorArg& statistics, DType dtype, bool fp8, bool sends, bool receives, Stream... stream) {
            self.combine(low_latency_combine_of(x, state, topk_weights, number, combined_x, statistics, dtype, fp8), sends, receives,
                         stream...);
        },
        py::arg("x"), py::arg("state"), py::arg("topk_weights"), py::arg("number"), py::arg("combined_x"), py::arg("statistics"),
        py::arg("dtype"), py::arg("fp8"), py::arg("sends"), py::arg("receives"), name..., Released());
}

}  // namespace deepep_moe
