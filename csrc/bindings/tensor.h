// What bindings read of a Python tensor, by its own methods: native code knows nothing of PyTorch.
#pragma once

#include <algorithm>

#include "bindings/bindings.h"
#include "common/types.h"

namespace deepep_moe {

// A new reference, or the error that is there instead of one.
inline py::object owned(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

// Of an attribute, made once, when the module is loaded.
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

inline const Name kShape{"shape"}, kItemsize{"itemsize"}, kDataPtr{"data_ptr"}, kStride{"stride"};

inline uintptr_t address_of(py::handle tensor) { return static_cast<uintptr_t>(to_int(called(tensor, kDataPtr))); }

// A tensor, contiguous, or None.
struct TensorArg {
    uintptr_t address = 0;  // 0 where there is nothing
    bool is_there = false;
    int num_dims = 0;
    int64_t num_rows = 1, num_columns = 1, element_bytes = 0;  // [num_rows], or [..., num_columns] with rows of all dimensions before,
    int64_t inner_rows = 1, num_leading = 1;                   // of which the last has these, and the others so many of it

    TensorArg() = default;
    // known_element_bytes: 0 where they are to be asked for.
    explicit TensorArg(py::handle tensor, int64_t known_element_bytes = 0) : element_bytes(known_element_bytes) {
        if (tensor.is_none()) return;
        is_there = true;
        const py::object shape = attribute(tensor, kShape);
        if (!PyTuple_Check(shape.ptr())) throw py::type_error("expected a tensor");
        num_dims = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
        if (num_dims > 1) num_columns = to_int(PyTuple_GET_ITEM(shape.ptr(), num_dims - 1));
        const int last = std::max(0, num_dims - 2);  // of the dimensions of rows
        for (int i = 0; i < last; ++i) num_leading *= to_int(PyTuple_GET_ITEM(shape.ptr(), i));
        if (num_dims > 0) inner_rows = to_int(PyTuple_GET_ITEM(shape.ptr(), last));
        num_rows = num_leading * inner_rows;
        if (element_bytes == 0) element_bytes = to_int(attribute(tensor, kItemsize));
        if (num_rows > 0 && num_columns > 0) address = address_of(tensor);
    }

    template <class Pointer>
    Pointer as() const { return reinterpret_cast<Pointer>(address); }
    int64_t row_bytes() const { return num_columns * element_bytes; }
};

// A tensor [num_rows, num_columns] whose entries lie as its strides say, or None.
struct MatrixArg : TensorArg {
    int64_t row_stride = 0, column_stride = 0;

    MatrixArg() = default;
    explicit MatrixArg(py::handle tensor) : TensorArg(tensor) {
        if (!is_there) return;
        const py::object strides = called(tensor, kStride);
        if (!PyTuple_Check(strides.ptr()) || PyTuple_GET_SIZE(strides.ptr()) != 2) throw py::type_error("expected a tensor of two dimensions");
        row_stride = to_int(PyTuple_GET_ITEM(strides.ptr(), 0)), column_stride = to_int(PyTuple_GET_ITEM(strides.ptr(), 1));
    }
};

}  // namespace deepep_moe

namespace pybind11::detail {

template <class Arg>
struct tensor_caster {
    PYBIND11_TYPE_CASTER(Arg, const_name("torch.Tensor | None"));
    bool load(handle source, bool) {
        value = Arg(source);
        return true;
    }
};
template <>
struct type_caster<deepep_moe::TensorArg> : tensor_caster<deepep_moe::TensorArg> {};
template <>
struct type_caster<deepep_moe::MatrixArg> : tensor_caster<deepep_moe::MatrixArg> {};

}  // namespace pybind11::detail
