#include "torch/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_map>

#include "runtime/nvlink/call.h"

namespace deepep_moe {
namespace {

using c10::impl::VirtualGuardImpl;

// Asks Python, once for each of PyTorch's own streams, which it never destroys: PyTorch 2.7 has no function in C++ for this without CUDA.
uintptr_t address_of(const c10::Stream& stream) {
    static auto& addresses = *new std::unordered_map<c10::Stream, uintptr_t>;  // under the GIL
    if (const auto known = addresses.find(stream); known != addresses.end()) return known->second;
    const py::object in_python =
        py::module_::import("torch.cuda")
            .attr("Stream")(py::arg("stream_id") = stream.id(), py::arg("device_index") = static_cast<int>(stream.device_index()),
                            py::arg("device_type") = static_cast<int>(stream.device_type()));
    const auto address = in_python.attr("cuda_stream").cast<uintptr_t>();
    if (address != 0 && static_cast<uintptr_t>(stream.id()) == address) return address | kExternalStream;  // PyTorch has not made it
    return addresses[stream] = address;
}

void keep_for(const c10::Stream& stream, at::TensorList tensors) {
    const VirtualGuardImpl guard(stream.device_type());
    for (const Tensor& tensor : tensors)
        if (tensor.defined() && tensor.device() == stream.device() && tensor.has_storage())
            guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

uintptr_t call_stream(const at::Device& device) {
    return device.is_cuda() ? address_of(VirtualGuardImpl(device.type()).getStream(device)) : 0;
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
    return event_.query();
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
        address_ = address_of(*stream_);
        given_.emplace(device_.type());
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
