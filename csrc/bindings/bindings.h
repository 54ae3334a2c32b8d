// Declares the parts of the bindings, and their helpers.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

namespace py = pybind11;

// Let Ctrl-C end a wait.
inline void poll_signals() {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Deletes objects whose destructor waits for peers. It releases the GIL, because the peers may wait for a Python thread.
struct DeleteUnlocked {
    template <class T>
    void operator()(T* object) const {
        const py::gil_scoped_release released;
        delete object;
    }
};
template <class T>
using Unlocked = std::unique_ptr<T, DeleteUnlocked>;

// Binds what the exchange and the low-latency calls of GPUs have in common.
template <class T>
py::class_<T, Unlocked<T>> bind_calls(py::module_& m, const char* name) {
    using Released = py::call_guard<py::gil_scoped_release>;
    return py::class_<T, Unlocked<T>>(m, name)
        .def_property_readonly("workspace_bytes", &T::workspace_bytes)
        .def_property_readonly("num_calls", &T::num_calls)
        .def("handle", [](const T& self) { return py::bytes(self.handle()); })
        .def("share", &T::share)
        .def("connect", &T::connect)
        .def("disconnect", &T::disconnect, Released())
        .def("free", &T::free, Released())
        .def("resume", &T::resume, Released())
        .def("leak", [](const py::object& self) { self.inc_ref(); })
        .def("refuse", &T::refuse, Released())
        .def("check", &T::check, Released())
        .def("shim", [](T& self) { return py::capsule(static_cast<typename T::Shim*>(&self), T::kName); })
        .def_static("raise_failure", &T::raise_failure);
}
