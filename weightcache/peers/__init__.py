"""Exchange chunks between nodes: query peers, serve them, and let one node read a chunk from the store for all.

`app/peer_node.py` composes the node's port and state. Begin with `peer_tier.py`, then `ownership_policy.py`;
`peer_protocol.py` has the messages.
"""
