"""Measure how much of an exchange hides behind GEMMs: `python benchmarks/run.py overlap --backend nvlink`. `exchange` measures it too.

An exchange runs in two halves (`return_hook=True`). Equal GEMMs run between them, about 1.5 times as long as the second half alone. The
exchange alone and the GEMMs alone are timed as well. One run uses copy engines (num_sms=0), which leave every SM to the GEMMs between the
halves; another uses the default number of SMs.

Results are checked first. Times are the begin and end of each half and of the GEMMs on the stream, on the slowest rank. The start of a
dispatch includes the host's wait for the counts. If the stream is empty by then, the GEMMs include the launch of the first one.
"""

import argparse

from benchmarks.exchange import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_shape_arguments(parser, ("nvlink", "shm"), command.OVERLAP_TOKENS["cuda"])
    parser.set_defaults(is_overlap=True, num_sms=None, sweep=False, quick=False, peer=[])


resolve, main = command.resolve, command.main
