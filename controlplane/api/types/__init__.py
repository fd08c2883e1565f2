"""Define the bodies of the admin API. The routes are in `api/`; the command line renders the answers.

Begin with `admin_types.py`.
"""
