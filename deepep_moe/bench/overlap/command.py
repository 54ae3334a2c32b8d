"""How much of an exchange hides behind GEMMs: `python -m deepep_moe.bench overlap --backend nvlink`. The link's benchmark does it too.

An exchange in two halves (`return_hook=True`) with equal GEMMs between them, which last about 1.5 times as long as its second half alone;
beside it the exchange alone and the GEMMs alone. Once with copy engines (num_sms=0), which leave every SM to the GEMMs from the start's end
to the hook, and once with the default number of SMs. All through the hook is checked, then timed: where on the stream each half and the
GEMMs begin and end, on the slowest rank. The start of a dispatch counts with the host's wait for what it will receive, and where the stream
has run dry by then, its GEMMs count with the way of the first one to the GPU.
"""

import argparse
from pathlib import Path

from deepep_moe.bench.exchange import nvlink


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nvlink.add_shape_arguments(parser, ("nvlink", "shm"), " ".join(map(str, nvlink.OVERLAP_TOKENS["cuda"])))
    parser.add_argument("--plot", type=Path, help="file for a figure of the timelines, such as overlap.png")
    parser.set_defaults(is_overlap=True, num_sms=None, sweep=False, quick=False, peer=[])


main = nvlink.main
