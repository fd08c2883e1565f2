"""What of the activator can be read at any moment: who is inside, who waits, what is not shipped yet."""

from activator.door import Door
from activator.feed import FeedClient
from activator.throttler import Throttler
from spool import Shipper
from telemetry.policy.instruments import Page


def describe(page: Page, door: Door, throttler: Throttler, shipper: Shipper, feed: FeedClient) -> None:
    """Each is read when the page is."""
    page.gauge("kelvin_requests_inside", "Requests of any kind under way.", lambda: door.inside)
    page.gauge("kelvin_requests_queued", "Requests that wait for a slot.", lambda: throttler.load.entries)
    page.gauge("kelvin_queued_bytes", "Bytes of their bodies.", lambda: throttler.load.nbytes)
    page.gauge("kelvin_spool_backlog_records", "Usage records that the ledger lacks.", lambda: shipper.backlog)
    page.gauge("kelvin_feed_connected", "Whether the control plane is heard.", lambda: feed.connected)
