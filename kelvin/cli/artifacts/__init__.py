"""Move versions in and out of the store: push, sign, export, check, collect.

What may enter is the snapshotter's policy; commands about models and their versions are in `models`. Begin with
`push_command.py` and `export_command.py`.
"""
