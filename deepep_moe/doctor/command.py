"""Say whether this machine can run each backend and each integration, and what to do where not.

Exit code: 0 without a fault, 1 with one, 2 for wrong arguments.
"""

import argparse
import json

from deepep_moe.command import Parser
from deepep_moe.doctor.base import Environment
from deepep_moe.doctor.page import CHECKS, TESTS, as_json, as_text, examine, exit_code


def main(arguments: list[str]) -> int:
    parser = Parser("deepep-moe doctor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--test", action="store_true", help="also exchange rows between ranks: correctness and bandwidth (up to 4 minutes)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the page")
    options = parser.parse_args(arguments)
    env = Environment()
    findings = examine(env, CHECKS)
    for test in TESTS if options.test else ():  # nothing runs beside what is timed
        findings += examine(env, [test])
    print(json.dumps(as_json(findings), indent=2) if options.json else as_text(findings))
    return exit_code(findings)
