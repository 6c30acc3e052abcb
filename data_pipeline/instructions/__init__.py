"""Instruction data: records of prompts and answers, rendered by a template and packed; the loss is on the answers."""
