"""Profiles: settings that `deepep-moe tune` has found faster on a machine, kept in files. Results never depend on them."""

from deepep_moe.tuning.files import Files, Found, Loaded, choose, load, write
from deepep_moe.tuning.profiles import SETTINGS, Machine, Profile, Shape, Values

__all__ = ["SETTINGS", "Files", "Found", "Loaded", "Machine", "Profile", "Shape", "Values", "choose", "load", "write"]
