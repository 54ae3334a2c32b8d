// Reads a Python tensor by its own methods, because native code does not link PyTorch.
#pragma once

#include "bindings/bindings.h"
#include "common/tensor_arg.h"

namespace deepep_moe {

constexpr int kMaxDims = 64;  // dimensions of a tensor
// Names of attributes, made once when the module is loaded.
inline PyObject* const kShape = PyUnicode_InternFromString("shape");
inline PyObject* const kItemsize = PyUnicode_InternFromString("itemsize");
inline PyObject* const kDataPtr = PyUnicode_InternFromString("data_ptr");

inline TensorArg tensor_arg(py::handle tensor) {
    TensorArg arg;
    if (tensor.is_none()) return arg;
    const py::object shape = py::getattr(tensor, kShape);
    if (!PyTuple_Check(shape.ptr())) throw py::type_error("expected a tensor");
    int64_t sizes[kMaxDims];
    const Py_ssize_t num_dims = PyTuple_GET_SIZE(shape.ptr());
    if (num_dims > kMaxDims) throw py::type_error("expected a tensor of fewer dimensions");
    for (Py_ssize_t i = 0; i < num_dims; ++i) sizes[i] = py::handle(PyTuple_GET_ITEM(shape.ptr(), i)).cast<int64_t>();
    arg.set_shape({sizes, static_cast<size_t>(num_dims)});
    arg.element_bytes = py::getattr(tensor, kItemsize).cast<int64_t>();
    if (arg.is_empty()) return arg;
    arg.address = py::getattr(tensor, kDataPtr)().cast<uintptr_t>();
    if (arg.address == 0) throw py::type_error("a tensor without memory of its own: a fake or meta tensor, or a wrapper of others");
    return arg;
}

}  // namespace deepep_moe

namespace pybind11::detail {

template <>
struct type_caster<deepep_moe::TensorArg> {
    PYBIND11_TYPE_CASTER(deepep_moe::TensorArg, const_name("torch.Tensor | None"));
    bool load(handle source, bool) {
        value = deepep_moe::tensor_arg(source);
        return true;
    }
};

}  // namespace pybind11::detail
