"""A test whose body runs on every rank."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from deepep_moe.testing import run_ranks


def on_ranks(number: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function of (rank, num_ranks, parameters and fixtures of the test), which `number` ranks run.

    Without a number, `num_ranks` is a parameter of the test. `options` are those of `run_ranks`. The function may skip the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**parameters: Any) -> None:
            num_ranks = parameters.pop("num_ranks", number)
            for skipped in filter(None, run_ranks(_run, num_ranks, test, parameters, **options)):
                pytest.skip(skipped)

        named = list(inspect.signature(body).parameters.values())
        test.__signature__ = inspect.Signature(named[2 if number else 1 :])
        return test

    return decorate


def _run(rank: int, num_ranks: int, test: Any, parameters: dict[str, Any]) -> str | None:
    """Return why the test is skipped."""
    try:
        test.__wrapped__(rank, num_ranks, **parameters)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return None
