"""Makes `import deep_ep` find this package."""

import importlib
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

PACKAGE = "deepep_moe.compat.deep_ep"
NAME = "deep_ep"
_ALSO = {
    "buffers": "buffer", "buffers.legacy": "buffer", "buffers.elastic": "elastic", "comm": "elastic", "hybrid_ep_buffer": "hybrid",
    "utils": "events", "utils.event": "events", "utils.envs": "elastic",
}  # fmt: skip
"""Modules of DeepEP, after those that hold them, and the module here that has their names."""


def install() -> None:
    """Make `import deep_ep`, `deep_ep.utils` and the other modules find deepep_moe in this process. May be called again.

    Raises:
        ImportError: another `deep_ep` was imported before.
    """
    present = sys.modules.get(NAME)
    if present is not None and present is not sys.modules.get(PACKAGE):
        place = getattr(present, "__file__", None) or "without a file"
        raise ImportError(
            f"deep_ep was already imported, from {place}; call deepep_moe.compat.deep_ep.install() before any import of deep_ep, or start "
            "the script with python -m deepep_moe.compat.run",
            name=NAME,
        )
    provide()


def provide() -> None:
    """Put this package and its modules under the name `deep_ep`, whatever was there."""
    package = importlib.import_module(PACKAGE)
    sys.modules[NAME] = package
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        sys.modules[NAME + module.name.removeprefix(PACKAGE)] = importlib.import_module(module.name)
    for name, source in _ALSO.items():
        also = module_from_spec(ModuleSpec(f"{NAME}.{name}", None, is_package=True))  # a package, as it has those modules
        also.__dict__.update({key: value for key, value in vars(sys.modules[f"{NAME}.{source}"]).items() if not key.startswith("_")})
        parent, _, last = also.__name__.rpartition(".")
        sys.modules[also.__name__] = also
        setattr(sys.modules[parent], last, also)
