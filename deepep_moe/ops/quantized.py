"""`QuantizedRows`: fp8 rows with scales that autograd takes for bf16 rows."""

from typing import Any

import torch
from torch import Tensor

from deepep_moe.ops.quant import BLOCK, FP8, dequantize_fp8, quantize_fp8

_aten = torch.ops.aten
_COPIES = {_aten.detach.default, _aten.alias.default}


class QuantizedRows(Tensor):
    """Rows [num_rows, hidden] as e4m3 `values` with one power of two per 128 columns in `scales` [num_rows, hidden / 128] fp32.

    Its dtype is bf16, so autograd gives it a bf16 gradient. `deepep_moe.ops.grouped_mlp` multiplies it in fp8. Other operations raise
    NotImplementedError, because they would silently allocate a tensor of twice the size: call `dequantized()`.
    """

    values: Tensor  # type: ignore[assignment]  # a method of sparse tensors has this name
    scales: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> "QuantizedRows":
        if values.dtype != FP8 or values.dim() != 2 or values.shape[1] % BLOCK:
            raise ValueError(
                f"values is {str(values.dtype).removeprefix('torch.')} {list(values.shape)}; it must be float8_e4m3fn [num_rows, hidden], "
                f"hidden a multiple of {BLOCK}"
            )
        if scales.dtype != torch.float32 or scales.shape != (values.shape[0], values.shape[1] // BLOCK):
            raise ValueError(
                f"scales is {str(scales.dtype).removeprefix('torch.')} {list(scales.shape)} for values {list(values.shape)}; it must be "
                f"float32, one for {BLOCK} columns"
            )
        rows = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16, device=values.device)
        rows.values, rows.scales = values, scales
        return rows

    @classmethod
    def of(cls, x: Tensor) -> "QuantizedRows":
        """Quantize x [num_rows, hidden] contiguous fp32, bf16 or fp16. Without gradient. Raises: as `quantize_fp8`."""
        return cls(*quantize_fp8(x, power_of_two=True))

    def dequantized(self) -> Tensor:
        """Return the rows [num_rows, hidden] in bf16, which holds them exactly. Without gradient."""
        return dequantize_fp8(self.values, self.scales).bfloat16()

    def record_stream_of(self, stream: torch.Stream) -> None:
        """Keep the memory until the work enqueued on `stream` is done, as `Tensor.record_stream` does."""
        self.values.record_stream(stream)
        self.scales.record_stream(stream)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedRows({list(self.shape)} on {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _COPIES:
            return cls(args[0].values, args[0].scales)
        if func is _aten.view.default and tuple(args[1]) in (tuple(args[0].shape), (-1, args[0].shape[1])):
            return cls(args[0].values, args[0].scales)
        if func is _aten.isnan.default:  # torch.autograd.detect_anomaly asks
            return args[0].dequantized().isnan()
        if func is _aten.record_stream.default:
            args[0].record_stream_of(args[1])
            return None
        raise NotImplementedError(f"{func} was called with fp8 rows, which only grouped_mlp takes; pass x.dequantized(), or switch fp8 off")
