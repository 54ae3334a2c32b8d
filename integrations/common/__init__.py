"""Buffers, warnings and process groups for all adapters."""
