"""The name `deep_ep`: this import ends with `deepep_moe.compat.deep_ep` in its place."""

from deepep_moe.compat.deep_ep.modules import provide

provide()
