"""Commands that run and maintain an installation: up, pods, backup, doctor, benches.

The processes are in `kelvin.supervisor`, the checks in `kelvin.doctor`. Begin with `installation_commands.py`.
"""
