"""What several benchmarks share: times, records, checks."""
