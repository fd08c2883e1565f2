"""Virtual time, a fake network, disks and processes, and the functions that draw, play and shrink histories.

The worlds with the product's modules are one folder up. Begin with `history_player.py`.
"""
