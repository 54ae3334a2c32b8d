"""`python -m deepep_moe.bench [exchange | gate] ...`; exchange, dispatch and combine, where nothing is named."""

import argparse
import sys

from deepep_moe.bench import exchange, gate

COMMANDS = {"exchange": exchange, "gate": gate}


def main(arguments: list[str]) -> None:
    if not arguments or (arguments[0] not in COMMANDS and arguments[0] not in ("-h", "--help")):
        arguments = ["exchange", *arguments]
    parser = argparse.ArgumentParser(prog="python -m deepep_moe.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(command)
        exchange.add_json(command)
        command.set_defaults(main=module.main)
    options = parser.parse_args(arguments)
    options.main(options)


if __name__ == "__main__":
    main(sys.argv[1:])
