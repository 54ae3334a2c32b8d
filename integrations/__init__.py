"""Adapters that put deepep_moe behind the MoE interfaces of training frameworks. Each is imported by name only."""
