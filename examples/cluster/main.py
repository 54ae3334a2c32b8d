"""Try deepep_moe on a cluster: one command each for correctness, bandwidth and the environment. Each prints a block for an issue.

examples/cluster/run.sh correctness                       # on each node; NNODES, NODE_RANK and MASTER_ADDR say which
sbatch --nodes 2 examples/cluster/slurm.sh bandwidth      # on Slurm
NPROC=4 examples/cluster/run.sh correctness --device cpu --ranks-per-node 2     # 2 x 2 virtual nodes on this host
"""

import argparse
import sys

import bandwidth
import correctness
import environment
import torch
from ranks import joined

COMMANDS = {"correctness": correctness.run, "bandwidth": bandwidth.run, "environment": environment.run}
_BY_DEVICE = {"cuda": {"num_tokens": 4096, "hidden": 7168, "iterations": 30}, "cpu": {"num_tokens": 256, "hidden": 1024, "iterations": 10}}
_CHECKED_TOKENS = 16  # the reference computes all ranks' results on every rank, in slow loops


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where PyTorch sees a GPU")
    parser.add_argument("--backend", default="auto", help="of deepep_moe.Buffer (default: auto)")
    parser.add_argument("--ranks-per-node", type=int, help="virtual nodes of so many ranks (default: the ranks of a host are a node)")
    parser.add_argument("--num-tokens", type=int, help=f"per rank (default: correctness {_CHECKED_TOKENS}, bandwidth 4096, on CPUs 256)")
    parser.add_argument("--hidden", type=int, help="bandwidth only (default: 7168, on CPUs 1024)")
    parser.add_argument("--num-topk", type=int, default=8, help="bandwidth only")
    parser.add_argument("--topk-groups", type=int, default=4, help="bandwidth only: nodes that a token may go to")
    parser.add_argument("--iterations", type=int, help="bandwidth only (default: 30, on CPUs 10)")
    options = parser.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.command == "correctness" and options.num_tokens is None:
        options.num_tokens = _CHECKED_TOKENS
    for name, value in _BY_DEVICE[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("num_tokens", "hidden", "num_topk", "topk_groups", "iterations"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    return options


def main() -> int:
    """Exit code: 0, or 1 where results differ from the reference."""
    options = arguments()
    with joined(options) as rank:
        return 0 if COMMANDS[options.command](rank) else 1


if __name__ == "__main__":
    sys.exit(main())
