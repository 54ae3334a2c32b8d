// Binding of copies of experts on the CPU; see deepep_moe/_C.pyi. The caller must check shapes and dtypes.
#include "bindings/copies.h"
#include "cpu/copy_plan.h"

using namespace deepep_moe;

void bind_copies(py::module_& m) {
    m.def(
        "plan_copies",
        [](const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& copies, const TensorArg& rows,
           const TensorArg& physical_topk_idx, int rank, int cost,
           int capacity) { plan_copies(copy_plan_params(topk_idx, counts, copies, rows, physical_topk_idx, rank, cost, capacity)); },
        py::arg("topk_idx"), py::arg("counts"), py::arg("copies"), py::arg("rows"), py::arg("physical_topk_idx"), py::arg("rank"),
        py::arg("cost"), py::arg("capacity"));
}
