"""`enable`, and the launcher: plain `deepspeed.initialize` honours the section of ds_config."""

import contextlib
import io

import pytest
from deepspeed_cases import Case, ds_config, make_model, on_deepspeed_ranks, run_steps
from scripts import run_python

import deepep_moe
from deepep_moe.integrations.deepspeed import disable, enable, initialize
from deepep_moe.integrations.deepspeed.options import Options

pytest.importorskip("deepspeed")


def _build(case, config, how=None):
    import deepspeed

    model = make_model(case)
    engine, *_ = (how or deepspeed.initialize)(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _name(engine) -> str:
    return type(engine.module.layers[0].deepspeed_moe).__name__


@on_deepspeed_ranks()
def test_enable_and_disable(rank):
    import deepspeed

    stock, case = deepspeed.initialize, Case(zero=2)
    asked = ds_config(case) | {"deepep_moe": {"enabled": True, "exact": False}}
    assert _name(_build(case, asked)) == "MOELayer", "DeepSpeed alone ignores the key"
    enable()
    enable()
    assert deepspeed.initialize.__wrapped__ is stock and deepspeed.initialize.__doc__ == stock.__doc__
    for how in (None, initialize):
        engine = _build(case, asked, how)
        assert engine.module.layers[1].deepspeed_moe.deepep_moe_plan.options == Options(exact=False)
    lines = io.StringIO()
    with contextlib.redirect_stderr(lines):  # without any setting of logging
        run_steps(engine, rank, 2)
    start = f"deepep_moe {deepep_moe.__version__}: 2 MoE layers on this rank, backend shm (fast mode)"
    line = f"{start}, experts are DeepSpeed's, in grouped products where that is fast"
    assert [each for each in lines.getvalue().splitlines() if "deepep_moe" in each] == [line] * (rank == 0)
    assert _name(_build(case, asked | {"deepep_moe": {"enabled": False}})) == "MOELayer"
    with pytest.raises(ValueError, match="unknown keys"):
        deepspeed.initialize(model=None, config=asked | {"deepep_moe": {"on": True}})

    kept = deepspeed.initialize
    disable()
    disable()
    assert deepspeed.initialize is stock
    assert _name(_build(case, asked, kept)) == "MOELayer", "what somebody kept of ours is DeepSpeed's own again"

    enable()
    theirs = deepspeed.initialize = lambda **arguments: kept(**arguments)
    disable()
    assert deepspeed.initialize is theirs, "of somebody else"


SCRIPT = """
import os, sys
import deepspeed
from helper import WORD
print(WORD, sys.argv[1:], __name__, os.path.basename(sys.argv[0]), hasattr(deepspeed.initialize, "__wrapped__"))
"""


def test_launcher_enables(tmp_path):
    """Under DeepSpeed's launcher, which adds an option for the script."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("WORD = 'found'")
    for arguments, code, words in (
        (["--local_rank=1", "scripts/train.py", "--bind", "-x"], 0, "found ['--local_rank=1', '--bind', '-x'] __main__ train.py True"),
        (["nowhere.py"], 2, "no such script: 'nowhere.py'"),
    ):
        done = run_python("-m", "deepep_moe.integrations.deepspeed", *arguments, code=code, cwd=tmp_path, DS_ACCELERATOR="cpu")
        assert words in done.stdout + done.stderr
