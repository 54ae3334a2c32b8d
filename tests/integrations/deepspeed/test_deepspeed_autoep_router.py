"""AutoEP's router and the bias that balances its experts."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from autoep_cases import Case, autoep_layers, build_engine, counted, ds_config, make_model, tokens
from deepspeed_cases import assert_equal, logged, on_deepspeed_ranks

from deepep_moe.integrations.deepspeed import initialize, replace_moe_layers, restore_moe_layers
from deepep_moe.integrations.deepspeed.options import Options

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="AutoEP came with DeepSpeed 0.19.2")
pytest.importorskip("transformers.models.deepseek_v3", reason="AutoEP serves transformers' models")
from deepep_moe.integrations.common.warn_once import log_once
from deepep_moe.integrations.deepspeed.autoep import router as autoep_router
from deepep_moe.integrations.deepspeed.autoep.router import GatedRouter, StepWithBias, restore_router, swap_router

# ---- routers ----


RATE = 0.02
BIAS = "e_score_correction_bias"


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


@pytest.mark.parametrize("options", [{}, {"score_func": "softmax", "route_norm": False}, {"num_expert_groups": 4, "num_limited_groups": 2}])
def test_overflows_in_fp16_go_through(options):
    """Like AutoEP's: the same tokens have weights that are not finite, and every token has different experts."""
    torch.manual_seed(3)
    router, x = _make_router(**options).half(), torch.randn(8, 16).half()
    x[2], x[5, 3] = torch.nan, torch.inf
    want, bias = _route(router, x, None), torch.linspace(-0.1, 0.1, 12)
    swap_router(router, Options())
    got = _route(router, x, None)
    assert torch.equal(got["weights"].isfinite().all(1), want["weights"].isfinite().all(1)) and not got["gate"].isfinite().all()
    for experts in (got["experts"], router(x, bias)[1]):
        assert ((experts >= 0) & (experts < 12)).all() and all(len(set(row)) == 3 for row in experts.tolist())
    with pytest.raises(ValueError, match="logits has nan for token 2"):
        router.bfloat16()(x.bfloat16())


def test_skipped_steps_and_evaluations_do_not_count():
    """3 tokens choose the experts 0 to 2 by a bias. A step that is skipped moves no bias, and its counts are gone."""
    router = _make_router()
    swap_router(router, Options(expert_bias_update_rate=RATE))
    chosen = torch.tensor([9.0] * 3 + [0.0] * 9)
    engine = SimpleNamespace(was_step_applied=lambda: engine.applied, seq_data_parallel_group=None, _take_model_step=lambda: None)
    step = StepWithBias(engine, [router])
    router(torch.randn(3, 16), chosen)
    engine.applied = False
    step()
    assert router.e_score_correction_bias.eq(0).all()
    with torch.no_grad():
        router(torch.randn(3, 16), chosen)
    router.eval()(torch.randn(3, 16), chosen)
    assert router.take_counts().sum() == 0
    router.train()(torch.randn(3, 16), chosen)
    assert router.take_counts().tolist() == [3] * 3 + [0] * 9


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({"top_k": 40, "num_experts": 64}, torch.float32, "num_topk is 40; it must be 1 to 32"),
        (
            {"num_expert_groups": 4, "num_limited_groups": 2, "group_score_func": "mean"},
            torch.float32,
            "groups scored by 'mean', limited to 2",
        ),
        ({"score_func": "tanh"}, torch.float32, "score function 'tanh'"),
        ({}, torch.float64, "logits has dtype torch.float64"),
    ],
)
def test_router_says_why_autoep_chooses(changes, dtype, message):
    router = _make_router(**changes).to(dtype)
    swap_router(router, Options())
    refused = pytest.raises(NotImplementedError) if changes and "top_k" not in changes else torch.no_grad()  # AutoEP does not know it too
    with logged() as messages, counted() as calls, refused:
        router(torch.randn(5, 16, dtype=dtype))
    assert calls["AutoEP's choice"] == 1 and len(messages) == 1
    assert messages[0].startswith("AutoEP's own router chooses, without the gate of deepep_moe: ") and message in messages[0]


# ---- the bias ----


def _biases(engine):
    """Copies, by layer."""
    return {i: layer.router.e_score_correction_bias.detach().clone() for i, layer in enumerate(autoep_layers(engine))}


def _forward_backward(engine, rank, step):
    """One micro step; the counts over all ranks, by layer."""
    counted = []
    hooks = [layer.router.register_forward_hook(lambda *call: counted.append(call[2][2].long())) for layer in autoep_layers(engine)]
    ids = tokens(rank, step)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    for hook in hooks:
        hook.remove()
    counts = torch.stack(counted)
    torch.distributed.all_reduce(counts)
    return counts


def _optimizer_step(engine, rank, step=10):
    """Two micro steps, after which biases have moved once; returns the load of the fullest expert, over the mean."""
    before, counts = _biases(engine), 0
    for micro in range(2):
        assert_equal(_biases(engine), before, "no optimizer step yet")
        counts = counts + _forward_backward(engine, rank, step + micro)
        engine.step()
    direction = torch.sign(counts.sum(1, keepdim=True) / counts.shape[1] - counts)
    for i, bias in _biases(engine).items():
        assert bias.dtype == torch.float32
        torch.testing.assert_close(bias, before[i] + RATE * direction[i], atol=1e-7, rtol=0)
    return float(counts.max() / counts.float().mean())


def _make_balancing(case):
    config = ds_config(case, optimizer={"type": "SGD", "params": {"lr": 0.0}}, gradient_accumulation_steps=2)
    config["deepep_moe"] = {"enabled": True, "expert_bias_update_rate": RATE}
    model = make_model(case)
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


@pytest.mark.slow
@on_deepspeed_ranks()
def test_bias_balances_and_is_in_checkpoints(rank, tmp_path):
    """DeepSeek-V3's routers have a bias, DeepSeek-V2's are given one."""
    for case in (Case("deepseek", zero=1, dtype="bf16"), Case("deepseek_v2")):
        tag = case.family
        lacks = [getattr(layer.router, BIAS, None) is None for layer in autoep_layers(build_engine(case, False))]
        assert all(lacks) or case.family != "deepseek_v2"
        log_once.cache_clear()
        with logged() as messages:
            engine = _make_balancing(case)
        assert sum("are given an e_score_correction_bias" in line for line in messages) == (any(lacks) and rank == 0), messages
        with mock.patch.object(autoep_router, "update_expert_bias", wraps=autoep_router.update_expert_bias) as update:
            loads = []
            for _ in range(8):
                loads.append(_optimizer_step(engine, rank))
                engine.eval()
                with torch.no_grad():
                    engine(input_ids=tokens(rank, 99))  # counts for nothing
                engine.train()
        shapes = [tuple(call.args[0].shape) for call in update.call_args_list]
        assert shapes == [(2, autoep_layers(engine)[0].num_experts)] * 8, "all layers in one call, once per optimizer step"
        assert min(loads[2:]) < 0.9 * loads[0], f"{tag}: load of the fullest expert {loads}"

        engine.save_checkpoint(tmp_path, tag=tag)
        resumed = _make_balancing(case)
        resumed.load_checkpoint(tmp_path, tag=tag)
        assert_equal(_biases(resumed), _biases(engine), "of the checkpoint")
        assert _optimizer_step(resumed, rank, 50) == _optimizer_step(engine, rank, 50)
        assert_equal(_biases(resumed), _biases(engine), "a step later")

        routers = [layer.router.bfloat16() for layer in autoep_layers(resumed)]
        with pytest.raises(TypeError, match="has become bfloat16, in which steps of 0.02 are lost"):
            autoep_router.move_biases(routers, None)
        replace_moe_layers(resumed, expert_bias_update_rate=RATE)
        assert all(bias.dtype == torch.float32 for bias in _biases(resumed).values())

        kept = _biases(engine)
        assert restore_moe_layers(engine) == 2
        for step in range(2):
            _forward_backward(engine, rank, step)
            engine.step()
        assert_equal(_biases(engine), kept, "moves no more")
        assert not [name for name in engine.module.state_dict() if "deepep" in name]


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


@pytest.mark.slow
@on_deepspeed_ranks()
def test_bias_moves_with_a_pipeline(rank):
    import deepspeed
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Linear(32, 32), Residual(), torch.nn.Linear(32, 32), Residual()]
    model = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    config = ds_config(Case(zero=1)) | {"gradient_accumulation_steps": 2}
    config["expert_parallel"] |= {"preset_model": "mixtral", "moe_layer_pattern": r"\d+\.mlp", "top_k": 2}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    assert replace_moe_layers(engine, expert_bias_update_rate=0.01) == 2
    for step in range(3):
        batch = torch.randn(2, 2, 2, 20, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.train_batch(iter([(x, y) for x, y in batch]))
        routers = [layer.router for layer in autoep_layers(engine)]
        moved = torch.stack([router.e_score_correction_bias for router in routers]) * 100
        assert torch.equal(moved.round(), moved.round().clamp(-step - 1, step + 1)) and (moved - moved.round()).abs().max() < 1e-4
        assert moved.abs().sum() > 0 and all(router.deepep_moe_counts is None for router in routers)
