"""What the command line decides: pure functions of what it was told."""
