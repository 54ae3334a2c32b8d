// Dense routing on GPUs, which csrc/torch launches. See deepep_moe/_C.pyi.
#include <exception>

#include "bindings/bindings.h"
#include "cuda/launch.h"
#include "runtime/nvlink/shim.h"
#include "runtime/nvlink/streams.h"

using namespace deepep_moe;

namespace {

template <auto kLaunch, class Params>
bool launched(const Params& params, uintptr_t stream) noexcept {
    try {
        kLaunch(params, as_stream(stream));
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

constexpr DenseRoutingShim kShim{&launched<launch_lanes_of_map>, &launched<launch_dense_of_lanes>, &launched<launch_count_lanes>};

}  // namespace

void bind_gpu_dense_routing(py::module_& m) {
    m.def("gpu_dense_routing_shim", [] { return py::capsule(&kShim, kDenseRoutingShimName); });
}
