"""Durable hand-over of records: an append returns once its record is on disk, and is shipped until acknowledged.

It does not know what records mean. Begin with `spool.py` (append), `shipper.py` (ship) and `recovery.py` (ship what a
dead process left); `frame.py` has the format.
"""

from spool.home import has_owner
from spool.recovery import RecoveredSource, recover
from spool.shipper import Post, Shipper
from spool.spool import Spool

__all__ = ["Post", "RecoveredSource", "Shipper", "Spool", "has_owner", "recover"]
