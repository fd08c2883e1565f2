"""What processes tell of themselves: metrics for whoever asks, spans and metrics for a collector where one is named."""
