"""The activator's world: real activator processes between fake clients, a fake control plane and fake replicas.

It runs on `tests/simulation/core`. Begin with `activator_world.py`.
"""
