"""Instruction data: records of prompts and answers, rendered by a template, packed into rows, of which answers are
learned."""
