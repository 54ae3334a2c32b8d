"""Tensors whose values are not those of their memory, but its negative (`is_neg()`)."""

import torch


def negative(tensor):
    """Return a tensor equal to `tensor`, in contiguous memory that holds the negative."""
    made = torch._neg_view(-tensor)
    assert made.is_neg() and made.is_contiguous() and torch.equal(made, tensor)
    return made


def imaginary(tensor):
    """Return a lazily negative tensor equal to `tensor`, with other strides. Programs get such tensors from complex ones."""
    made = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert made.is_neg() and torch.equal(made, tensor)
    return made
