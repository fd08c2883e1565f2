"""Failures of the store that several activators share. Importing them does not import the Redis library."""


class StoreUnavailable(Exception):
    """The store failed or did not answer in time. The command may have been executed."""


class StoreFull(StoreUnavailable):
    """The store answers but has no room for the answer to keep. The command was not sent."""
