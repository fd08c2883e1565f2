"""The front door: keys, routes, the queue for models at zero, streams, and a usage record of each request."""
