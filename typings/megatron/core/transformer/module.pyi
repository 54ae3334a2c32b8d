from typing import Any

from torch import nn

class MegatronModule(nn.Module):
    config: Any

    def __init__(self, config: Any) -> None: ...
