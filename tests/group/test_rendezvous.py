"""Messages of ranks while a buffer is made: a peer's message is data, and a malformed one is an error that names the peer."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from deepep_moe import Buffer, LowLatencyBuffer
from deepep_moe.errors import EPError, EPPeerError
from deepep_moe.group.rendezvous import Exchange, introduce
from deepep_moe.group.settings import Settings


class Bomb:
    """Create a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def send(data, size=None):
    """Return what `gather_objects` would send for a message with these bytes, which it never writes itself."""
    sizes = Exchange(torch.tensor([len(data) if size is None else size]), dist.group.WORLD, "test", 60).wait().flatten()
    if size is None:
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        Exchange(padded, dist.group.WORLD, "test", 60).wait()


WANTED = "the message of rank 1 is .*; it must be .*construction of a Buffer.* same version of deepep_moe"


STRANGE = {
    "number": (b"5", None), "list": (b"[]", None), "other fields": (b'{"error": null}', None), "no text": (b"\xff\x00", None),
    "deep": (b"[" * 200_000, None), "too large": (b"", 1 << 60), "negative": (b"", -1), "low latency": (b"5", None),
}  # fmt: skip


@on_ranks(2, name=STRANGE)
def test_strange_introduction(rank, name):
    refuse_introduction(rank, *STRANGE[name], LowLatencyBuffer if name == "low latency" else Buffer)


def refuse_introduction(rank, data, size, make):
    if rank == 1:
        return send(data, size)
    with pytest.raises(EPError, match=WANTED) as info:
        make(None, 8, 16, 4, 2, timeout_s=60.0)
    assert type(info.value) is EPError


@on_ranks(2)
def test_message_runs_no_code(rank, tmp_path):
    bomb = tmp_path / "bomb"
    refuse_introduction(rank, pickle.dumps(Bomb(str(bomb))), None, Buffer)
    assert not bomb.exists()


@on_ranks(2, data=(b"5", b"[null, 5]", b'[null, ["/proc/1/fd/3", "5"]]', b'[null, {"bytes": "0g"}]', b"[null, null]"))
def test_strange_address(rank, data):
    """Rank 1 introduces itself as it must, and then says strange things of its memory."""
    if rank == 1:
        introduce(Settings(2, 1, 8, 16, 4, 2, 60.0), "auto", 1, None, dist.group.WORLD)
        return send(data)
    with pytest.raises(EPError, match=r"the message of rank 1 is .*; it must be .*sharing of workspaces"):
        Buffer(None, 8, 16, 4, 2, timeout_s=60.0)


@on_ranks(2)
def test_refusal_with_a_value_of_any_type(rank):
    """A wrong argument of any kind reaches the peers as words."""
    wrong = torch.tensor([1, 2]) if rank == 1 else 16
    with pytest.raises(TypeError if rank == 1 else EPPeerError, match=r"hidden is tensor\(\[1, 2\]\)"):
        Buffer(None, 8, wrong, 4, 2, timeout_s=60.0)
