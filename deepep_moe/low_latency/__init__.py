"""Dispatch and combine for small batches: `LowLatencyBuffer`, its backends, and double-batch overlap."""
