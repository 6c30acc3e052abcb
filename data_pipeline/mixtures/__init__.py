"""Mixtures: where their text is, how much of each component every phase reads, and in which order."""
