// Helpers of the bindings.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

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
