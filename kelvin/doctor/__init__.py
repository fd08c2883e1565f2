"""The checks of `kelvin doctor`. Each module looks at one subject and yields findings.

Functions named `judge_*` are pure: they turn a measured value into a finding. `kelvin/cli/operations/doctor_command.py`
runs the checks in order. Begin with `finding_policy.py`.
"""
