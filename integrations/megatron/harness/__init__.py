"""What the example, the benchmark and the tests run Megatron-Core with; a training script needs none of it."""
