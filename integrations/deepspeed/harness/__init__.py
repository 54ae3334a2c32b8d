"""What the example, the benchmark and the tests run DeepSpeed with; a training script needs none of it."""
