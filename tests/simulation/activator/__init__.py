"""The activator's world: real activator processes between clients, a control plane and replicas that are fakes.

What it runs on is in `tests/simulation/core`. Begin with `activator_world.py`.
"""
