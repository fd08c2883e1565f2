"""Send requests to replicas over HTTP/1.1 with kept connections, and probe pods that are not ready yet.

Which replica gets a request is decided in `queue/`, whether it is sent again in `request/`.
Begin with `replica_requests.py`.
"""
