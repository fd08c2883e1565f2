"""Pure decisions of the snapshotter: what may enter, and how it is laid out."""
