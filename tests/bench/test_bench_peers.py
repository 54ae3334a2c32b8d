"""Other libraries in the benchmarks of exchanges and of small batches. deepep_moe's own `deep_ep` interface stands in for DeepEP."""

import argparse

import pytest
from bench_cases import options_of

import deepep_moe
from benchmarks.exchange import command as exchange
from benchmarks.low_latency import command as low_latency
from deepep_moe.compat import deep_ep
from deepep_moe.testing import run_ranks

SIZES = ["--backend", "shm", "--num-experts", "8", "--num-topk", "3", "--iterations", "2"]
OPERATIONS = {"dispatch bf16", "dispatch fp8", "combine bf16", "cached dispatch bf16"}
V1, V2 = {f"deep_ep {o} rank" for o in OPERATIONS}, {f"deep_ep_v2 {o} {layout}" for o in OPERATIONS for layout in ("rank", "expert")}
VERSION = f"9.9 of deepep-moe {deepep_moe.__version__}"
SMALL_V1 = {f"deep_ep {o}" for o in ("dispatch fp8", "dispatch bf16", "combine bf16")}
SMALL_V2 = {name.replace("deep_ep", "deep_ep_v2") for name in SMALL_V1}


def exchange_options(*peer: str) -> argparse.Namespace:
    """The options of a run on the CPU, where the command itself refuses peers."""
    return with_peers(options_of(exchange, *SIZES, "--num-tokens", "9", "--hidden", "256", "--expert-alignment", "4"), peer)


def small_options(*peer: str) -> argparse.Namespace:
    return with_peers(options_of(low_latency, *SIZES, "--num-tokens", "9", "3", "--hidden", "256"), peer)


def with_peers(options: argparse.Namespace, names: tuple[str, ...]) -> argparse.Namespace:
    return argparse.Namespace(**vars(options) | {"peer": list(names)})


def stand_in(rank: int, num_ranks: int, fault: str, run, options: argparse.Namespace):
    """Run one rank with our interface in DeepEP's place. Rank 1 has a fault."""
    deep_ep.install()
    deep_ep.__version__ = "9.9"
    changes(deep_ep.ElasticBuffer, "dispatch", asks_for_experts)
    if fault and rank == 1:
        FAULTS[fault]()
    return run(rank, num_ranks, options)


def names_of(records: list[dict], *, of_peers: bool = False) -> list[str]:
    """Return the names of the records of whole calls, of all libraries or only of other ones."""
    whole = [r for r in records if r.get("half", "both") == "both" and (r["backend"] != "shm" or not of_peers)]
    return [r["name"].removeprefix("low-latency ") for r in whole]


def measured(run, options: argparse.Namespace, fault: str = ""):
    """The report of rank 0, which must have the records and failures of rank 1."""
    first, second = run_ranks(stand_in, 2, fault, run, options)
    assert names_of(first.records) == names_of(second.records) and first.failures == second.failures
    return first


# ---- faults ----


def changes(kind: type, method: str, change) -> None:
    """Have a method return what `change` makes of its result."""
    original = getattr(kind, method)
    setattr(kind, method, lambda self, *args, **kwargs: change(original(self, *args, **kwargs), kwargs))


def one_sum_is_wrong(result, _):
    result[0][0] += 100
    return result


def asks_for_experts(result, kwargs):
    assert kwargs["num_experts"] > 0, "DeepEP takes it modulo something, beside a handle too"
    return result


def refuses(*_, **__):
    raise AssertionError("no such GPU")  # DeepEP asserts


FAULTS = {
    "V2 sum": lambda: changes(deep_ep.ElasticBuffer, "combine", one_sum_is_wrong),
    "V1 start": lambda: setattr(deep_ep.Buffer, "set_num_sms", refuses),
}
"""The fault on rank 1."""


# ---- exchanges ----


def test_records(capsys):
    options = exchange_options("deep_ep", "deep_ep_v2")
    report = measured(exchange.ExchangeRank.measure, options)
    assert report.failures == []
    records = report.records
    assert set(names_of(records, of_peers=True)) == V1 | V2 and len(records) == len(V1 | V2) + 7
    for r in (r for r in records if r["name"] in V1 | V2):
        assert r["backend"] in ("deep_ep", "deep_ep_v2") and r["versions"][r["backend"]] == VERSION
        assert f"{r['backend']} {r['op']}" in r["name"] and r["us_median"] > 0 and r["rival_us"] > 0
        assert (r["num_sms"] == 24) == (r["backend"] == "deep_ep")
    ours = {(r["op"], r["dtype"], r["layout"]): r["bytes_moved"] for r in records if r["backend"] == "shm"}
    same = [r for r in records if r["backend"] != "shm" and (r["op"], r["dtype"], r["layout"]) in ours]
    assert len(same) == 3 + 7 and all(r["bytes_moved"] == ours[r["op"], r["dtype"], r["layout"]] for r in same)
    assert all("deep_ep" not in r["versions"] for r in records if r["backend"] == "shm")
    exchange.show(records)
    assert f"other libraries: deep_ep is {VERSION}, deep_ep_v2 is {VERSION}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "timed", "failure"),
    [
        ("V1 start", V2, "deep_ep, 9 tokens: rank 1: AssertionError: no such GPU"),
        ("V2 sum", V1, "deep_ep_v2, 9 tokens: rank 1: EPError: the combine of its dispatch, layout rank, is off by "),
    ],
)
def test_what_fails_is_not_timed(fault, timed, failure):
    report = measured(exchange.ExchangeRank.measure, exchange_options("deep_ep", "deep_ep_v2"), fault)
    assert set(names_of(report.records, of_peers=True)) == timed
    assert len(report.failures) == 1 and report.failures[0].startswith(f"EP2: {failure}")


# ---- small batches ----


def test_small_batches(capsys):
    options = small_options("deep_ep", "deep_ep_v2")
    report = measured(low_latency.LowLatencyRank.measure, options)
    assert report.failures == []
    records = report.records
    theirs = {(r["name"], r["num_tokens"]) for r in records if r["backend"] != "shm"}
    assert theirs == {(f"low-latency {name}", n) for name in SMALL_V1 | SMALL_V2 for n in (3, 9)}
    for r in (r for r in records if r["backend"] != "shm"):
        assert r["versions"][r["backend"]] == VERSION and r["name"].startswith(f"low-latency {r['backend']} {r['op']}")
        assert r["num_sms"] is None and r["layout"] == ("expert" if r["backend"] == "deep_ep" else "rank")
        assert (r["rival_us"] is not None) == (r["layout"] == "expert" and r["half"] == "both")
    halves = {(r["backend"], r["half"]) for r in records}
    assert halves >= {("deep_ep", "send"), ("deep_ep", "receive"), ("deep_ep_v2", "both")} and ("deep_ep_v2", "send") not in halves
    low_latency.show(records)
    assert f"other libraries: deep_ep is {VERSION}, deep_ep_v2 is {VERSION}" in capsys.readouterr().out
