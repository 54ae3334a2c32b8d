"""Profiles: settings that `deepep-moe tune` has found faster on a machine, kept in files. Results never depend on them."""

from deepep_moe.tuning.profiles import SETTINGS, Files, Found, Loaded, Machine, Profile, Shape, Values, choose, load, write

__all__ = ["SETTINGS", "Files", "Found", "Loaded", "Machine", "Profile", "Shape", "Values", "choose", "load", "write"]
