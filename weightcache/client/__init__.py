"""Lease a version from the agent, map its bytes read-only, and copy them to a device.

This is the library of a runtime. The agent uses its protocol, its spans and its system calls, and is not imported
here. Begin with `lease.py`; `lease_protocol.py` has the messages, `device_copy.py` the tensors.
"""
