"""Megatron-Core's stock DeepEP and HybridEP backends on deepep_moe: the same training as its alltoall dispatcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_ranks", (2, pytest.param(4, marks=pytest.mark.slow)))
@pytest.mark.parametrize("mode", ("deepep", "hybridep", pytest.param("hybridep to capacity", marks=pytest.mark.slow)))
def test_stock_backend_equals_alltoall(mode, num_ranks, tmp_path):
    from megatron.core.transformer.transformer_config import TransformerConfig

    backends = TransformerConfig.__dataclass_fields__.get("moe_flex_dispatcher_backend")
    if backends is None or mode.split()[0] not in str(backends.type):
        pytest.skip("this Megatron-Core names its backend of flex in another way")
    support = ROOT / "tests" / "support"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    to_files = ["--redirects", "3", "--log-dir", str(tmp_path)]
    script = ["-m", "deepep_moe.compat.run", str(support / "deep_ep_megatron.py"), mode]
    path = os.pathsep.join([str(ROOT / "examples" / "common"), os.environ.get("PYTHONPATH", "")])  # where the set-up of Megatron-Core is
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, *launcher, *to_files, *script], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )
    logs = {path: path.read_text() for path in sorted(tmp_path.glob("*/attempt_0/*/std*.log"))}
    assert result.returncode == 0, result.stderr + "".join(logs.values())
    assert len(re.findall(r"^rank \d: 5 steps", "".join(logs.values()), flags=re.MULTILINE)) == num_ranks
