"""fp8 copies of weights that several forwards share: which forward makes them, which uses them, and when they are refused or made anew."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepep_moe import ops
from deepep_moe.nn import GroupedExperts
from deepep_moe.ops import KeptWeights, QuantizedRows

HIDDEN = WIDTH = 128
COUNTS = [128, 128]


def randn(*shape, seed, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def weights(value=0.0625, dtype=torch.float32):
    return torch.full((2, 2 * WIDTH, HIDDEN), value, dtype=dtype), torch.full((2, HIDDEN, WIDTH), value, dtype=dtype)


def experts(seed=3):
    torch.manual_seed(seed)
    return GroupedExperts(2, HIDDEN, WIDTH, dtype=torch.bfloat16)


def run(module, is_first=None, *, seed=1, recompute=False):
    """Return the output, and gradients of the rows and weights, of a forward and backward."""
    module.zero_grad()
    rows, probs = QuantizedRows.of(randn(256, HIDDEN, seed=seed)).requires_grad_(), torch.linspace(0, 1, 256)
    if recompute:
        y = checkpoint(lambda r: module(r, COUNTS, probs, is_first_microbatch=is_first), rows, use_reentrant=False)
    else:
        y = module(rows, COUNTS, probs, is_first_microbatch=is_first)
    y.backward(randn(256, HIDDEN, seed=seed + 1))
    return [y.detach(), rows.grad, module.up.grad.clone(), module.down.grad.clone()]


def assert_equal(ours, theirs, what):
    for name, a, b in zip(("y", "x", "up", "down"), ours, theirs, strict=True):
        assert torch.equal(a, b), f"{what}: {name}"


# ---- by hand ----


def test_copies_by_hand():
    """0.75 is 384 times 2^-9: the largest magnitude of a block is stored as 384, and 448 is the largest that e4m3 has."""
    kept, (w1, w2) = KeptWeights(), weights(0.75)
    w1[1, 128, 5] = -0.001953125  # 2^-9: -1 in its block
    assert repr(kept) == "KeptWeights(0 bytes)" and kept.take(None, w1, w2) is None and not kept.has(w1, w2)
    first, second = kept.take(True, w1, w2)
    assert first.plain[0][0, 0, 0] == 384 and first.plain[1].tolist() == [[[2**-9]] * 2] * 2
    assert first.plain[0][1, 128, 5] == -1 == first.transposed[0][1, 5, 128] and first.transposed[1].shape == (2, 1, 2)
    assert second.plain[0].shape == second.transposed[0].shape == (2, HIDDEN, WIDTH)
    # Two bytes for each of 98304 parameters, and twice a scale of four bytes for each of their 6 blocks.
    assert kept.num_bytes == 2 * 3 * 2 * 128 * 128 + 2 * 4 * 6
    w1.data.mul_(2)  # which nobody sees
    assert kept.take(False, w1, w2)[0].plain[0] is first.plain[0]
    again = kept.take(True, w1, w2)[0]
    assert again.plain[1].unique() == 2 * first.plain[1].unique() and kept.take(None, w1, w2) is None
    assert kept.take(False, w1, w2)[0].plain[0] is again.plain[0]


# ---- the same results ----


def test_weights_are_quantized_once_a_step(monkeypatch):
    from deepep_moe.ops import fp8_kept, fp8_mlp

    calls = []
    for place, name in ((fp8_kept, "quantize_fp8_weights_both"), (fp8_mlp, "quantize_fp8_weights_both"), (fp8_mlp, "quantize_fp8_weights")):
        stock = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, stock=stock, **kwargs: calls.append(1) or stock(*args, **kwargs))
    module = experts()
    for expected, is_first, recompute in ((2, True, False), (0, False, False), (0, False, True), (2, True, True), (2, None, False)):
        calls.clear()
        run(module, is_first, recompute=recompute)
        assert len(calls) == expected, f"is_first_microbatch={is_first}, recompute={recompute}"
    module.recompute_activation = True
    calls.clear()
    run(module, False)
    assert not calls
    run(module)
    assert len(calls) == 4, "each pass quantizes both"


def test_backwards_after_the_next_step_began():
    """A forward keeps the copies that it has used."""
    module, plain = experts(), experts()
    rows = [QuantizedRows.of(randn(256, HIDDEN, seed=seed)).requires_grad_() for seed in (1, 1)]
    y, expected = module(rows[0], COUNTS, is_first_microbatch=True), plain(rows[1], COUNTS)
    module.down.data.mul_(3)
    module(QuantizedRows.of(randn(256, HIDDEN, seed=5)), COUNTS, is_first_microbatch=True)
    module.down.data.div_(3)
    for each in (y, expected):
        each.backward(torch.ones_like(each))
    assert torch.equal(rows[0].grad, rows[1].grad)


def test_without_gradients_first():
    """A forward for evaluation makes what a training forward then needs."""
    module = experts()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            module(QuantizedRows.of(randn(256, HIDDEN, seed=5)), COUNTS, is_first_microbatch=True)
    assert_equal(run(module, False), run(experts()), "after evaluation")


# ---- weights that change ----


@pytest.mark.parametrize("change", ("step", "step of masters", "copy_"))
def test_written_weights_are_quantized_again(change):
    module = experts()
    run(module, True)
    if change == "step":
        torch.optim.AdamW(module.parameters(), lr=0.1).step()
    elif change == "copy_":
        with torch.no_grad():
            module.down.copy_(2 * module.down)
    else:  # as Megatron-Core and DeepSpeed do
        master = torch.nn.Parameter(module.up.detach().float())
        master.grad = torch.ones_like(master)
        torch.optim.SGD([master], lr=0.1).step()
        module.up.data.copy_(master.data)
    got = run(module, False)
    fresh = experts()
    fresh.load_state_dict(module.state_dict())
    assert_equal(got, run(fresh), change)


def other_shape(module):
    module.up = torch.nn.Parameter(torch.zeros(2, 2 * WIDTH, 256, dtype=torch.bfloat16))


def other_memory(module):
    module.down.data = module.down.data.clone()


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (GroupedExperts.release_fp8_weights, "no fp8 copies of the weights are kept"),
        (GroupedExperts.float, r"w1 bfloat16 .*, which now is float32"),
        (other_shape, r"w1 .* \[2, 256, 128\] on cpu, which now is .* \[2, 256, 256\]"),
        (other_memory, "w2 lies in other memory"),
    ),
)
def test_other_weights_are_refused(change, message):
    module = experts()
    run(module, True)
    change(module)
    kept = module.kept_weights
    assert not kept.has(module.up, module.down)
    with pytest.raises(ValueError, match=f"is_first_microbatch is False, but .*{message}"):
        kept.take(False, module.up, module.down)
    assert kept.take(True, module.up, module.down) and kept.has(module.up, module.down)


def test_bad_arguments():
    module, rows = experts(), QuantizedRows.of(randn(256, HIDDEN, seed=1))
    with pytest.raises(TypeError, match="is_first_microbatch is 1"):
        module(rows, COUNTS, is_first_microbatch=1)
    with pytest.raises(ValueError, match="is_first_microbatch is True"):
        ops.grouped_mlp(rows, COUNTS, *weights(), is_first_microbatch=True)
    plain = module(rows.dequantized(), COUNTS, is_first_microbatch=False)
    assert torch.equal(plain, module(rows.dequantized(), COUNTS)), "without fp8 rows nothing is kept"
    assert module.kept_weights.num_bytes == 0


# ---- copies of modules, checkpoints ----


def test_nothing_is_saved_or_copied():
    module = experts()
    before = module.state_dict().keys()
    run(module, True)
    assert module.kept_weights.num_bytes and module.state_dict().keys() == before == {"up", "down"}
    again = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (again, torch.load(file, weights_only=False), pickle.loads(pickle.dumps(module))):
        assert other.kept_weights is not module.kept_weights and other.kept_weights.num_bytes == 0
        assert_equal(run(other, True), run(module, False), "a copy")
    module.release_fp8_weights()
    assert module.kept_weights.num_bytes == 0


# ---- CUDA graphs ----


@pytest.mark.gpu
def test_steps_of_one_graph():
    """Replays quantize the weights of that moment, once for both forwards. Copies of a graph serve no forward outside of it."""
    module, plain = experts().cuda(), experts().cuda()
    rows = QuantizedRows.of(randn(256, HIDDEN, seed=1).cuda())
    counts = torch.tensor(COUNTS, device="cuda")

    def step():
        return [module(rows, counts, is_first_microbatch=is_first) for is_first in (True, False)]

    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for factor in (1.0, 2.0):
            for each in (module, plain):
                each.down.mul_(factor)
            graph.replay()
            for y in captured:
                assert torch.equal(y, plain(rows, counts)), f"times {factor}"
        with pytest.raises(ValueError, match="inside of a CUDA graph's capture"):
            module(rows, counts, is_first_microbatch=False)
        assert torch.equal(module(rows, counts, is_first_microbatch=True), plain(rows, counts))
