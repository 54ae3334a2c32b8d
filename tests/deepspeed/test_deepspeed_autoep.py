"""AutoEP's layers of transformers' models, swapped, against AutoEP's own: passes, steps, routers, the bias that balances, refusals."""

import contextlib
import copy
import itertools
import math
import time
from dataclasses import replace

import autoep_cases
import pytest
import torch
from autoep_cases import Case, autoep_layers, build_engine, counted, ds_config, make_model, run_steps, tokens
from deepspeed_cases import assert_equal, engine_ready, logged

from deepep_moe.errors import EPPeerError
from deepep_moe.integrations.deepspeed import initialize, replace_moe_layers, restore_moe_layers
from deepep_moe.integrations.deepspeed.buffers import all_buffers
from deepep_moe.integrations.deepspeed.options import Options, options_of
from deepep_moe.testing.launch import run_ranks

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
pytest.importorskip("transformers.models.deepseek_v3", reason="AutoEP serves transformers' models")
from deepep_moe.integrations.deepspeed import autoep_bias
from deepep_moe.integrations.deepspeed.autoep_router import GatedRouter, restore_router, swap_router
from deepep_moe.integrations.say_once import say_once

RATE = 0.02
BIAS = "e_score_correction_bias"


# ---- whole models ----

CASES = [
    Case(),
    Case(zero=2, uneven=True),
    Case(zero=1, exact=False, recomputed=True),
    Case("qwen3_moe", exact=False, recomputed=False, score_apply="pre"),
    Case("deepseek_v2", zero=2, gate=False),
    Case("deepseek_v2", recomputed=True, uneven=True),
    Case("deepseek_v3", zero=1, recomputed=False, uneven=True),
    Case("deepseek_v3", zero=3, exact=False),
    Case("deepseek_v3", zero=2, score_apply="pre"),
    Case("deepseek_v3", exact=False, score_apply="pre", uneven=True),
]
FOUR_RANKS = [Case(zero=2, ep=4), Case("deepseek_v3", zero=1, exact=False, uneven=True)]


def _steps_worker(rank: int, num_ranks: int, cases: list[Case], device_type: str = "cpu") -> dict[str, float]:
    worst = {}
    with engine_ready(device_type):
        for case in cases:
            with counted() as calls:
                own = run_steps(build_engine(case, False), rank, case)
            num_forwards = autoep_cases.STEPS * 2 * (1 if case.recomputed is None else 2)
            assert calls == {"dispatch": 0, "AutoEP's all-to-all": 2 * num_forwards, "AutoEP's choice": num_forwards}, f"{case}: {calls}"
            with counted() as calls:
                ours = run_steps(build_engine(case, True), rank, case)
            chosen = 0 if case.gate else num_forwards
            assert calls == {"dispatch": num_forwards, "AutoEP's all-to-all": 0, "AutoEP's choice": chosen}, f"{case}: {calls}"
            worst[str(case)] = assert_equal(ours, own, f"{case}, rank {rank}", tolerance=case.tolerance)
    return worst


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES), (4, FOUR_RANKS)], ids=["2 ranks", "4 ranks"])
def test_steps_equal_autoep(num_ranks, cases):
    """Logits, losses, every gradient, parameters after steps of AdamW: with recomputation, uneven numbers of tokens, ZeRO 0 to 3."""
    for name, value in run_ranks(_steps_worker, num_ranks, cases, timeout_s=400)[0].items():
        print(f"{value:.1e} {name}")


@pytest.mark.multi_gpu(2)
def test_steps_equal_autoep_on_gpus():
    cases = [replace(case, tolerance=max(case.tolerance, 1e-3)) for case in CASES if case.zero < 3]
    run_ranks(_steps_worker, 2, cases, "cuda", timeout_s=400)


def _checkpoint_worker(rank: int, num_ranks: int, folder: str) -> None:
    case = Case("deepseek_v3", zero=2)
    with engine_ready():
        for ours, tag in ((True, "ours"), (False, "AutoEP's")):
            engine = build_engine(case, ours)
            run_steps(engine, rank, case)
            engine.save_checkpoint(folder, tag=tag)
        want = run_steps(engine, rank, case)
        for ours, tag in ((True, "AutoEP's"), (False, "ours")):
            model = make_model(case)
            for tensor in (*model.parameters(), *(layer.e_score_correction_bias for layer in model.modules() if hasattr(layer, BIAS))):
                tensor.data.fill_(torch.nan)  # what a checkpoint does not hold would show
            engine = build_engine(case, ours, model=model)
            path, _ = engine.load_checkpoint(folder, tag=tag)
            assert path is not None
            assert_equal(run_steps(engine, rank, case), want, f"{tag} checkpoint, rank {rank}", tolerance=case.tolerance)


def test_checkpoints_both_ways(tmp_path):
    """What swapped layers have saved AutoEP loads, and the reverse, in the middle of a training."""
    run_ranks(_checkpoint_worker, 2, str(tmp_path), timeout_s=300)


# ---- one layer ----


def _layer_pass(layer, x, cotangent):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * cotangent).float().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "input gradient": x.grad} | gradients


def _layer_worker(rank: int, num_ranks: int) -> None:
    tolerances = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
    generator = torch.Generator().manual_seed(rank)
    with engine_ready():
        engine = build_engine(Case("deepseek_v3"), False)
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


def test_layer_equals_autoep():
    """All dtypes, weights before and after the experts, a rank without tokens, experts without."""
    run_ranks(_layer_worker, 2)


# ---- routers ----


def _make_router(**options):
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    defaults = {"dim": 16, "num_experts": 12, "num_expert_groups": None, "num_limited_groups": None, "top_k": 3, "score_func": "sigmoid"}
    router = TokenChoiceTopKRouter(**(defaults | {"route_norm": True, "route_scale": 1.0, "gate_bias": False} | options))
    torch.nn.init.normal_(router.gate.weight)
    return router


def _route(router, x, bias):
    """Weights and choice by expert, counts, and gradients."""
    router.zero_grad()
    x = x.clone().requires_grad_()
    weights, experts, counts = router(x, bias)
    order = experts.argsort(1)
    weights, experts = weights.gather(1, order), experts.gather(1, order)
    (weights * torch.randn(weights.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    return {"weights": weights.detach(), "experts": experts, "counts": counts.long(), "x": x.grad, "gate": router.gate.weight.grad.clone()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_func": "softmax", "route_norm": False},
        {"score_func": "softmax", "gate_bias": True},
        {"num_expert_groups": 4, "num_limited_groups": 2, "route_scale": 2.5},
        {"num_expert_groups": 6, "num_limited_groups": 3, "group_score_func": "max", "score_func": "softmax", "route_norm": False},
        {"num_expert_groups": 1, "num_limited_groups": 1, "top_k": 1, "route_norm": False},
        {"top_k": 12},
    ],
)
# Scores of bf16 logits tie, and between ties AutoEP chooses as topk happens to, unless a bias decides.
@pytest.mark.parametrize(("dtype", "num_biases"), [(torch.float32, 0), (torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)])
def test_router_equals_autoep(options, dtype, num_biases):
    torch.manual_seed(3)
    router = _make_router(**options).to(dtype)
    biases = torch.randn(2, 12) / 10
    if num_biases == 2:
        router.e_score_correction_bias = torch.nn.Parameter(biases[1], requires_grad=False)
    x, bias = torch.randn(200, 16).to(dtype), biases[0] if num_biases else None
    want = _route(router, x, bias)
    swap_router(router, Options())
    assert type(router) is GatedRouter
    with counted() as calls:
        got = _route(router, x, bias)
    assert calls["AutoEP's choice"] == 0
    assert torch.equal(got["experts"], want["experts"]) and torch.equal(got["counts"], want["counts"])
    assert_equal(got, want, str(options), tolerance=2e-6 if dtype == torch.float32 else 2e-2)
    restore_router(router)
    assert type(router).__name__ == "TokenChoiceTopKRouter" and not [name for name in vars(router) if "deepep_moe" in name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 40, "num_experts": 64}, "num_topk is 40; it must be 1 to 32 for 64 experts"),
        ({"num_expert_groups": 4, "num_limited_groups": 2, "group_score_func": "mean"}, "groups scored by 'mean', limited to 2"),
        ({"score_func": "tanh"}, "does not know AutoEP's score function 'tanh'"),
    ],
)
def test_router_says_why_autoep_chooses(changes, message):
    router = _make_router(**changes)
    swap_router(router, Options())
    with logged() as messages, counted() as calls, pytest.raises(NotImplementedError) if "top_k" not in changes else torch.no_grad():
        router(torch.randn(5, 16))
    assert calls["AutoEP's choice"] == 1 and len(messages) == 1
    assert messages[0].startswith("AutoEP's own router chooses, without the gate of deepep_moe: ") and message in messages[0]


def test_router_in_double_is_autoeps():
    router, x = _make_router().double(), torch.randn(5, 16, dtype=torch.float64)
    expected = _route(router, x, None)
    swap_router(router, Options())
    with logged() as messages:
        got = _route(router, x, None)
    assert_equal(got, expected, "in double")
    assert len(messages) == 1 and "logits has dtype torch.float64; it must be float32, bfloat16 or float16" in messages[0]


# ---- the bias ----


def _biases(engine):
    return [layer.router.e_score_correction_bias for layer in autoep_layers(engine)]


def _forward_backward(engine, rank, step):
    """One micro step; the counts over all ranks, by layer."""
    found = []
    hooks = [layer.router.register_forward_hook(lambda *call: found.append(call[2][2].long())) for layer in autoep_layers(engine)]
    ids = tokens(rank, step)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    for hook in hooks:
        hook.remove()
    counts = torch.stack(found)
    torch.distributed.all_reduce(counts)
    return counts


def _optimizer_step(engine, rank, step=10):
    """Two micro steps, after which biases have moved once; returns the load of the fullest expert, over the mean."""
    before, counts = _copies(_biases(engine)), 0
    for micro in range(2):
        assert_equal(dict(enumerate(_biases(engine))), before, "no optimizer step yet")
        counts = counts + _forward_backward(engine, rank, step + micro)
        engine.step()
    direction = torch.sign(counts.sum(1, keepdim=True) / counts.shape[1] - counts)
    for i, bias in enumerate(_biases(engine)):
        assert bias.dtype == torch.float32
        torch.testing.assert_close(bias, before[i] + RATE * direction[i], atol=1e-7, rtol=0)
    return float(counts.max() / counts.float().mean())


def _copies(tensors):
    return {i: tensor.clone() for i, tensor in enumerate(tensors)}


def _make_balancing(case):
    config = ds_config(case, optimizer={"type": "SGD", "params": {"lr": 0.0}}, gradient_accumulation_steps=2)
    config["deepep_moe"] = {"enabled": True, "expert_bias_update_rate": RATE}
    model = make_model(case)
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _balance_worker(rank: int, num_ranks: int, folder: str) -> None:
    with engine_ready():
        for case in (Case("deepseek_v3", zero=1, dtype="bf16"), Case("deepseek_v2")):
            tag = case.family
            lacks = [getattr(layer.router, BIAS, None) is None for layer in autoep_layers(build_engine(case, False))]
            assert all(lacks) or case.family != "deepseek_v2"
            say_once.cache_clear()
            with logged() as messages:
                engine = _make_balancing(case)
            assert sum("are given an e_score_correction_bias" in line for line in messages) == (any(lacks) and rank == 0), messages
            with _update_calls() as calls:
                loads = []
                for _ in range(8):
                    loads.append(_optimizer_step(engine, rank))
                    engine.eval()
                    with torch.no_grad():
                        engine(input_ids=tokens(rank, 99))  # counts for nothing
                    engine.train()
            assert calls == [(2, autoep_layers(engine)[0].num_experts)] * 8, "all layers in one call, once per optimizer step"
            assert min(loads[2:]) < 0.9 * loads[0], f"{tag}: load of the fullest expert {loads}"

            engine.save_checkpoint(folder, tag=tag)
            resumed = _make_balancing(case)
            resumed.load_checkpoint(folder, tag=tag)
            assert_equal(_copies(_biases(resumed)), _copies(_biases(engine)), "of the checkpoint")
            assert _optimizer_step(resumed, rank, 50) == _optimizer_step(engine, rank, 50)
            assert_equal(_copies(_biases(resumed)), _copies(_biases(engine)), "a step later")

            routers = [layer.router.bfloat16() for layer in autoep_layers(resumed)]
            with pytest.raises(
                TypeError, match="has become bfloat16, in which steps of 0.02 are lost: the model was cast after replace_moe"
            ):
                autoep_bias.move_biases(routers, None)
            replace_moe_layers(resumed, expert_bias_update_rate=RATE)
            assert all(bias.dtype == torch.float32 for bias in _biases(resumed))

            kept = _copies(_biases(engine))
            assert restore_moe_layers(engine) == 2
            for step in range(2):
                _forward_backward(engine, rank, step)
                engine.step()
            assert_equal(_copies(_biases(engine)), kept, "moves no more")
            assert not [name for name in engine.module.state_dict() if "deepep" in name]


@contextlib.contextmanager
def _update_calls():
    """Shapes of the stacked biases that are moved meanwhile."""
    shapes, own = [], autoep_bias.update_expert_bias

    def update(bias, *arguments):
        shapes.append(tuple(bias.shape))
        own(bias, *arguments)

    autoep_bias.update_expert_bias = update
    yield shapes
    autoep_bias.update_expert_bias = own


def test_bias_balances_and_is_in_checkpoints(tmp_path):
    """DeepSeek-V3's routers have a bias, DeepSeek-V2's are given one."""
    run_ranks(_balance_worker, 2, str(tmp_path), timeout_s=300)


class Residual(torch.nn.Module):
    """A MoE layer of a pipeline."""

    def __init__(self):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        super().__init__()
        self.mlp = MixtralSparseMoeBlock(MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2))
        for parameter in self.mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.2)

    def forward(self, x):
        return x + self.mlp(x)


def _pipeline_worker(rank: int, num_ranks: int) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    with engine_ready():
        layers = [torch.nn.Linear(32, 32), Residual(), torch.nn.Linear(32, 32), Residual()]
        model = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
        section = {"preset_model": "mixtral", "moe_layer_pattern": r"\d+\.mlp", "top_k": 2}
        config = ds_config(Case(zero=1)) | {"gradient_accumulation_steps": 2}
        config["expert_parallel"] |= section
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        assert replace_moe_layers(engine, expert_bias_update_rate=0.01) == 2
        for step in range(3):
            batch = torch.randn(2, 2, 2, 20, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            engine.train_batch(iter([(x, y) for x, y in batch]))
            routers = [layer.router for layer in autoep_layers(engine)]
            moved = torch.stack([router.e_score_correction_bias for router in routers]) * 100
            assert torch.equal(moved.round(), moved.round().clamp(-step - 1, step + 1)) and (moved - moved.round()).abs().max() < 1e-4
            assert moved.abs().sum() > 0 and all(router.deepep_moe_counts is None for router in routers)


def test_bias_moves_with_a_pipeline():
    run_ranks(_pipeline_worker, 2)


# ---- options, refusals ----


def test_options():
    chosen = {"gate": False, "expert_bias_update_rate": 0.001}
    assert options_of({"deepep_moe": chosen}) == Options(**chosen)
    for section, error, message in (
        ({"gate": "no"}, TypeError, "gate must be true or false, got 'no'"),
        ({"expert_bias_update_rate": "0.1"}, TypeError, "expert_bias_update_rate must be a number or null, got '0.1'"),
        ({"expert_bias_update_rate": True}, TypeError, "expert_bias_update_rate must be a number or null, got True"),
        ({"expert_bias_update_rate": 0}, ValueError, "expert_bias_update_rate must be positive, such as 0.001, got 0"),
    ):
        with pytest.raises(error, match=message):
            options_of({"deepep_moe": section})


def _refused_worker(rank: int, num_ranks: int) -> None:
    case = Case("deepseek_v3")
    with engine_ready():
        for expert_parallel, why in (
            ({"autoep_size": 1}, "autoep_size is 1, every rank has all experts"),
            ({"combine_impl": "legacy_bmm"}, "combine_impl is 'legacy_bmm', which this dispatch would bypass; leave it out"),
        ):
            config = ds_config(case)
            config["expert_parallel"] |= expert_parallel
            want = run_steps(build_engine(case, False, config=copy.deepcopy(config)), rank, case, 1)
            with logged() as messages, counted() as calls:
                got = run_steps(build_engine(case, True, config=config), rank, case, 1)
            assert calls["dispatch"] == 0
            assert_equal(got, want, why, tolerance=case.tolerance)
            line = f"AutoEP's own dispatch is used, without deepep_moe: {why}"
            assert messages.count(line) == (rank == 0), messages

        engine = build_engine(case, False)
        with pytest.raises(ValueError, match="expert_bias_update_rate needs the steps of DeepSpeed's engine"):
            replace_moe_layers(engine.module, expert_bias_update_rate=0.001)
        router = autoep_layers(engine)[0].router
        del router.e_score_correction_bias
        router.e_score_correction_bias = torch.nn.Parameter(torch.zeros(8))
        with pytest.raises(ValueError, match="here it is a parameter, which the optimizer moves"):
            replace_moe_layers(engine, expert_bias_update_rate=0.001)
        assert restore_moe_layers(engine) == 0, "nothing was swapped"
        _replaced_forwards(rank, case)


def _replaced_forwards(rank: int, case: Case) -> None:
    """Of layers, of routers: nothing is bypassed, nor counted as swapped."""
    engine = build_engine(case, False)
    layers = autoep_layers(engine)
    for layer in layers:
        layer.forward = layer.forward
    say_once.cache_clear()
    with logged() as messages:
        assert replace_moe_layers(engine) == 0
    assert messages == ["2 MoE layers keep their forward, which was replaced on the layer or its class; swap them before that"] * (
        rank == 0
    )
    for layer in layers:
        del layer.forward
    for change, reason in (
        (lambda router: setattr(router, "forward", router.forward), "the router's forward was replaced; replace it after swapping"),
        (_subclass, "deepep_moe knows deepspeed's TokenChoiceTopKRouter, and this is a Other"),
    ):
        change(layers[0].router)
        with pytest.raises(ValueError, match=f"expert_bias_update_rate needs routers that count their choices: {reason}"):
            replace_moe_layers(engine, expert_bias_update_rate=0.001)
        with logged() as messages:
            assert replace_moe_layers(engine) == 2
        kept = f"AutoEP's routers keep their own choice, without the gate of deepep_moe: {reason}"
        assert messages == [kept, "2 MoE layers dispatch through deepep_moe (exact mode)"] * (rank == 0)
        with counted() as calls:
            run_steps(engine, rank, case, 1)
        assert calls["dispatch"] == 2 and calls["AutoEP's all-to-all"] == 0
        assert restore_moe_layers(engine) == 2
        layers[0].router.__dict__.pop("forward", None)


def _subclass(router) -> None:
    router.__class__ = type("Other", (type(router),), {})


def _failing_worker(rank: int, num_ranks: int) -> None:
    """A router, by tokens that are not finite, and experts."""
    case = Case("deepseek_v3")
    with engine_ready():
        layer = autoep_layers(build_engine(case, True))[0]
        x = torch.randn(1, 10, 32)
        for place, error, message in (
            (None, ValueError, "ValueError: logits must be finite"),
            (layer.experts, ArithmeticError, "ArithmeticError: none here"),
        ):
            hook = place.register_forward_pre_hook(_fail) if place is not None and rank == 1 else None
            began = time.monotonic()
            with pytest.raises(error if rank == 1 else EPPeerError, match=message.split(": ")[1] if rank == 1 else message):
                layer(x * (math.inf if place is None and rank == 1 else 1))
            assert time.monotonic() - began < 60, "far from the deadline of 300 s"
            if hook is not None:
                hook.remove()
            assert layer(x).isfinite().all(), "all go on"


def _fail(*_) -> None:
    raise ArithmeticError("none here")


def test_peers_learn_what_failed():
    run_ranks(_failing_worker, 2)


def test_what_is_refused_says_so():
    run_ranks(_refused_worker, 2)
