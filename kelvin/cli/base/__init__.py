"""What every command needs: where the installation is, calls of its API, options, tables.

Commands are in the folders beside this one. Begin with `api_client.py`.
"""
