"""Run a script whose ds_config may name deepep_moe: `python -m deepep_moe.integrations.deepspeed [options] script.py [arguments]`."""

from deepep_moe.integrations.common import script
from deepep_moe.integrations.deepspeed import enable

_DESCRIPTION = """Let deepspeed.initialize honour the section "deepep_moe" of ds_config, then run a script as if it had been started itself.

Add to the ds_config that the script uses:
  "deepep_moe": {"enabled": true}
"""
_EPILOG = """examples:
  torchrun --nproc-per-node 8 -m deepep_moe.integrations.deepspeed train.py --deepspeed_config ds_config.json ...
  deepspeed --module deepep_moe.integrations.deepspeed train.py --deepspeed_config ds_config.json ...
"""


def main() -> None:
    parser = script.parser_of("deepep_moe.integrations.deepspeed", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--local_rank", metavar="N", help="DeepSpeed's launcher gives it to the program that it starts; the script gets it as it came"
    )
    options = script.parse(parser, "train.py")
    enable()
    local_rank = [] if options.local_rank is None else [f"--local_rank={options.local_rank}"]
    script.run(options.script, [*local_rank, *options.arguments])


if __name__ == "__main__":
    main()
