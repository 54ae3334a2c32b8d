"""Profiles and their files: what is read, refused, chosen and written. No GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepep_moe import Buffer, config
from deepep_moe.tuning import Files, Machine, Profile, Shape, Values, choose, load, write
from deepep_moe.tuning.profiles import as_text, parse

MACHINE = Machine("NVIDIA H100 80GB HBM3", 132, 4, 1)
VALUES = Values(16, 18, 6, 4, 96, 0)
PROFILE = Profile(MACHINE, Shape(4096, 7168, 8), VALUES, 0.04, "a test")


def file_of(folder: Path, name: str, *profiles: Profile) -> Path:
    path = folder / name
    path.write_text(as_text(profiles))
    return path


def test_packaged_files_are_whole():
    """Only the packaged files are read here, each without a complaint."""
    packaged = Files.of_environment().packaged
    assert packaged and load(Files(None, None, packaged)).damaged == ()


@pytest.mark.parametrize(("num_tokens", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_shapes_are_powers_of_two(num_tokens, bucket):
    assert Shape.of(num_tokens, 7168, 8) == Shape(bucket, 7168, 8)


def changed(path: str, value) -> bytes:
    """The file with `PROFILE` and another value at `path`, or none where `value` is KeyError."""
    content = json.loads(as_text([PROFILE]))
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place[0] if name == "0" else place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "can't decode byte 0xff"),
        (changed("format", 2), "its format is 2, this version of deepep_moe reads 1"),
        (changed("profiles", {}), "'profiles' is a dict, not a list"),
        (changed("profiles.0.values.num_sms", True), "profile 0: values: 'num_sms' is True, not a whole number from 1 to 4096"),
        (changed("profiles.0.values.num_sms", 133), "profile 0: 'num_sms' is 133, and its machine has 132 SMs"),
        (changed("profiles.0.values.ring_stages", 2), "'ring_stages' is 2, not a whole number from 3 to 16"),
        (changed("profiles.0.shape.num_topk", KeyError), "profile 0: shape is num_tokens, hidden, not num_tokens, hidden, num_topk"),
        (changed("profiles.0.machine", 7), "profile 0: machine is a int, not gpu, num_sms, num_ranks, num_nodes"),
        (changed("profiles.0.more", 1), "gain, source, more, not machine, shape, values, gain, source"),
    ],
)
def test_damaged(content, message, tmp_path):
    """A warning names the file, and its profiles do not count."""
    file = tmp_path / "profiles.json"
    file.write_bytes(content)
    loaded = load(Files(file, None))
    (damage,) = loaded.damaged
    assert message in damage and damage.startswith(f"{file} is no file of profiles: ")
    assert choose(loaded, MACHINE, PROFILE.shape) is None


def test_later_files_win(tmp_path):
    """packaged < the user's < the one that is given; each for its own machine and shape only."""
    values = [replace(VALUES, num_sms=n) for n in (8, 10, 12)]
    packaged, user, named = (file_of(tmp_path, f"{v.num_sms}.json", replace(PROFILE, values=v)) for v in values)
    for files, file in (
        (Files(None, None, (packaged,)), packaged),
        (Files(user, None, (packaged,)), user),
        (Files(user, named, (packaged,)), named),
        (Files(tmp_path / "not there", None, (packaged,)), packaged),
    ):
        chosen = choose(load(files), MACHINE, PROFILE.shape)
        assert chosen is not None and chosen.file == file and f"{chosen.profile.values.num_sms}.json" == file.name
    loaded = load(Files(user, named, (packaged,)))
    for machine in (replace(MACHINE, num_ranks=2), replace(MACHINE, num_sms=66), replace(MACHINE, gpu="NVIDIA H200")):
        assert choose(loaded, machine, PROFILE.shape) is None
    assert choose(loaded, MACHINE, Shape.of(4097, 7168, 8)) is None and choose(loaded, MACHINE, Shape.of(4096, 7168, 4)) is None


def test_write(tmp_path):
    """A profile takes the place of one with the same key, beside others; nothing else stays in the folder."""
    file, other = tmp_path / "new folder" / "profiles.json", replace(PROFILE, shape=Shape(8, 7168, 8))
    better = replace(PROFILE, gain=0.2)
    for profile in (PROFILE, other, better):
        write(profile, file)
    assert parse(file.read_text()) == [other, better] == parse(as_text([other, better])) and list(file.parent.iterdir()) == [file]
    file.write_text("{")
    with pytest.raises(ValueError, match="Expecting property name"):
        write(PROFILE, file)
    assert file.read_text() == "{"


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DEEPEP_MOE_PROFILE", raising=False)
    assert (Files.of_environment().user, Files.of_environment().from_variable) == (tmp_path / "deepep_moe" / "profiles.json", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.cache_folder() == Path("/home/somebody/.cache/deepep_moe")
    monkeypatch.setenv("DEEPEP_MOE_PROFILE", "/a/file")
    assert Files.of_environment().from_variable == Path("/a/file")


def test_given_file(monkeypatch, tmp_path, caplog):
    """A file that the user names is read on any backend. CPUs have no profile, whatever the file holds."""
    file = tmp_path / "profiles.json"
    for file_named, message in ((file, "names a file that cannot be read .No such file"), (tmp_path, "cannot be read .Is a directory")):
        monkeypatch.setenv("DEEPEP_MOE_PROFILE", str(file_named))
        with pytest.raises(ValueError, match=f"DEEPEP_MOE_PROFILE=.*{message}"):
            Buffer(None, 4, 16, 4, 2)
    file.write_text("{")
    monkeypatch.setenv("DEEPEP_MOE_PROFILE", str(file))
    assert Buffer(None, 4, 16, 4, 2).profile is None and not [r for r in caplog.records if r.levelname == "WARNING"]
