"""Show which NUMA nodes, GPUs and NICs this machine has, and how near they are to each other. `nccl` shows settings of NCCL instead."""

import argparse
import json
import sys
from pathlib import Path

from deepep_moe.errors import EPError
from deepep_moe.topology import nccl, picture
from deepep_moe.topology.reader import read


def main(arguments: list[str]) -> None:
    """Run the command with `arguments`, those after its name."""
    parser = argparse.ArgumentParser(prog="python -m deepep_moe.topology", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/"), help="folder that holds sys and proc (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a picture")
    command = parser.add_subparsers(dest="command", metavar="[nccl]").add_parser("nccl", description=nccl.__doc__)
    command.add_argument("--write", type=Path, metavar="FILE", help="write a topology file for NCCL")
    options = parser.parse_args(arguments)
    topology = read(options.root)
    if options.command != "nccl":
        print(json.dumps(topology.to_dict(), indent=2) if options.json else picture.text(topology))
        return
    if options.write:
        try:
            options.write.write_text(nccl.topology_xml(topology))
        except (EPError, OSError) as error:
            sys.exit(f"cannot write {options.write}: {error}")
    print(nccl.report(options.root, options.write))


if __name__ == "__main__":
    main(sys.argv[1:])
