"""The gate, on the CPU and on a GPU."""
