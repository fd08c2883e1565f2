"""A deterministic simulation of the product's own modules on virtual time.

`history.py` draws operations and faults from a seed, `history_player.py` plays them on a world, checks its invariants
after each step and shrinks a history that breaks one. The worlds put real modules together with a fake network, disk
and processes. `docs/simulation.md` says how to run it and how to extend it.
"""
