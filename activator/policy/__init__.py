"""What the front door decides, as pure functions and pure state."""
