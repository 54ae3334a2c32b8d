"""Losses of training with Megatron-Core's DDP and optimizers against its own experts and dispatcher, across checkpoints into other experts."""

import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_training import Setting, load, save, train, training

from deepep_moe.testing.launch import run_ranks

pytest.importorskip("megatron.core")

BEFORE, AFTER = range(4), range(4, 6)
OTHER = {"sequential": "grouped", "grouped": "sequential"}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of a loss of about 4.2. A step with weights of the step before is off by more than 0.05."""

OPTIMIZERS = (
    {"is_distributed": False},
    {"is_distributed": False, "overlap_grad_reduce": True},
    {},
    {"overlap_grad_reduce": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
)


def settings(experts: Iterable[str], sizes: Iterable[int], dtypes: Iterable[torch.dtype], optimizers: Iterable[dict]) -> list[Setting]:
    return [
        Setting(kind, ep=ep, dtype=dtype, **optimizer)
        for kind, ep, dtype, optimizer in itertools.product(experts, sizes, dtypes, optimizers)
    ]


def _against_stock(rank: int, num_ranks: int, cells: list[Setting], folder: str) -> None:
    """Each cell trains, saves, loads into the other experts and trains on."""
    stock: dict[tuple, list[float]] = {}
    for number, cell in enumerate(cells):
        key = cell.ep, cell.dtype
        if key not in stock:
            with training(Setting("stock", ep=cell.ep, dtype=cell.dtype)) as run:
                stock[key] = train(run, range(BEFORE.start, AFTER.stop))
        path = Path(folder) / str(number)
        with training(cell) as run:
            losses = train(run, BEFORE)
            save(run, path)
        with training(replace(cell, experts=OTHER[cell.experts]), seed=8) as run:
            load(run, path)
            losses += train(run, AFTER)
        differences = [abs(ours - theirs) for ours, theirs in zip(losses, stock[key], strict=True)]
        assert max(differences) <= TOLERANCE[cell.dtype], f"{cell}: {losses}, stock: {stock[key]}"


def run_cells(cells: list[Setting]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_against_stock, 4, cells, folder, timeout_s=600)


def test_losses():
    run_cells(settings(("grouped", "sequential"), (2,), (torch.float32,), OPTIMIZERS[-1:]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("ep", (4, 2), ids=("EP = DP", "EP < DP"))
def test_losses_in_every_cell(ep, dtype):
    run_cells(settings(OTHER, (ep,), (dtype,), OPTIMIZERS))
