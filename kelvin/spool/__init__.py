"""Durable queues of records: an append returns once its record is on disk, and a shipper sends it until acknowledged.

The meaning of records is unknown here. Begin with `spool.py` (append), `shipper.py` (ship) and `leftover_recovery.py`
(ship records of dead processes); `frame.py` has the format.
"""

from kelvin.spool.leftover_recovery import RecoveredSource, recover
from kelvin.spool.shipper import Post, Shipper
from kelvin.spool.source_directory import has_owner
from kelvin.spool.spool import Spool

__all__ = ["Post", "RecoveredSource", "Shipper", "Spool", "has_owner", "recover"]
