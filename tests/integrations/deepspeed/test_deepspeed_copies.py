"""DeepSpeed's layers with copies of hot experts, against the same layers without."""

import pytest
import torch
from deepspeed_cases import (
    HIDDEN,
    Case,
    assert_equal,
    ds_config,
    make_model,
    make_moe,
    most_experts,
    on_deepspeed_ranks,
    run_layer,
    run_steps,
    sequential,
)
from exchange_cases import plans_of_copies
from on_ranks import refused
from torch.utils.checkpoint import checkpoint

from deepep_moe.integrations.deepspeed import initialize, replace_moe_layers, restore_moe_layers
from deepep_moe.integrations.deepspeed.options import options_of
from deepep_moe.nn import Balance, Metrics

pytest.importorskip("deepspeed")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2)))


def skewed_layer(num_experts=8, **options):
    """The first tokens' experts are 0 and 1 mostly: those of rank 0."""
    torch.manual_seed(3)
    layer = make_moe(num_experts, expert=sequential(bias=False), **options)
    with torch.no_grad():
        for parameter in layer.deepspeed_moe.experts.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        layer.deepspeed_moe.gate.wg.weight[0] += 0.3
        layer.deepspeed_moe.gate.wg.weight[1] += 0.2
    return layer


@on_deepspeed_ranks(device=DEVICES, k=(1, 2, 4), sums=("ranks", "lanes"))
def test_layer_equals_one_without_copies(rank, k, sums, device):
    """Twice, with other numbers of tokens, under recomputation too. Sums of a token's rows, and of weights' gradients, round in another
    order."""
    if k > most_experts():
        pytest.skip("this DeepSpeed's gates choose at most two experts")
    generator = torch.Generator().manual_seed(rank)
    layer, runs, plans = skewed_layer(k=k, drop_tokens=False).to(device), [], plans_of_copies()
    for balance in (None, Balance(2, cost=1)):
        replace_moe_layers(layer, exact=False, grouped_experts=True, balance=balance, sums=sums)
        for num_tokens in (40 + 9 * rank, 300):
            x, cotangent = (torch.rand(num_tokens, HIDDEN, generator=generator.manual_seed(rank)).to(device) for _ in range(2))
            runs.append(run_layer(layer, x, cotangent))
        x.requires_grad_()
        y, *_ = checkpoint(layer, x, use_reentrant=False)
        y.backward(cotangent)
        runs.append({"recomputed": y.detach(), "gradient": x.grad})
    assert len(plans) == 4 and all((planned.plan.copies >= 0).any() for planned in plans)  # the recomputation plans again
    for number, (with_copies, without) in enumerate(zip(runs[3:], runs[:3], strict=True)):
        assert_equal(with_copies, without, f"rank {rank}, run {number}", tolerance=2e-6)
    restore_moe_layers(layer)


@on_deepspeed_ranks()
def test_engine_trains_alike_and_counts_rows_at_home(rank):
    """By the key of ds_config. ZeRO 1 has the experts' parameters in one memory, and two layers share the copies."""
    runs, rows, plans = [], [], plans_of_copies()
    Balance.__init__.__kwdefaults__["cost"] = 1  # by the key's own, so few rows get no copies
    for key in ({}, {"balance": 2}):
        case = Case(zero=1, k=1, accumulation=2)
        model = make_model(case)
        for module in model.layers:
            module.deepspeed_moe.experts.deepspeed_experts = torch.nn.ModuleList(
                expert for expert in skewed_layer(4, with_groups=False).deepspeed_moe.experts.deepspeed_experts
            )
        config = ds_config(case) | {"deepep_moe": {"exact": False, "grouped_experts": True, **key}}
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
        metrics = Metrics(engine.module)
        runs.append(run_steps(engine, rank, 3))
        rows.append([report.rows_per_expert for report in metrics.take()])
    assert rows[1] == rows[0] and any((planned.plan.copies >= 0).any() for planned in plans)
    assert_equal(runs[1], runs[0], f"rank {rank}", tolerance=1e-4)


@on_deepspeed_ranks()
def test_what_copies_do_not_go_with(rank):
    for options, reason in (({"exact": True}, "exact=True"), ({"exact": False, "grouped_experts": False}, "grouped_experts=False")):
        with pytest.raises(ValueError, match=f"balance is given with .*{reason}"):
            replace_moe_layers(skewed_layer(), balance=Balance(2), **options)
    with pytest.raises(TypeError, match="balance is 2; pass deepep_moe.nn.Balance"):
        replace_moe_layers(skewed_layer(), balance=2, exact=False)
    with pytest.raises(TypeError, match="ds_config: balance is True; it must be a number of expert slots"):
        options_of({"deepep_moe": {"exact": False, "balance": True}})
    x = torch.rand(8, HIDDEN)
    layer = make_moe(expert=sequential(), ep=2)
    replace_moe_layers(layer, exact=False, balance=Balance(2))
    with pytest.raises(ValueError, match="balance is given, but the experts have biases"):
        layer(x)
    for has_copies in (False, True):
        layer = skewed_layer()
        replace_moe_layers(layer, exact=False, balance=Balance(2))
        if has_copies:
            layer(x)
        if rank == 1:
            hook = layer.deepspeed_moe.experts.deepspeed_experts[0].register_forward_hook(lambda *_: None)
        with refused(rank, 1, ValueError, "balance is given, but experts cannot run in grouped products"):
            layer(x)
        if rank == 1:
            hook.remove()
        assert layer(x)[0].isfinite().all()
