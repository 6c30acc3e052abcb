"""Mixtures: where their text lies, how much of each kind every phase reads, and in which order."""
