"""Benchmarks: `python -m deepep_moe.bench --help`."""
