"""MoE layers of Megatron-Core and DeepSpeed, with our exchange and with theirs."""
