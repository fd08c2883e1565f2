"""Commands about tenants: their keys, their bills, and the audit log.

The control plane makes all decisions; these commands call it and print the result. Begin with `tenant_commands.py`.
"""
