"""Commands that move versions in and out of the store: push, sign, export, check, collect.

The snapshotter decides which files it accepts. Commands about models and versions are in `models`. Begin with
`push_command.py` and `export_command.py`.
"""
