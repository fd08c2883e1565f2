"""Send requests to replicas over HTTP/1.1 with kept connections, and probe pods that are not ready yet. `queue/`
decides which replica gets a request, `request/` whether it is retried. Begin with `upstream_request.py`.
"""
