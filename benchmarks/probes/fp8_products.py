"""Compares grouped fp8 products on one GPU: activations with a scale for 1x128 elements, weights with one for 128x128.

    python benchmarks/probes/fp8_products.py --wheels DIR --json FILE

It needs PyTorch, Triton and the files of this checkout, but no build of deepep_moe. Each candidate runs in a process of its own, with a
limit of time: a failure is a line with its reason. DIR may hold wheels of rivals; they are unpacked, not installed. TFLOPS count the rows
that hold tokens, not those that pad a group to 128.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

FILE = Path(__file__).resolve()
# What was looked at and is not timed, with the reason.
LISTED = {
    "torchao 0.18 blockwise": "its grouped products are DeepGEMM's, or emulated in bf16 "
    "(prototype/blockwise_fp8_training/{deepgemm_grouped_kernels,grouped_kernels}.py); its Triton kernels are dense",
    "flashinfer 0.7": "group_gemm_fp8_nt_groupwise serves Blackwell (sm_100, sm_120); on Hopper cutlass_fused_moe has the forward alone",
    "quack 0.6.5": "gemm_sm90 has no block scales; its block-scaled operands are for sm_120 (quack/gemm_sm90.py)",
    "CUTLASS DSL 4.8": "has no such kernel; grouped fp8 with block scales on Hopper is an open pull request (NVIDIA/cutlass#3194)",
    "TransformerEngine 2.20": "loops over experts with counts on the host; its grouped fp8 block product needs cuBLASLt 13.6",
    "sgl-kernel, vLLM": "fp8_blockwise_scaled_grouped_mm (CUTLASS, forward only) is in wheels of 355 MB and more",
}


# ---- records ----


def hardware(torch):
    return torch.cuda.get_device_name()


def record(torch, case, candidate, times, baseline_times, **extra):
    """Return a measurement in the form of all benchmarks; times are microseconds."""
    ordered, rival_us = sorted(times), statistics.median(baseline_times) if baseline_times else None
    median = statistics.median(ordered)
    return {
        "op": f"fp8 products {case['name']} {candidate}", "backend": None, "num_ranks": 1, "num_tokens": case["rows"],
        "hidden": 7168, "num_topk": None, "num_experts": case["experts"], "dtype": "float8_e4m3fn", "layout": "expert", "us_median": median,
        "us_p10": ordered[len(ordered) // 10], "us_p90": ordered[len(ordered) * 9 // 10], "bytes_moved": case["bytes"],
        "gbps": case["bytes"] / median / 1e3, "rival": "PyTorch grouped_mm, bf16" if baseline_times else None, "rival_us": rival_us,
        "ratio": None if rival_us is None else rival_us / median, "hardware": hardware(torch),
        "tflops": case["flops"] / median / 1e6, **extra,
        "versions": {"deepep_moe": "0.1.0", "commit": None, "torch": torch.__version__, "python": sys.version.split()[0]},
        "command": "python benchmarks/probes/fp8_products.py",
    }  # fmt: skip


# ---- cases ----


def groups_of(torch, rows, experts):
    """Return the counts of a random, uneven routing, and the ends of the groups once each is padded to 128."""
    generator = torch.Generator().manual_seed(1)
    shares = torch.softmax(0.5 * torch.randn(experts, generator=generator), 0)
    counts = torch.bincount(torch.multinomial(shares, rows, True, generator=generator), minlength=experts)
    return counts.tolist(), ((counts + 127) // 128 * 128).cumsum(0).tolist()


def cases(options):
    import torch

    counts, ends = groups_of(torch, options.rows, options.experts)
    hidden, width, padded = 7168, 2048, ends[-1]
    shapes = {  # n, k of the matrices
        "forward gate+up": (2 * width, hidden), "forward down": (hidden, width),
        "input gradient gate+up": (hidden, 2 * width), "input gradient down": (width, hidden),
        "weight gradient gate+up": (2 * width, hidden), "weight gradient down": (hidden, width),
    }  # fmt: skip
    for name, (n, k) in shapes.items():
        is_weight = name.startswith("weight")
        matrices, activations = options.experts * n * k, padded * (n + k)
        bytes_ = activations + 4 * matrices if is_weight else padded * (k + 2 * n) + matrices
        yield {
            "name": name, "n": n, "k": k, "is_weight": is_weight, "rows": options.rows, "padded": padded, "experts": options.experts,
            "counts": counts, "ends": ends, "flops": 2 * options.rows * n * k, "bytes": bytes_,
        }  # fmt: skip


def operands(torch, case):
    """Return e4m3 operands and scales, powers of two: x, w of a product, or both transposed operands of a weight gradient."""
    generator = torch.Generator("cuda").manual_seed(2)

    def values(*shape):
        made = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
        for part in made.view(-1).split(1 << 28):  # the fp32 numbers of a whole tensor are large
            part.copy_(torch.randn(part.shape, generator=generator, device="cuda").mul_(50))
        return made

    def scales(*shape):
        return torch.exp2(torch.randint(-9, -5, shape, generator=generator, device="cuda").float())

    rows, experts, n, k = case["padded"], case["experts"], case["n"], case["k"]
    offsets = torch.tensor(case["ends"], dtype=torch.int32, device="cuda")
    if case["is_weight"]:  # 128 rows and 128 columns share a scale in what rescale_transpose makes of rows
        of_n, of_k = (scales(rows // 128, size // 128).repeat_interleave(128, 1) for size in (n, k))
        return values(n, rows), of_n, values(k, rows), of_k, offsets
    return values(rows, k), scales(rows, k // 128), values(experts, n, k), scales(experts, n // 128, k // 128), offsets


def largest_error(torch, case, given, result, by_row=False):
    """Return the largest error of some groups' rows, as a share of the largest element there, against fp32 products of what was given."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for expert in (0, case["experts"] // 2, case["experts"] - 1):
        start, end = ([0] + case["ends"])[expert], case["ends"][expert]
        if start == end:
            continue
        a, a_scales, b, b_scales, _ = given
        if case["is_weight"]:
            blocks = slice(start // 128, end // 128)
            x = a[:256, start:end].float() * a_scales[blocks, :256].t().repeat_interleave(128, 1)
            w = b[:, start:end].float() * b_scales[blocks].t().repeat_interleave(128, 1)
            got = result[expert, :256]
        else:
            rows = slice(max(start, end - 256), end)
            x, w = a[rows].float(), b[expert].float()
            if by_row:
                x, w = x * a_scales[rows, :1], w * b_scales[expert, :, :1].repeat_interleave(128, 0)
            else:
                x = x * a_scales[rows].repeat_interleave(128, 1)
                w = w * b_scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
            got = result[rows]
        wanted = x @ w.t()
        error = ((got.float() - wanted).abs().max() / wanted.abs().max()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


# ---- candidates: each yields (variant, callable, options of the error's computation) ----


def torch_bf16(torch, case, given, options):
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    counts = torch.tensor(case["counts"])
    offsets, rows = counts.cumsum(0).to(torch.int32).cuda(), case["rows"]  # bf16 needs no padding
    n, k, experts = case["n"], case["k"], case["experts"]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    if case["is_weight"]:
        dy = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
        yield "bf16", lambda: product(dy.t(), x, offs=offsets), None
    else:
        w = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16).normal_()
        yield "bf16", lambda: product(x, w.transpose(1, 2), offs=offsets), None


def torch_blockwise(torch, case, given, options):
    if case["is_weight"]:
        a, a_scales, b, b_scales, offsets = given
        a_scales, b_scales, recipe = a_scales.t(), b_scales, "BlockWise1x128"
    else:
        a, a_scales, b, b_scales, offsets = given
        recipe = "BlockWise128x128"
    kinds = torch.nn.functional.ScalingType
    call = torch.nn.functional.scaled_grouped_mm

    def run():
        return call(
            a, b.transpose(-2, -1), a_scales, kinds.BlockWise1x128, b_scales, getattr(kinds, recipe), offs=offsets,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    yield "torch 1x128, 128x128", run, {}


def torch_rowwise(torch, case, given, options):
    """Other arithmetic, a scale for a whole row: what PyTorch serves on Hopper, as a mark of speed."""
    a, a_scales, b, b_scales, offsets = given
    if case["is_weight"]:
        ones = [torch.ones(case["experts"] * size, device="cuda") for size in (case["n"], case["k"])]
        run = lambda: torch._scaled_grouped_mm(a, b.t(), ones[0], ones[1], offs=offsets, out_dtype=torch.bfloat16)  # noqa: E731
        yield "torch rowwise", run, None
        return
    row, column = a_scales[:, 0].contiguous(), b_scales[:, :, 0].repeat_interleave(128, 1).contiguous()
    for fast in (False, True):
        yield (
            "torch rowwise" + (", fast sums" if fast else ""),
            lambda fast=fast: torch._scaled_grouped_mm(
                a, b.transpose(-2, -1), row, column, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=fast
            ),
            {"by_row": True},
        )


def ours_triton(torch, case, given, options):
    kernels = loaded("fp8_product_kernels", FILE.parents[2] / "deepep_moe" / "ops" / "fp8_product_kernels.py")
    tiling = kernels.Tiling
    tilings = [tiling(128, 128, 2, 8, 3), tiling(64, 128, 1, 4, 3, 2), tiling(128, 128, 1, 8, 4)]
    a, a_scales, b, b_scales, offsets = given
    if case["is_weight"]:
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(case["experts"], case["n"], case["k"], dtype=dtype, device="cuda")
            for one in (tilings[2]._replace(num_stages=3), tilings[1]):
                name = f"Triton {str(dtype)[6:]} {tuple(one)}"
                yield name, lambda one=one, out=out: kernels.weight_gradient(a, a_scales, b, b_scales, offsets, out, one), {}
        return
    by_column = a_scales.t().contiguous().t()
    for one in tilings:
        yield f"Triton {tuple(one)}", lambda one=one: kernels.product(a, by_column, b, b_scales, offsets, one), {}
    yield "Triton, scales by row", lambda: kernels.product(a, a_scales, b, b_scales, offsets), {}


def ours_cuda(torch, case, given, options):
    import ctypes

    native = ctypes.CDLL(str(Path(options.wheels, options.library).resolve()))
    title = options.library.removeprefix("libfp8_products").removesuffix(".so").replace("_", " ")
    address = lambda tensor: ctypes.c_void_p(tensor.data_ptr())  # noqa: E731
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    a, a_scales, b, b_scales, offsets = given
    experts, n, k, rows = case["experts"], case["n"], case["k"], case["padded"]
    native.fp8_error.restype = ctypes.c_char_p

    def call(function, *arguments):
        if function(*arguments, stream):
            raise RuntimeError(native.fp8_error().decode())

    if case["is_weight"]:
        others = torch.exp2(torch.randint(-9, -5, b_scales.shape, device="cuda").float())
        for dtype, of_b in ((torch.float32, b_scales), (torch.bfloat16, b_scales), (torch.bfloat16, others)):
            out = torch.empty(experts, n, k, dtype=dtype, device="cuda")

            def run(out=out, of_b=of_b, is_fp32=int(dtype == torch.float32)):
                sizes = (ctypes.c_int64(rows), n, k, experts, is_fp32)
                call(native.fp8_weight_gradient, *map(address, (a, a_scales, b, of_b, offsets, out)), *sizes)
                return out

            yield f"CUDA{title} {str(dtype)[6:]}" + (", a scale a column" if of_b is others else ""), run, None if of_b is others else {}
        return
    y = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")

    def run():
        call(native.fp8_product, *map(address, (a, a_scales, b, b_scales, offsets, y)), ctypes.c_int64(rows), n, k, experts)
        return y

    yield f"CUDA{title}", run, {}


def deep_gemm(torch, case, given, options):
    module = options.rival
    a, a_scales, b, b_scales, _ = given
    ends = torch.tensor(case["ends"])
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
    if case["is_weight"]:
        # Its operands hold one group after another, each [n, rows of the group]; it adds to c, fp32.
        parts = lambda values: torch.cat([part.reshape(-1) for part in values.split(sizes.tolist(), 1)])  # noqa: E731
        flat_a, flat_b = parts(a), parts(b)
        c = torch.zeros(case["experts"], case["n"], case["k"], device="cuda")
        d = torch.empty_like(c)
        of_a, of_b, ks, on_device = a_scales.t().contiguous(), b_scales.t().contiguous(), sizes.tolist(), sizes.int().cuda()

        def run():
            module.k_grouped_fp8_gemm_nt_contiguous((flat_a, of_a), (flat_b, of_b), d, ks, on_device, c)
            return d

    else:
        expert_of_row = torch.repeat_interleave(torch.arange(case["experts"]), sizes).int().cuda()
        y = torch.empty(case["padded"], case["n"], dtype=torch.bfloat16, device="cuda")

        def run():
            module.m_grouped_fp8_fp4_gemm_nt_contiguous((a, a_scales), (b, b_scales), y, expert_of_row, disable_ue8m0_cast=True)
            return y

    yield options.rival_name, run, {}


CANDIDATES = {
    "torch bf16": torch_bf16, "torch blockwise": torch_blockwise, "torch rowwise": torch_rowwise, "CUDA": ours_cuda,
    "Triton": ours_triton, "DeepGEMM": deep_gemm,
}  # fmt: skip


# ---- one candidate, in a process of its own ----


def loaded(name, path):
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_rival(options):
    """Import deep_gemm from the unpacked wheel that --rival names."""
    wheels, folder = Path(options.wheels), Path(tempfile.mkdtemp())
    for wheel in [wheels / options.rival_wheel, *wheels.glob("apache_tvm_ffi*.whl")]:
        zipfile.ZipFile(wheel).extractall(folder)
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.setdefault("DG_JIT_USE_NVRTC", "1")  # compiles several times faster than nvcc
    os.environ["DG_JIT_CACHE_DIR"] = os.environ.get("DG_JIT_CACHE_DIR", "/tmp/deep_gemm_cache_" + options.rival_wheel[:20])
    sys.path.insert(0, str(folder))
    import deep_gemm as module

    options.rival, options.rival_name = module, "DeepGEMM of " + "-".join(options.rival_wheel.split("-")[:2])


def timed(torch, run, repeats):
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in times]


def serve(options):
    """Print a line of JSON for each measurement of one candidate."""
    import torch

    def say(**what):
        print("RESULT " + json.dumps(what), flush=True)

    if options.one == "DeepGEMM":
        load_rival(options)
    for case in cases(options):
        if options.case not in case["name"]:
            continue
        try:
            given = None if options.one == "torch bf16" else operands(torch, case)
            for variant, run, check in CANDIDATES[options.one](torch, case, given, options):
                try:
                    result = run()
                    error = None if check is None else largest_error(torch, case, given, result, **check)
                    times = timed(torch, run, options.repeats)
                    say(case=case["name"], candidate=variant, times=times, error=error)
                except Exception as reason:
                    say(case=case["name"], candidate=variant, failed=f"{type(reason).__name__}: {str(reason)[:600]}")
        except Exception as reason:
            say(case=case["name"], candidate=options.one, failed=f"{type(reason).__name__}: {str(reason)[:600]}")
        given = None
        torch.cuda.empty_cache()


def measure(options, name, seconds, **more):
    """Run a candidate in another process; return what it printed and, if it did not end well, why."""
    command = [sys.executable, str(FILE), "--one", name, "--wheels", str(options.wheels), "--rows", str(options.rows)]
    command += ["--experts", str(options.experts), "--repeats", str(options.repeats), "--case", options.case]
    for key, value in more.items():
        command += [f"--{key.replace('_', '-')}", value]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code, why = process.wait(seconds), None
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code, why = None, f"stopped after {seconds:.0f} s"
        output.seek(0)
        text = output.read()
    found = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
    if code:
        tail = [line for line in text.splitlines() if not line.startswith("RESULT ")]
        why = f"exit code {code}: {' | '.join(tail[-4:])[-700:]}"
    return found, why


def main(options):
    import torch

    began, results, records = time.monotonic(), {}, []
    rivals = sorted(path.name for path in Path(options.wheels).glob("sgl_deep_gemm*.whl")) if options.wheels else []
    ours = sorted(path.name for path in Path(options.wheels).glob("libfp8_products*.so"))
    plan = [(name, {}) for name in CANDIDATES if name not in ("CUDA", "DeepGEMM")]
    plan[1:1] = [("CUDA", {"library": one}) for one in ours]
    plan += [("DeepGEMM", {"rival_wheel": one}) for one in rivals[::-1]]
    if not ours:
        print("CUDA: no libfp8_products.so among the wheels; build it with nvcc as its source says")
    print(f"{hardware(torch)}, PyTorch {torch.__version__}; {options.rows} rows, {options.experts} experts")
    for name, more in plan:
        if options.only and not any(part in name for part in options.only.split(",")):
            continue
        left = options.total - (time.monotonic() - began)
        if left < 5:
            print(f"{name}: not run, {options.total} s are over")
            continue
        found, why = measure(options, name, min(options.seconds, left), **more)
        for one in found:
            results.setdefault(one["case"], []).append(one)
            show(options, one)
        if why:
            print(f"{name} {' '.join(more.values())}: {why}", flush=True)
        if name == "DeepGEMM" and any("times" in one for one in found):
            break
    for name, reason in LISTED.items():
        print(f"not timed: {name}: {reason}")
    for case in cases(options):
        of_case = [one for one in results.get(case["name"], []) if "times" in one]
        baseline = next((one["times"] for one in of_case if one["candidate"] == "bf16"), [])
        records += [
            record(torch, case, one["candidate"], one["times"], baseline, max_error=one["error"]) for one in of_case
        ]  # fmt: skip
    print(f"took {time.monotonic() - began:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=2) + "\n")
        print(f"wrote {len(records)} records to {options.json}")


def show(options, one):
    case = next(case for case in cases(options) if case["name"] == one["case"])
    if "failed" in one:
        print(f"{one['case']:24} {one['candidate']:44} {one['failed']}", flush=True)
        return
    us = statistics.median(one["times"])
    error = "" if one["error"] is None else f"  error {one['error']:.1e}"
    print(f"{one['case']:24} {one['candidate']:44} {us:8.0f} us {case['flops'] / us / 1e6:7.0f} TFLOPS{error}", flush=True)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", default="wheels", help="folder with wheels of rivals and libfp8_products.so")
    parser.add_argument("--json", help="file to write the records to")
    parser.add_argument("--only", default="", help="names of candidates, or parts of them, with commas between: " + ", ".join(CANDIDATES))
    parser.add_argument("--case", default="", help="part of the names of the cases to run")
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=30, help="limit of a candidate")
    parser.add_argument("--total", type=float, default=150, help="limit of all of them")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--rival-wheel", default="", help=argparse.SUPPRESS)
    parser.add_argument("--library", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    parsed_options = parsed()
    if parsed_options.one:
        serve(parsed_options)
    else:
        main(parsed_options)
