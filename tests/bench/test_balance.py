"""The benchmark of unbalanced ranks: what its routings are, and its records, on the CPU."""

import pytest
import torch
from bench_cases import bench

from benchmarks.balance import workloads
from benchmarks.balance.workloads import WORKLOADS, Routing
from deepep_moe.nn.writers import RoutingTrace

EXPERTS, TOPK, TOKENS = 32, 4, 4096


def rows_of(name, step=0):
    return workloads.workload(name, EXPERTS, 0).rows_per_expert(TOKENS, TOPK, step)


def overload(rows, num_parts):
    """Rows of the busiest of equal parts of the experts, over the mean."""
    of_parts = rows.view(num_parts, -1).sum(1).double()
    return float(of_parts.max() / of_parts.mean())


def test_rows_by_hand():
    """Shares of 8 rows are 4, 2, 1.5 and 0.5: what is missing goes to the largest remainder, and to the first of equal ones."""
    routing = Routing("by hand", lambda step: torch.tensor([8.0, 4.0, 3.0, 1.0], dtype=torch.float64))
    drawn = routing.draw(4, 2, 0)
    assert (drawn == 0).any(1).all() and drawn.flatten().bincount(minlength=4).tolist() == [4, 2, 2, 0]
    with pytest.raises(ValueError, match=r"by hand: a token would choose the busiest expert 1.50 times; give a smaller"):
        routing.draw(4, 3, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_of_a_token(name):
    """Experts of a token differ. Name, seed and step decide, and ranks have parts of one batch: two of four that of one of two."""
    routing = workloads.workload(name, EXPERTS, 7)
    drawn = routing.draw(TOKENS, TOPK, 3)
    ordered = drawn.sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all() and torch.equal(drawn.flatten().bincount(minlength=EXPERTS) == 0, rows_of(name, 3) == 0)
    others = [workloads.workload(name, EXPERTS, 7).draw(TOKENS, TOPK, step) for step in (3, 2)]
    assert [torch.equal(drawn, other) for other in others] == [True, False]
    by_size = {num: [drawn[routing.tokens_of(rank, num, TOKENS)] for rank in range(num)] for num in (2, 4)}
    assert torch.equal(torch.cat(by_size[4]), drawn) and torch.equal(torch.cat(by_size[4][2:]), by_size[2][1])
    assert list(map(len, by_size[4])) == ([256, 768, 1280, 1792] if name == "W4" else [1024] * 4)


@pytest.mark.parametrize(("num_experts", "num_topk"), [(32, 4), (256, 8)])
def test_max_vio_is_reached(num_experts, num_topk):
    for max_vio in (0, 0.5, 1, 2, 4):
        rows = workloads.lognormal(max_vio, num_experts, 3).rows_per_expert(TOKENS, num_topk, 0)
        assert overload(rows, num_experts) == pytest.approx(1 + max_vio, rel=0.02) and int(rows.sum()) == TOKENS * num_topk


def test_workloads():
    """Four hot experts of 32 have 8 of each 15 rows. By 8 ranks: W2 has them on one, W3 on four, and W1 anywhere."""
    rows = {name: rows_of(name) for name in WORKLOADS}
    for name in ("W1", "W2", "W3", "W6"):
        assert overload(rows[name], EXPERTS) == pytest.approx(64 / 15, rel=0.01) and int((rows[name] > 1000).sum()) == 4
    assert (rows["W3"] > 1000).nonzero().flatten().tolist() == [0, 8, 16, 24]
    assert {name: round(overload(rows[name], 8), 2) for name in ("W0", "W2", "W3", "W4")} == {"W0": 1, "W2": 4.27, "W3": 1.47, "W4": 1}
    assert 1 < overload(rows["W1"], 8) < 4.2, "not all on one rank"
    assert (rows["W5"] == 0).nonzero().flatten().tolist() == [3, 7, 11, 15, 19, 23, *range(24, 32)]
    assert [int(rows_of("W6", step).view(8, -1).sum(1).argmax()) for step in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert [overload(rows_of("W7", step), 8) > 4 for step in range(8)] == [False, False, False, True] * 2


def recorded(folder, num_local_experts):
    """A trace of two ranks, three different forwards of two layers. Experts of rank 1 have 30 rows more."""
    traces = [RoutingTrace(folder, rank) for rank in range(2)]
    for rank, trace in enumerate(traces):
        trace.write(list(torch.arange(6 * num_local_experts).view(2, 3, -1) + 20 + 30 * rank))
    return [trace.path for trace in traces]


def test_trace(tmp_path):
    """Each forward of each layer has its turn. With its own tokens and top-k a step has the rows that were recorded."""
    files = recorded(tmp_path, 2)
    routing = workloads.trace(files, 4, 0)
    drawn = [routing.draw(int(routing.popularity(step).sum()) // 2, 2, step) for step in range(6)]
    assert {tuple(each.flatten().bincount().tolist()) for each in drawn} == {(20 + n, 21 + n, 50 + n, 51 + n) for n in range(0, 12, 2)}
    with pytest.raises(ValueError, match="^--trace has 6 forwards of 4 experts; give the files of all ranks, and --num-experts$"):
        workloads.trace(files, 8, 0)


TINY = ["--device", "cpu", "--num-ranks", "2", "--num-tokens", "96", "--hidden", "32", "--ffn-hidden", "16"]


def test_records(tmp_path):
    """Ranks' loads by hand: of 16 experts two are hot, so W2 gives rank 0 of 2 (16 + 6) / 30 of the rows."""
    arguments = ["--max-vio", "1", "--workload", "W2", "W7", "--repeats", "4", "--slots", "2"]
    _, records = bench(tmp_path, *TINY, *arguments, command="balance", backend="auto")
    records = {record["op"].removeprefix("balance "): record for record in records}
    for r in records.values():
        assert (r["num_ranks"], r["num_tokens"], r["num_topk"], r["rival"]) == (2, 96, 2, "unbalanced")
        assert r["copies_us"] > 0 and r["num_slots"] == 2
        assert r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"]) and r["rival_us_p90"] >= r["rival_us"]
        assert r["experts_us"] > 0 and r["rival_experts_us"] > 0
        assert 0 < r["bytes_moved"] <= 4 * 2 * 32 * 96 and r["bytes_moved"] % (4 * 2 * 32) == 0
    loads = {name: [r["max_vio"], r["rank_overload"], r["max_rank_overload"]] for name, r in records.items()}
    assert loads.pop("MaxVio 1")[0] == pytest.approx(1, abs=0.03)
    hot = {"W2": [49 / 15, 22 / 15, 22 / 15], "W7": [49 / 60, (3 + 22 / 15) / 4, 22 / 15]}
    assert loads == {name: pytest.approx(values, rel=0.02) for name, values in hot.items()}
