"""Dispatch and combine of `LowLatencyBuffer`, on GPUs and on the CPU."""
