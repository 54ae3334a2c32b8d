"""`python -m deepep_moe.bench COMMAND ...`

exchange     dispatch and combine on the CPU
link         dispatch and combine on GPUs
low-latency  dispatch and combine of small batches
nodes        the same over virtual nodes, time of kernels by half
pipeline     both hops over virtual nodes, at a network's pace
overlap      dispatch and combine beside GEMMs
gate         the gate
host         the time of the host in calls on a GPU
all-reduce   small all-reduces with and without binding
model        dispatch and combine over nodes, simulated
megatron     a layer of Megatron-Core
deepspeed    a layer of DeepSpeed
fp8          a layer with fp8 experts, against bf16 and TransformerEngine
compare      two pages of --report side by side

`--report FILE.html` writes a page of the records, which lie beside it. All but `model`, `all-reduce` and `compare` take `--bind`.
Without a command, `--backend nvlink` means link, and everything else exchange.
"""

import argparse
import json
import sys

from deepep_moe import config
from deepep_moe.bench.all_reduce import command as all_reduce
from deepep_moe.bench.common.records import add_json
from deepep_moe.bench.exchange import cpu as exchange
from deepep_moe.bench.exchange import nvlink as link
from deepep_moe.bench.exchange import pipeline
from deepep_moe.bench.gate import command as gate
from deepep_moe.bench.host import command as host
from deepep_moe.bench.layers import deepspeed, fp8, megatron
from deepep_moe.bench.low_latency import command as low_latency
from deepep_moe.bench.low_latency import nodes
from deepep_moe.bench.model import command as model
from deepep_moe.bench.overlap import command as overlap
from deepep_moe.bench.page import command as compare
from deepep_moe.bench.page.records import page_of
from deepep_moe.topology.option import add_bind, bind_this_rank

COMMANDS = {
    "exchange": exchange, "link": link, "pipeline": pipeline, "low-latency": low_latency, "nodes": nodes, "overlap": overlap, "gate": gate,
    "host": host, "model": model, "megatron": megatron, "deepspeed": deepspeed, "fp8": fp8, "all-reduce": all_reduce, "compare": compare,
}  # fmt: skip

_UNBOUND = ("model", "all-reduce", "compare")  # nothing to bind; binds its ranks by turns
_ONE_PROCESS = ("gate", "host")  # the others start ranks of their own, or are ranks of a launcher


def _with_command(arguments: list[str]) -> list[str]:
    if arguments and (arguments[0] in COMMANDS or arguments[0] in ("-h", "--help")):
        return arguments
    backend = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    backend.add_argument("--backend")
    return ["link" if backend.parse_known_args(arguments)[0].backend == "nvlink" else "exchange", *arguments]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deepep_moe.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(command)
        if module is not compare:
            add_json(command)
        if name in _UNBOUND:
            command.set_defaults(bind=False)
        else:
            add_bind(command)
        command.set_defaults(main=module.main, is_one_process=name in _ONE_PROCESS)
    options = parser.parse_args(_with_command(arguments))
    if options.bind and (options.is_one_process or config.launched_rank() is not None):
        bind_this_rank()
    report = getattr(options, "report", None)
    if report is None:
        return options.main(options)
    options.json = options.json or report.with_suffix(".json")
    options.main(options)
    if not config.launched_rank():  # the others of a launcher write nothing
        page_of(json.loads(options.json.read_text())).write(report)


if __name__ == "__main__":
    main(sys.argv[1:])
