"""Show which NUMA nodes, GPUs and NICs this machine has, and how near they are to each other. `nccl` shows settings of NCCL instead."""

import json
import sys
from pathlib import Path

from deepep_moe.command import Parser
from deepep_moe.errors import EPError
from deepep_moe.topology import nccl, picture
from deepep_moe.topology.reader import read


def main(arguments: list[str]) -> None:
    """Run the command with `arguments`, those after its name."""
    parser = Parser("deepep-moe topology", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/"), help="folder that holds sys and proc (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a picture")
    command = parser.add_subparsers(dest="command", metavar="[nccl]").add_parser("nccl", description=nccl.__doc__)
    command.add_argument("--output", type=Path, metavar="FILE", help="write a topology file for NCCL")
    options = parser.parse_args(arguments)
    if not options.root.is_dir():
        parser.error(f"--root {options.root} is no folder; give the one that holds sys and proc")
    topology = read(options.root)
    if options.command != "nccl":
        print(json.dumps(topology.to_dict(), indent=2) if options.json else picture.text(topology))
        return
    if options.output:
        try:
            options.output.write_text(nccl.topology_xml(topology))
        except (EPError, OSError) as error:
            sys.exit(f"cannot write {options.output}: {error}")
    print(nccl.report(options.root, options.output))
