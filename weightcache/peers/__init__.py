"""Exchange chunks between nodes: ask them, serve them, and let one node read a chunk from the store for all.

The node's port and its state are put together in `app/peer_node.py`. Begin with `peer_tier.py`, then
`ownership_policy.py`; `peer_protocol.py` has the messages.
"""
