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
