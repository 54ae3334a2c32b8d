"""Show which NUMA nodes, GPUs and NICs this machine has, and how near they are to each other. `nccl` shows settings of NCCL instead."""

import argparse
import json
import sys
from pathlib import Path

from deepep_moe.errors import EPError
from deepep_moe.topology import nccl, picture
from deepep_moe.topology.drawing import draw
from deepep_moe.topology.machine import Topology
from deepep_moe.topology.png import png
from deepep_moe.topology.reader import read
from deepep_moe.topology.svg import svg


def main(arguments: list[str]) -> None:
    """Run the command with `arguments`, those after its name."""
    parser = argparse.ArgumentParser(prog="python -m deepep_moe.topology", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/"), help="folder that holds sys and proc (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a picture")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the picture into FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="the same as PNG; needs matplotlib")
    command = parser.add_subparsers(dest="command", metavar="[nccl]").add_parser("nccl", description=nccl.__doc__)
    command.add_argument("--write", type=Path, metavar="FILE", help="write a topology file for NCCL")
    options = parser.parse_args(arguments)
    topology = read(options.root)
    if options.command == "nccl":
        show_nccl(options, topology)
        return
    print(json.dumps(topology.to_dict(), indent=2) if options.json else picture.text(topology))
    if options.svg:
        write(options.svg, svg(draw(topology)).encode())
    if options.png:
        try:
            write(options.png, png(draw(topology)))
        except EPError as error:
            sys.exit(f"cannot write {options.png}: {error}")


def show_nccl(options: argparse.Namespace, topology: Topology) -> None:
    """Write NCCL's topology file if asked to, and print the settings."""
    if options.write:
        try:
            write(options.write, nccl.topology_xml(topology).encode())
        except EPError as error:
            sys.exit(f"cannot write {options.write}: {error}")
    print(nccl.report(options.root, options.write))


def write(path: Path, data: bytes) -> None:
    """Write `data` to `path`, and say so on stderr. Ends the program with the reason where the file cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        sys.exit(f"cannot write {path}: {error.strerror}; give a file in a folder that is there")
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
