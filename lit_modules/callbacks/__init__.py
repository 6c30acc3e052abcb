"""What is seen of a run: progress, losses by tokens of context, forget gates, samples."""
