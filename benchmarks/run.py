"""usage: python benchmarks/run.py [NAME] ...

exchange     dispatch and combine, on GPUs, or with --backend shm on the CPU
low-latency  dispatch and combine of small batches
gate         the gate
host         the time of the host in calls on a GPU
model        dispatch and combine over nodes, simulated
trainer      a training step of Megatron-LM
megatron     a layer of Megatron-Core
deepspeed    a layer of DeepSpeed
fp8          a layer with fp8 experts, against bf16 and TransformerEngine
balance      a layer with unbalanced ranks, against balanced ones

NAME --help lists the options of one. All but `model` and `trainer` take `--bind`.
The default name is exchange.
"""

import argparse
import importlib
import sys
from pathlib import Path

# At the end of the path, so that an installed package has priority.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "common"))

from deepep_moe import config
from deepep_moe.errors import EPError
from deepep_moe.topology.binding import add_bind, bind_this_rank

MODULES = {
    "exchange": "exchange.command", "low-latency": "low_latency.command", "gate": "gate", "host": "host.command",
    "model": "model", "megatron": "layers.megatron", "trainer": "layers.trainer", "deepspeed": "layers.deepspeed", "fp8": "layers.fp8",
    "balance": "balance.command",
}  # fmt: skip

_UNBOUND = ("model", "trainer")  # they run nothing on ranks of their own
_ONE_PROCESS = ("gate", "host")  # the others start ranks of their own, or are ranks of a launcher


def main(arguments: list[str]) -> None:
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if arguments and not arguments[0].startswith("-") and arguments[0] not in MODULES:
        sys.exit(f"{arguments[0]!r} is no benchmark; choose from {', '.join(MODULES)}")
    name, *rest = arguments if arguments and arguments[0] in MODULES else ["exchange", *arguments]
    module = importlib.import_module(f"benchmarks.{MODULES[name]}")
    parser = argparse.ArgumentParser(
        f"python benchmarks/run.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    parser.add_argument("--json", type=Path, help="file to write the records to")
    parser.set_defaults(bind=False)
    if name not in _UNBOUND:
        add_bind(parser)
    options = parser.parse_args(rest)
    if hasattr(module, "resolve"):
        try:
            module.resolve(options)
        except (EPError, ValueError, OSError) as error:
            sys.exit(str(error))
    if options.bind and (name in _ONE_PROCESS or config.launched_rank() is not None):
        bind_this_rank()
    module.main(options)


if __name__ == "__main__":
    main(sys.argv[1:])
