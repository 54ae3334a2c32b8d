// The native module: each room's bindings in a file of their own.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_gate(py::module_& m);

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native library of deepep_moe. Tensors come in as pointers and sizes; see deepep_moe/_C.pyi.";
    m.attr("__version__") = DEEPEP_MOE_VERSION;
    bind_gate(m);
}
