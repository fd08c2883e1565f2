"""The checks of `kelvin doctor`: each looks at one subject and yields findings.

What judges a figure is a pure function. The command that runs the checks in order is
`kelvin/cli/operations/doctor_command.py`. Begin with `finding_policy.py`.
"""
