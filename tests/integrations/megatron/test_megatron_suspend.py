"""Megatron-Core's layers whose exchange memory is given back between steps."""

import pytest
import torch
from megatron_cases import HIDDEN, layer_of, model_parallel
from on_ranks import on_ranks

from deepep_moe.errors import BufferSuspendedError
from deepep_moe.integrations.common.registry import all_buffers
from deepep_moe.integrations.megatron import resume, suspend

pytest.importorskip("megatron.core")


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(2))))
@on_ranks(2)
def test_between_forward_and_backward(rank: int, num_ranks: int, device: str) -> None:
    with model_parallel(device, ep=num_ranks) as sizes:
        layer = layer_of(sizes)
        x = torch.randn(12, 1, HIDDEN, device=next(layer.parameters()).device)

        def gradient(between):
            rows = x.clone().requires_grad_()
            y = layer(rows)[0]
            between()
            y.square().sum().backward()
            return rows.grad

        def cycle():
            suspend()
            suspend()
            assert all(buffer.memory().suspended or buffer.backend == "collective" for buffer in all_buffers())
            with pytest.raises(BufferSuspendedError):
                layer(x)
            resume()
            resume()

        assert torch.equal(gradient(lambda: None), gradient(cycle))
