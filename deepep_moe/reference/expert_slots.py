"""What `ExpertSlots` moves: copies of experts, and their gradients."""

from torch import Tensor


def fetch(copies: list[list[int]], slots: list[Tensor], weights: list[Tensor]) -> None:
    """Fill slots[rank][j] with the weights of expert copies[rank][j], unless it is -1.

    slots, weights: for each rank, [num_slots, ...] and [num_local_experts, ...].
    """
    for rank, row in enumerate(copies):
        for slot, expert in enumerate(row):
            if expert >= 0:
                home, local = divmod(expert, len(weights[rank]))
                slots[rank][slot] = weights[home][local]


def return_gradients(copies: list[list[int]], slots: list[Tensor], grads: list[Tensor]) -> None:
    """Add slots[rank][j] to the gradients of expert copies[rank][j] at its home: in fp32, ranks ascending, rounded once.

    slots, grads: for each rank, [num_slots, ...] and [num_local_experts, ...].
    """
    totals = [grad.float() for grad in grads]
    for rank, row in enumerate(copies):
        for slot, expert in enumerate(row):
            if expert >= 0:
                home, local = divmod(expert, len(grads[rank]))
                totals[home][local] += slots[rank][slot].float()
    for grad, total in zip(grads, totals, strict=True):
        grad.copy_(total)
