"""Commands that run and keep an installation: up, pods, backup, doctor, benches.

The processes themselves are `kelvin.supervisor`'s, the checks `kelvin.doctor`'s. Begin with
`installation_commands.py`.
"""
