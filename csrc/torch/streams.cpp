#include "torch/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_set>

#include "runtime/nvlink/call.h"

namespace deepep_moe {
namespace {

using c10::impl::VirtualGuardImpl;

// Asks Python for the device's current stream, because a module built without CUDA can call no function of PyTorch's C++ for it.
uintptr_t current_address(const at::Device& device) {
    static PyObject* getter = nullptr;  // under the GIL; never destroyed
    if (getter == nullptr) getter = py::object(py::module_::import("torch._C").attr("_cuda_getCurrentRawStream")).release().ptr();
    const auto index = py::reinterpret_steal<py::object>(PyLong_FromLong(device.index()));
    const auto address = py::reinterpret_steal<py::object>(PyObject_CallOneArg(getter, index.ptr()));
    if (!address) throw py::error_already_set();
    return PyLong_AsUnsignedLongLong(address.ptr());
}

void keep_for(const c10::Stream& stream, at::TensorList tensors) {
    const VirtualGuardImpl guard(stream.device_type());
    for (const Tensor& tensor : tensors)
        if (tensor.defined() && tensor.device() == stream.device() && tensor.has_storage())
            guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

uintptr_t call_stream(const at::Device& device) {
    static auto& lasting = *new std::unordered_set<uintptr_t>{0};  // PyTorch never destroys its own streams
    if (!device.is_cuda()) return 0;
    const uintptr_t address = current_address(device);
    if (lasting.contains(address)) return address;
    const auto id = VirtualGuardImpl(device.type()).getStream(device).id();  // the address, of a stream that PyTorch has not made
    if (static_cast<uintptr_t>(id) == address) return address | kExternalStream;
    lasting.insert(address);
    return address;
}

// ---- moments ----

Recorded::Recorded(const at::Device& device) : device_(device), event_(device.type()) {
    if (device.is_cuda()) event_.record(VirtualGuardImpl(device.type()).getStream(device));
}

Recorded::Recorded(const c10::Stream& stream, const c10::Stream& caller, variable_list tensors)
    : device_(stream.device()), event_(stream.device_type()), stream_(stream), caller_(caller), tensors_(std::move(tensors)) {
    event_.record(stream);
}

Recorded::~Recorded() {
    try {
        release_to(nullptr);
    } catch (...) {  // at the end of the process, when the device is gone
    }
}

void Recorded::wait() {
    if (!device_.is_cuda()) return;
    const c10::Stream current = VirtualGuardImpl(device_.type()).getStream(device_);
    event_.block(current);
    release_to(&current);
}

// waiting: the stream that waits by now, if one does.
void Recorded::release_to(const c10::Stream* waiting) {
    if (tensors_.empty()) return;
    if (waiting == nullptr || *waiting != *caller_) keep_for(*stream_, tensors_);
    tensors_.clear();
}

bool Recorded::query() const {
    if (!device_.is_cuda()) return true;
    return !py::module_::import("torch.cuda").attr("is_current_stream_capturing")().cast<bool>() && event_.query();
}

// ---- memory, and the stream beside the caller's ----

void keep_for_current(const at::Device& device, at::TensorList tensors) {
    if (device.is_cuda()) keep_for(VirtualGuardImpl(device.type()).getStream(device), tensors);
}

uintptr_t OwnStream::follow() {
    if (!device_.is_cuda()) return 0;
    const VirtualGuardImpl guard(device_.type());
    const c10::Stream current = guard.getStream(device_);
    if (!stream_) {
        stream_ = guard.getStreamFromGlobalPool(device_);
        given_.emplace(device_.type());
        guard.exchangeStream(*stream_);
        address_ = current_address(device_);
        guard.exchangeStream(current);
    }
    caller_ = current;
    given_->record(current);
    given_->block(*stream_);
    return address_;
}

void OwnStream::keep(at::TensorList tensors) const {
    if (stream_) keep_for(*stream_, tensors);
}

std::shared_ptr<Recorded> OwnStream::record(variable_list tensors) const {
    return stream_ ? std::make_shared<Recorded>(*stream_, *caller_, std::move(tensors)) : std::make_shared<Recorded>(device_);
}

}  // namespace deepep_moe
