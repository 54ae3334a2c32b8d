"""The tuner: `python -m deepep_moe.tune`."""
