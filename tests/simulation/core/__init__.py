"""Virtual time, a fake network, disks and processes, and how histories are drawn, played and shrunk.

The worlds that put the product's modules on it are one folder up. Begin with `history_player.py`.
"""
