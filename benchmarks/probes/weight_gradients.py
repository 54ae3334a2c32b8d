"""Gradients of experts' weights that are added to fp32 sums: `deepep_moe`, PyTorch with a pass of its own, TransformerEngine.

python benchmarks/probes/weight_gradients.py on one Hopper GPU. Rows of normal values, groups as uneven as 1 to 3 before a random draw.
A line is the median time on the GPU of five chains of 20 calls, and the least time of the host for a call.
"""

import time

import torch
from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

from deepep_moe.ops import grouped_products as products

SHAPES = [(32, 65536, 2816, 2048), (32, 65536, 2048, 1408), (16, 65536, 2816, 2048), (16, 65536, 2048, 1408), (16, 32768, 3072, 4096)]


def measure(call):
    for _ in range(3):
        call()
    start, end, times, host = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), [], []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(3_000_000)
        begin = time.perf_counter()
        start.record()
        for _ in range(20):
            call()
        end.record()
        host.append((time.perf_counter() - begin) / 20 * 1e6)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 20 * 1e3)
    return sorted(times)[2], min(host)


def main():
    for num_experts, rows, out, columns in SHAPES:
        torch.manual_seed(0)
        counts = torch.multinomial(torch.rand(num_experts) + 0.5, rows, replacement=True).bincount(minlength=num_experts)
        grads, x = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (out, columns))
        sums, sizes, groups = torch.zeros(num_experts, out, columns, device="cuda"), counts.tolist(), products.Groups(counts, num_experts, x)

        def library(arguments=(grads, x, groups, sums)):
            products.weight_gradients(*arguments)

        def pytorch(grads=grads, x=x, groups=groups, sums=sums):
            sums.add_(torch._grouped_mm(grads.t(), x, offs=groups.offsets))

        def te(grads=grads, x=x, sizes=sizes, outs=tuple(sums.unbind(0))):
            general_grouped_gemm(
                x.split(sizes), grads.split(sizes), list(outs), [None] * len(sizes), out_dtype=torch.bfloat16, layout="NT", grad=True,
                m_splits=sizes, accumulate=True, use_split_accumulator=True,
            )  # fmt: skip

        for name, call in (("PyTorch, grouped_mm and add_", pytorch), ("TransformerEngine", te), ("deepep_moe", library)):
            us, host = measure(call)
            print(f"{num_experts:3} {rows:6} {out:5} {columns:5} {name:30} {us:8.1f} us, host {host:7.1f} us")


if __name__ == "__main__":
    main()
