"""Refuse to save a spread model as a whole: this rank has only its own experts, under names that no model has."""

import functools
import sys
import types
from typing import Any

from torch import nn

from deepep_moe.nn.rank_parameters import RankExperts

# Functions that save the state dict of one rank as that of the model, or drop what other ranks have under the same names.
_SAVERS = {
    ("transformers.modeling_utils", "save_pretrained"),
    ("transformers.trainer", "_save"),
    ("accelerate.accelerator", "get_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "get_model_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "get_state_dict"),
}
_ADAPTER_SAVERS = {("peft.utils.save_and_load", "get_peft_model_state_dict")}


class _SavingError(ValueError):
    def __init__(self, who: str):
        super().__init__(
            f"{who} would save the experts of one rank as those of the model, which spread_experts has spread; save the model before "
            "spread_experts, or keep a file of each rank: torch.save(model.state_dict(), f'rank{rank}.pt')"
        )


def refuse_state_dict(layer: RankExperts, *_: Any) -> None:
    """Raise ValueError where a library asks for the state dict of the model. A caller's own `state_dict()` is that of its rank."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_globals.get("__name__"), frame.f_code.co_name
        if caller in _SAVERS or (caller in _ADAPTER_SAVERS and _is_trained(layer)):
            raise _SavingError(caller[1])
        frame = frame.f_back  # type: ignore[assignment]


def guard(model: nn.Module) -> None:
    """Refuse `save_pretrained` of the model and of models in it, also with a state dict of this rank, and `Trainer.save_model`."""
    for module in model.modules():
        has_own = "save_pretrained" in vars(module) or hasattr(module, "get_base_model")
        if not has_own and hasattr(type(module), "save_pretrained") and _layers(module):
            vars(module)["save_pretrained"] = types.MethodType(_save_pretrained, module)
    guard_trainer()


def guard_trainer() -> None:
    """Let `Trainer.save_model` raise on all ranks, where only the first one saves and its peers would train on."""
    trainer = sys.modules.get("transformers.trainer")
    if trainer is not None and not hasattr(trainer.Trainer.save_model, "refuses_spread_models"):
        save_model = trainer.Trainer.save_model

        @functools.wraps(save_model)
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            layers = _layers(self.model)
            if layers and (not hasattr(self.model, "get_base_model") or any(map(_is_trained, layers))):
                raise _SavingError("Trainer.save_model")
            return save_model(self, *args, **kwargs)

        refuse.refuses_spread_models = True  # type: ignore[attr-defined]
        trainer.Trainer.save_model = refuse


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    state = kwargs.get("state_dict") if len(args) < 2 else args[1]
    own = {id(parameter) for layer in _layers(self) for parameter in layer.expert_parameters()}
    names = {name for name, parameter in self.named_parameters(remove_duplicate=False) if id(parameter) in own}
    if state is None or not names.isdisjoint(state):
        raise _SavingError("save_pretrained")
    return type(self).save_pretrained(self, save_directory, *args, **kwargs)


def _layers(model: nn.Module) -> list[RankExperts]:
    return [module for module in model.modules() if isinstance(module, RankExperts)]


def _is_trained(layer: RankExperts) -> bool:
    return any(parameter.requires_grad for parameter in layer.expert_parameters())
