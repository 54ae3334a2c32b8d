"""Set-up of Megatron-Core for the example, the benchmark and the tests. A training script needs none of it."""
