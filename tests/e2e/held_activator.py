"""`python -m tests.e2e.held_activator`: what `held_up` starts in the activator's place."""

from tests.e2e.held_up import main

if __name__ == "__main__":
    main()
