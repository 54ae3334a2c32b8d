"""The doctor says what of this library can run on a machine: `deepep-moe doctor` (docs/doctor.md).

Each check is a function of an `Environment`. It imports neither PyTorch nor the native modules: facts.py, a process of its own, does so.
A broken import is a finding.
"""
