"""Tables of the docs that name no record in their rows repeat the records that stand above them."""

import json
import re

from scripts import ROOT

DOCS = ROOT / "docs"


def records_of(name):
    newest = max((ROOT / "benchmarks" / "results").glob(f"{name}-????-??-??.json"))
    return json.loads(newest.read_text())


def rows_below(page, title):
    """The cells of the rows of the table whose title row begins with `title`."""
    lines = (DOCS / page).read_text().split(title, 1)[1].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]


def only(records, **kind):
    (record,) = [record for record in records if {field: record.get(field) for field in kind} == kind]
    return record


def test_exchange_over_virtual_nodes():
    records, one_node = records_of("h200-nvshmem-2x2"), records_of("h200-nvlink")
    rows = rows_below("design/nvshmem.md", "| SMs that move rows | dispatch bf16, us | dispatch fp8, us | combine bf16, us |")
    assert [row[0] for row in rows] == ["2", "4", "8", "16", "`nvlink`"]
    for num_sms, *cells in rows:
        for cell, name in zip(cells, ("dispatch bf16 rank", "dispatch fp8 rank", "combine bf16 rank"), strict=True):
            kind = {"name": name, "num_ranks": 4, "num_tokens": 4096, "num_sms": None}
            is_nvlink = num_sms == "`nvlink`"
            record = only(one_node if is_nvlink else records, **kind, **({} if is_nvlink else {"num_rail_sms": int(num_sms)}))
            assert cell == f"{record['us_median']:.0f}", (num_sms, name)


def test_exchange_at_a_networks_pace():
    records = records_of("h200-nvshmem-paced")
    rows = rows_below("design/nvshmem.md", "| rate of a card, GB/s | dispatch, us | ratio | combine, us | ratio | bytes at that rate, us |")
    assert len(rows) == 4
    for rate, *cells, at_rate in rows[:3]:
        for op, us, ratio in (("dispatch", *cells[:2]), ("combine", *cells[2:])):
            record = only(records, op=f"{op} paced", rate_gbps=float(rate))
            assert [us, ratio, at_rate] == [f"{record['us_median']:.0f}", f"{record['pipeline_ratio']:.2f}", f"{record['rival_us']:.0f}"]


def test_small_batches_by_size():
    records = records_of("h200-low-latency")
    names = ("dispatch fp8", "dispatch bf16", "combine bf16", "combine fp8")
    rows = rows_below("limits.md", "| tokens | dispatch fp8, EP4 | EP2 |")
    assert [row[0] for row in rows] == ["1", "8", "32", "128", "256", "512"]
    for num_tokens, *cells in rows:
        for cell, (name, num_ranks) in zip(cells, [(name, n) for name in names for n in (4, 2)], strict=True):
            kind = {"name": f"low-latency {name}", "num_ranks": num_ranks, "num_tokens": int(num_tokens), "half": "both", "graph": True}
            assert cell == f"{only(records, **kind)['us_graph_of_20']:.1f}", (num_tokens, name, num_ranks)


def test_time_of_the_host():
    records = records_of("h100-host-before")
    layer = ("layer forward", "layer backward", "layer backward alone")
    names = (*layer, "dispatch", "dispatch cached", "combine", "gate", "gate dense", "low-latency")
    rows = rows_below("benchmarks.md", "| eager call | host |")
    assert [us for _, us in rows] == [f"{only(records, op=f'host {name}')['us_median']:.0f} us" for name in names]


def test_other_libraries_on_two_gpus():
    """A call of 4096 tokens with the default SMs, one of 128 from a CUDA graph."""
    rows = rows_below("benchmarks.md", "| 2 x H100 | tokens a rank | deepep_moe | DeepEP V1 | DeepEP V2 | NCCL EP |")
    assert len(rows) == 7
    for label, num_tokens, *cells in rows:
        operation = label.replace(", layout `rank`", " rank").replace(", layout `expert`", " expert")
        small = operation.removeprefix("low-latency ") if num_tokens == "128" else None
        files = ["h100-peers"] * 3 + ["h100-peers-nccl-ep"]
        if small:
            files = ["h100-peers-low-latency-v1"] * 2 + ["h100-peers-low-latency-v2", ""]
        for cell, file, prefix in zip(cells, files, ("", "deep_ep ", "deep_ep_v2 ", "nccl_ep "), strict=True):
            kind = {
                "name": f"low-latency {prefix}{small}" if small else f"{prefix}{operation}",
                "num_ranks": 2,
                "num_tokens": int(num_tokens),
            }
            kind |= {"half": "both", "graph": True} if small else {} if prefix else {"num_sms": None}
            fitting = [record for record in records_of(file) if {field: record[field] for field in kind} == kind] if file else []
            assert [cell] == ([f"{record['us_median']:.0f} us" for record in fitting] or ["none"]), (label, prefix)


def test_other_libraries_on_four_gpus():
    rows = rows_below("benchmarks.md", "| 4 x H200 | tokens a rank | deepep_moe | DeepEP V1 | DeepEP V2 |")
    assert len(rows) == 9
    for label, num_tokens, *cells in rows:
        is_small = "no graph" in label
        records = records_of("h200-peers-low-latency-v1" if is_small else "h200-peers")
        name = re.sub(r", layout `(\w+)`", r" \1", label.removeprefix("low-latency ").removesuffix(", no graph"))
        for cell, library in zip(cells, ("", "deep_ep ", "deep_ep_v2 "), strict=True):
            kind = {"name": f"{'low-latency ' if is_small else ''}{library}{name}", "num_tokens": int(num_tokens), "num_ranks": 4}
            kind |= {"half": "both", "graph": False} if is_small else {} if library else {"num_sms": None}
            fitting = [record for record in records if {key: record.get(key) for key in kind} == kind]
            assert cell in ("none", "not timed") if not fitting else cell == f"{only(fitting)['us_median']:.0f} us", (label, library)


def test_drop_in_on_four_gpus():
    records = records_of("h200-peers-drop-in")
    rows = rows_below("benchmarks.md", "| 4 x H200 | our own calls | V1's interface | V2's interface | DeepEP V1 |")
    assert len(rows) == 4
    for label, *cells in rows:
        call, _, which = label.partition(", ")
        for cell, prefix in zip(cells, ("", "drop_in ", "drop_in_v2 ", "deep_ep "), strict=True):
            record = only(records, name=f"{prefix}{call} rank", num_tokens=4096, **({} if prefix else {"num_sms": None}))
            assert cell == f"{record['us_median' if 'busy' in which else 'call_us']:.0f} us", (label, prefix)


def test_layer_with_fp8_experts():
    """Kernels and host beside the times."""
    by_8 = records_of("h100-fp8-layer-8-graphs")
    each, shared = (only(by_8, op=f"fp8 layer {name}", rival="bf16") for name in ("fp8", "fp8, micro-batches"))
    theirs = only(by_8, op="fp8 layer fp8, micro-batches", rival="alltoall, TE fp8, micro-batches")
    rows = rows_below("benchmarks.md", "| one H100, 8 micro-batches | bf16 | fp8 |")
    for (name, *cells), field in zip(rows, ("kernel_us", "host_us"), strict=True):
        values = each[f"rival_{field}"], each[field], shared[field], theirs[f"rival_{field}"]
        assert cells == [f"{value / 1e3:.1f}" for value in values], name


def test_fast_mode_of_deepspeed():
    """Its columns stand in the rows of exact mode, whose comments name the record."""
    page = (DOCS / "benchmarks.md").read_text()
    rows = re.findall(r"^\|.+\| (\S+) ms \| (\S+)x \| <!-- (\S+-ep2-\S+) (deepspeed .+) / deepspeed -->$", page, re.MULTILINE)
    rows = [row for row in rows if " exact " in row[3]]
    assert len(rows) == 2
    for ms, ratio, file, op in rows:
        records = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
        record = only(records, op=op.replace(" exact ", " fast "), rival="deepspeed")
        assert (ms, ratio) == (f"{record['us_median'] / 1e3:.1f}", f"{record['ratio']:.1f}"), op


def test_other_steps_of_megatron_lm():
    records = records_of("h200-trainer-shapes")
    for step, ms, kernels, rival, rival_ms, rival_kernels, times in rows_below("megatron.md", "| step | the flag alone, ms | kernels |"):
        sizes = {
            "hidden": 4096 if "4096" in step else 2048,
            "num_topk": 6 if "top-6" in step else 8,
            "num_tokens": 65536 if "micro" in step else 16384,
        }
        ours, theirs = (only(records, op=f"trainer {run}", **sizes) for run in ("flag", rival.strip("`")))
        for record, clock, busy in ((ours, ms, kernels), (theirs, rival_ms, rival_kernels)):
            assert (
                clock == f"{record['us_median'] / 1e3:.0f} ({record['us_least'] / 1e3:.0f})" and busy == f"{record['us_kernels'] / 1e3:.0f}"
            ), step
        assert ours["rival"] == rival.strip("`") and times == f"{ours['ratio']:.2f}x", step


def test_unbalanced_ranks():
    records = records_of("h200-balance-ep2")
    rows = rows_below("benchmarks.md", "| MaxVio of experts | rows of the busiest rank |")
    assert len(rows) == len(records) - 1
    for max_vio, rows_of_rank, layer, balanced in rows:
        record = only(records, op=f"balance MaxVio {max_vio}")
        assert rows_of_rank == f"{record['rank_overload']:.2f}", max_vio
        assert (layer, balanced) == tuple(f"{record[name] / 1e3:.2f} ms" for name in ("rival_us", "us_median")), max_vio
    records = sorted(records_of("h200-balance-copies-ep2"), key=lambda record: (record["hidden"], record["rank_overload"]))
    for row, record in zip(rows_below("benchmarks.md", "| sizes of | rows of the busiest rank |"), records, strict=True):
        layer, copies = record["rival_us"], record["copies_us"]
        assert row[1:] == [
            f"{record['rank_overload']:.2f}", f"{layer / 1e3:.2f} ms", f"{copies / 1e3:.2f} ms", f"{layer / copies:.2f}x"
        ]  # fmt: skip
        assert row[0] == {2880: "GPT-OSS-20B", 4096: "Qwen3-235B"}[record["hidden"]]


def test_a_step_of_megatron_lm():
    records = {num_ranks: records_of(f"h200-trainer-ep{num_ranks}") for num_ranks in ("4", "2")}
    rows = rows_below("megatron.md", "| GPUs | run | ms an iteration, median (least) |")
    assert len(rows) == sum(map(len, records.values()))
    for num_ranks, name, ms, kernels, memory, times in rows:
        run = "flag" if name.startswith("deepep_moe") else "alltoall" if "alltoall" in name else "allgather"
        record = only(records[num_ranks], op=f"trainer {run}{'_graphs' if name.endswith('graphs') else ''}")
        assert ms == f"{record['us_median'] / 1e3:.0f} ({record['us_least'] / 1e3:.0f})", name
        assert (kernels, memory) == (f"{record['us_kernels'] / 1e3:.0f}", f"{record['peak_bytes'] / 1e9:.1f} GB"), name
        rival, _, graphs = record["rival"].partition("_")
        faster = f"{record['ratio']:.2f}x of `{rival}`{' with graphs' if graphs else ''}"
        assert times == (faster if run == "flag" else ""), name


def figures_of(file):
    """Microseconds by (backend, operation, wire, half)."""
    return {(r["backend"], r["op"], r["wire"], r["half"]): f"{r['us_median']:.1f}" for r in records_of(file)}


def test_halves_of_low_latency_calls_over_nodes():
    page = (DOCS / "design/low_latency_nodes.md").read_text()
    rows = re.findall(r"^\| (dispatch|combine)(.*), (send|hook) \| (.+) \|$", page, re.MULTILINE)
    runs = [figures_of(f"{name}-low-latency-nodes-2x2{gpus}") for name, gpus in (("h200", ""), ("h100", ""), ("h200", "-four-gpus"))]
    assert len(rows) == 8
    for op, name, half, text in rows:
        aim, one_node, *figures = text.split(" | ")
        key = op, "fp8" if "fp8" in name else "bf16", "receive" if half == "hook" else "send"
        assert one_node == runs[0]["nvlink", *key], key
        assert [figure.strip("*") for figure in figures] == [run["nvshmem", *key] for run in runs], key
        for figure in figures:
            assert figure.startswith("**") == (float(figure.strip("*")) <= int(aim)), (key, figure)
