"""Settings from the environment. Every variable the library reads is read here, at each call, so that a change takes effect at once."""

import os


def num_threads() -> int:
    """Most threads a native CPU operation may use: `DEEPEP_MOE_NUM_THREADS`, by default the CPUs this process may run on, at most 8.

    Raises:
        ValueError: the variable is not a whole number of at least 1.
    """
    text = os.environ.get("DEEPEP_MOE_NUM_THREADS")
    if text is None:
        return min(8, len(os.sched_getaffinity(0)))
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(
            f"DEEPEP_MOE_NUM_THREADS must be a whole number of at least 1, got {text!r}; correct it or unset it for the default"
        )
    return int(text)
