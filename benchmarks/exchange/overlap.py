"""How much of an exchange hides behind GEMMs: `python benchmarks/run.py overlap --backend nvlink`. The command `exchange` measures it too.

An exchange is made in two halves (`return_hook=True`), with equal GEMMs between them that last about 1.5 times as long as its second half
alone. The exchange alone and the GEMMs alone are timed beside it. One run uses copy engines (num_sms=0), which leave every SM to the GEMMs
between the halves; another uses the default number of SMs. Results are checked first. Then the times are taken at which each half and the
GEMMs begin and end on the stream, on the slowest rank. The start of a dispatch includes the host's wait for the counts. If the stream has
run dry by then, the GEMMs include the launch of the first one.
"""

import argparse

from benchmarks.exchange import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_shape_arguments(parser, ("nvlink", "shm"), command.OVERLAP_TOKENS["cuda"])
    parser.set_defaults(is_overlap=True, num_sms=None, sweep=False, quick=False, peer=[])


resolve, main = command.resolve, command.main
