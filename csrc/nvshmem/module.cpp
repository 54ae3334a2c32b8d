// Makes the module `deepep_moe._nvshmem`; see deepep_moe/_nvshmem.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "nvshmem/rail.h"
#include "nvshmem/world.h"

namespace py = pybind11;

PYBIND11_MODULE(_nvshmem, m) {
    using namespace deepep_moe;
    using WithoutGil = py::call_guard<py::gil_scoped_release>;
    m.doc() = "NVSHMEM for deepep_moe: the world of this process, its symmetric heap, and kernels. See deepep_moe/_nvshmem.pyi.";
    m.def("version_built", &nvshmem::version_built);
    m.def("version_found", &nvshmem::version_found);
    m.def("status", &nvshmem::status);
    m.def("unique_id", [] { return py::bytes(nvshmem::unique_id()); });
    m.def("bootstrap", &nvshmem::bootstrap, WithoutGil(), py::arg("unique_id"), py::arg("rank"), py::arg("num_ranks"));
    m.def("init", &nvshmem::init, WithoutGil(), py::arg("unique_id"), py::arg("rank"), py::arg("num_ranks"), py::arg("device"));
    m.def("attach", &nvshmem::attach, WithoutGil(), py::arg("device"));
    m.def("my_pe", &nvshmem::my_pe);
    m.def("num_pes", &nvshmem::num_pes);
    m.def("free_bytes", &nvshmem::free_bytes);
    m.def("allocate", &nvshmem::allocate, WithoutGil(), py::arg("bytes"));
    m.def("free", &nvshmem::free, WithoutGil(), py::arg("address"));
    m.def("mapped", &nvshmem::mapped, py::arg("address"), py::arg("pe"));
    m.def("orders_network_writes", &nvshmem::orders_network_writes, py::arg("device"));
    m.def("quiet", &nvshmem::quiet, WithoutGil(), py::arg("timeout_s"));
    m.def("rail_shim", [] { return py::capsule(&rail_shim(), kRailShimName); });
    m.def("low_latency_rail_shim", [] { return py::capsule(&low_latency_rail_shim(), kLowLatencyRailShimName); });
}
