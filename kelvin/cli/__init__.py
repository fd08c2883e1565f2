"""The command `kelvin`: its start, and the mounting of every command.

Commands are in the folders here, each under its subject; what every command needs is in `base`. It talks HTTP to the
services and imports of them only pure policy. Begin with `main.py`.
"""
