"""Make and load the certificates of the front door: a local CA, leaf certificates by name, and externally renewed
files. Mutual TLS between Kelvin's processes is in `kelvin/service`. Begin with `server_certificates.py`.
"""
