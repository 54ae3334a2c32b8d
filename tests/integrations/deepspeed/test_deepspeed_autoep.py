"""AutoEP's layers of transformers' models, swapped, against AutoEP's own: passes, steps, routers, the bias that balances, refusals."""

import copy
import itertools
import math
from dataclasses import replace

import autoep_cases
import pytest
import torch
from autoep_cases import Case, autoep_layers, build_engine, counted, ds_config, make_model, run_steps
from deepspeed_cases import assert_equal, logged, on_deepspeed_ranks
from on_ranks import failing, refused

from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.deepspeed import replace_moe_layers, restore_moe_layers
from deepep_moe.nn import Metrics

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
pytest.importorskip("transformers.models.deepseek_v3", reason="AutoEP serves transformers' models")

BIAS = "e_score_correction_bias"

# ---- whole models ----

CASES = [
    Case(),
    Case(zero=2, uneven=True),
    Case(zero=1, exact=False, recomputed=True),
    Case("qwen3", exact=False, recomputed=False, score_apply="pre"),
    Case("deepseek_v2", zero=2, gate=False),
    Case("deepseek_v2", recomputed=True, uneven=True),
    Case("deepseek", zero=1, recomputed=False, uneven=True),
    Case("deepseek", zero=3, exact=False),
    Case("deepseek", zero=2, score_apply="pre"),
    Case("deepseek", exact=False, score_apply="pre", uneven=True),
]


def _run_cases(rank: int, cases: list[Case]) -> None:
    for case in cases:
        with counted() as calls:
            theirs = run_steps(build_engine(case, False), rank, case)
        num_forwards = autoep_cases.STEPS * 2 * (1 if case.recomputed is None else 2)
        assert calls == {"dispatch": 0, "AutoEP's all-to-all": 2 * num_forwards, "AutoEP's choice": num_forwards}, f"{case}: {calls}"
        with counted() as calls:
            ours = run_steps(build_engine(case, True), rank, case)
        chosen = 0 if case.gate else num_forwards
        assert calls == {"dispatch": num_forwards, "AutoEP's all-to-all": 0, "AutoEP's choice": chosen}, f"{case}: {calls}"
        assert_equal(ours, theirs, f"{case}, rank {rank}", tolerance=case.tolerance)


@on_deepspeed_ranks(device=("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
def test_steps_equal_autoep(rank, device):
    """Logits, losses, every gradient, parameters after steps of AdamW: with recomputation, uneven numbers of tokens, ZeRO 0 to 3."""
    cases = CASES
    if device.type == "cuda":
        cases = [replace(case, tolerance=max(case.tolerance, 1e-3)) for case in CASES if case.zero < 3]
    _run_cases(rank, cases)


@pytest.mark.slow
@on_deepspeed_ranks(4)
def test_steps_equal_autoep_on_four_ranks(rank):
    _run_cases(rank, [Case(zero=2, ep=4), Case("deepseek", zero=1, exact=False, uneven=True)])


@pytest.mark.slow
@on_deepspeed_ranks()
def test_checkpoints_both_ways(rank, tmp_path):
    """AutoEP loads checkpoints of swapped layers, and the reverse, in the middle of a training."""
    case = Case("deepseek", zero=2)
    for ours, tag in ((True, "ours"), (False, "AutoEP's")):
        engine = build_engine(case, ours)
        run_steps(engine, rank, case)
        engine.save_checkpoint(tmp_path, tag=tag)
    want = run_steps(engine, rank, case)
    for ours, tag in ((True, "AutoEP's"), (False, "ours")):
        model = make_model(case)
        for tensor in (*model.parameters(), *(layer.e_score_correction_bias for layer in model.modules() if hasattr(layer, BIAS))):
            tensor.data.fill_(torch.nan)  # what a checkpoint does not hold would show
        engine = build_engine(case, ours, model=model)
        path, _ = engine.load_checkpoint(tmp_path, tag=tag)
        assert path is not None
        assert_equal(run_steps(engine, rank, case), want, f"{tag} checkpoint, rank {rank}", tolerance=case.tolerance)


# ---- one layer ----


@on_deepspeed_ranks()
def test_metrics(rank):
    engine = build_engine(case := Case(exact=False), True)
    metrics = Metrics(engine)
    run_steps(engine, rank, case, steps=1)
    reports = metrics.take()
    assert len(reports) == len(autoep_layers(engine))
    for report in reports:
        of_ranks = torch.tensor(report.rows_per_expert).double().unflatten(0, (2, -1)).sum(1)
        assert report.rank_overload == of_ranks.max() / of_ranks.mean() >= 1 and report.max_vio == pytest.approx(report.busiest - 1)


def _layer_pass(layer, x, cotangent):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * cotangent).float().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "input gradient": x.grad} | gradients


@on_deepspeed_ranks()
def test_layer_equals_autoep(rank):
    """All dtypes, weights before and after the experts, a rank without tokens, experts without."""
    tolerances = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
    generator = torch.Generator().manual_seed(rank)
    engine = build_engine(Case("deepseek"), False)
    layer = autoep_layers(engine)[0]
    for (dtype, lengths), score_apply in itertools.product(zip(tolerances, ((9, 0), (70, 3), (40, 40)), strict=True), ("pre", "post")):
        layer.to(dtype).score_apply = score_apply
        x, cotangent = (torch.randn(1, lengths[rank], 32, generator=generator).to(dtype) for _ in range(2))
        restore_moe_layers(layer)
        want = _layer_pass(layer, x, cotangent)
        for exact in (True, False):
            assert replace_moe_layers(layer, exact=exact) == 1
            with counted() as calls:
                got = _layer_pass(layer, x, cotangent)
            assert calls["dispatch"] == 1 and calls["AutoEP's all-to-all"] == 0
            context = f"{dtype}, {score_apply}, {lengths[rank]} tokens, exact {exact}, rank {rank}"
            assert_equal(got, want, context, tolerance=tolerances[dtype])
    assert restore_moe_layers(engine) == 1 and not all_buffers()
    _all_tokens_to_one_rank(layer.float(), rank)


def _all_tokens_to_one_rank(layer, rank):
    """Experts of the other are not run without rows, of which grouped products have no gradient."""
    x, cotangent = torch.randn(2, 1, 30, 32, generator=torch.Generator().manual_seed(rank))
    num_rows = []
    layer.router.e_score_correction_bias = torch.tensor([10.0] * 4 + [0.0] * 4)
    want = _layer_pass(layer, x, cotangent)
    layer.experts.register_forward_pre_hook(lambda _, inputs: num_rows.append((len(inputs[0]), int(inputs[1].sum()))))
    for exact in (True, False):
        replace_moe_layers(layer, exact=exact)
        assert_equal(_layer_pass(layer, x, cotangent), want, f"exact {exact}, rank {rank}", tolerance=5e-6)
    rows = 180 if rank == 0 else 1
    assert num_rows == [(rows, rows)] * 2


# ---- refusals ----


@on_deepspeed_ranks()
def test_what_is_refused_says_so(rank):
    case = Case("deepseek")
    for expert_parallel, why in (
        ({"autoep_size": 1}, "autoep_size is 1"),
        ({"combine_impl": "legacy_bmm"}, "combine_impl is 'legacy_bmm'"),
    ):
        config = ds_config(case)
        config["expert_parallel"] |= expert_parallel
        want = run_steps(build_engine(case, False, config=copy.deepcopy(config)), rank, case, 1)
        with logged() as messages, counted() as calls:
            got = run_steps(build_engine(case, True, config=config), rank, case, 1)
        assert calls["dispatch"] == 0
        assert_equal(got, want, why, tolerance=case.tolerance)
        assert sum(f"AutoEP's own dispatch is used, without deepep_moe: {why}" in line for line in messages) == (rank == 0), messages

    engine = build_engine(case, False)
    with pytest.raises(ValueError, match="expert_bias_update_rate needs the steps of DeepSpeed's engine"):
        replace_moe_layers(engine.module, expert_bias_update_rate=0.001)
    router = autoep_layers(engine)[0].router
    del router.e_score_correction_bias
    router.e_score_correction_bias = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match="here it is a parameter, which the optimizer moves"):
        replace_moe_layers(engine, expert_bias_update_rate=0.001)
    assert restore_moe_layers(engine) == 0, "nothing was swapped"


def _subclass(router) -> None:
    router.__class__ = type("Other", (type(router),), {})


@on_deepspeed_ranks()
def test_replaced_forwards(rank):
    """Layers and routers with replaced forwards are neither bypassed nor counted as swapped."""
    case = Case("deepseek")
    engine = build_engine(case, False)
    layers = autoep_layers(engine)
    for layer in layers:
        layer.forward = layer.forward
    with logged() as messages:
        assert replace_moe_layers(engine) == 0
    assert len(messages) == (rank == 0) and all("2 MoE layers keep their forward, which was replaced" in line for line in messages)
    for layer in layers:
        del layer.forward
    for change, reason in (
        (lambda router: setattr(router, "forward", router.forward), "the router's forward was replaced"),
        (_subclass, "deepep_moe knows deepspeed's TokenChoiceTopKRouter"),
    ):
        change(layers[0].router)
        with pytest.raises(ValueError, match=f"expert_bias_update_rate needs routers that count their choices: {reason}"):
            replace_moe_layers(engine, expert_bias_update_rate=0.001)
        with logged() as messages:
            assert replace_moe_layers(engine) == 2
        assert [line for line in messages if "AutoEP's routers keep their own choice" in line and reason in line] == messages[: rank == 0]
        assert len(messages) == (rank == 0)
        with counted() as calls:
            run_steps(engine, rank, case, 1)
        assert calls["dispatch"] == 2 and calls["AutoEP's all-to-all"] == 0
        assert restore_moe_layers(engine) == 2
        layers[0].router.__dict__.pop("forward", None)


@on_deepspeed_ranks()
def test_peers_learn_what_failed(rank):
    """A router, by tokens that are not finite, and experts."""
    layer = autoep_layers(build_engine(Case("deepseek"), True))[0]
    x = torch.randn(1, 10, 32)
    for error, message in ((ValueError, "logits has -?(inf|nan) for token"), (ArithmeticError, "none here")):
        is_here = rank == 1 and error is ArithmeticError
        with failing(layer.experts, is_here, ArithmeticError("none here")), refused(rank, 1, error, message):
            layer(x * (math.inf if rank == 1 and error is ValueError else 1))
        assert layer(x).isfinite().all(), "all go on"
