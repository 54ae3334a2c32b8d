"""Tests whose body runs on several ranks, and what such a body checks."""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from deepep_moe.errors import EPPeerError
from deepep_moe.testing import run_ranks


def on_ranks(num_ranks: int | Sequence[Any] = (), **how: Any) -> Callable[..., Any]:
    """Make a test of a function that every rank runs. It takes `rank` and, where it names it, `num_ranks`, beside what pytest gives it.

    Keywords that name its parameters say which values they have, as `pytest.mark.parametrize` does. The others are options of `run_ranks`,
    or functions of the values that are sent to the ranks. Several numbers of ranks, or none if another mark gives them, are values of
    `num_ranks`. A rank may skip the test.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(body).parameters
        marks = {name: how[name] for name in how if name in parameters}
        options = {name: how[name] for name in how if name not in parameters}
        is_fixed = isinstance(num_ranks, int)
        of_pytest = [name for name in parameters if name not in (("rank", "num_ranks") if is_fixed else ("rank",))]
        sent = [name for name in of_pytest if name != "num_ranks"]

        @functools.wraps(body)
        def test(*of_rank: Any, **how: Any) -> str | None:
            if of_rank:
                of_ranks = dict(zip(("rank", "num_ranks", *sent), of_rank, strict=True))
                try:
                    body(**{name: of_ranks[name] for name in parameters})
                except pytest.skip.Exception as skipped:
                    return str(skipped)
                return None
            values = [how[name] for name in sent]
            chosen = {name: option(*values) if callable(option) else option for name, option in options.items()}
            for skipped in filter(None, run_ranks(test, num_ranks if is_fixed else how["num_ranks"], *values, **chosen)):
                pytest.skip(skipped)
            return None

        test.__signature__ = inspect.Signature([parameters[name] for name in of_pytest])
        if not is_fixed and num_ranks:
            test = pytest.mark.parametrize("num_ranks", num_ranks)(test)
        for name in marks:
            test = pytest.mark.parametrize(name, marks[name], ids=_id)(test)
        return test

    return decorate


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, torch.dtype) else None


@contextlib.contextmanager
def refused(rank: int, culprit: int, error: type[BaseException] | tuple[type[BaseException], ...], message: str) -> Iterator[Any]:
    """The culprit's call raises `error`. Its peers' calls raise EPPeerError, which names the culprit and the error, in time."""
    if rank == culprit:
        with pytest.raises(error, match=message) as own:
            yield own
        return
    began = time.monotonic()
    with pytest.raises(EPPeerError, match=f"rank {culprit} did not make its call: .*{message}") as info:
        yield info
    names = [kind.__name__ for kind in (error if isinstance(error, tuple) else (error,))]
    assert info.value.rank == culprit and info.value.cause in names, repr(info.value)
    assert time.monotonic() - began < 120


@contextlib.contextmanager
def failing(module: torch.nn.Module, is_here: bool, error: BaseException) -> Iterator[None]:
    """Forwards of the module that begin meanwhile raise `error`, on the rank where that `is_here`."""

    def fail(*_: Any) -> None:
        raise error

    hook = module.register_forward_pre_hook(fail) if is_here else None
    yield
    if hook is not None:
        hook.remove()


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], context: str, tolerance: float, least: float) -> float:
    """Check that no entry differs by more than `tolerance` of its largest value, or of `least`. Return the largest such difference."""
    worst = 0.0
    for name, want in theirs.items():
        scale = max(float(want.double().abs().max()) if want.numel() else 0.0, least)
        difference = float((ours[name].double() - want.double()).abs().max()) / scale if want.numel() else 0.0
        assert difference <= tolerance, f"{context}: {name} differs by {difference:.2e} of its scale {scale:.3g}, allowed {tolerance:.0e}"
        worst = max(worst, difference)
    return worst
