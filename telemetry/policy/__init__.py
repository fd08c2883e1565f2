"""What is told, under which names, and of which requests. Pure."""
