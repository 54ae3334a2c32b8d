// Helpers of the bindings. Tensors come as addresses: Python keeps them alive for the length of a call.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <type_traits>

namespace py = pybind11;

// Ctrl-C ends a wait.
inline void poll_signals() {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Of what waits for peers when it is destroyed; they may wait for a thread of Python.
struct DeleteUnlocked {
    template <class T>
    void operator()(T* object) const {
        const py::gil_scoped_release released;
        delete object;
    }
};
template <class T>
using Unlocked = std::unique_ptr<T, DeleteUnlocked>;

// A field of a params struct that holds an address: an int in Python, 0 for none.
template <class Struct, class Pointer>
void pointer_field(py::class_<Struct>& cls, const char* name, Pointer Struct::* field) {
    static_assert(std::is_pointer_v<Pointer>);
    cls.def_property(
        name, [field](const Struct& self) { return reinterpret_cast<uintptr_t>(self.*field); },
        [field](Struct& self, uintptr_t address) { self.*field = reinterpret_cast<Pointer>(address); });
}
