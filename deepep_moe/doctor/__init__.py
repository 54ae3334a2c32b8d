"""The doctor says what of this library can run on a machine: `python -m deepep_moe.doctor` (docs/doctor.md).

Each check is a function of an `Environment` and returns a `Finding`. It imports neither PyTorch nor the native modules: what could break is
imported by processes of its own (`children`), so a broken import is a finding.
"""
