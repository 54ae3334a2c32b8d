"""Run a script with the dispatcher enabled: `python -m deepep_moe.integrations.megatron [options] script.py [arguments of the script]`."""

import argparse
import dataclasses

from deepep_moe.group.settings import SUMS
from deepep_moe.integrations.common import script
from deepep_moe.integrations.megatron import enable
from deepep_moe.integrations.megatron.options import EXPERTS, Options
from deepep_moe.nn.balance import Balance

_DESCRIPTION = """Enable deepep_moe in Megatron-Core, then run a script as if it had been started itself.

Select the dispatcher among the script's own arguments:
  megatron-core 0.16 and newer:  --moe-flex-dispatcher-backend deepep_moe
  megatron-core 0.13 to 0.15:    --moe-token-dispatcher-type flex   (without --moe-enable-deepep)
"""
_EPILOG = """example:
  torchrun --nproc-per-node 8 -m deepep_moe.integrations.megatron pretrain_gpt.py \\
      --moe-flex-dispatcher-backend deepep_moe ...
"""


def _parser() -> argparse.ArgumentParser:
    parser = script.parser_of("deepep_moe.integrations.megatron", _DESCRIPTION, _EPILOG)
    parser.add_argument("--backend", default="auto", help="backend of deepep_moe.Buffer: auto, shm, collective, ... (default: auto)")
    parser.add_argument(
        "--num-max-tokens-per-rank",
        type=int,
        metavar="N",
        help="on GPUs, the most tokens that a rank ever has in a forward (default: grows with the forwards)",
    )
    parser.add_argument(
        "--expert-alignment", type=int, default=1, metavar="N", help="pad the rows of each expert to a multiple of this (default: 1)"
    )
    parser.add_argument(
        "--gate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let the gate of deepep_moe choose the experts where it can (default), or leave routing to Megatron-Core",
    )
    parser.add_argument("--max-sms", type=int, metavar="N", help="on GPUs, the most SMs that a call takes (default: all)")
    parser.add_argument("--num-sms", type=int, metavar="N", help="on GPUs, the SMs that send (default: the buffer's own choice)")
    parser.add_argument(
        "--experts",
        choices=EXPERTS,
        default="auto",
        help="run the experts of a layer in grouped products where that is fast and the config allows it (auto, the default), "
        "always (own), or never (framework)",
    )
    of_fp8 = "send rows as fp8 in both passes; the grouped experts multiply them so (bf16 models)"
    parser.add_argument("--fp8-experts", dest="fp8", action="store_true", help=of_fp8)
    parser.add_argument("--sums", choices=SUMS, default="ranks", help="add a token's rows by ranks (default) or lanes (docs/rollout.md)")
    parser.add_argument(
        "--sync-free",
        action="store_true",
        help="let the host wait for nothing in MoE layers: rows get room for every routing, or for --recv-capacity-factor",
    )
    parser.add_argument(
        "--recv-capacity-factor",
        type=float,
        metavar="F",
        help="with --sync-free, room for F times an even share of all rows; more rows are an error",
    )
    parser.add_argument(
        "--metrics", action="store_true", help="write load, exchange time and calls over capacity of each MoE layer to TensorBoard and W&B"
    )
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="consecutive ranks that are a node (default: those of a host)")
    of_balance = "copies of hot experts that a rank may hold, planned in each forward (default: none)"
    parser.add_argument("--balance", type=int, metavar="SLOTS", help=of_balance)
    return parser


def main() -> None:
    parser = _parser()
    options = script.parse(parser, "pretrain_gpt.py")
    values = vars(options)
    try:
        values["balance"] = None if options.balance is None else Balance(options.balance)
        Options(**(chosen := {field.name: values[field.name] for field in dataclasses.fields(Options)}))  # it checks them
    except ValueError as error:
        parser.error(str(error))
    enable(**chosen)
    script.run(options.script, options.arguments)


if __name__ == "__main__":
    main()
