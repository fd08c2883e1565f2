"""Takes pushed directories in and makes versions of them: refuse, lay out, stage, pack, seal, publish, check."""
