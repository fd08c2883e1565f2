"""Make and load the certificates of the front door: a local CA, leaf certificates by name, and externally renewed
files. Mutual TLS between Kelvin's processes is in `kelvin/ipc`, its certificates are in `kelvin/crypto`. Begin with
`server_certificates.py`.
"""
