"""Megatron-Core's stock DeepEP and HybridEP backends on deepep_moe: the same training as its alltoall dispatcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[2]


BOTH = ("deepep", "hybridep")


@pytest.mark.parametrize(("num_ranks", "modes"), [(2, BOTH), pytest.param(4, (*BOTH, "hybridep to capacity"), marks=pytest.mark.slow)])
def test_stock_backends_equal_alltoall(num_ranks, modes, tmp_path):
    from megatron.core.transformer.transformer_config import TransformerConfig

    backends = TransformerConfig.__dataclass_fields__.get("moe_flex_dispatcher_backend")
    served = [mode for mode in modes if backends is not None and mode.split()[0] in str(backends.type)]
    if not served:
        pytest.skip("this Megatron-Core names its backend of flex in another way")
    support = ROOT / "tests" / "support"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    to_files = ["--redirects", "3", "--log-dir", str(tmp_path)]
    script = ["-m", "deepep_moe.compat.run", str(support / "deep_ep_megatron.py"), *served]
    path = os.pathsep.join([str(ROOT / "examples" / "common"), os.environ.get("PYTHONPATH", "")])  # where the set-up of Megatron-Core is
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, *launcher, *to_files, *script], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )
    logs = {path: path.read_text() for path in sorted(tmp_path.glob("*/attempt_0/*/std*.log"))}
    assert result.returncode == 0, result.stderr + "".join(logs.values())
    reported = re.findall(r"^rank \d, (.+): 5 steps", "".join(logs.values()), flags=re.MULTILINE)
    assert sorted(reported) == sorted(served * num_ranks)
