"""Set-up of DeepSpeed for the example, the benchmark and the tests. A training script needs none of it."""
