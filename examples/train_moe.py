"""Train a mixture-of-experts layer on two ranks, without any framework: python examples/train_moe.py

A fixed random SwiGLU network is the teacher; 8 experts on 2 ranks, of which every token chooses 2, and a shared expert learn it.
"""

import sys

import torch
import torch.distributed as dist

from deepep_moe.nn import MoELayer, Router, SwiGLU
from deepep_moe.testing import run_ranks

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 64, 64, 8, 2, 512


def train(rank: int, num_ranks: int, num_steps: int) -> list[float]:
    torch.manual_seed(0)  # the same teacher, router and shared expert on every rank
    teacher = SwiGLU(HIDDEN, 4 * INTERMEDIATE).requires_grad_(False)
    router = Router(HIDDEN, NUM_EXPERTS, NUM_TOPK, expert_bias=True)
    shared = SwiGLU(HIDDEN, INTERMEDIATE)
    torch.manual_seed(1 + rank)  # other experts and other tokens on every rank
    experts = [SwiGLU(HIDDEN, INTERMEDIATE) for _ in range(NUM_EXPERTS // num_ranks)]
    layer = MoELayer(router, experts, shared, num_max_tokens_per_rank=NUM_TOKENS)
    of_experts = set(layer.expert_parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)

    losses = []
    for step in range(num_steps):
        x = torch.randn(NUM_TOKENS, HIDDEN)
        loss = 100 * (layer(x) - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in layer.parameters():  # experts saw the tokens of all ranks already
            if parameter not in of_experts:
                dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks
        optimizer.step()
        router.update_expert_bias(1e-3)
        mean_loss = loss.detach() / num_ranks
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item())
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    losses = run_ranks(train, 2, int(sys.argv[1]) if len(sys.argv) > 1 else 301)[0]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
