"""The page of a run as the examples write it, for tests that read one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "common"))

from page import Page, Picture, Table, read

__all__ = ["Page", "Picture", "Table", "read"]
