// Converts PyTorch's tensors to what native calls take, and says when a call is plain.
#pragma once

// This is not torch/extension.h, which brings PyTorch's C++ layers and optimizers, and nearly doubles the time of each file.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "common/tensor_arg.h"
#include "common/types.h"
#include "runtime/nvlink/shim.h"

namespace deepep_moe {

using at::Tensor;
using torch::autograd::variable_list;

// ---- of Python ----

// Tensors of PyTorch's own class, or None.
inline bool are_plain(std::initializer_list<py::handle> tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [](py::handle tensor) { return tensor.is_none() || THPVariable_CheckExact(tensor.ptr()); });
}

inline Tensor unpacked(py::handle tensor) { return tensor.is_none() ? Tensor() : THPVariable_Unpack(tensor.ptr()); }

[[noreturn]] inline void raise_python() {  // the error that Python has
    python_error error;
    error.persist();
    throw error;
}

// Makes `call(shim)` without the GIL: launches wait where a stream has too many, and for peers. Raises the failure of a call that returns
// false, by the method `raise_failure` of the shim's owner, which another thread may release meanwhile.
template <class Shim, class Call>
void call_unlocked(py::object owner, Shim& shim, const Call& call) {
    bool was_made = false;
    {
        const py::gil_scoped_release released;
        was_made = call(shim);
    }
    if (was_made) return;
    const py::object method = py::reinterpret_steal<py::object>(PyObject_GetAttrString(owner.ptr(), "raise_failure"));
    if (method) py::reinterpret_steal<py::object>(PyObject_CallNoArgs(method.ptr()));
    raise_python();
}

template <class Shim>
Shim* shim_in(const py::capsule& capsule) {
    if (std::string_view(capsule.name()) != Shim::kName)
        throw py::type_error("deepep_moe._C and deepep_moe._torch are of different builds; install deepep_moe again");
    return capsule.get_pointer<Shim>();
}

inline const KernelShim* kernels = nullptr;  // Python sets it once, by `connect`

// ---- of autograd ----

// Does a mode, tracer or transform see what PyTorch does now, whatever the tensors? As `is_watched` of deepep_moe/library.py asks.
inline bool is_watched() {
    using Key = c10::DispatchKey;
    constexpr c10::DispatchKeySet kWatchers(
        {Key::FuncTorchDynamicLayerFrontMode, Key::FuncTorchDynamicLayerBackMode, Key::VmapMode, Key::Tracer, Key::PreDispatch});
    if (c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatchers) || c10::impl::TorchDispatchModeTLS::any_modes_set())
        return true;
    return at::impl::torch_function_mode_enabled() && py::module_::import("deepep_moe.library").attr("watches_functions")().cast<bool>();
}

inline bool needs_gradients(std::initializer_list<const Tensor*> tensors) {
    return at::GradMode::is_enabled() &&
           std::any_of(tensors.begin(), tensors.end(), [](const Tensor* t) { return t->defined() && t->requires_grad(); });
}

using OptionalTensor = std::optional<Tensor>;
inline OptionalTensor optional_of(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
inline Tensor or_none(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// Returns the result of `gradients()`. Errors of Python leave in the form that the autograd engine expects from its threads.
template <class Gradients>
auto with_errors(const Gradients& gradients) {
    const py::gil_scoped_acquire gil;
    try {
        return gradients();
    } catch (py::error_already_set& error) {
        error.restore();
        raise_python();
    }
}

// Converts a sequence of tensors and None that Python returned.
inline variable_list tensors_of(const py::object& sequence) {
    variable_list list;
    for (const py::handle item : sequence) list.push_back(item.is_none() ? Tensor() : item.cast<Tensor>());
    return list;
}

// ---- memory ----

// Returns a part of `all`'s storage that is not registered as a view: autograd treats it as a tensor of its own. `begin` counts elements of
// `type` from the begin of the storage.
inline Tensor part_of(const Tensor& all, int64_t begin, at::IntArrayRef sizes, at::ScalarType type) {
    auto part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(all.storage()), all.key_set(), at::scalarTypeToTypeMeta(type));
    part.unsafeGetTensorImpl()->set_storage_offset(begin);
    part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return part;
}

inline Tensor part_of(const Tensor& all, int64_t offset, at::IntArrayRef sizes) {
    return part_of(all, all.storage_offset() + offset, sizes, all.scalar_type());
}

// Returns false if its storage was freed or cut.
inline bool has_memory(const Tensor& tensor) {
    if (tensor.numel() == 0) return true;
    int64_t last = tensor.storage_offset();
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return tensor.storage().nbytes() >= static_cast<size_t>(last + 1) * tensor.element_size();
}

// Does the tensor have memory on this device, which a kernel can be given? Lazy negatives and zeros do not hold their values there, and a
// tangent of forward-mode AD would be lost.
inline bool is_on(const at::Device& device, const Tensor& tensor) {
    return tensor.defined() && tensor.device() == device && tensor.layout() == at::kStrided &&
           !tensor.unsafeGetTensorImpl()->is_python_dispatch() && tensor.has_storage() && !tensor.is_neg() && !tensor._is_zerotensor() &&
           !tensor._fw_grad(0).defined() && has_memory(tensor);
}

// Does the tensor have contiguous memory on this device, of this type and shape?
inline bool has_form(const at::Device& device, const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) {
    return is_on(device, tensor) && tensor.scalar_type() == type && tensor.sizes() == sizes && tensor.is_contiguous();
}

inline TensorArg arg_of(const Tensor& tensor) {
    TensorArg arg;
    if (!tensor.defined()) return arg;
    arg.set_shape({tensor.sizes().data(), tensor.sizes().size()});
    arg.element_bytes = static_cast<int64_t>(tensor.element_size());
    if (!arg.is_empty()) arg.address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return arg;
}

// Returns the address of the tensor's memory, or nullptr if it has none. Type: const if nobody writes there.
template <class Type>
Type* data_of(const Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) return nullptr;
    if constexpr (std::is_const_v<Type>)
        return static_cast<Type*>(tensor.const_data_ptr());
    else
        return static_cast<Type*>(tensor.data_ptr());
}

inline bool is_aligned(const Tensor& tensor) { return arg_of(tensor).address % kRowAlignment == 0; }

inline bool is_index(at::ScalarType type) { return type == at::kLong || type == at::kInt; }
inline bool can_be_summed(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

inline DType dtype_of(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return DType::kFloat32;
        case at::kBFloat16: return DType::kBFloat16;
        case at::kHalf: return DType::kFloat16;
        case at::kFloat8_e5m2: return DType::kFloat8E5M2;
        default: return DType::kFloat8;
    }
}

}  // namespace deepep_moe
