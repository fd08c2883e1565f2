"""Things to run and to look at."""
