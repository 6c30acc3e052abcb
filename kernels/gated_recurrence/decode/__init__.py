"""One token of the gated recurrence: the state alone, with a window, and a whole Liger layer."""
