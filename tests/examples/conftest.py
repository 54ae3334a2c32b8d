"""The modules that examples share are found."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "common"))
