"""Switching on and off, what is refused, ds_config, checkpoints, optimizer groups."""

import copy
import gc
import json
import os
import re
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
    engine_ready,
    logged,
    make_model,
    make_moe,
    repeats_bits,
    run_steps,
)

from deepep_moe.errors import EPError
from deepep_moe.exchange.backends.select import BACKENDS
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import initialize, replace_moe_layers, restore_moe_layers
from deepep_moe.integrations.deepspeed.options import Options, options_of
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("deepspeed")


# ---- options ----


def test_section():
    assert options_of({}) is None and options_of({"deepep_moe": {"enabled": False, "exact": False}}) is None
    assert options_of({"deepep_moe": {}}) == options_of({"deepep_moe": {"enabled": True}}) == Options()
    chosen = {"exact": False, "backend": "collective", "num_max_tokens_per_rank": 64, "num_sms": 0}
    assert options_of({"deepep_moe": {"enabled": True, **chosen}}) == Options(**chosen)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        (True, TypeError, r'"deepep_moe" of ds_config is True; it must be a dictionary such as \{"enabled": true\}'),
        (None, TypeError, r"is None; it must be a dictionary such as \{.*\}"),
        (
            {"exakt": True, "enable": True},
            ValueError,
            r"has unknown keys \['enable', 'exakt'\]; the known keys are \['enabled', 'exact', 'backend', 'num_max_tokens_per_rank', "
            r"'num_sms', 'gate', 'expert_bias_update_rate', 'grouped_experts', 'ranks_per_node', 'fp8'\]",
        ),
        ({"enabled": "yes"}, TypeError, "enabled is 'yes'; it must be true or false"),
        ({"exact": 1}, TypeError, '"deepep_moe" of ds_config: exact is 1; it must be true or false'),
        ({"backend": "nccl"}, ValueError, r"backend is 'nccl'; it must be one of \['auto', 'shm', 'nvlink', 'nvshmem', 'collective'\]"),
        ({"num_max_tokens_per_rank": 0}, ValueError, "num_max_tokens_per_rank is 0; it must be at least 1"),
        ({"num_sms": "all"}, TypeError, "num_sms is 'all'; it must be a whole number or null"),
        ({"ranks_per_node": 0}, ValueError, "ranks_per_node is 0; it must be at least 1"),
        ({"num_sms": -1, "enabled": False}, ValueError, "num_sms is -1; it must be at least 0"),
    ],
)
def test_section_refused(section, error, message):
    with pytest.raises(error, match=message):
        options_of({"deepep_moe": section})


def test_docs_name_every_backend():
    page = (Path(__file__).parents[3] / "docs" / "deepspeed.md").read_text()
    (row,) = re.findall(r"^\| `backend` \|.*", page, flags=re.MULTILINE)
    assert all(name in row for name in BACKENDS), row


def test_old_deepspeed_is_refused(monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.14.4+abc")
    with pytest.raises(EPError, match=r"needs deepspeed 0.14.5 or newer, found 0.14.4\+abc; pip install 'deepspeed>=0.14.5'"):
        replace_moe_layers(torch.nn.Linear(1, 1))
    monkeypatch.setattr(deepspeed, "__version__", "0.20.0")
    with logged() as messages:
        assert replace_moe_layers(torch.nn.Linear(1, 1)) == 0
    assert messages == [
        "deepspeed 0.20.0 is newer than the newest deepep_moe was tested with (0.19.8)",
        "this model has no MoE layers of DeepSpeed; those of AutoEP are there after deepspeed.initialize",
    ]


# ---- on and off ----


def _swap_worker(rank: int, num_ranks: int) -> None:
    from deepspeed.moe.sharded_moe import MOELayer

    class Own(MOELayer):
        pass

    with engine_ready():
        layers = torch.nn.ModuleList([make_moe(), make_moe()])
        state, modules = {name: id(value) for name, value in layers.state_dict(keep_vars=True).items()}, list(map(id, layers.modules()))
        assert replace_moe_layers(layers) == 2
        assert {name: id(value) for name, value in layers.state_dict(keep_vars=True).items()} == state
        assert list(map(id, layers.modules())) == modules and isinstance(layers[0].deepspeed_moe, MOELayer)
        for layer in layers:
            layer.set_deepspeed_parallelism()
            layer(torch.randn(8, HIDDEN))
        assert len(all_buffers()) == 1
        assert restore_moe_layers(layers[0]) == 1 and len(all_buffers()) == 1, "the other layer still has its buffer"
        assert restore_moe_layers(layers) == 1 and not all_buffers()
        assert all(
            type(layer.deepspeed_moe) is MOELayer and not vars(layer.deepspeed_moe).keys() & {"deepep_moe_plan", "deepep_moe_topk_idx"}
            for layer in layers
        )
        assert restore_moe_layers(layers) == 0

        assert replace_moe_layers(layers[0]) == replace_moe_layers(layers[1]) == 1
        for layer in layers:
            layer(torch.randn(8, HIDDEN))
        assert len(all_buffers()) == 2, "one for each call"
        replace_moe_layers(layers[0], exact=False)
        assert len(all_buffers()) == 1, "a buffer that no layer uses any more is gone"
        layers[0](torch.randn(8, HIDDEN))
        assert restore_moe_layers(torch.nn.Linear(1, 1)) == 0 and len(all_buffers()) == 2
        assert restore_moe_layers(layers) == 2 and not all_buffers()
        fresh = make_moe()
        assert replace_moe_layers(fresh) == restore_moe_layers(copy.deepcopy(fresh)) == restore_moe_layers(fresh) == 1
        wrapped = make_moe()
        wrapped.deepspeed_moe.forward = wrapped.deepspeed_moe.forward
        with logged() as messages:
            assert replace_moe_layers(wrapped) == 0
        assert messages == ["1 MoE layers keep their forward, which was replaced on the layer or its class; swap layers before that"] * (
            rank == 0
        )
        layers[0].deepspeed_moe.__class__ = Own
        layers.append(make_moe())
        layers[2].deepspeed_moe.gate = torch.nn.Linear(HIDDEN, 8)
        with logged() as messages:
            assert replace_moe_layers(layers, exact=False) == 1
        assert messages == [
            "MoE layers ['MOELayer with Linear', 'Own with TopKGate'] keep their own forward: deepep_moe swaps deepspeed's MOELayer "
            "with TopKGate only",
            "1 MoE layers dispatch through deepep_moe (fast mode)",
        ] * (rank == 0)
        with pytest.raises(ValueError, match="backend is 'nccl'; it must be one of"):
            replace_moe_layers(layers, backend="nccl")


def test_swapping_changes_the_forward_only():
    run_ranks(_swap_worker, 2)


def _used(layer: torch.nn.Module) -> torch.Tensor:
    layer.set_deepspeed_parallelism()
    return layer(torch.randn(8, HIDDEN))[0]


def _stray_worker(rank: int, num_ranks: int) -> None:
    """Layers of which one rank still has a reference, and copies, are in nobody's way."""
    with engine_ready():
        stray = []
        for _ in range(3):
            layer = make_moe()
            replace_moe_layers(layer)
            _used(layer).sum().backward()
            stray.extend([layer] * (rank == 0))
        layer = make_moe()
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

        layers = torch.nn.ModuleList([make_moe(), make_moe()])
        replace_moe_layers(layers)
        other = copy.deepcopy(layers)
        y = _used(other[1])
        assert restore_moe_layers(other[0]) == 1 and len(all_buffers()) == 1, "the other copy still has its buffer"
        y.sum().backward()
        assert restore_moe_layers(other) == 1 and not all_buffers()


def _class_worker(rank: int, num_ranks: int) -> None:
    """The class stands where models are built; what somebody kept of a layer serves after it was restored."""
    from deepspeed.moe import layer as moe_layer
    from deepspeed.moe.sharded_moe import MOELayer

    from deepep_moe.integrations.deepspeed.native.layer import PackedMOELayer

    with engine_ready():
        moe_layer.MOELayer = PackedMOELayer
        first, second = make_moe(), make_moe()
        moe_layer.MOELayer = MOELayer
        _used(first)
        y = _used(second)
        assert len(all_buffers()) == 1, "that both share"
        kept = first.deepspeed_moe.forward
        x = torch.randn(8, HIDDEN), None
        torch.manual_seed(0)
        want = kept(*x)
        assert restore_moe_layers(first) == 1 and len(all_buffers()) == 1
        y.sum().backward()
        torch.manual_seed(0)
        torch.testing.assert_close(kept(*x), want)
        gc.collect()
        gc.disable()
        del y, second
        assert not all_buffers(), "the plan went with its layers"
        gc.enable()


def test_layers_built_of_our_class():
    run_ranks(_class_worker, 2)


def test_stray_layers_and_copies():
    run_ranks(_stray_worker, 2)


def _config_worker(rank: int, num_ranks: int, folder: str) -> None:
    case = Case(zero=2)
    config = ds_config(case) | {"deepep_moe": {"enabled": True, "exact": False, "backend": "collective"}}
    path = Path(folder) / f"{rank}.json"
    path.write_text(json.dumps(config))
    with engine_ready():
        for given in (config, str(path)):
            model = make_model(case)
            engine, optimizer, *_ = initialize(model=model, model_parameters=model.parameters(), config=given)
            assert optimizer is engine.optimizer
            plan = engine.module.layers[1].deepspeed_moe.deepep_moe_plan
            assert plan.options == Options(exact=False, backend="collective")
            run_steps(engine, rank, 1)
        assert {buffer.backend for buffer in all_buffers()} == {"collective"}

        model = make_model(case)
        with logged() as messages:
            engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=ds_config(case))
        assert type(engine.module.layers[0].deepspeed_moe).__name__ == "MOELayer", "no section, no change"
        assert messages == ['ds_config has no section "deepep_moe": MoE layers keep the dispatch of DeepSpeed'] * (rank == 0)
        model = torch.nn.Linear(HIDDEN, HIDDEN)
        with logged() as messages:
            initialize(model=model, model_parameters=model.parameters(), config=config)
        advice = 'use deepspeed.moe.layer.MoE, or let AutoEP make some: "expert_parallel" in ds_config'
        assert messages == [f"this model has no MoE layers of DeepSpeed; {advice}"] * (rank == 0)
        wrong = ds_config(case) | {"deepep_moe": {"on": True}}
        path.write_text(json.dumps(wrong))
        for arguments in ({"config": wrong}, {"config": str(path)}, {"args": SimpleNamespace(deepspeed_config=path)}):
            with pytest.raises(ValueError, match="unknown keys"):
                initialize(model=None, **arguments)  # before any engine is built


def test_initialize_honours_ds_config(tmp_path):
    run_ranks(_config_worker, 2, str(tmp_path))


def _before_worker(rank: int, num_ranks: int) -> None:
    """Swapped before deepspeed.initialize; with an optimizer and parameter groups of the user's own."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    case = Case(zero=2, k=2)
    runs = []
    with engine_ready():
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


def test_before_initialize_with_own_optimizer_groups():
    run_ranks(_before_worker, 2)


# ---- checkpoints ----


def _checkpoint_worker(rank: int, num_ranks: int, folder: str) -> None:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # DeepSpeed before 0.15 loads its own checkpoints in newer PyTorch only so
    with engine_ready():
        # Old versions do not load the checkpoints of ZeRO 0 that they save with fp32 parameters.
        for case in (Case(zero=2, k=2), Case(zero=0 if repeats_bits() else 1, k=1)):
            runs, files = [], []
            for saved_by_us in (True, False):
                where = f"{folder}/{case.zero}_{saved_by_us}"
                first = build_engine(case, saved_by_us)
                run_steps(first, rank, 3)
                first.save_checkpoint(where, tag="three")
                second = build_engine(case, not saved_by_us, model=_other_weights(case))
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


def _other_weights(case: Case) -> torch.nn.Module:
    """NaN everywhere: what a checkpoint does not hold would show."""
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def test_checkpoints_both_ways(tmp_path):
    run_ranks(_checkpoint_worker, 2, str(tmp_path))


# ---- pipelines ----


class OutputOf(torch.nn.Module):
    """A MoE layer of a pipeline, whose auxiliary loss nobody takes."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(x)[0]


def _stages_worker(rank: int, num_ranks: int) -> None:
    """Two stages of two ranks; the MoE layer is in the second."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    with engine_ready(), logged() as messages:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), OutputOf(make_moe(4, k=2, ep=1)), torch.nn.Identity()]
        model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
        config = ds_config(Case(accumulation=2))
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        is_second = engine.stage_id == 1
        assert replace_moe_layers(engine) == is_second
        for module in engine.modules():
            if hasattr(module, "deepep_moe_plan"):  # it falls back
                module.experts.__class__ = type("Own", (type(module.experts),), {})
        data = [(torch.randn(2, 20, HIDDEN), torch.randn(2, 20, HIDDEN)) for _ in range(2)]
        assert torch.isfinite(engine.train_batch(iter(data)))
    swapped = "1 MoE layers dispatch through deepep_moe (exact mode)"
    fallback = "DeepSpeed's own MoE forward runs, without deepep_moe: experts are Own, not deepspeed.moe.experts.Experts"
    assert messages == ([swapped, fallback] if is_second and engine.grid.get_data_parallel_rank() == 0 else []), messages


def test_a_later_stage_of_a_pipeline_says_it():
    run_ranks(_stages_worker, 4)
