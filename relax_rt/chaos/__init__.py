"""Harm done to a living run on purpose, and whether it kept its word: faults, schedules, the checker, the verdict.

Pure: `faults`, `schedule`, `intensity`, `timeline`, `checker` and its checks, `ettr`, `verdict`. The shell: `injector`,
`guard`, `disk`, `evidence`, `session`.
"""
