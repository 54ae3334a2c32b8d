// Makes the native module. Each part has a file of bindings.
#include "bindings/bindings.h"

void bind_exchange(py::module_& m);
#if defined(DEEPEP_MOE_CUDA)
constexpr bool kHasCuda = true;
void bind_gpu(py::module_& m);
#else
constexpr bool kHasCuda = false;
void bind_gpu(py::module_&) {}
#endif
void bind_low_latency(py::module_& m);

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native library of deepep_moe. Tensors come in as pointers and sizes; see deepep_moe/_C.pyi.";
    m.attr("__version__") = DEEPEP_MOE_VERSION;
    m.def("build_info", [] {
        using namespace py::literals;
        return py::dict("compiler"_a = __VERSION__, "shm"_a = true, "nvlink"_a = kHasCuda, "nvshmem"_a = false, "collective"_a = true,
                        "found_nvcc"_a = kHasCuda, "found_nvshmem"_a = DEEPEP_MOE_FOUND_NVSHMEM);
    });
    bind_exchange(m);
    bind_low_latency(m);
    bind_gpu(m);
}
