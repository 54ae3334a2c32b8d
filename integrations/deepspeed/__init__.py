"""deepep_moe under the MoE layers of DeepSpeed 0.14.5 to 0.19.8 (`deepspeed.moe.layer.MoE`), from 0.19.2 on those of AutoEP too.

From ds_config: `"deepep_moe": {"enabled": true}`, and the script is started by `python -m deepep_moe.integrations.deepspeed train.py ...`.
In place of that launcher, call `enable()` before engines are built, or `initialize(...)` in place of `deepspeed.initialize(...)`. From
code: `replace_moe_layers(model)` before or after `deepspeed.initialize`, `restore_moe_layers(model)` to undo it.
Parameters, state dicts, gates, optimizer groups and checkpoints stay DeepSpeed's own.

Importing this package does not import DeepSpeed.
"""

from deepep_moe.integrations.common.registry import recover, resume, suspend
from deepep_moe.integrations.deepspeed.engines import disable, enable, initialize
from deepep_moe.integrations.deepspeed.expert_weights import ExpertWeights
from deepep_moe.integrations.deepspeed.plugin import replace_moe_layers, restore_moe_layers, set_is_first_microbatch

__all__ = [
    "initialize", "enable", "disable", "replace_moe_layers", "restore_moe_layers", "ExpertWeights", "set_is_first_microbatch", "recover",
    "suspend", "resume",
]  # fmt: skip
