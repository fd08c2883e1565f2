"""Code that every command needs: where the installation is, calls of its API, options, tables.

Commands are in the sibling folders. Begin with `api_client.py`.
"""
