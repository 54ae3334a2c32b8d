"""The parts that a newcomer uses first: build, README, command, settings, launcher, benchmarks."""

import copy
import importlib
import json
import os
import pickle
import re
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch
from bench_cases import RECORD_FIELDS
from scripts import ROOT, run_python

import deepep_moe
from deepep_moe import build, config, errors, torch_module
from deepep_moe.command import COMMANDS, main
from deepep_moe.testing import RankFailedError, run_ranks

SHIM_BYTES = getattr(deepep_moe._C, "SHIM_BYTES", 0)


# ---- build ----


def test_features():
    built = deepep_moe.features()
    assert built["shm"] is True and built["collective"] is True and built["nvlink"] is built["found_nvcc"]
    assert built["nvshmem"] is (built["found_nvcc"] and built["found_nvshmem"])
    assert built["version"] == deepep_moe.__version__ and f'version = "{built["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert {"compiler", "found_nvcc", "found_nvshmem"} <= set(built)
    if built["found_nvcc"]:
        assert built["autograd"] is True  # as `make install` builds it
    else:
        assert built["autograd"].startswith("not built; deepep_moe was built without nvcc, so it has no kernels, which it calls; install")


def test_modules_without_kernels_are_not_built(monkeypatch, tmp_path, capsys):
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "setup.py").touch()
    monkeypatch.setattr(build, "PACKAGE", tmp_path)  # as a wheel has it
    monkeypatch.setattr(build._C, "build_info", lambda: {"nvlink": False})
    monkeypatch.setattr(build, "build", lambda modules, isolated: (modules, ""))
    with pytest.raises(SystemExit):
        build.main(["_torch"])
    assert "built without nvcc, so it has no kernels, which _torch would call; install the CUDA toolkit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"TORCH_VERSION": torch.__version__, "SHIM_BYTES": SHIM_BYTES, "connect": id}, ""),
        ({}, "not built; `deepep-moe build _torch`"),
        ({"TORCH_VERSION": "1.0", "SHIM_BYTES": SHIM_BYTES}, f"built for torch 1.0, this is {torch.__version__}; `deepep-moe build"),
        ({"TORCH_VERSION": torch.__version__, "SHIM_BYTES": 1}, "of another build than deepep_moe._C; `deepep-moe build"),
    ],
)
def test_autograd_functions_of_another_build(monkeypatch, values, reason):
    monkeypatch.setitem(sys.modules, "deepep_moe._torch", SimpleNamespace(**values) if values else None)
    monkeypatch.setattr(torch_module._C, "build_info", lambda: {"nvlink": True})
    monkeypatch.setattr(torch_module._C, "gpu_kernel_shim", object, raising=False)
    module, message = torch_module._load()
    assert (module is None) is bool(reason) is bool(message) and message.startswith(reason)


# ---- README ----


DOCUMENTS = "".join((ROOT / name).read_text() for name in ("README.md", "docs/benchmarks.md", "docs/deepspeed.md"))
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


@pytest.mark.parametrize("file", sorted(MARKDOWN), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", file.read_text()):
        if link.startswith("http"):
            continue
        target = file.parent / link if link else file
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)", target.read_text(), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], f"{link}#{anchor}"


def shown(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us:.0f} us" if us >= 10 else f"{us:.1f} us"


def test_numbers_come_from_results():
    """Rows of tables end in a comment that names a record, and repeat its figures, also of kernels. The comment is "FILE OP / RIVAL", or
    "FILE NAME [graph] EPn [of num_tokens]" for GPUs."""
    rows = [line for line in DOCUMENTS.splitlines() if re.search(r"\| \d+\.\dx \|", line)]
    rows = [row for row in rows if len(re.findall(r"\d+\.\dx", row)) < 3]  # a summary of other rows' ratios
    assert len(rows) > 50 and all(re.search(r"<!-- \S+\.json .+ -->$", row) for row in rows)
    for line in rows:
        file, key = re.search(r"<!-- (\S+) (.+) -->", line).groups()
        records = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
        if match := re.fullmatch(r"(.+?)( graph)? EP(\d)(?: of (\d+))?", key):
            name, graph, num_ranks, num_tokens = match.groups()
            kind = {"num_tokens": 128, "half": "both", "graph": True} if graph else {"num_tokens": int(num_tokens or 4096), "num_sms": None}
            kind |= {"name": name, "num_ranks": int(num_ranks)}
            (record,) = [record for record in records if {field: record[field] for field in kind} == kind]
            cells = [f"{record['us_median']:.0f} us", f"{record['rival_us']:.0f} us", f"{record['ratio']:.1f}x", f"{record['gbps']:.0f}"]
        else:
            op, rival = key.split(" / ")
            (record,) = [record for record in records if (record["op"], record["rival"]) == (op, rival)]
            cells = [shown(record["us_median"]), shown(record["rival_us"]), f"{record['ratio']:.1f}x"]
            if "rival_peak_bytes" in record:
                cells.append(f"{record['peak_bytes'] / 1e9:.1f}, {record['rival_peak_bytes'] / 1e9:.1f}")
            elif "peak_bytes" in record:
                assert f"{record['peak_bytes'] / 1e9:.1f} GB a GPU" in line
            if line.count("|") == 8:
                ours, theirs = record["us_kernels"], record["rival_us_kernels"]
                cells += [shown(ours), shown(theirs), f"{theirs / ours:.1f}x"]
        for cell in cells:
            assert f"| {cell} |" in line, f"{cell} is not in {line}"


@pytest.mark.skipif(not deepep_moe.features()["found_nvcc"], reason="the sizes of GPU workspaces are compiled with nvcc only")
@pytest.mark.parametrize("name", ("megatron.md", "deepspeed.md"))
def test_tables_of_memory(name):
    """Ranks, hidden and tokens a rank, then GiB: of Megatron's layers, of DeepSpeed's in exact mode with top-2 and top-8, and fast."""
    rows = re.findall(r"^\| (\d+), (\d+), (\d+) \| (.+) \|$", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE)
    assert len(rows) >= 4
    for num_ranks, hidden, num_tokens, cells in rows:
        ways = ((8, 1),) if name == "megatron.md" else ((1, 2), (1, 8), (8, 1))
        for (num_topk, num_rows), cell in zip(ways, cells.split(" | "), strict=True):
            sizes = {"num_ranks": int(num_ranks), "num_experts": 16 * int(num_ranks), "num_topk": num_topk, "hidden": int(hidden)}
            gib = deepep_moe._C.gpu_workspace_bytes(**sizes, num_max_tokens=num_rows * int(num_tokens)) / 2**30
            assert gib == pytest.approx(float(cell.removesuffix(" GiB")), rel=0.04), (num_ranks, hidden, num_tokens, cell)


# ---- settings ----


def test_settings(monkeypatch):
    for name in ("DEEPEP_MOE_NUM_THREADS", "DEEPEP_MOE_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    assert config.timeout_s() == 300 and 1 <= config.num_threads() <= 8 and config.num_threads(1000) == 1
    monkeypatch.setenv("DEEPEP_MOE_NUM_THREADS", "3")
    monkeypatch.setenv("DEEPEP_MOE_TIMEOUT_S", "2.5")
    assert config.timeout_s() == 2.5 and config.num_threads() == 3
    for value, message in (("many", "is not a number"), ("0", "from 1 to 64"), ("1.5", "not a whole number")):
        monkeypatch.setenv("DEEPEP_MOE_NUM_THREADS", value)
        with pytest.raises(ValueError, match=f"DEEPEP_MOE_NUM_THREADS=.*{message}"):
            config.num_threads()


# ---- launcher ----


def fails_on_one_rank(rank, num_ranks):
    if rank == 1:
        raise RuntimeError("no such luck")


def dies_on_one_rank(rank, num_ranks):
    if rank == 1:
        os._exit(7)


def test_launcher_reports_failures():
    with pytest.raises(RankFailedError, match="(?s)rank 1 failed.*no such luck"):
        run_ranks(fails_on_one_rank, 2)
    with pytest.raises(RankFailedError, match="rank 1 failed: the process died with exit code 7"):
        run_ranks(dies_on_one_rank, 2)


# ---- errors ----


ERRORS = [
    errors.EPTimeoutError("late", rank=3, phase="entry", expected=2, seen=1), errors.EPCapacityError("small", rank=1),
    errors.EPMismatchError("other"), errors.EPError("no"),
    errors.EPPeerError("rank 2 did not make its call: ValueError: no", rank=2, code=errors.Cause.OUTGROWN),
    errors.BackendUnavailableError("not here"), errors.BufferDestroyedError("gone"), RankFailedError(1, "no such luck"),
    errors.OutgrownError("many"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_reach_other_processes(error):
    """Errors survive pickling and copying, as in workers of `multiprocessing` and `concurrent.futures`."""
    for got in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(got) is type(error) and str(got) == str(error) and vars(got) == vars(error)


# ---- benchmarks ----


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda file: file.name)
def test_committed_results_are_records(file):
    for record in json.loads(file.read_text()):
        assert set(record) >= RECORD_FIELDS


# ---- the files for those who cite, report or release: they name what is there ----

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_citation_has_the_version():
    assert re.search(rf"^version: \"?{VERSION}\"?$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ("RELEASING.md", "CONTRIBUTING.md", "SECURITY.md"))
def test_files_that_a_page_names(page):
    for name in re.findall(r"`((?:\.ci|docs|benchmarks|tests|deepep_moe)/[\w./-]+)`", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), name


# ---- the command `deepep-moe`: what it shows, and what it refuses in one line ----


def test_command_and_module_are_one():
    (name, entry) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].popitem()
    module, function = entry.split(":")
    assert name == "deepep-moe" and getattr(importlib.import_module(module), function) is main
    assert run_python("-m", "deepep_moe", "--version").stdout == f"deepep_moe {deepep_moe.__version__}\n"


def test_help_without_a_subcommand(capsys):
    assert main([]) == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: deepep-moe ") and all(f"  {name} " in output for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tset", "deepep-moe: argument COMMAND: invalid choice: 'tset' (choose from "),
        ("doctor --tset", "deepep-moe doctor: unrecognized arguments: --tset"),
        ("topology ncl", "deepep-moe topology: argument nccl: invalid choice: 'ncl' (choose from "),
        ("tune --time-limit nan", "deepep-moe tune: --time-limit nan must be above 0 and below 1e9"),
        ("tune --hidden 24", "deepep-moe tune: --hidden 24 must be a multiple of 16, "),
        ("tune --num-topk 9 --num-experts 8", "deepep-moe tune: --num-topk 9 must be at most 32 and at most --num-experts 8"),
        ("launch x.py", "deepep-moe launch: no such script: 'x.py' (current folder: "),
        ("launch --nproc-per-node 0 -m x", "deepep-moe launch: --nnodes 1:1 and --nproc-per-node 0 must be at least 1"),
        ("build _triton", "deepep-moe build: no module _triton; choose from _torch, _nvshmem"),
    ],
)
def test_wrong_values_are_named_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    output = capsys.readouterr()
    assert end.value.code == 2 and not output.out and output.err.startswith(message) and output.err.count("\n") == 1, output
