// Reads a Python tensor by its own methods, because native code does not link PyTorch.
#pragma once

#include "bindings/bindings.h"
#include "common/tensor_arg.h"

namespace deepep_moe {

// Return a new reference, or throw the Python error.
inline py::object owned(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

// Holds the name of an attribute, interned once when the module is loaded.
struct Name {
    PyObject* const text;
    explicit Name(const char* name) : text(PyUnicode_InternFromString(name)) {}
};

inline py::object attribute(py::handle owner, const Name& name) { return owned(PyObject_GetAttr(owner.ptr(), name.text)); }

inline py::object called(py::handle owner, const Name& method) { return owned(PyObject_CallMethodNoArgs(owner.ptr(), method.text)); }

inline int64_t to_int(py::handle number) {
    const long long value = PyLong_AsLongLong(number.ptr());
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

constexpr int kMaxDims = 64;  // dimensions of a tensor
inline const Name kShape{"shape"}, kItemsize{"itemsize"}, kDataPtr{"data_ptr"}, kStride{"stride"};

inline uintptr_t address_of(py::handle tensor) { return static_cast<uintptr_t>(to_int(called(tensor, kDataPtr))); }

// Reads a tensor, and also its element size if known_element_bytes is 0.
inline TensorArg tensor_arg_of(py::handle tensor, int64_t known_element_bytes) {
    TensorArg arg;
    arg.element_bytes = known_element_bytes;
    if (tensor.is_none()) return arg;
    const py::object shape = attribute(tensor, kShape);
    if (!PyTuple_Check(shape.ptr())) throw py::type_error("expected a tensor");
    int64_t sizes[kMaxDims];
    const Py_ssize_t num_dims = PyTuple_GET_SIZE(shape.ptr());
    if (num_dims > kMaxDims) throw py::type_error("expected a tensor of fewer dimensions");
    for (Py_ssize_t i = 0; i < num_dims; ++i) sizes[i] = to_int(PyTuple_GET_ITEM(shape.ptr(), i));
    arg.set_shape({sizes, static_cast<size_t>(num_dims)});
    if (arg.element_bytes == 0) arg.element_bytes = to_int(attribute(tensor, kItemsize));
    if (arg.is_empty()) return arg;
    arg.address = address_of(tensor);
    if (arg.address == 0) throw py::type_error("a tensor without memory of its own: a fake or meta tensor, or a wrapper of others");
    return arg;
}

inline TensorArg tensor_arg(py::handle tensor) { return tensor_arg_of(tensor, 0); }

inline MatrixArg matrix_arg(py::handle tensor) {
    MatrixArg arg{tensor_arg(tensor)};
    if (!arg.is_there) return arg;
    const py::object strides = called(tensor, kStride);
    if (!PyTuple_Check(strides.ptr()) || PyTuple_GET_SIZE(strides.ptr()) != 2) throw py::type_error("expected a tensor of two dimensions");
    arg.row_stride = to_int(PyTuple_GET_ITEM(strides.ptr(), 0)), arg.column_stride = to_int(PyTuple_GET_ITEM(strides.ptr(), 1));
    return arg;
}

}  // namespace deepep_moe

namespace pybind11::detail {

template <class Arg, Arg (*of)(py::handle)>
struct tensor_caster {
    PYBIND11_TYPE_CASTER(Arg, const_name("torch.Tensor | None"));
    bool load(handle source, bool) {
        value = of(source);
        return true;
    }
};
template <>
struct type_caster<deepep_moe::TensorArg> : tensor_caster<deepep_moe::TensorArg, deepep_moe::tensor_arg> {};
template <>
struct type_caster<deepep_moe::MatrixArg> : tensor_caster<deepep_moe::MatrixArg, deepep_moe::matrix_arg> {};

}  // namespace pybind11::detail
