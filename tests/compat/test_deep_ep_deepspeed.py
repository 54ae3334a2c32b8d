"""DeepSpeed AutoEP with its own comm_backend "deepep", which is DeepEP 2, on deepep_moe: the same training as with its all-to-all."""

import pytest
import torch
from autoep_cases import Case, autoep_layers, build_engine, counted, ds_config, run_steps
from deepspeed_cases import assert_equal, engine_ready
from on_ranks import on_ranks

from deepep_moe.compat import deep_ep

auto_ep_comm = pytest.importorskip("deepspeed.module_inject.auto_ep_comm", reason="comm_backend came with DeepSpeed 0.19.8")
pytest.importorskip("transformers.models.deepseek_v3", reason="AutoEP serves transformers' models")

CASES = [
    Case("deepseek", zero=2, uneven=True),
    Case("qwen3", zero=1, recomputed=True, score_apply="pre"),
    Case("deepseek", recomputed=False, uneven=True),
]
ROUNDED = Case(dtype="bf16", zero=1, tolerance=0.02)


def on_cpu(monkeypatch):
    """AutoEP barriers on the GPU's index, which tensors of the CPU do not have, and takes bf16 alone, whose roundings hide differences."""
    from deepspeed.module_inject import auto_ep_layer

    barrier = auto_ep_layer.dist.barrier
    monkeypatch.setattr(auto_ep_layer.dist, "barrier", lambda group=None, device_ids=None: barrier(group=group))
    monkeypatch.setattr(auto_ep_comm, "SUPPORTED_DTYPES", (torch.bfloat16, torch.float32))


def config_of(case, backend):
    config = ds_config(case)
    config["expert_parallel"] |= {"comm_backend": backend, "comm_max_tokens_per_rank": 256}
    return config


@pytest.mark.parametrize("cases", (CASES, [ROUNDED]), ids=("fp32", "bf16"))
@on_ranks(2)
def test_steps_equal_all_to_all(rank, cases):
    """Logits, losses, every gradient, parameters after steps of AdamW: with recomputation, uneven numbers of tokens, ZeRO 0 to 2."""
    deep_ep.install()
    with engine_ready(), pytest.MonkeyPatch.context() as monkeypatch:
        on_cpu(monkeypatch)
        for case in cases:
            theirs = run_steps(build_engine(case, False, config=config_of(case, "comm")), rank, case)
            engine = build_engine(case, False, config=config_of(case, "deepep"))
            with counted() as calls:
                ours = run_steps(engine, rank, case)
            assert calls["AutoEP's all-to-all"] == 0 and calls["dispatch"] > 0, f"{case}: {calls}"
            exchanges = {layer._deepep_exchange for layer in autoep_layers(engine)}
            assert {type(exchange.buffer) for exchange in exchanges} == {deep_ep.ElasticBuffer}
            if case.dtype == "bf16":  # a rounding may change a token's experts, and so all that follows but the losses
                ours, theirs = ({name: value for name, value in run.items() if name.startswith("loss")} for run in (ours, theirs))
            assert_equal(ours, theirs, f"{case}, rank {rank}", tolerance=case.tolerance)
            auto_ep_comm.destroy_exchanges(engine.module)
