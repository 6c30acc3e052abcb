"""Callbacks that report on a run (progress, losses by context length, forget gates, samples) or keep it alive."""
