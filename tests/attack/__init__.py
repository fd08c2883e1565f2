"""Attacks from outside on a fresh installation, most with a bystander who must not notice. See docs/attacks.md.

An attack has what a client, an operator or a tenant has: HTTPS, the command line, files, signals. Nothing here imports
the product's inner modules. Begin with attacker.py.
"""
