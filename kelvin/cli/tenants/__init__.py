"""Commands about tenants: their keys, their bills, and the audit log.

The control plane decides; here is only what is asked and printed. Begin with `tenant_commands.py`.
"""
