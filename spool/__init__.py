"""Durable hand-over of records: an append returns once its record is on disk, and is shipped until acknowledged."""

from spool.recovery import Recovered, has_owner, recover
from spool.shipper import Post, Shipper
from spool.spool import Spool

__all__ = ["Post", "Recovered", "Shipper", "Spool", "has_owner", "recover"]
