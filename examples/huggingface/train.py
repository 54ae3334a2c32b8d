"""Spread the experts of a Hugging Face style model over two ranks, and train it: python examples/huggingface/train.py

Weights are random and nothing is downloaded. --stand-in trains without transformers.
"""

import argparse
import sys
from pathlib import Path

import model
import torch
import torch.distributed as dist

from deepep_moe.integrations.huggingface import expert_parameters, spread_experts
from deepep_moe.nn import JsonLines, Metrics
from deepep_moe.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import data


def loss_of(network: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = network(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(rank: int, num_ranks: int, num_steps: int, stand_in: bool, out: str) -> tuple[list[str], float, list[float]]:
    """Return the modules that were replaced, how far logits moved by that, and the loss of each step over all ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    network, corpus = model.build(stand_in=stand_in), data.load_corpus()
    tokens = data.batch(corpus, 4, 32, seed=0, step=0, rank=rank)
    with torch.no_grad():
        before = network(input_ids=tokens).logits
        replaced = spread_experts(network, num_max_tokens_per_rank=4 * 33)  # the one call
        difference = (network(input_ids=tokens).logits - before).abs().max().item()

    of_experts = {id(parameter) for parameter in expert_parameters(network)}
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    metrics, losses = Metrics(network, [JsonLines(Path(out) / "metrics.jsonl")] if rank == 0 else []), []
    for step in range(num_steps):
        loss = loss_of(network, data.batch(corpus, 4, 32, seed=0, step=step, rank=rank))
        optimizer.zero_grad()
        loss.backward()
        for parameter in network.parameters():
            if id(parameter) not in of_experts:
                dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks
        optimizer.step()
        dist.all_reduce(loss := loss.detach() / num_ranks)
        losses.append(loss.item())
        metrics.write(step, {"loss": losses[-1]})
    return replaced, difference, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stand-in", action="store_true", help="a model of the same shape in place of that of transformers")
    parser.add_argument("--out", default="runs/huggingface", help="folder for metrics.jsonl (default: %(default)s)")
    options = parser.parse_args()
    replaced, difference, losses = run_ranks(train, 2, options.steps, options.stand_in, options.out, start_method="spawn")[0]
    print(f"{len(replaced)} blocks were spread over 2 ranks; logits moved by {difference:.1e} at most")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {options.out}/metrics.jsonl")
