"""deepep_moe as a token dispatcher of Megatron-Core 0.13 to 0.19.

From code: `enable()` before the model is built, and `moe_flex_dispatcher_backend="deepep_moe"` in the config.
Without editing a script: `python -m deepep_moe.integrations.megatron pretrain_gpt.py ...` with `--moe-flex-dispatcher-backend
deepep_moe` among its arguments. `enable()` says what to give 0.13 to 0.15.

Importing this package does not import Megatron-Core.
"""

from deepep_moe.integrations.common.registry import recover, resume, suspend
from deepep_moe.integrations.megatron.plugin import disable, enable, grow_recv_capacity, take_metrics

__all__ = ["enable", "disable", "take_metrics", "recover", "grow_recv_capacity", "suspend", "resume"]
