"""The repository is as large as `size.py` allows."""

import pytest
from size import LIMITS, sizes

ROOM = 1.03


@pytest.mark.parametrize("name", LIMITS)
def test_size_is_within_its_limit(name):
    size = sizes()[name]
    assert size <= ROOM * LIMITS[name], f"{name}: {size}; delete some, or raise the limit in tests/structure/size.py"
