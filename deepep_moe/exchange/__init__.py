"""Dispatch and combine with gradients, for any batch: `Buffer`, its calls and its backends."""
