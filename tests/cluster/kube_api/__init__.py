"""A strict Kubernetes API server in memory, held to recorded answers of a real one (`data/`).

The tests that use it are one folder up, and in tests/controlplane, tests/manifests and tests/e2e. Begin with
`api_server.py`.
"""
