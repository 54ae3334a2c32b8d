from typing import Any

import torch.distributed as dist

class MoETokenDispatcher:
    config: Any
    cudagraph_attrs: list[str]
    ep_size: int
    tp_size: int
    tp_ep_group: dist.ProcessGroup

    def __init__(self, config: object, **groups: object) -> None: ...

class MoEFlexTokenDispatcher(MoETokenDispatcher): ...
