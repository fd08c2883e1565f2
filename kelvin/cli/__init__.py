"""The command `kelvin`: its entry point, and the folders of its commands.

Commands talk HTTP to the services; of the services' code they import only pure policies. Helpers that every command
needs are in `base`. Begin with `main.py`.
"""
