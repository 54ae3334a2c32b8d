"""The benchmark of unbalanced ranks: what its routings are, and its records, on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from bench_cases import RECORD_FIELDS, bench, options_of

from benchmarks.balance import command, workloads
from benchmarks.balance.workloads import WORKLOADS, Routing
from deepep_moe.nn.writers import RoutingTrace

EXPERTS, TOPK, TOKENS = 32, 4, 4096


def routings():
    return [workloads.workload(name, EXPERTS, 7) for name in WORKLOADS] + [workloads.lognormal(2, EXPERTS, 7)]


def rows_of(routing, step=0):
    return routing.rows_per_expert(TOKENS, TOPK, step)


def overload(rows, parts=EXPERTS):
    """Rows of the busiest of equal parts of the experts, over the mean."""
    of_parts = rows.view(parts, -1).sum(1).double()
    return float(of_parts.max() / of_parts.mean())


def test_rows_by_hand():
    """Shares of 8 rows are 4, 2, 1.5 and 0.5: what is missing goes to the largest remainder, and to the first of equal ones."""
    routing = Routing("by hand", lambda step: torch.tensor([8.0, 4.0, 3.0, 1.0], dtype=torch.float64))
    assert routing.rows_per_expert(4, 2, 0).tolist() == [4, 2, 2, 0]
    drawn = routing.draw(4, 2, 0)
    assert (drawn == 0).any(1).all() and drawn.flatten().bincount(minlength=4).tolist() == [4, 2, 2, 0]
    with pytest.raises(ValueError, match=r"by hand: a token would choose the busiest expert 1.50 times; give a smaller"):
        routing.draw(4, 3, 0)


@pytest.mark.parametrize("routing", routings(), ids=lambda routing: routing.name)
def test_rows_of_a_token(routing):
    drawn = routing.draw(TOKENS, TOPK, 3)
    assert drawn.shape == (TOKENS, TOPK) and drawn.dtype == torch.int64
    ordered = drawn.sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all() and int(drawn.min()) >= 0 and int(drawn.max()) < EXPERTS
    assert torch.equal(drawn.flatten().bincount(minlength=EXPERTS), rows_of(routing, 3))
    again = next(each for each in routings() if each.name == routing.name)
    assert torch.equal(drawn, again.draw(TOKENS, TOPK, 3)), "name, seed and step decide"
    assert not torch.equal(drawn, routing.draw(TOKENS, TOPK, 2))


@pytest.mark.parametrize("name", ["W2", "W4"])
def test_ranks_have_parts_of_one_batch(name):
    """Two ranks of four have the tokens of one rank of two."""
    routing = workloads.workload(name, EXPERTS, 0)
    tokens = list(range(TOKENS))
    for num_ranks in (1, 2, 4, 8):
        assert [token for rank in range(num_ranks) for token in tokens[routing.tokens_of(rank, num_ranks, TOKENS)]] == tokens
    assert routing.tokens_of(1, 2, TOKENS) == slice(routing.tokens_of(2, 4, TOKENS).start, routing.tokens_of(3, 4, TOKENS).stop)


def test_experts_of_a_token_are_mixed():
    """A token of a balanced routing goes to as many of 8 ranks as experts drawn at random do."""
    drawn = workloads.workload("W0", EXPERTS, 0).draw(TOKENS, TOPK, 0)
    ranks = torch.nn.functional.one_hot(drawn // 4, 8).amax(1).sum(1).double().mean()
    random = 8 * (1 - 28 * 27 * 26 * 25 / (32 * 31 * 30 * 29))
    assert float(ranks) == pytest.approx(random, rel=0.03)
    assert len(drawn.sort(1).values.unique(dim=0)) > TOKENS / 8


@pytest.mark.parametrize("max_vio", [0, 0.5, 1, 2, 4])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(32, 4), (256, 8)])
def test_max_vio_is_reached(max_vio, num_experts, num_topk):
    rows = workloads.lognormal(max_vio, num_experts, 3).rows_per_expert(TOKENS, num_topk, 0)
    assert overload(rows, num_experts) == pytest.approx(1 + max_vio, rel=0.02) and int(rows.sum()) == TOKENS * num_topk


def test_hot_experts():
    """Four of 32 experts have 8 of each 15 rows. By 8 ranks: W2 has them on one, W3 on four, and W1 anywhere."""
    hot = 8 * 8 / 15
    rows = {name: rows_of(workloads.workload(name, EXPERTS, 0)) for name in WORKLOADS}
    for name in ("W1", "W2", "W3", "W6"):
        assert overload(rows[name]) == pytest.approx(hot, rel=0.01) and int((rows[name] > 1000).sum()) == 4
    assert rows["W3"].nonzero().numel() == EXPERTS and (rows["W3"] > 1000).nonzero().flatten().tolist() == [0, 8, 16, 24]
    assert {name: round(overload(rows[name], 8), 2) for name in ("W0", "W2", "W3", "W4")} == {"W0": 1, "W2": 4.27, "W3": 1.47, "W4": 1}
    assert 1 < overload(rows["W1"], 8) < 4.2, "not all on one rank"


def test_tokens_are_ragged():
    routing = workloads.workload("W4", EXPERTS, 0)
    assert [len(range(TOKENS)[routing.tokens_of(rank, 4, TOKENS)]) for rank in range(4)] == [256, 768, 1280, 1792]
    assert not any(workloads.workload(name, EXPERTS, 0).is_ragged for name in WORKLOADS if name != "W4")


def test_experts_and_ranks_without_rows():
    rows = rows_of(workloads.workload("W5", EXPERTS, 0))
    assert (rows == 0).nonzero().flatten().tolist() == [3, 7, 11, 15, 19, 23, *range(24, 32)]
    assert (rows.view(4, -1).sum(1) == 0).tolist() == [False, False, False, True]


def test_a_hot_spot_that_moves_and_one_that_comes_and_goes():
    moving, burst = (workloads.workload(name, EXPERTS, 0) for name in ("W6", "W7"))
    assert [int(rows_of(moving, step).view(8, -1).sum(1).argmax()) for step in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert [overload(rows_of(burst, step)) > 2 for step in range(8)] == [False, False, False, True] * 2


def recorded(folder: Path, num_local_experts: int = 2):
    """A trace of two ranks: three forwards of two layers. All its forwards differ."""
    files = []
    for rank in range(2):
        trace = RoutingTrace(folder, rank)
        rows = torch.arange(6 * num_local_experts).view(2, 3, -1) + 20 + 30 * rank
        trace.write(list(rows))
        files.append(trace.path)
    return files


def test_trace(tmp_path):
    """Each forward of each layer has its turn, with the rows that were recorded: 50 and more for experts of rank 1."""
    files = recorded(tmp_path)
    routing = workloads.trace(files, 4, 0)
    found = {tuple(routing.popularity(step).int().tolist()) for step in range(6)}
    assert found == {(20 + n, 21 + n, 50 + n, 51 + n) for n in range(0, 12, 2)}
    num_tokens = int(routing.popularity(2).sum()) // 2
    rows = routing.draw(num_tokens, 2, 2).flatten().bincount(minlength=4)
    assert torch.equal(rows.double(), routing.popularity(2)), "the same top-k and tokens: the same rows"
    with pytest.raises(ValueError, match="^--trace has 6 forwards of 4 experts; give the files of all ranks, and --num-experts$"):
        workloads.trace(files, 8, 0)


TINY = ["--device", "cpu", "--num-ranks", "2", "--num-tokens", "96", "--hidden", "32", "--ffn-hidden", "16", "--num-experts", "16"]


def test_records(tmp_path):
    """Ranks' loads by hand: of 16 experts two are hot, so W2 gives rank 0 of 2 (16 + 6) / 30 of the rows."""
    trace = [str(path) for path in recorded(tmp_path / "trace", 8)]
    path = tmp_path / "balance.json"
    arguments = ["--max-vio", "1", "--workload", "W2", "W4", "W5", "W7", "--trace", *trace, "--repeats", "4", "--json", str(path)]
    done = bench(*TINY, *arguments, command="balance", backend="auto")
    assert done.returncode == 0, done.stdout + done.stderr
    records = {record["op"].removeprefix("balance "): record for record in json.loads(path.read_text())}
    assert list(records) == ["MaxVio 1", "W2", "W4", "W5", "W7", "trace"]
    for r in records.values():
        assert set(r) >= RECORD_FIELDS and (r["num_ranks"], r["num_tokens"], r["num_topk"], r["rival"]) == (2, 96, 2, "unbalanced")
        assert r["ratio"] == pytest.approx(r["rival_us"] / r["us_median"]) and r["rival_us_p90"] >= r["rival_us"]
        assert 0 < r["experts_us"] < r["us_median"] * 3 and r["rival_experts_us"] > 0
        assert 0 < r["bytes_moved"] <= 4 * 2 * 32 * 96 and r["bytes_moved"] % (4 * 2 * 32) == 0
        assert 1 <= r["rank_overload"] <= r["max_rank_overload"] <= 2
    loads = {name: (r["max_vio"], r["rank_overload"], r["max_rank_overload"]) for name, r in records.items()}
    assert loads["MaxVio 1"][0] == pytest.approx(1, abs=0.03)
    assert loads["W2"] == pytest.approx((8 * 8 / 15 - 1, 22 / 15, 22 / 15), rel=0.02)
    assert loads["W4"] == (0, 1, 1)
    assert loads["W5"] == pytest.approx((7 / 9, 12 / 9, 12 / 9), rel=0.02), "9 experts share the rows, 6 of them on rank 0"
    assert loads["W7"] == pytest.approx(((8 * 8 / 15 - 1) / 4, (3 + 22 / 15) / 4, 22 / 15), rel=0.02), "a burst in four steps"
    assert 1.18 < loads["trace"][1] < 1.4, "rank 1 has 240 rows more than rank 0, which has 188 to 508"
    lines = done.stdout.splitlines()
    assert lines[2].split()[:3] == ["routing", "MaxVio", "ranks"] and lines[3].startswith("MaxVio 1") and "ranks share" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    (
        (["--max-vio", "8"], "MaxVio 8: a token would choose the busiest expert 1.12 times; give a smaller --num-topk, or more"),
        (["--trace", "nowhere.npy"], "nowhere.npy"),
        (["--num-ranks", "3"], "--num-experts 16 must be a multiple of --num-ranks 3"),
    ),
)
def test_refusals(arguments, told):
    with pytest.raises((ValueError, OSError), match=told):
        options_of(command, *TINY, *arguments)


def test_defaults():
    """MaxVio is swept where nothing else is asked for. Sizes that are given stand."""
    options = options_of(command, "--device", "cpu", "--num-experts", "32")
    assert (options.shape, options.num_ranks, options.hidden, options.num_experts) == ("small", 2, 128, 32)
    assert [each.name for each in command.routings_of(options)] == [f"MaxVio {each}" for each in ("0", "0.5", "1", "2", "4")]
    options.workload = ["W3"]
    assert [each.name for each in command.routings_of(options)] == ["W3"]
