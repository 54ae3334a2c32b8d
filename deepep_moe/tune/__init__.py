"""The tuner: `deepep-moe tune`."""
