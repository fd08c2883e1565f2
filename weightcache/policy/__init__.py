"""Pure decisions of the weight cache."""
