"""Draw docs/pictures: `python docs/scripts/draw.py`. A test compares them with what this draws."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pictures_of_design
import pictures_of_use
from drawing import Picture, write


def all_pictures() -> dict[str, Picture]:
    return {name: draw() for name, draw in {**pictures_of_use.PICTURES, **pictures_of_design.PICTURES}.items()}


if __name__ == "__main__":
    write(all_pictures(), Path(__file__).parents[1] / "pictures")
