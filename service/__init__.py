"""What every process of Kelvin does alike: Unix sockets, JSON logs, readiness, drain, lifeline. No product logic."""
