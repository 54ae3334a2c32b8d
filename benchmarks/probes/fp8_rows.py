"""Times what fp8 rows need between products, on one GPU: the transposed copies, and SwiGLU that quantizes.

    python benchmarks/probes/fp8_rows.py

It needs PyTorch, Triton and the files of this checkout, but no build of deepep_moe. Shapes are those of fp8_products.py.
"""

import statistics

import torch
from fp8_products import FILE, groups_of, loaded, timed

HIDDEN, WIDTH = 7168, 2048


def say(name, run, num_bytes):
    us = statistics.median(timed(torch, run, 20))
    print(f"{name:48} {us:8.1f} us {num_bytes / us / 1e6:6.2f} TB/s", flush=True)


def main():
    kernels = loaded("fp8_row_kernels", FILE.parents[2] / "deepep_moe" / "ops" / "fp8_row_kernels.py")
    rows = groups_of(torch, 32768, 32)[1][-1]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; {rows} rows")
    ends = torch.tensor([rows], dtype=torch.int32, device="cuda")
    for columns in (HIDDEN, 2 * WIDTH, WIDTH):
        x = (50 * torch.randn(rows, columns, device="cuda")).to(torch.float8_e4m3fn)
        scales = torch.exp2(torch.randint(-9, -5, (rows, columns // 128), device="cuda").float())
        x_t, x_t_scales = kernels.rescale_transpose(x, scales)
        largest = scales.unflatten(0, (-1, 128)).amax(1, keepdim=True)
        factors = (scales.unflatten(0, (-1, 128)) / largest).flatten(0, 1).repeat_interleave(128, 1)
        assert torch.equal((x.float() * factors).to(torch.float8_e4m3fn).float(), x_t.t().float())
        assert torch.equal(x_t_scales, largest.squeeze(1).repeat_interleave(128, 1))
        say(f"rescale_transpose of {columns} columns", lambda x=x, scales=scales: kernels.rescale_transpose(x, scales), 2 * rows * columns)
    inner = torch.randn(rows, 2 * WIDTH, device="cuda").bfloat16()
    grad, probs = torch.randn(rows, WIDTH, device="cuda").bfloat16(), torch.rand(rows, device="cuda")
    say("SwiGLU that quantizes", lambda: kernels.swiglu_quantized(inner, probs, ends), rows * WIDTH * 5)
    say("its backward", lambda: kernels.swiglu_backward_quantized(grad, inner, probs, ends), rows * WIDTH * 8)


if __name__ == "__main__":
    main()
