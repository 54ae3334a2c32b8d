from torch import nn

class Experts(nn.Module):
    deepspeed_experts: nn.ModuleList
