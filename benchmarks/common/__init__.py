"""Times, records, checks and the start of ranks, for several benchmarks."""
