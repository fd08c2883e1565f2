"""What bodies of the admin API hold, as types. The routes that send them are in `api/`; rendering is the command
line's.

Begin with `admin_types.py`.
"""
