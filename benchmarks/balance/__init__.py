"""Measures what unbalanced ranks cost a layer."""
