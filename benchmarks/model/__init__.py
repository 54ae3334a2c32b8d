"""A model of dispatch and combine over several nodes: `python benchmarks/run.py model --help`."""
