"""Linearization of a small model that was pretrained here: what each run found, the report and the pictures."""
