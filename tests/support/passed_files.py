"""The way of a call: the files of the package that it passes, and what it asks of C++."""

import sys
from pathlib import Path

MODES = {"now": {}, "async": {"async_op": True}, "hook": {"return_hook": True}}


class Counted:
    """A native object that notes what is asked of it."""

    def __init__(self, native, asked):
        self.__dict__.update(native=native, asked=asked)

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.native, name)


def passed(natives, call):
    """Return the result of `call`, the files of the package that it passes, and what it asks of C++. natives: owners, and their names for
    it."""
    files, asked, values = set(), [], [getattr(*native) for native in natives]
    root = str(Path(sys.modules["deepep_moe"].__file__).parent)

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.add(Path(frame.f_code.co_filename).name)

    for native, value in zip(natives, values, strict=True):
        setattr(*native, Counted(value, asked))
    sys.setprofile(look)
    try:
        output = call()
    finally:
        sys.setprofile(None)
        for native, value in zip(natives, values, strict=True):
            setattr(*native, value)
    return output, files, asked


def finish(event):
    """`event`: an event, a hook, or None of a call that is over."""
    if event is not None:
        event() if callable(event) else event.wait()
