"""From the dense map to top-k lists: cases small enough to check by eye."""

import pytest
import torch

from deepep_moe.integrations.megatron.routing import choice_of_shards, repeat_for_tp, topk_from_dense


def topk_from_map(routing_map, num_topk):
    return topk_from_dense(routing_map, torch.zeros(routing_map.shape), num_topk)[0]


def test_topk_comes_from_the_map_in_ascending_order():
    routing_map = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert topk_from_map(routing_map, 2).tolist() == [[1, 3], [0, -1], [-1, -1], [2, 3]]
    assert topk_from_map(routing_map, 2).dtype == torch.int64


def test_more_lanes_than_experts_stay_empty():
    assert topk_from_map(torch.tensor([[True, True]]), 3).tolist() == [[0, 1, -1]]


def test_no_tokens():
    assert topk_from_map(torch.zeros(0, 4, dtype=torch.bool), 2).shape == (0, 2)


def test_a_token_with_too_many_experts_names_one_that_is_none():
    assert topk_from_map(torch.tensor([[True, True, False], [False, True, False]]), 1).tolist() == [[3], [1]]


def test_a_chosen_expert_of_prob_zero_stays_chosen():
    probs = torch.tensor([[0.0, 0.7, 0.0, 0.3]])
    topk_idx, weights = topk_from_dense(torch.tensor([[True, True, False, False]]), probs, 2)
    assert topk_idx.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, pytest.approx(0.7)]]


def test_weights_are_fp32_and_differentiable_where_chosen():
    probs = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64, requires_grad=True)
    _, weights = topk_from_dense(torch.tensor([[False, True, False]]), probs, 2)
    assert weights.dtype == torch.float32 and weights.tolist() == [[0.5, 0.0]]
    weights.sum().backward()
    assert probs.grad.tolist() == [[0.0, 1.0, 0.0]]


def test_every_shard_of_an_expert_is_addressed():
    # 4 experts, 2 per expert-parallel rank, 2 shards each: ranks (e, t) = (0, 0), (0, 1), (1, 0), (1, 1) hold "experts" 01, 23, 45, 67.
    topk_idx, weights = repeat_for_tp(torch.tensor([[1, 2], [3, -1]]), torch.tensor([[0.1, 0.2], [0.3, 0.0]]), 2, 2)
    assert topk_idx.tolist() == [[1, 3, 4, 6], [5, 7, -1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.1, 0.2, 0.2], [0.3, 0.3, 0.0, 0.0]]))


def test_one_shard_changes_nothing():
    topk_idx, weights = torch.tensor([[1, -1]]), torch.rand(1, 2)
    assert repeat_for_tp(topk_idx, weights, 2, 1) == (topk_idx, weights)


@pytest.mark.parametrize("tp_size", (1, 2, 4))
def test_the_choice_is_read_from_its_shards(tp_size):
    choice = torch.tensor([[1, 2, -1], [7, 0, 5], [-1, -1, -1]])
    topk_idx, _ = repeat_for_tp(choice, torch.ones(3, 3), 2, tp_size)
    found = choice_of_shards(topk_idx.to(torch.int32), 2, tp_size)
    assert torch.equal(found, choice) and found.dtype == torch.int64
