from typing import Any

import torch
import torch.distributed as dist

class DistributedOptimizer:
    buffers: list[Any]
    data_parallel_group: dist.ProcessGroup
    gbuf_idx_to_model_idx_map: dict[int, int]
    model_chunks: list[Any]
    per_bucket_numel: list[dict[torch.dtype, list[int]]]
    per_bucket_numel_unpadded: list[dict[torch.dtype, list[int]]]

    def sharded_param_state_dp_reshardable(self, *args: object, **kwargs: object) -> Any: ...
    def sharded_param_state_fully_reshardable(self, *args: object, **kwargs: object) -> Any: ...
    def load_parameter_state_from_dp_reshardable(self, state_dict: dict[str, Any]) -> None: ...
    def get_parameter_state_dp_zero(self, *args: object, **kwargs: object) -> Any: ...
    def load_parameter_state_from_dp_zero(self, state_dict: dict[int, Any] | None, *, update_legacy_format: bool = False) -> None: ...
