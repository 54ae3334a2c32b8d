"""Expert parallelism for mixture-of-experts training."""
