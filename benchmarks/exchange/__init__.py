"""Dispatch and combine of `Buffer`, on the CPU and on GPUs."""
