"""Every snippet of the README and the documentation runs, and every command that they name exists with its options."""

import json
import re
from pathlib import Path

import pytest
import torch
from scripts import ROOT, run_python

from deepep_moe.command import COMMANDS
from deepep_moe.integrations.deepspeed.options import Options, options_of
from deepep_moe.testing import run_ranks
from deepep_moe.tuning import Files, load

MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / "distributions").rglob("*.md")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(MARKDOWN)}
BLOCKS = {
    (name, number): block
    for name, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
}
ALONE = [
    *((f"docs/api/{page}.md", 0) for page in ("buffer", "low_latency", "nn", "ops", "rest")),
    ("docs/index.md", 0),
    ("docs/inference.md", 0),
    ("docs/watch.md", 0),
]
STEPS = [("docs/steps.md", number) for number in range(7)]
PAGES = [("README.md", 0), ("docs/guide.md", 0), ("docs/rollout.md", 0)]
UNDER_TORCHRUN = [*PAGES, ("docs/huggingface.md", 0), ("docs/huggingface.md", 1), *STEPS]
FSDP2_BLOCK = "docs/data_parallel.md", 0
IN_DEEPSPEED = [("docs/deepspeed.md", number) for number in range(4)]


def test_every_block_is_run_below():
    assert sorted(BLOCKS) == sorted([*ALONE, *UNDER_TORCHRUN, FSDP2_BLOCK, *IN_DEEPSPEED]), "add new blocks to one of these lists"


APART = """
import os, sys, torch, deepep_moe
for block in sys.argv[1:]:
    print("==", flush=True)
    if not os.fork():
        sys.exit(exec(block, {"__name__": "__main__"}))
    assert os.wait()[1] == 0, block
"""


def test_blocks_run_alone(tmp_path):
    """Each in its own process, which a process that has imported PyTorch forks."""
    blocks = [BLOCKS[key] for key in ALONE]
    assert all(len(block.strip().splitlines()) <= 20 for block in blocks)
    result = run_python("-c", APART, *blocks, cwd=tmp_path)
    names = "busiest_expert exchange_ms rows repeats rank_overload max_rank_overload max_vio"
    scalars = ["loss", *(f"deepep_moe/layer_1/{name}" for name in names.split())]
    expected = {"docs/index.md": "shm torch.Size([512, 256])\n", "docs/watch.md": f"{scalars}\n"}
    assert result.stdout.split("==\n") == ["", *(expected.get(name, "") for name, _ in ALONE)]


def run_under_torchrun(script: str, folder: Path, device: str) -> list[str]:
    """Run on two ranks, and return what each has printed."""
    (folder / "moe.py").write_text(script)
    to_files = ("--redirects", "1", "--log-dir", str(folder))  # on one pipe lines of ranks may mix
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *to_files, folder / "moe.py"]
    run_python(*command, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}))
    return [output.read_text() for rank in range(2) for output in folder.glob(f"*/attempt_0/{rank}/stdout.log")]


DEVICES = ("cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu(2)]))


@pytest.mark.parametrize("device", DEVICES)
def test_scripts_of_readme_and_guide_run(device, tmp_path):
    readme, backend = BLOCKS["README.md", 0], "nvlink" if device == "cuda" else "shm"
    printed = {readme: r"(\d+) rows received, \[512, 256\] came back", BLOCKS["docs/guide.md", 0]: r"(\d+) rows, gradient of x (\d+\.\d+)"}
    lines = []
    for number, (script, shown) in enumerate(printed.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        outputs = run_under_torchrun(script, folder, device)
        lines.append([re.fullmatch(rf"rank {rank}: {backend}, {shown}\n", output) for rank, output in enumerate(outputs)])
        assert all(lines[-1]), outputs
    assert sum(int(line[1]) for line in lines[0]) == 2 * 512 * 4
    assert all(int(line[1]) > 0 and float(line[2]) > 0 for line in lines[1])


@pytest.mark.parametrize("device", DEVICES)
def test_rollout_has_the_bits_of_training(device, tmp_path):
    printed, of_the_other = run_under_torchrun(BLOCKS["docs/rollout.md", 0], tmp_path, device)
    by_ranks, by_lanes = re.findall(r"training and rollout differ by (\S+)", printed)
    assert float(by_ranks) > 0 and by_lanes == "0" and not of_the_other


def test_steps_print_what_the_page_says(tmp_path):
    """The page is one script in pieces, each with what rank 0 prints for both."""
    printed, of_the_other = run_under_torchrun("\n".join(BLOCKS[key] for key in STEPS), tmp_path, "cpu")
    shown = re.findall(r"```text\n(.*?)```", TEXTS["docs/steps.md"], flags=re.DOTALL)
    assert len(shown) == len(STEPS) and printed == "".join(shown) and not of_the_other


def _run_part(rank: int, _: int, text: str, names: dict, shown: str) -> object:
    torch.manual_seed(rank)
    exec(compile(text, "part of a page", "exec"), names)
    return eval(shown, names)


HUGGING_FACE = f"""
import sys; sys.path.insert(0, {str(ROOT / "examples" / "huggingface")!r})
import torch, model as example
torch.manual_seed(0)
model, tokens = example.build(), torch.randint(0, 256, (2, 9))
"""


def test_hugging_face_blocks_run(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    blocks = HUGGING_FACE + BLOCKS["docs/huggingface.md", 0] + BLOCKS["docs/huggingface.md", 1]
    assert run_ranks(_run_part, 2, blocks, {"directory": str(tmp_path / "saved")}, "len(own)") == [4, 4], "up and down of two blocks"


FSDP2 = """
import torch
from deepep_moe.nn import GroupedExperts, MoELayer, Router
layer = MoELayer(Router(16, 4, 2), GroupedExperts(2, 16, 8), num_max_tokens_per_rank=8)
model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), layer), torch.randn(8, 16)
"""


def test_fsdp2_block_runs():
    one, other = run_ranks(_run_part, 2, FSDP2 + BLOCKS[FSDP2_BLOCK], {}, "(len(dense), len(experts), float(norm))")
    assert one == other and one[:2] == (3, 2) and 0 < one[2] < 1, "all ranks have the same norm"


def _deepspeed_worker(rank: int, num_ranks: int, blocks: list[str]) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed_cases import SeparateGate, engine_ready

    with engine_ready():
        first, swap, group, loss = blocks
        names: dict = {}
        exec(compile(first.replace("range(50)", "range(2)"), "the script", "exec"), names)
        layer = names["engine"].module.moe.deepspeed_moe
        assert type(layer).__name__ == "PackedMOELayer"
        exec(compile(swap, "swap and restore", "exec"), {"model": names["engine"]})
        assert type(layer).__name__ == "MOELayer"

        model = MoE(16, SeparateGate(16, 16), num_experts=4, ep_size=2, k=1)
        model.set_deepspeed_parallelism()
        exec(compile(group, "grouped experts", "exec"), {"model": model, "torch": torch})
        assert torch.isfinite(model(torch.randn(8, 16))[0]).all()

        variables = {"torch": torch, "losses": torch.full((3 + rank,), 2.0)}
        exec(compile(loss, "the loss", "exec"), variables)
        total = variables["loss"].clone()
        torch.distributed.all_reduce(total)
        assert total / num_ranks == 2.0, "the mean over all tokens, after ranks were averaged"


@pytest.mark.slow
def test_deepspeed_blocks_run():
    pytest.importorskip("deepspeed")
    run_ranks(_deepspeed_worker, 2, [BLOCKS[key] for key in IN_DEEPSPEED])


# ---- files of settings ----

JSON = {name: blocks for name, text in TEXTS.items() if (blocks := re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL))}
KEYS = re.findall(r'`("\w+": [^`\n]+)`', "\n".join(TEXTS.values()))
"""Settings that a page names: the section of ds_config, or a key of it."""


def test_every_json_block_is_read_below():
    assert {name: len(blocks) for name, blocks in JSON.items()} == {"docs/deepspeed_autoep.md": 1, "docs/tuning.md": 1}


def test_sections_of_ds_config_are_read_by_the_adapter():
    (block,) = JSON["docs/deepspeed_autoep.md"]
    assert options_of(json.loads(block)) == Options()
    sections = [json.loads(f"{{{key}}}") for key in KEYS]
    assert {"exact": False} in sections and {"deepep_moe": {"enabled": True}} in sections
    for section in sections:
        assert options_of(section if "deepep_moe" in section else {"deepep_moe": section}) is not None, section


def test_profile_of_the_page_is_read_by_the_loader(tmp_path):
    (block,) = JSON["docs/tuning.md"]
    (tmp_path / "profiles.json").write_text(block)
    loaded = load(Files(None, tmp_path / "profiles.json"))
    (profile,) = [entry.profile for entry in loaded.profiles]
    assert not loaded.damaged and (profile.machine.num_sms, profile.shape.hidden, profile.values.num_sms) == (132, 7168, 12)


# ---- commands ----


HELP = """
import runpy, sys
for module, *arguments in map(str.split, sys.argv[1:]):
    print("==", " ".join([module, *arguments]))
    sys.argv = [module, *arguments, "--help"]
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, end.code
"""
WITHOUT_HELP = {"deepep_moe.compat.run", "deepep_moe.topology.bound"}  # all that follows is another program's
SUBCOMMANDS = {"benchmarks/run.py", "deepep_moe", "deepep_moe topology"}


def commands() -> dict[str, set[str]]:
    """Return the modules that the texts start, with subcommand, and the options that they give them."""
    listed: dict[str, set[str]] = {}
    pattern = r"(?:python|torchrun[^`\n]*?) (?:-m )?(deepep_moe(?:[\w.]*\w)?|benchmarks/run\.py)([^`\n]*)"
    text = re.sub(rf"deepep-moe (?={'|'.join(COMMANDS)})", "python -m deepep_moe ", "\n".join(TEXTS.values()))
    for name, rest in re.findall(pattern, text):
        words = rest.split("#")[0].split()
        while name in SUBCOMMANDS and words and re.fullmatch(r"[a-z][\w-]+", words[0]):
            name = f"{name} {words.pop(0)}"
        if name == "benchmarks/run.py" and words[:1] != ["--help"]:
            name = "benchmarks/run.py exchange"  # what runs without a name
        script = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
        listed.setdefault(name, set()).update(re.findall(r"--[a-z][\w-]+", " ".join(words[:script])))
    return listed


def test_modules_and_their_options_exist():
    named = commands()
    assert named.keys() >= {
        "deepep_moe doctor",
        "deepep_moe tune",
        "deepep_moe topology nccl",
        "deepep_moe.integrations.deepspeed",
        "benchmarks/run.py low-latency",
    }
    named = {name: options for name, options in named.items() if name not in WITHOUT_HELP}
    result = run_python("-c", HELP, *sorted(named), DS_ACCELERATOR="cpu")
    printed = dict(part.split("\n", 1) for part in result.stdout.split("== ")[1:])
    assert set(printed) == set(named), result.stderr
    for name, options in named.items():
        missing = [option for option in options if option not in printed[name]]
        assert "usage: " in printed[name] and not missing, f"{name} has no {missing}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([\w-]+)", "\n".join(TEXTS.values()), flags=re.MULTILINE))
    assert len(targets) >= 8 and not [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)], targets


# ---- what pages say of the code ----


def sources() -> str:
    """Return all sources as one text, with messages that span lines joined."""
    folders = (("deepep_moe", "*.py"), ("integrations", "*.py"), ("csrc", "*.cpp"), ("csrc", "*.h"))
    text = "\n".join(path.read_text() for folder, pattern in folders for path in sorted((ROOT / folder).rglob(pattern)))
    return re.sub(r'"\s*\n\s*f?"', "", text)


FOREIGN = (
    "cannot import name 'Buffer' from 'deepep_moe' (unknown location)", "terminate called without an active exception",
    "Invalid backend: deepep_moe", "CUDA out of memory",
)  # fmt: skip
"""Messages of Python's, the C++ library's, Megatron-Core's and PyTorch's."""


def test_messages_of_troubleshoot_are_those_of_the_code():
    page = TEXTS["docs/troubleshoot.md"].split("## By its message")[1].split("\n## ")[0]
    messages = re.findall(r"^#### `([^`]+)`$", page, flags=re.MULTILINE)
    messages = [message for message in messages if message not in FOREIGN]
    text = sources()
    missing = [message for message in messages if message.split(" ...")[0] not in text]
    assert len(messages) > 25 and not missing, missing
