"""Pure decisions of the supervisor and the command line."""
