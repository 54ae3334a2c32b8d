"""Megatron-Core's own flex dispatcher with a backend of DeepEP's, beside alltoall: a script for `python -m deepep_moe.compat.run`.

Its arguments are some of `MODES`. Every rank prints the largest differences of each pass, and of the parameters after some steps of an
optimizer.
"""

import os
import sys

import megatron_ranks as ranks
import torch
import torch.distributed as dist
from megatron_cases import assert_same, build_layer, draw, forward_backward, layer_config

CAPACITY = {
    "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "moe_router_group_topk": None,
    "moe_router_num_groups": None, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
MODES = {"deepep": ("deepep", {}), "hybridep": ("hybridep", {}), "hybridep to capacity": ("hybridep", CAPACITY)}
"""Backend of flex, and switches of both dispatchers. To capacity: every expert takes as many tokens, of any number of experts."""
MANAGERS = {"deepep": "_DeepepManager", "hybridep": "_HybridEPManager"}
STOCK = {"moe_token_dispatcher_type": "flex"}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
COMMON = {"moe_router_dtype": "fp32"}
NUM_STEPS = 5


def _mean_dense_gradients(layer: torch.nn.Module) -> None:
    """Average the gradients of parameters that every rank holds, as data parallelism does; experts are this rank's own."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def compare(mode: str, rank: int, num_ranks: int) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    backend, switches = MODES[mode]
    with ranks.model_parallel("cpu", ep=num_ranks, seed=7):
        common = {"expert_model_parallel_size": num_ranks} | COMMON | switches
        flex = STOCK | {"moe_flex_dispatcher_backend": backend}
        stock, alltoall = (build_layer(layer_config(**common, **dispatcher)) for dispatcher in (flex, ALLTOALL))
        assert isinstance(stock.token_dispatcher, MoEFlexTokenDispatcher)
        assert type(stock.token_dispatcher._comm_manager).__name__ == MANAGERS[backend]
        alltoall.load_state_dict(stock.state_dict())
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.02, momentum=0.9) for layer in (stock, alltoall)]
        before = {name: parameter.detach().clone() for name, parameter in stock.named_parameters()}
        worst = []
        for step in range(NUM_STEPS):
            inputs = draw(100 * step + rank, 6 + 5 * rank * (not switches) + step, 2)
            passes = [forward_backward(layer, *inputs) for layer in (stock, alltoall)]
            worst.append(assert_same(*passes, f"{mode}, step {step}, rank {rank}", tolerance=2e-6 * (1 + 9 * (step > 0))))
            for layer, optimizer in zip((stock, alltoall), optimizers, strict=True):
                _mean_dense_gradients(layer)
                optimizer.step()
        trained, wanted = ({name: value.detach() for name, value in layer.named_parameters()} for layer in (stock, alltoall))
        assert all((trained[name] != before[name]).any() for name in before)
        worst.append(assert_same(trained, wanted, f"{mode}, parameters, rank {rank}"))
        print(f"rank {rank}, {mode}: {NUM_STEPS} steps, differences {' '.join(f'{value:.1e}' for value in worst)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for each in sys.argv[1:]:
        compare(each, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
