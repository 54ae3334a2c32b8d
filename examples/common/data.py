"""Real text without a download: the bytes of the Python standard library's sources on this machine."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

VOCAB_SIZE = 256


def load_corpus(max_bytes: int = 8_000_000) -> np.ndarray:
    """uint8 [num_bytes]: the modules and packages of the standard library in the order of their paths, installed packages left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, num_bytes = [], 0
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if {"site-packages", "dist-packages", "test", "tests"} & set(folders):
            continue
        parts.append(path.read_bytes())
        num_bytes += len(parts[-1])
        if num_bytes >= max_bytes:
            break
    if num_bytes < 100_000:
        raise FileNotFoundError(f"only {num_bytes} bytes of Python sources under {root}; this example trains on the standard library's")
    return np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8)


def unigram_entropy(corpus: np.ndarray) -> float:
    """Loss (nats per byte) of the best model that ignores context: what training has to beat."""
    counts = np.bincount(corpus, minlength=VOCAB_SIZE)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def batch(corpus: np.ndarray, num_sequences: int, seq_length: int, *, seed: int, step: int, rank: int) -> torch.Tensor:
    """int64 [num_sequences, seq_length + 1]: windows drawn from (seed, step, rank) alone, so every dispatcher sees the same."""
    starts = np.random.default_rng((seed, step, rank)).integers(0, len(corpus) - seq_length - 1, num_sequences)
    return torch.from_numpy(np.stack([corpus[start : start + seq_length + 1] for start in starts]).astype(np.int64))
