"""What every operation of the library means, in plain PyTorch: slow, short and obviously right."""

from deepep_moe.reference.exchange import Received, combine, combine_lane_values, dispatch, layout, rank_of

__all__ = ["Received", "combine", "combine_lane_values", "dispatch", "layout", "rank_of"]
