"""Decoding steps of the gated recurrence: the state alone, state and window, and a whole Liger layer."""
