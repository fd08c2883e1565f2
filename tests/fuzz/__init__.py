"""Everything of ours that reads what strangers wrote, fed with what nobody wrote. How and why: docs/fuzzing.md."""
