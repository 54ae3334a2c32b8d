"""Profiles and their files: what is read, refused, chosen and written. No GPU."""

import json
from dataclasses import asdict, replace
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


def test_round_trip(tmp_path):
    other = replace(PROFILE, shape=Shape(128, 7168, 8))
    assert parse(as_text([PROFILE, other])) == [PROFILE, other]


def test_packaged_files_are_whole():
    """Only the packaged files are read here, each without a complaint."""
    packaged = Files.of_environment().packaged
    assert packaged and load(Files(None, None, packaged)).damaged == ()


@pytest.mark.parametrize(("num_tokens", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_shapes_are_powers_of_two(num_tokens, bucket):
    assert Shape.of(num_tokens, 7168, 8) == Shape(bucket, 7168, 8)


def changed(path: str, value) -> str:
    """The text of a file with `PROFILE`, with the field at `path` replaced, or removed where `value` is KeyError."""
    told = json.loads(as_text([PROFILE]))
    *parents, last = path.split(".")
    place = told if parents[:1] == ["file"] else told["profiles"][0]
    for name in parents[1:] if parents[:1] == ["file"] else parents:
        place = place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(told)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "it holds a list, not an object"),
        (changed("file.format", 2), "its format is 2, this version of deepep_moe reads 1"),
        (changed("file.profiles", {}), "'profiles' is a dict, not a list"),
        (changed("file.more", 1), "the file has 'more', which this version does not know"),
        (changed("values.num_sms", True), "profile 0: values: 'num_sms' is True, not a whole number from 1 to 4096"),
        (changed("values.num_sms", 0), "profile 0: values: 'num_sms' is 0, not a whole number"),
        (changed("values.num_sms", 133), "profile 0: 'num_sms' is 133, and its machine has 132 SMs"),
        (changed("values.ring_stages", 2), "'ring_stages' is 2, not a whole number from 3 to 16"),
        (changed("values.ring_warps", 12), "'ring_warps' is 12, not a whole number from 1 to 11"),
        (changed("values.ring_warps", 6.0), "'ring_warps' is 6.0, not a whole number"),
        (changed("values.num_work_blocks", KeyError), "profile 0: values lacks 'num_work_blocks'"),
        (changed("values.speed", 1), "profile 0: values has 'speed', which this version does not know"),
        (changed("machine.gpu", ""), "profile 0: machine: 'gpu' is '', not the name of a GPU"),
        (changed("machine", []), "profile 0: machine is a list, not an object"),
        (changed("shape.num_tokens", 4095), "profile 0: 'num_tokens' is 4095, not a power of two"),
        (changed("gain", float("nan")), "profile 0: 'gain' is nan, not a number above 0 and below 1"),
        (changed("gain", 0), "profile 0: 'gain' is 0, not a number above 0"),
        (changed("source", None), "profile 0: 'source' is None, not a text"),
        (as_text([PROFILE, replace(PROFILE, gain=0.1)]), "profiles 0 and 1 are for the same machine and shape"),
    ],
)
def test_damaged(text, message, tmp_path):
    """It is told with the file's name, and its profiles do not count."""
    file = tmp_path / "profiles.json"
    file.write_text(text)
    loaded = load(Files(file, None))
    (told,) = loaded.damaged
    assert message in told and told.startswith(f"{file} is no file of profiles: ") and told.endswith("repair or delete it")
    assert choose(loaded, MACHINE, PROFILE.shape) is None


def test_not_text(tmp_path):
    file = tmp_path / "profiles.json"
    file.write_bytes(b"\xff\xfe\x00")
    (told,) = load(Files(None, file)).damaged
    assert "can't decode byte 0xff" in told


def test_later_files_win(tmp_path):
    """packaged < the user's < the one that is given; each for its own machine and shape only."""
    values = [replace(VALUES, num_sms=n) for n in (8, 10, 12)]
    packaged, user, given = (file_of(tmp_path, f"{v.num_sms}.json", replace(PROFILE, values=v)) for v in values)
    for files, file in (
        (Files(None, None, (packaged,)), packaged),
        (Files(user, None, (packaged,)), user),
        (Files(user, given, (packaged,)), given),
        (Files(tmp_path / "not there", None, (packaged,)), packaged),
    ):
        found = choose(load(files), MACHINE, PROFILE.shape)
        assert found is not None and found.file == file and f"{found.profile.values.num_sms}.json" == file.name
    loaded = load(Files(user, given, (packaged,)))
    for machine in (replace(MACHINE, num_ranks=2), replace(MACHINE, num_sms=66), replace(MACHINE, gpu="NVIDIA H200")):
        assert choose(loaded, machine, PROFILE.shape) is None
    assert choose(loaded, MACHINE, Shape.of(4097, 7168, 8)) is None and choose(loaded, MACHINE, Shape.of(4096, 7168, 4)) is None


def test_other_machines(tmp_path):
    """Only the user's files are told of, and only where they have no profile of this machine at all."""
    user, packaged = file_of(tmp_path, "user.json", PROFILE), file_of(tmp_path, "packaged.json", PROFILE)
    loaded, other = load(Files(user, None, (packaged,))), replace(MACHINE, num_sms=66)
    assert loaded.of_other_machines(MACHINE) == []
    (told,) = loaded.of_other_machines(other)
    assert told.startswith(f"{user} has no profile of this machine (NVIDIA H100 80GB HBM3 with 66 SMs, 4 ranks, nodes: 1), only of: ")
    assert load(Files(file_of(tmp_path, "empty.json"), None)).of_other_machines(other) == []


def test_write(tmp_path):
    """A profile takes the place of one with the same key, beside others; nothing else stays in the folder."""
    file, other = tmp_path / "new folder" / "profiles.json", replace(PROFILE, shape=Shape(8, 7168, 8))
    better = replace(PROFILE, gain=0.2)
    for profile in (PROFILE, other, better):
        write(profile, file)
    assert parse(file.read_text()) == [other, better] and list(file.parent.iterdir()) == [file]
    file.write_text("{")
    with pytest.raises(ValueError, match="Expecting property name"):
        write(PROFILE, file)
    assert file.read_text() == "{"


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DEEPEP_MOE_PROFILE", raising=False)
    assert (Files.of_environment().user, Files.of_environment().given) == (tmp_path / "deepep_moe" / "profiles.json", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.cache_folder() == Path("/home/somebody/.cache/deepep_moe")
    monkeypatch.setenv("DEEPEP_MOE_PROFILE", "/a/file")
    assert Files.of_environment().given == Path("/a/file")


def test_given_file_that_cannot_be_read(monkeypatch, tmp_path):
    """On any backend: who names a file wants it."""
    monkeypatch.setenv("DEEPEP_MOE_PROFILE", str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"DEEPEP_MOE_PROFILE='.*missing.json' names a file that cannot be read \(No such file"):
        Buffer(None, 4, 16, 4, 2)
    monkeypatch.setenv("DEEPEP_MOE_PROFILE", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\); give the path of a file of profiles, or unset it"):
        Buffer(None, 4, 16, 4, 2)


def test_cpus_have_no_profile(monkeypatch, tmp_path, caplog):
    file = tmp_path / "profiles.json"
    file.write_text("{")
    monkeypatch.setenv("DEEPEP_MOE_PROFILE", str(file))
    assert Buffer(None, 4, 16, 4, 2).profile is None and not [r for r in caplog.records if r.levelname == "WARNING"]


def test_values_are_settings_of_native_code():
    """The names are those of the struct that they are written to."""
    from deepep_moe import _C

    if _C.build_info()["nvlink"]:
        assert all(isinstance(getattr(_C.GpuTuning, name), property) for name in asdict(VALUES))
