"""What is seen of a run: progress, losses by position, forget gates, samples."""
