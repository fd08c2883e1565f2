"""The runtime's library: lease a version from the agent, map its bytes read-only, and copy them to a device.

The agent uses its protocol, spans and system calls. Of the agent only the digest check of `sources/source.py` is
imported here. Begin with `lease.py`; `lease_protocol.py` has the messages, `device_copy.py` the tensors.
"""
