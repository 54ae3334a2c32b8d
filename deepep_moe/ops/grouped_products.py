"""Products of rows, grouped by expert, with one matrix per expert: the forward's, and the two of the backward.

Weights are [num_experts, out, in]; each matrix has the layout of `torch.nn.Linear`. All three products read this layout, and the weights'
gradient has it too. No product transposes a weight, and none copies a weight whose matrices begin at multiples of 16 bytes.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepep_moe import _C
from deepep_moe.device import is_gpu, launch
from deepep_moe.ops.weighted import aligned

_log = logging.getLogger(__name__)
_ALIGNMENT = _C.ROW_ALIGNMENT  # bytes: Hopper's tensor memory accelerator needs addresses and row strides that are multiples
_LARGEST = torch.iinfo(torch.int32).max  # offsets are int32


class Groups:
    """The rows of each expert: expert 0 has the first ones, then comes expert 1, and so on. Rows after the last expert's are the tail.

    Counts on the host are checked. Counts on a GPU stay there, so nothing waits for them, and the tail is not known to the host.
    """

    def __init__(self, counts: Tensor | Sequence[int], num_experts: int, rows: Tensor):
        """counts: [num_experts] ints: a tensor on the device of `rows`, or a tensor on the CPU or a sequence. rows: [num_rows, ...]."""
        self.num_rows, self._device = rows.shape[0], rows.device
        on_gpu = isinstance(counts, Tensor) and is_gpu(counts.device)
        _check_form(counts, num_experts, rows)
        self._counts = counts if on_gpu else None
        self._sizes = None if on_gpu else _checked_sizes(counts, self.num_rows)
        if self.num_rows == 0:
            self._sizes = [0] * num_experts

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Return [num_experts] int32 on the rows' device: where the rows of each expert end. No more than num_rows, whatever the counts
        are."""
        if self._sizes is None:
            return self._counts.cumsum(0, dtype=torch.int32).clamp_(max=self.num_rows)  # type: ignore[union-attr]
        # From memory that is not pinned, this copy does not wait for the GPU.
        return torch.tensor(self._sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self._device, non_blocking=True)

    @property
    def sizes(self) -> list[int]:
        """Return the rows of each expert, on the host. Waits for the GPU if the counts are there."""
        if self._sizes is None:
            ends = self.offsets.tolist()
            self._sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
        return self._sizes

    def slices(self) -> list[slice]:
        return [slice(start, end) for start, end in itertools.pairwise(itertools.accumulate(self.sizes, initial=0))]

    def clear_tail(self, values: Tensor) -> Tensor:
        """Set the tail of values [num_rows, ...] to zero, in place, and return them."""
        if self._sizes is None and _has_whole_pieces(values):
            launch(_C.gpu_clear_tail, values, self.offsets, on=values)
        elif self._sizes is None:
            values.masked_fill_(self._is_tail.view(-1, *[1] * (values.dim() - 1)), 0)
        elif (total := sum(self._sizes)) < self.num_rows:
            values[total:] = 0
        return values

    def spread(self, values: Tensor) -> Tensor:
        """Return [num_rows, ...]: for each row the entry of its expert in values [num_experts, ...]. The tail gets any of them."""
        return values[torch.searchsorted(self.offsets, self._row_numbers, right=True).clamp_(max=len(values) - 1)]

    @functools.cached_property
    def _row_numbers(self) -> Tensor:
        return torch.arange(self.num_rows, dtype=torch.int32, device=self._device)

    @functools.cached_property
    def _is_tail(self) -> Tensor:
        return self._row_numbers >= self.offsets[-1]


def _has_whole_pieces(rows: Tensor) -> bool:
    """Return whether a kernel can clear rows by pieces of 16 bytes, and only those of the tail."""
    if torch.compiler.is_compiling() or not (is_gpu(rows.device) and hasattr(_C, "gpu_clear_tail")):
        return False
    is_aligned = rows.dim() == 2 and rows.is_contiguous() and rows.data_ptr() % _C.ROW_ALIGNMENT == 0
    return is_aligned and rows.shape[1] * rows.element_size() % _C.ROW_ALIGNMENT == 0


def _check_form(counts: Tensor | Sequence[int], num_experts: int, rows: Tensor) -> None:
    shape = list(counts.shape) if isinstance(counts, Tensor) else [len(counts)]
    if shape != [num_experts]:
        raise ValueError(f"counts has shape {shape}; it must be [{num_experts}], a number of rows for each expert of the weights")
    if isinstance(counts, Tensor) and counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"counts has dtype {str(counts.dtype).removeprefix('torch.')}; it must be int64 or int32")
    if isinstance(counts, Tensor) and is_gpu(counts.device) and counts.device != rows.device:
        raise ValueError(f"counts is on {counts.device} and x on {rows.device}; counts must be there too, or on the CPU")
    if len(rows) > _LARGEST:
        raise ValueError(f"x has {len(rows)} rows; at most {_LARGEST} are possible, so use fewer tokens at a time")


def _checked_sizes(counts: Tensor | Sequence[int], num_rows: int) -> list[int]:
    sizes = counts.tolist() if isinstance(counts, Tensor) else [int(count) for count in counts]
    if min(sizes, default=0) < 0 or sum(sizes) > num_rows:
        raise ValueError(
            f"counts is {sizes} with sum {sum(sizes)}; entries must be at least 0, and their sum at most the {num_rows} rows of x"
        )
    return sizes


# ---- which way products are made ----


def _grouped_mm() -> Callable[..., Tensor] | None:
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the GPU is of a generation that grouped_mm has a kernel for. For others PyTorch makes a loop that waits for it."""
    return _grouped_mm() is not None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _runs_on_cpus() -> bool:
    one = torch.ones(1, 8, 8, dtype=torch.bfloat16, device="cpu")
    try:
        _grouped_mm()(one[0], one, offs=torch.tensor([8], dtype=torch.int32, device="cpu"))  # type: ignore[misc]
    except NotImplementedError:
        return False
    return True


def why_not_grouped(rows: Tensor, num_columns: int) -> str | None:
    """Return why products of rows [num_rows, in] with weights [num_experts, num_columns, in] are made expert by expert; None if not."""
    if _grouped_mm() is None:
        return f"PyTorch {torch.__version__} has no torch.nn.functional.grouped_mm; install PyTorch 2.10 or newer"
    if rows.dtype != torch.bfloat16:
        return f"x has dtype {str(rows.dtype).removeprefix('torch.')}; grouped products need bfloat16"
    if any(size * rows.element_size() % _ALIGNMENT for size in (rows.shape[1], num_columns)):
        return f"an expert's matrix has {num_columns} rows and {rows.shape[1]} columns; grouped products need multiples of 8"
    if not is_gpu(rows.device) and not _runs_on_cpus():
        return f"PyTorch {torch.__version__} has grouped products for GPUs only; install PyTorch 2.10 or newer"
    if is_gpu(rows.device) and not has_kernels(rows.device):
        return f"{torch.cuda.get_device_name(rows.device)} has no kernel for grouped products; they need a Hopper or Blackwell GPU"
    return None


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("products of experts run one expert after another, and the host waits for counts that are on the GPU: %s", reason)


def _is_grouped(rows: Tensor, num_columns: int) -> bool:
    reason = why_not_grouped(rows, num_columns)
    if reason is not None and is_gpu(rows.device):
        _warn(reason)
    return reason is None and len(rows) > 0


def _aligned_matrices(weights: Tensor) -> Tensor:
    is_aligned = weights.data_ptr() % _ALIGNMENT == 0 and weights.stride(0) * weights.element_size() % _ALIGNMENT == 0
    return weights if is_aligned else weights.clone(memory_format=torch.contiguous_format)


def _product(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    return _grouped_mm()(a, b, offs=groups.offsets)  # type: ignore[misc]


# ---- the products ----


def multiply(rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return each row times the transposed matrix of its expert: [num_rows, out] from [num_rows, in]. Its tail is not set."""
    if _is_grouped(rows, weights.shape[1]):
        return _product(aligned(rows), _aligned_matrices(weights).transpose(1, 2), groups)
    return _by_expert(rows, [weight.t() for weight in weights], groups)


def multiply_back(grads: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return each row times the matrix of its expert: [num_rows, in] from [num_rows, out]. Its tail is not set."""
    if _is_grouped(grads, weights.shape[2]):
        return _product(aligned(grads), _aligned_matrices(weights), groups)
    return _by_expert(grads, list(weights), groups)


def weight_gradients(grads: Tensor, rows: Tensor, groups: Groups, into: Tensor | None = None) -> Tensor:
    """Return, for each expert, the transposed grads [num_rows, out] times the rows [num_rows, in]: [num_experts, out, in].

    Neither tail is read. An expert without rows has zeros. `into`: [num_experts, out, in], fp32 as a rule, to which they are added; what is
    returned then is not initialized, but has the shape and the dtype. A Hopper GPU adds fp32 products to contiguous fp32 sums; elsewhere
    products are rounded to the dtype first.
    """
    if into is not None and _is_grouped(grads, rows.shape[1]) and _add_products(grads, rows, groups, into):
        return grads.new_empty(into.shape)
    return add_to(into, _weight_gradients(grads, rows, groups))


def _add_products(grads: Tensor, rows: Tensor, groups: Groups, into: Tensor) -> bool:
    """Add the products to `into` by one kernel. Return False where there is none for these tensors."""
    if torch.compiler.is_compiling() or not (is_gpu(rows.device) and hasattr(_C, "gpu_add_weight_gradients")):
        return False
    if into.device != rows.device or into.dtype != torch.float32 or not into.is_contiguous() or into.data_ptr() % _ALIGNMENT:
        return False
    if into.shape != (len(groups.offsets), grads.shape[1], rows.shape[1]) or rows.dtype != grads.dtype:
        return False
    return launch(_C.gpu_add_weight_gradients, aligned(grads), aligned(rows), groups.offsets, into, on=rows)


def add_to(into: Tensor | None, gradients: Tensor) -> Tensor:
    """Add the gradients of weights to `into`, if it is given, and return a tensor of their shape."""
    if into is not None:
        into.add_(gradients)
    return gradients


def _weight_gradients(grads: Tensor, rows: Tensor, groups: Groups) -> Tensor:
    if _is_grouped(grads, rows.shape[1]):
        return _product(aligned(grads).t(), aligned(rows), groups)
    result = grads.new_empty(len(groups.sizes), grads.shape[1], rows.shape[1])
    for one, of_expert in zip(result, groups.slices(), strict=True):
        torch.mm(grads[of_expert].t(), rows[of_expert], out=one)
    return result


def group_sums(rows: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each expert's rows: [num_experts, columns]. The tail is not read."""
    if _is_grouped(rows, 8):
        # A product with ones keeps sums in fp32 and adds in one order. PyTorch's index_add_ does neither.
        return weight_gradients(rows.new_ones(len(rows), 8), rows, groups)[:, 0]
    return torch.stack([rows[of_expert].sum(0) for of_expert in groups.slices()])


def _by_expert(rows: Tensor, matrices: Sequence[Tensor], groups: Groups) -> Tensor:
    result = rows.new_empty(len(rows), matrices[0].shape[1])
    for matrix, of_expert in zip(matrices, groups.slices(), strict=True):
        torch.mm(rows[of_expert], matrix, out=result[of_expert])
    return result
