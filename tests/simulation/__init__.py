"""Deterministic simulation of the product's modules in virtual time.

`core/history.py` draws operations and faults from a seed. `core/history_player.py` plays them in a world, checks its
invariants after each step, and shrinks a failing history. A world combines real modules with a fake network, disk and
processes. `docs/simulation.md` says how to run and extend the simulation.
"""
