"""Tensors whose values are not those of their memory, but its negative (`is_neg()`)."""

import torch


def negative(tensor):
    """Return a tensor equal to `tensor`, in contiguous memory that holds the negative."""
    lazy = torch._neg_view(-tensor)
    assert lazy.is_neg() and lazy.is_contiguous() and torch.equal(lazy, tensor)
    return lazy


def imaginary(tensor):
    """Return a lazily negative tensor equal to `tensor`, with other strides. Programs get such tensors from complex ones."""
    lazy = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, tensor)
    return lazy
