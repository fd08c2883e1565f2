"""Commands about models and versions: list, deploy, split, scale, degrade, explain.

Commands that move the bytes of versions are in `artifacts`, manifests for a cluster in `operations`. Begin with
`model_commands.py`.
"""
