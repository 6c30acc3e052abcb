"""Questions and answers from Stack Exchange's dumps."""
