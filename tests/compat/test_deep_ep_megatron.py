"""Megatron-Core's stock DeepEP and HybridEP backends on deepep_moe: the same training as its alltoall dispatcher."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from megatron_cases import assert_same, build_layer, draw, forward_backward, layer_config
from on_ranks import on_ranks

from deepep_moe.compat import deep_ep

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
CAPACITY = {
    "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "moe_router_group_topk": None,
    "moe_router_num_groups": None, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
MODES = [("deepep", "_DeepepManager", {}), ("hybridep", "_HybridEPManager", {})]
"""Backend of flex, its class, and switches of both dispatchers."""
# Every expert takes as many tokens, which have any number of experts.
TO_CAPACITY = ("hybridep", "_HybridEPManager", CAPACITY)


def step(layer: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average the gradients of parameters that every rank holds, as data parallelism does; experts are this rank's own."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()


@pytest.mark.parametrize(("num_ranks", "modes"), [(2, MODES), pytest.param(4, [*MODES, TO_CAPACITY], marks=pytest.mark.slow)])
@on_ranks(start_method="spawn")
def test_stock_backends_equal_alltoall(rank, num_ranks, modes):
    """In processes of their own, where Megatron-Core looks for DeepEP after `install()`."""
    deep_ep.install()
    import megatron_ranks
    from megatron.core.transformer.transformer_config import TransformerConfig

    named = TransformerConfig.__dataclass_fields__.get("moe_flex_dispatcher_backend")
    served = [mode for mode in modes if named is not None and mode[0] in str(named.type)]
    if not served:
        pytest.skip("this Megatron-Core names its backend of flex in another way")
    for backend, manager, switches in served:
        with megatron_ranks.model_parallel("cpu", ep=num_ranks, seed=7):
            common = {"expert_model_parallel_size": num_ranks, "moe_router_dtype": "fp32"} | switches
            flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
            layers = [build_layer(layer_config(**common, **how)) for how in (flex, {"moe_token_dispatcher_type": "alltoall"})]
            assert type(layers[0].token_dispatcher._comm_manager).__name__ == manager
            layers[1].load_state_dict(layers[0].state_dict())
            optimizers = [torch.optim.SGD(layer.parameters(), lr=0.02, momentum=0.9) for layer in layers]
            before = {name: parameter.detach().clone() for name, parameter in layers[0].named_parameters()}
            for number in range(5):
                inputs = draw(100 * number + rank, 6 + 5 * rank * (not switches) + number, 2)
                passes = [forward_backward(layer, *inputs) for layer in layers]
                assert_same(*passes, f"{backend}, {switches}, step {number}, rank {rank}", tolerance=2e-6 * (1 + 9 * (number > 0)))
                for layer, optimizer in zip(layers, optimizers, strict=True):
                    step(layer, optimizer)
            trained, wanted = ({name: value.detach() for name, value in layer.named_parameters()} for layer in layers)
            assert all((trained[name] != before[name]).any() for name in before)
            assert_same(trained, wanted, f"{backend}, {switches}, parameters, rank {rank}")
