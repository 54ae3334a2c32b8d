"""A model of dispatch and combine over several nodes: `python -m deepep_moe.bench model --help`."""
