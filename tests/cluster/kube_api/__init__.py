"""A strict Kubernetes API server in memory, checked against recorded answers of a real one (`data/`).

Its users are the tests one folder up and in tests/controlplane, tests/manifests and tests/e2e. Begin with
`api_server.py`.
"""
