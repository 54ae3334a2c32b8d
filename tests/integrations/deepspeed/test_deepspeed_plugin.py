"""Switching on and off, what is refused, ds_config, the launcher, checkpoints, optimizer groups."""

import contextlib
import copy
import gc
import io
import json
import os
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed_cases import (
    HIDDEN,
    Case,
    assert_equal,
    build_engine,
    ds_config,
    logged,
    make_model,
    make_moe,
    on_deepspeed_ranks,
    repeats_bits,
    run_layer,
    run_steps,
)
from scripts import run_python
from torch import nn

import deepep_moe
from deepep_moe.errors import EPError
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import disable, enable, initialize, replace_moe_layers, restore_moe_layers
from deepep_moe.integrations.deepspeed.options import Options, options_of

pytest.importorskip("deepspeed")


# ---- options ----

FP8 = {"exact": False, "grouped_experts": True, "fp8": True}


def test_section():
    assert options_of({}) is None and options_of({"deepep_moe": {"enabled": False, "exact": False}}) is None
    assert options_of({"deepep_moe": {}}) == options_of({"deepep_moe": {"enabled": True}}) == Options()
    chosen = {"exact": False, "backend": "collective", "num_max_tokens_per_rank": 64, "num_sms": 0, "gate": False}
    for more in (chosen, {"expert_bias_update_rate": 0.001, "ranks_per_node": 2}, {"exact": False, "sums": "lanes"}, FP8):
        assert options_of({"deepep_moe": {"enabled": True, **more}}) == Options(**more)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        (True, TypeError, "is True; it must be a dictionary"),
        ({"exakt": True, "enable": True}, ValueError, r"unknown keys \['enable', 'exakt'\]; the known keys are \['enabled', 'exact', "),
        ({"enabled": "yes"}, TypeError, "enabled is 'yes'"),
        ({"backend": "nccl"}, ValueError, r"backend is 'nccl'; it must be one of \['auto', "),
        ({"num_max_tokens_per_rank": 0}, ValueError, "num_max_tokens_per_rank is 0"),
        ({"num_sms": "all"}, TypeError, "num_sms is 'all'"),
        ({"ranks_per_node": 0}, ValueError, "ranks_per_node is 0"),
        ({"num_sms": -1, "enabled": False}, ValueError, "num_sms is -1"),
        ({"expert_bias_update_rate": "0.1"}, TypeError, "expert_bias_update_rate is '0.1'"),
        ({"expert_bias_update_rate": 0}, ValueError, "expert_bias_update_rate is 0"),
        ({"grouped_experts": 1}, TypeError, "grouped_experts is 1"),
        ({"grouped_experts": len}, TypeError, "grouped_experts is a function; pass it to replace_moe_layers"),
        (FP8 | {"exact": True}, ValueError, "fp8 is True with exact=True"),
        (FP8 | {"grouped_experts": False}, ValueError, "fp8 is True with .*grouped_experts=False"),
        (FP8 | {"fp8": 1}, TypeError, "fp8 is 1"),
        ({"exact": False, "sums": "lane"}, ValueError, "sums is 'lane'; it must be one of"),
        ({"sums": "lanes"}, ValueError, "sums is 'lanes' with exact=True"),
        (FP8 | {"sums": "lanes_fma"}, ValueError, "sums is 'lanes_fma' with .*fp8=True"),
    ],
)
def test_section_refused(section, error, message):
    with pytest.raises(error, match=f'"deepep_moe" of ds_config.*{message}'):
        options_of({"deepep_moe": section})


def test_arguments_refused():
    assert Options(grouped_experts=len).grouped_experts is len, "a function, here where the section has none"
    for arguments, error in (({"grouped_experts": 1}, TypeError), ({"backend": "nccl"}, ValueError)):
        with pytest.raises(error, match=f"^{next(iter(arguments))} is "):
            replace_moe_layers(nn.Linear(1, 1), **arguments)


def test_old_deepspeed_is_refused(monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.14.4+abc")
    with pytest.raises(EPError, match=r"needs deepspeed 0.14.5 or newer, found 0.14.4\+abc"):
        replace_moe_layers(nn.Linear(1, 1))
    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    with logged() as messages:
        assert replace_moe_layers(nn.Linear(1, 1)) == 0
    newer, nothing = messages
    assert newer.startswith("deepspeed 0.20.0 is newer") and nothing.startswith("this model has no MoE layers of DeepSpeed")


# ---- on and off ----


def _used(layer: nn.Module) -> torch.Tensor:
    if layer.deepspeed_moe.ep_group is None:  # layers are copied without groups, which cannot be copied
        layer.set_deepspeed_parallelism()
    return layer(torch.randn(8, HIDDEN))[0]


@on_deepspeed_ranks()
def test_swapping_changes_the_forward_only(rank):
    from deepspeed.moe.sharded_moe import MOELayer

    class Own(MOELayer):
        pass

    layers = nn.ModuleList([make_moe(), make_moe()])
    state, modules = {name: id(value) for name, value in layers.state_dict(keep_vars=True).items()}, list(map(id, layers.modules()))
    assert replace_moe_layers(layers) == 2
    assert {name: id(value) for name, value in layers.state_dict(keep_vars=True).items()} == state
    assert list(map(id, layers.modules())) == modules and isinstance(layers[0].deepspeed_moe, MOELayer)
    for layer in layers:
        _used(layer)
    assert len(all_buffers()) == 1
    assert restore_moe_layers(layers[0]) == 1 and len(all_buffers()) == 1, "the other layer still has its buffer"
    assert restore_moe_layers(layers) == 1 and not all_buffers()
    for layer in layers:
        assert type(layer.deepspeed_moe) is MOELayer
        assert not vars(layer.deepspeed_moe).keys() & {"deepep_moe_plan", "deepep_moe_topk_idx"}
    assert restore_moe_layers(layers) == 0

    assert replace_moe_layers(layers[0]) == replace_moe_layers(layers[1]) == 1
    for layer in layers:
        _used(layer)
    assert len(all_buffers()) == 2, "one for each call"
    replace_moe_layers(layers[0], exact=False)
    assert len(all_buffers()) == 1, "a buffer that no layer uses any more is gone"
    _used(layers[0])
    assert restore_moe_layers(nn.Linear(1, 1)) == 0 and len(all_buffers()) == 2
    assert restore_moe_layers(layers) == 2 and not all_buffers()
    fresh = make_moe(with_groups=False)
    assert replace_moe_layers(fresh) == restore_moe_layers(copy.deepcopy(fresh)) == restore_moe_layers(fresh) == 1

    wrapped = make_moe()
    wrapped.deepspeed_moe.forward = wrapped.deepspeed_moe.forward
    layers[0].deepspeed_moe.__class__ = Own
    layers.append(make_moe())
    layers[2].deepspeed_moe.gate = nn.Linear(HIDDEN, 8)
    for model, num_swapped, message in (
        (wrapped, 0, "1 MoE layers keep their forward, which was replaced"),
        (layers, 1, "MoE layers ['MOELayer with Linear', 'Own with TopKGate'] keep their own forward"),
    ):
        with logged() as messages:
            assert replace_moe_layers(model, exact=False) == num_swapped
        assert len(messages) == (rank == 0) and (rank or messages[0].startswith(message))


@on_deepspeed_ranks()
def test_stray_layers_and_copies(rank):
    """Layers of which one rank still has a reference, and copies, are in nobody's way."""
    stray = []
    for _ in range(3):
        layer = make_moe(with_groups=False)
        replace_moe_layers(layer)
        _used(layer).sum().backward()
        stray.extend([layer] * (rank == 0))
    layer = make_moe(with_groups=False)
    replace_moe_layers(layer)
    other = copy.deepcopy(layer)
    _used(layer)
    y = _used(other)
    assert restore_moe_layers(layer) == 1
    y.sum().backward()
    stray.clear()
    gc.collect()
    assert len(all_buffers()) == 1, "of the copy"
    assert restore_moe_layers(other) == 1 and not all_buffers()

    layers = nn.ModuleList([make_moe(with_groups=False), make_moe(with_groups=False)])
    replace_moe_layers(layers)
    other = copy.deepcopy(layers)
    y = _used(other[1])
    assert restore_moe_layers(other[0]) == 1 and len(all_buffers()) == 1, "the other copy still has its buffer"
    y.sum().backward()
    assert restore_moe_layers(other) == 1 and not all_buffers()


@on_deepspeed_ranks()
def test_a_method_that_was_kept(rank):
    """What somebody kept of a layer serves after it was restored."""
    first, second = make_moe(), make_moe()
    assert replace_moe_layers(nn.ModuleList([first, second])) == 2
    # Many rows an expert: for a single one a matrix product may take another way, and round other bits.
    x, cotangent = torch.randn(2, 120, HIDDEN, generator=torch.Generator().manual_seed(rank))
    packed = run_layer(first, x, cotangent)
    y = _used(second)
    assert len(all_buffers()) == 1, "that both share"
    kept = first.deepspeed_moe.forward
    assert restore_moe_layers(first) == 1 and len(all_buffers()) == 1
    assert_equal(packed, run_layer(first, x, cotangent), f"rank {rank}")
    y.sum().backward()
    torch.manual_seed(0)
    assert_equal({"output": kept(x, None)}, {"output": packed["output"]}, f"kept, rank {rank}")
    gc.collect()
    gc.disable()
    del y, second
    assert not all_buffers(), "the plan went with its layers"
    gc.enable()


@on_deepspeed_ranks()
def test_initialize_honours_ds_config(rank, tmp_path):
    case = Case(zero=2)
    config = ds_config(case) | {"deepep_moe": {"enabled": True, "exact": False, "backend": "collective"}}
    path = tmp_path / f"{rank}.json"
    path.write_text(json.dumps(config))
    for ds in (config, str(path)):
        model = make_model(case)
        engine, optimizer, *_ = initialize(model=model, model_parameters=model.parameters(), config=ds)
        assert optimizer is engine.optimizer
        plan = engine.module.layers[1].deepspeed_moe.deepep_moe_plan
        assert plan.options == Options(exact=False, backend="collective")
        run_steps(engine, rank, 1)
    assert {buffer.backend for buffer in all_buffers()} == {"collective"}

    for model, ds, start in (
        (make_model(case), ds_config(case), 'ds_config has no section "deepep_moe"'),
        (nn.Linear(HIDDEN, HIDDEN), config, "this model has no MoE layers of DeepSpeed"),
    ):
        with logged() as messages:
            engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=ds)
        assert len(messages) == (rank == 0) and all(line.startswith(start) for line in messages)
        assert not any(hasattr(module, "deepep_moe_plan") for module in engine.modules()), "no section, no change"
    wrong = ds_config(case) | {"deepep_moe": {"on": True}}
    path.write_text(json.dumps(wrong))
    for arguments in ({"config": wrong}, {"config": str(path)}, {"args": SimpleNamespace(deepspeed_config=path)}):
        with pytest.raises(ValueError, match="unknown keys"):
            initialize(model=None, **arguments)  # before any engine is built


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


@on_deepspeed_ranks()
def test_before_initialize_with_own_optimizer_groups(rank):
    """Swapped before deepspeed.initialize; with an optimizer and parameter groups of the user's own."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    case = Case(zero=2, k=2)
    runs = []
    for ours in (True, False):
        model = make_model(case)
        if ours:
            replace_moe_layers(model)
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
        assert [group["name"] for group in groups] == ["all", "ep_size_2"]
        engine = build_engine(case, False, model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), model_parameters=groups)
        assert type(engine.module.layers[0].deepspeed_moe).__name__ == ("PackedMOELayer" if ours else "MOELayer")
        runs.append(run_steps(engine, rank))
    assert_equal(*runs, f"own optimizer, rank {rank}", rounding=2e-3)


# ---- checkpoints ----


@on_deepspeed_ranks()
def test_checkpoints_both_ways(rank, tmp_path):
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # DeepSpeed before 0.15 loads its own checkpoints in newer PyTorch only so
    # Old versions do not load the checkpoints of ZeRO 0 that they save with fp32 parameters.
    for case in (Case(zero=2, k=2), Case(zero=0 if repeats_bits() else 1, k=1)):
        runs, files = [], []
        for saved_by_us in (True, False):
            where = tmp_path / f"{case.zero}_{saved_by_us}"
            first = build_engine(case, saved_by_us)
            run_steps(first, rank, 3)
            first.save_checkpoint(where, tag="three")
            model = make_model(case)
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)  # what a checkpoint does not hold would show
            second = build_engine(case, not saved_by_us, model=model)
            path, _ = second.load_checkpoint(where, tag="three")
            assert path is not None, f"{case}: nothing was loaded"
            runs.append(run_steps(second, rank, range(3, 6)))
            files.append(sorted(file.name for file in Path(where, "three").iterdir()))
        straight = build_engine(case, False)
        run_steps(straight, rank, 3)
        runs.append(run_steps(straight, rank, range(3, 6)))
        assert files[0] == files[1] and sum("expert_" in name for name in files[0]) >= 8, files
        assert_equal(runs[0], runs[2], f"{case}: saved by deepep_moe, loaded by DeepSpeed, rank {rank}", rounding=2e-3)
        assert_equal(runs[1], runs[2], f"{case}: saved by DeepSpeed, loaded by deepep_moe, rank {rank}", rounding=2e-3)


# ---- pipelines ----


@on_deepspeed_ranks(4)
def test_a_later_stage_of_a_pipeline_says_it(rank):
    """Two stages of two ranks; the MoE layer is in the second."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(7)
    moe = make_moe(4, k=2, ep=1, with_groups=False)
    layers = [nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), moe, itemgetter(0)]  # nobody takes its auxiliary loss
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = ds_config(Case(accumulation=2))
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    is_second = engine.stage_id == 1
    with logged() as messages:
        assert replace_moe_layers(engine) == is_second
        for module in engine.modules():
            if hasattr(module, "deepep_moe_plan"):  # it falls back
                module.experts.__class__ = type("Own", (type(module.experts),), {})
        data = [(torch.randn(2, 20, HIDDEN), torch.randn(2, 20, HIDDEN)) for _ in range(2)]
        assert torch.isfinite(engine.train_batch(iter(data)))
    assert len(messages) == (is_second and engine.grid.get_data_parallel_rank() == 0), messages
    assert all(line.startswith("DeepSpeed's own MoE forward runs, without deepep_moe: experts are Own") for line in messages)
