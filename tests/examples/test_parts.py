"""The report of optimizer and norms of a run, and DeepSpeed's FusedAdam by option."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parts import line_of, parts_of

EXAMPLES = Path(__file__).parents[2] / "examples"


class FusedAdam:
    """Stands for that of apex or TransformerEngine."""


def test_parts_are_read_off_the_objects():
    model = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 4), torch.nn.RMSNorm(4), torch.nn.LayerNorm(4))
    norms = "torch.nn.modules.normalization.LayerNorm, torch.nn.modules.normalization.RMSNorm"
    parts = parts_of(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert parts == {"optimizer": "torch.optim.adamw.AdamW (fused)", "norms": norms}
    assert line_of(parts) == f"optimizer: torch.optim.adamw.AdamW (fused); norms: {norms}"
    wrapped = SimpleNamespace(optimizer=FusedAdam())  # as Megatron-Core and DeepSpeed have it
    chained = SimpleNamespace(chained_optimizers=[wrapped, SimpleNamespace(optimizer=wrapped)])
    assert parts_of(model, wrapped)["optimizer"] == parts_of(model, chained)["optimizer"] == f"{__name__}.FusedAdam"


def test_fused_adam_of_deepspeed(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    for name in ("model", "worker"):  # of another example, or of none; what is there again in the end
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.syspath_prepend(EXAMPLES / "deepspeed")
    spec = importlib.util.spec_from_file_location("deepspeed_train", EXAMPLES / "deepspeed" / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    for fused in (False, True):
        adam = train.worker.ds_config(train.worker.Settings(fused_adam=fused))["optimizer"]
        assert adam["type"] == "AdamW" and adam["params"]["torch_adam"] is not fused
    with pytest.raises(SystemExit):
        train.main(["--fused-adam"])
    assert "--fused-adam needs --device cuda" in capsys.readouterr().err
