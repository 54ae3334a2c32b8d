"""`deep_ep.comm`, where version 2.5 has the sizes of domains."""

from deepep_moe.compat.deep_ep.elastic import get_logical_domain_size, get_physical_domain_size

__all__ = ["get_logical_domain_size", "get_physical_domain_size"]
