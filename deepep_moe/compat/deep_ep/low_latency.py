"""DeepEP's low-latency calls on `deepep_moe.LowLatencyBuffer`."""


class LowLatencyCalls:
    """The low-latency half of DeepEP's `Buffer`."""
