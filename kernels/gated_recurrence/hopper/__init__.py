"""The recurrence with one gate per head in Gluon for Hopper."""
