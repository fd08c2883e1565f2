"""Make and load the certificates that the front door shows: a local CA, leaves by name, files that others renew.

Mutual TLS between Kelvin's own processes is not here; it is in `service`.
Begin with `server_certificates.py`.
"""
